// A quick way into all operators, and one autograd node that they share: arguments are unpacked and
// dispatched here, and gradients come from X_backward without a word of Python.
//
// It serves what is plain: dense tensors on the CPU or a CUDA device, and no transform, mode,
// tracing or autocast. All else, and whatever raises, goes the slow way, in Python, which alone has
// the messages; so do gradients that are to be differentiated again. Operators are called through
// torch's dispatcher, which has their newest kernels. All this is torch's C++ interface, not the
// stable one: the library is for one torch and one Python (node.py).
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
// Needs Python.h, which torch's headers have to be the first to include.
#include <structmember.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "past_autograd.h"
#include "plain.h"

namespace {

using at::Tensor;
using c10::IValue;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using NodePointer = decltype(torch::autograd::Edge::function);  // from torch 2.15 on another one

/// A reference that is given back at the end of its scope.
struct Held {
    PyObject* object;
    explicit Held(PyObject* o) : object(o) {}
    Held(const Held&) = delete;
    ~Held() { Py_XDECREF(object); }
    explicit operator bool() const { return object; }
};

/// One operator, which lives as long as the process: nodes have nothing of Python's to give back.
struct Operator {
    /// Where an argument of X_backward behind its tensors comes from.
    enum class From { kOption, kNeed, kMask, kDeterministic };
    /// Options as they were given, and as X takes them.
    struct Options {
        std::vector<PyObject*> given;
        std::vector<IValue> taken;
    };

    std::string name;
    c10::OperatorHandle forward;
    std::optional<c10::OperatorHandle> backward;
    size_t tensors = 0;   // that gradients go to
    bool spared = false;  // whether the first is kept for the gradient to the second alone
    // Python's: a tuple of flags, which tensors the backward needs; (*tensors, *given) -> what X
    // takes behind its tensors, or null; (grad_out, tensors, options, need) -> gradients.
    PyObject *kept = nullptr, *options = nullptr, *gradients = nullptr;
    std::vector<From> rest = {};
    std::array<Options, 4> known = {};
    size_t next = 0;  // of `known`, to be forgotten
};

PyObject* to_python(const IValue& x) {
    if (x.isBool()) return PyBool_FromLong(x.toBool());
    if (x.isInt()) return PyLong_FromLongLong(x.toInt());
    if (x.isDouble()) return PyFloat_FromDouble(x.toDouble());
    if (x.isString()) return PyUnicode_FromString(x.toStringRef().c_str());
    if (x.isTensor()) return THPVariable_Wrap(x.toTensor());
    return Py_NewRef(Py_None);
}

/// A value for an argument of X; false where it has not the argument's very type.
bool from_python(PyObject* from, const c10::TypePtr& type, IValue& to) {
    switch (type->kind()) {
        case c10::TypeKind::BoolType:
            if (!PyBool_Check(from)) return false;
            return to = IValue(from == Py_True), true;
        case c10::TypeKind::IntType: {
            if (!PyLong_CheckExact(from)) return false;
            int overflow = 0;
            to = IValue(int64_t(PyLong_AsLongLongAndOverflow(from, &overflow)));
            return !overflow;
        }
        case c10::TypeKind::FloatType:
            if (!PyFloat_CheckExact(from)) return false;
            return to = IValue(PyFloat_AS_DOUBLE(from)), true;
        case c10::TypeKind::StringType: {
            const char* text = PyUnicode_CheckExact(from) ? PyUnicode_AsUTF8(from) : nullptr;
            if (!text) return false;
            return to = IValue(std::string(text)), true;
        }
        case c10::TypeKind::OptionalType: return to = IValue(), from == Py_None;
        default: return false;
    }
}

/// Tuple of what these are in Python.
template <typename Items>
PyObject* tuple_of(const Items& items) {
    PyObject* tuple = PyTuple_New(Py_ssize_t(items.size()));
    for (size_t i = 0; i < items.size(); ++i)
        PyTuple_SET_ITEM(tuple, Py_ssize_t(i), to_python(IValue(items[i])));
    return tuple;
}

/// Gradients by X_backward, of what is plain and is not to be differentiated again.
variable_list quick_gradients(const Operator& op, const std::vector<IValue>& options,
                              const Tensor& grad_out, const variable_list& tensors,
                              const std::vector<bool>& need) {
    torch::jit::Stack stack;
    stack.reserve(1 + tensors.size() + op.rest.size());
    stack.emplace_back(grad_out);
    for (const Tensor& x : tensors) stack.push_back(x.defined() ? IValue(x) : IValue());
    c10::List<bool> mask;
    for (const bool wanted : need) mask.push_back(wanted);
    size_t option = 0, flag = 0;
    for (const Operator::From from : op.rest) switch (from) {
            case Operator::From::kOption: stack.push_back(options[option++]); break;
            case Operator::From::kNeed: stack.emplace_back(bool(need[flag++])); break;
            case Operator::From::kMask: stack.emplace_back(mask); break;
            case Operator::From::kDeterministic:
                stack.emplace_back(at::globalContext().deterministicAlgorithms());
        }
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.backward->callBoxed(stack);
    variable_list found(need.size());
    for (size_t i = 0; i < need.size(); ++i) found[i] = std::move(stack[i]).toTensor();
    return found;
}

/// The same by Python, which makes a graph of it where that is wanted.
variable_list slow_gradients(const Operator& op, const std::vector<IValue>& options,
                             const Tensor& grad_out, const variable_list& tensors,
                             const std::vector<bool>& need) {
    const pybind11::gil_scoped_acquire gil;
    const Held first(to_python(grad_out)), second(tuple_of(tensors));
    const Held third(tuple_of(options)), fourth(tuple_of(need));
    PyObject* const args[] = {first.object, second.object, third.object, fourth.object};
    const Held result(PyObject_Vectorcall(op.gradients, args, 4, nullptr));
    const Held each(result ? PySequence_Fast(result.object, "gradients") : nullptr);
    if (!each) {
        python_error error;
        error.persist();
        throw error;
    }
    variable_list found(need.size());
    for (size_t i = 0; i < need.size(); ++i) {
        PyObject* x = PySequence_Fast_GET_ITEM(each.object, Py_ssize_t(i));
        if (x != Py_None) found[i] = THPVariable_Unpack(x);
    }
    return found;
}

variable_list gradients(const Operator& op, const std::vector<IValue>& options,
                        const Tensor& grad_out, const variable_list& tensors,
                        const std::vector<bool>& need) {
    if (std::find(need.begin(), need.end(), true) == need.end()) return variable_list(need.size());
    bool plain = op.backward && !at::GradMode::is_enabled() && is_plain(grad_out);
    for (const Tensor& x : tensors) plain = plain && (!x.defined() || is_plain(x));
    const auto way = plain && is_plain_here() ? quick_gradients : slow_gradients;
    variable_list found;
    try {
        found = way(op, options, grad_out, tensors, need);
    } catch (const std::runtime_error& error) {
        // In torch's class, which a kernel on the stable ABI cannot raise.
        if (std::string_view(error.what()).rfind("CUDA out of memory.", 0) != 0) throw;
        C10_THROW_ERROR(OutOfMemoryError, error.what());
    }
    for (size_t i = 0; i < need.size(); ++i)
        if (!need[i]) found[i].reset();
    return found;
}

struct Gradient : torch::autograd::Node {
    const Operator& op;
    const std::vector<IValue> options;
    std::vector<SavedVariable> saved;

    Gradient(const Operator& o, const std::vector<IValue>& taken) : op(o), options(taken) {}

    std::string name() const override { return op.name + "Backward"; }

    void release_variables() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (SavedVariable& x : saved) x.reset_data();
    }

    variable_list apply(variable_list&& arriving) override {
        const Tensor grad_out =
            arriving[0].defined() ? arriving[0] : input_metadata(0).zeros_like();
        return gradients(op, options, grad_out, unpacked(), needed());
    }

    // What compiled autograd asks of a node: its facts, and a call that it can put into a graph.
    void compiled_args(torch::autograd::CompiledNodeArgs& args) const override {
        args.collect(op.name);
        args.collect(options);
        args.collect(saved, /*is_output=*/false);
    }
    variable_list apply_with_saved(const variable_list& arriving,
                                   torch::autograd::SwapSavedVariables& swap) override {
        using namespace torch::dynamo::autograd;
        swap.before(saved);
        PackedArgs packed;
        packed.pack(unpacked());
        packed.pack(needed());
        swap.after(saved);
        std::vector<at::TypePtr> types;
        for (const IValue& x : packed.vec())
            types.push_back(x.isTensor() ? c10::TypePtr(at::TensorType::get()) : x.type());
        const auto call = [&op = op, options = options](const variable_list& inputs,
                                                        const std::vector<IValue>& args) {
            PackedArgs given(args);
            const auto tensors = given.unpack<variable_list>();
            const auto need = given.unpack<std::vector<bool>>();
            if (!inputs[0].defined()) return variable_list(need.size());
            return gradients(op, options, inputs[0], tensors, need);
        };
        const auto& compiler = getPyCompilerInterface();
        const std::string bound =
            compiler->bind_function(swap.get_py_compiler(), name(), call, types,
                                    /*is_custom_function=*/true, /*is_traceable=*/true);
        using Shapes = std::vector<std::optional<torch::autograd::InputMetadata>>;
        return compiler->call_function(
            swap.get_py_compiler(), "apply_functional", bound, arriving, packed.vec(),
            IValuePacker<Shapes>::pack(get_input_metadata(next_edges())));
    }

  private:
    std::vector<bool> needed() const {
        std::vector<bool> need(num_outputs());
        for (size_t i = 0; i < need.size(); ++i) need[i] = task_should_compute_output(i);
        return need;
    }
    variable_list unpacked() {
        const std::lock_guard<std::mutex> lock(mutex_);
        variable_list tensors;
        tensors.reserve(saved.size());
        for (const SavedVariable& x : saved) tensors.push_back(x.unpack());
        return tensors;
    }
};

/// What X takes behind its tensors; null where Python has to look at it. Options are constants in
/// most programs, so the last few are kept as they came.
const std::vector<IValue>* options_of(Operator& op, PyObject* const* args, size_t count) {
    static const std::vector<IValue> none;
    if (!op.options) return count == op.tensors ? &none : nullptr;
    for (const Operator::Options& known : op.known) {
        bool same = !known.taken.empty() && known.given.size() + op.tensors == count;
        for (size_t i = op.tensors; same && i < count; ++i) {
            PyObject *a = args[i], *b = known.given[i - op.tensors];
            same =
                a == b || (Py_TYPE(a) == Py_TYPE(b) && PyObject_RichCompareBool(a, b, Py_EQ) == 1);
        }
        if (same) return &known.taken;
    }
    for (size_t i = op.tensors; i < count; ++i) {
        PyObject* x = args[i];
        if (x != Py_None && !PyBool_Check(x) && !PyLong_CheckExact(x) && !PyFloat_CheckExact(x) &&
            !PyUnicode_CheckExact(x))
            return nullptr;
    }
    const Held taken(PyObject_Vectorcall(op.options, args, count, nullptr));
    const auto& arguments = op.forward.schema().arguments();
    if (!taken || !PyTuple_Check(taken.object) ||
        size_t(PyTuple_GET_SIZE(taken.object)) + op.tensors != arguments.size())
        return PyErr_Clear(), nullptr;
    Operator::Options made;
    for (size_t i = op.tensors; i < arguments.size(); ++i) {
        PyObject* x = PyTuple_GET_ITEM(taken.object, Py_ssize_t(i - op.tensors));
        if (!from_python(x, arguments[i].type(), made.taken.emplace_back()))
            return PyErr_Clear(), nullptr;
    }
    for (size_t i = op.tensors; i < count; ++i) made.given.push_back(Py_NewRef(args[i]));
    Operator::Options& place = op.known[op.next++ % op.known.size()];
    std::swap(place, made);
    for (PyObject* x : made.given) Py_DECREF(x);
    return &place.taken;
}

/// The operator of plain arguments; an undefined tensor where the slow way has to be gone. `done`:
/// that it has been computed, and what is thrown now comes from hooks that tensors are kept with.
Tensor quick(Operator& op, PyObject* const* args, size_t count, bool& done) {
    if (count < op.tensors) return {};
    constexpr int64_t kFew = 1024;
    bool wanted = false, on_cpu = true, floating = true;
    int64_t elements = 0;
    torch::jit::Stack stack;
    stack.reserve(op.forward.schema().arguments().size());
    for (size_t i = 0; i < op.tensors; ++i) {
        if (!THPVariable_CheckExact(args[i])) return {};
        const Tensor& x = THPVariable_Unpack(args[i]);
        if (!is_plain(x)) return {};
        wanted |= x.requires_grad();
        on_cpu &= x.is_cpu();
        floating &= at::isFloatingType(x.scalar_type());
        elements += x.numel();
        stack.emplace_back(x);
    }
    if (!is_plain_here() || at::impl::torch_function_mode_enabled()) return {};
    wanted &= at::GradMode::is_enabled();
    if (wanted && !floating) return {};
    const std::vector<IValue>* options = options_of(op, args, count);
    if (!options) return {};
    stack.insert(stack.end(), options->begin(), options->end());
    // Another thread may have others looked at meanwhile.
    const std::vector<IValue> kept = wanted ? *options : std::vector<IValue>();
    {
        // To let other threads run takes longer than to compute so little.
        std::optional<pybind11::gil_scoped_release> released;
        if (elements > kFew || !on_cpu) released.emplace();
        const at::AutoDispatchBelowADInplaceOrView guard;
        op.forward.callBoxed(stack);
    }
    Tensor out = std::move(stack[0]).toTensor();
    done = true;
    if (!wanted) return out;
    auto made = std::make_unique<Gradient>(op, kept);
    std::vector<SavedVariable>& saved = made->saved;
    const NodePointer node(std::unique_ptr<torch::autograd::Node>(std::move(made)));
    torch::autograd::edge_list edges;
    edges.reserve(op.tensors);
    for (size_t i = 0; i < op.tensors; ++i)
        edges.push_back(torch::autograd::impl::gradient_edge(THPVariable_Unpack(args[i])));
    saved.reserve(op.tensors);
    for (size_t i = 0; i < op.tensors; ++i) {
        const bool spared = op.spared && i == 0 && !edges[1].is_valid();
        if (PyTuple_GET_ITEM(op.kept, Py_ssize_t(i)) == Py_True && !spared)
            saved.emplace_back(THPVariable_Unpack(args[i]), /*is_output=*/false);
        else
            saved.emplace_back();
    }
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(out, node);
    return out;
}

struct Call {
    PyObject_HEAD vectorcallfunc vectorcall;
    Operator* op;
    PyObject* slow;  // Python's way into the operator
    char wanted;     // false where all go that way
};

PyObject* call(PyObject* self, PyObject* const* args, size_t flags, PyObject* names) {
    const auto& way = *reinterpret_cast<Call*>(self);
    if (!names && way.wanted) {
        bool done = false;
        try {
            Tensor out = quick(*way.op, args, size_t(PyVectorcall_NARGS(flags)), done);
            if (out.defined()) return THPVariable_Wrap(std::move(out));
        } catch (python_error& error) {
            // By this torch.utils.checkpoint ends a second run, whose hooks are not called again.
            if (done) return error.restore(), nullptr;
        } catch (const std::exception&) {  // which the slow way raises again, as Python knows it
        }
        PyErr_Clear();
    }
    return PyObject_Vectorcall(way.slow, args, flags, names);
}

/// Where each argument of X_backward behind its tensors comes from, by its name and type.
std::vector<Operator::From> rest_of(const c10::FunctionSchema& schema, size_t tensors) {
    std::vector<Operator::From> rest;
    for (size_t i = 1 + tensors; i < schema.arguments().size(); ++i) {
        const c10::Argument& argument = schema.arguments()[i];
        const std::string& name = argument.name();
        rest.push_back(argument.type()->kind() == c10::TypeKind::ListType ? Operator::From::kMask
                       : name.rfind("need_", 0) == 0                      ? Operator::From::kNeed
                       : name == "deterministic" ? Operator::From::kDeterministic
                                                 : Operator::From::kOption);
    }
    return rest;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* named) {
    static const char* words[] = {"name", "kept",   "options", "gradients",
                                  "slow", "spared", nullptr};
    const char* name = nullptr;
    PyObject *kept, *options, *gradients, *slow;
    int spared = 0;
    if (!PyArg_ParseTupleAndKeywords(args, named, "sO!OOO|p", const_cast<char**>(words), &name,
                                     &PyTuple_Type, &kept, &options, &gradients, &slow, &spared))
        return nullptr;
    try {
        const std::string forward = std::string("octet::") + name;
        auto& dispatcher = c10::Dispatcher::singleton();
        auto* op = new Operator{name, dispatcher.findSchemaOrThrow(forward.c_str(), ""),
                                dispatcher.findSchema({forward + "_backward", ""})};
        op->tensors = size_t(PyTuple_GET_SIZE(kept));
        op->spared = spared;
        op->kept = Py_NewRef(kept);
        op->options = options == Py_None ? nullptr : Py_NewRef(options);
        op->gradients = Py_NewRef(gradients);
        if (op->backward) op->rest = rest_of(op->backward->schema(), op->tensors);
        auto* self = reinterpret_cast<Call*>(type->tp_alloc(type, 0));
        if (!self) return nullptr;
        self->vectorcall = call;
        self->op = op;
        self->slow = Py_NewRef(slow);
        self->wanted = true;
        call_past_autograd(forward);
        return reinterpret_cast<PyObject*>(self);
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
}

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Call, vectorcall), READONLY, nullptr},
    {"slow", T_OBJECT_EX, offsetof(Call, slow), READONLY, nullptr},
    {"wanted", T_BOOL, offsetof(Call, wanted), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_members, members},
                       {0, nullptr}};
PyType_Spec spec = {"octet_node.Call", sizeof(Call), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
PyObject* call_type = nullptr;

/// Makes a function of Python's the `__call__` that torch.compile finds and follows. Set past
/// the type's own setter, which would have all calls go through it.
PyObject* follow(PyObject*, PyObject* function) {
    auto* of = reinterpret_cast<PyTypeObject*>(call_type);
    if (PyDict_SetItemString(of->tp_dict, "__call__", function) < 0) return nullptr;
    PyType_Modified(of);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"follow", follow, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "octet_node", nullptr, -1, functions, {}, {}, {}, {}};

}  // namespace

PyMODINIT_FUNC PyInit_octet_node() {
    PyObject* made = PyModule_Create(&module);
    call_type = made ? PyType_FromSpec(&spec) : nullptr;
    if (!call_type || PyModule_AddObjectRef(made, "Call", call_type) < 0) return nullptr;
    return made;
}
