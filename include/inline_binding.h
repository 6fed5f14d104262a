// Binds C++ functions to Python over the C API alone: what pybind11 does, for the argument types
// that short extensions use, at a twentieth of its time to compile. Conversions, messages and
// exceptions are those that a user of torch.utils.cpp_extension knows.
#pragma once

#include <Python.h>

#include <array>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef OCTET_TENSORS
// As torch/csrc/autograd/python_variable.h and torch/csrc/Exceptions.h declare them: to include
// these takes five seconds.
PyObject* THPVariable_Wrap(const at::TensorBase& var);
namespace torch {
void translate_exception_to_python(const std::exception_ptr&);
}
#endif

namespace octet_binding {

/// A reference that is given back at the end of its scope.
struct Held {
    PyObject* object;
    explicit Held(PyObject* o) : object(o) {}
    Held(const Held&) = delete;
    ~Held() { Py_XDECREF(object); }
};

/// Conversion of one type: `type()` for the docstring, `load` (false: no such value), `cast`.
template <class T, class = void>
struct Convert {
    static_assert(!sizeof(T), "octet_binding::Convert lacks this type");
};

template <>
struct Convert<bool> {
    static std::string type() { return "bool"; }
    static bool load(PyObject* from, std::optional<bool>& to) {
        if (from == Py_None) return to.emplace(false), true;
        const auto* number = Py_TYPE(from)->tp_as_number;
        if (!PyBool_Check(from) && !(number && number->nb_bool)) return false;
        const int value = PyObject_IsTrue(from);
        if (value < 0) return PyErr_Clear(), false;
        return to.emplace(value != 0), true;
    }
    static PyObject* cast(bool value) { return PyBool_FromLong(value); }
};

template <class T>
struct Convert<T, std::enable_if_t<std::is_integral_v<T> && (sizeof(T) > 1)>> {
    static_assert(!std::is_same_v<T, wchar_t> && !std::is_same_v<T, char16_t> &&
                      !std::is_same_v<T, char32_t>,
                  "octet_binding::Convert lacks this type");
    static std::string type() { return "int"; }
    static bool load(PyObject* from, std::optional<T>& to) {
        if (PyFloat_Check(from)) return false;
        PyObject* index = PyNumber_Index(from);
        if (!index && PyNumber_Check(from)) {
            PyErr_Clear();
            index = PyNumber_Long(from);
        }
        const Held number(index);
        if (!index) return PyErr_Clear(), false;
        if constexpr (std::is_signed_v<T>) {
            const long long value = PyLong_AsLongLong(index);
            if (value == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
            return to.emplace(static_cast<T>(value)), static_cast<T>(value) == value;
        } else {
            const unsigned long long value = PyLong_AsUnsignedLongLong(index);
            if (value == ~0ULL && PyErr_Occurred()) return PyErr_Clear(), false;
            return to.emplace(static_cast<T>(value)), static_cast<T>(value) == value;
        }
    }
    static PyObject* cast(T value) {
        if constexpr (std::is_signed_v<T>) return PyLong_FromLongLong(value);
        return PyLong_FromUnsignedLongLong(value);
    }
};

template <class T>
struct Convert<T, std::enable_if_t<std::is_same_v<T, float> || std::is_same_v<T, double>>> {
    static std::string type() { return "float"; }
    static bool load(PyObject* from, std::optional<T>& to) {
        double value = PyFloat_AsDouble(from);
        if (value == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            if (!PyNumber_Check(from)) return false;
            const Held number(PyNumber_Float(from));
            if (!number.object) return PyErr_Clear(), false;
            value = PyFloat_AsDouble(number.object);
        }
        return to.emplace(static_cast<T>(value)), true;
    }
    static PyObject* cast(T value) { return PyFloat_FromDouble(value); }
};

template <>
struct Convert<std::string> {
    static std::string type() { return "str"; }
    static bool load(PyObject* from, std::optional<std::string>& to) {
        Py_ssize_t size = 0;
        if (PyUnicode_Check(from)) {
            const char* text = PyUnicode_AsUTF8AndSize(from, &size);
            if (!text) return PyErr_Clear(), false;
            return to.emplace(text, size), true;
        }
        if (PyBytes_Check(from)) {
            return to.emplace(PyBytes_AS_STRING(from), PyBytes_GET_SIZE(from)), true;
        }
        if (!PyByteArray_Check(from)) return false;
        return to.emplace(PyByteArray_AS_STRING(from), PyByteArray_GET_SIZE(from)), true;
    }
    static PyObject* cast(const std::string& value) {
        return PyUnicode_DecodeUTF8(value.data(), value.size(), nullptr);
    }
};

/// Results only: an argument would have to keep its text alive.
template <>
struct Convert<const char*> {
    static std::string type() { return "str"; }
    static PyObject* cast(const char* value) {
        if (!value) Py_RETURN_NONE;
        return PyUnicode_FromString(value);
    }
};

template <class T>
struct Convert<std::optional<T>> {
    static std::string type() { return "Optional[" + Convert<T>::type() + "]"; }
    static bool load(PyObject* from, std::optional<std::optional<T>>& to) {
        std::optional<T> value;
        if (from != Py_None && !Convert<T>::load(from, value)) return false;
        return to.emplace(std::move(value)), true;
    }
    static PyObject* cast(const std::optional<T>& value) {
        if (!value) Py_RETURN_NONE;
        return Convert<T>::cast(*value);
    }
};

template <class T>
struct Convert<std::vector<T>> {
    static std::string type() { return "list[" + Convert<T>::type() + "]"; }
    static bool load(PyObject* from, std::optional<std::vector<T>>& to) {
        if (PyUnicode_Check(from) || PyBytes_Check(from)) return false;
        if (!PySequence_Check(from) && !PyAnySet_Check(from) && !PyGen_Check(from)) return false;
        const Held items(PySequence_Fast(from, ""));
        if (!items.object) return PyErr_Clear(), false;
        to.emplace();
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.object); ++i) {
            std::optional<T> value;
            if (!Convert<T>::load(PySequence_Fast_GET_ITEM(items.object, i), value)) return false;
            to->push_back(std::move(*value));
        }
        return true;
    }
    static PyObject* cast(const std::vector<T>& values) {
        PyObject* list = PyList_New(values.size());
        for (std::size_t i = 0; list && i < values.size(); ++i) {
            PyObject* item = Convert<T>::cast(values[i]);
            if (!item) return Py_DECREF(list), nullptr;
            PyList_SET_ITEM(list, i, item);
        }
        return list;
    }
};

template <class Tuple, class... T>
struct ConvertTuple {
    static std::string type() {
        std::string text;
        ((text += (text.empty() ? "" : ", ") + Convert<T>::type()), ...);
        return "tuple[" + text + "]";
    }
    static bool load(PyObject* from, std::optional<Tuple>& to) {
        return load(from, to, std::index_sequence_for<T...>());
    }
    static PyObject* cast(const Tuple& values) {
        return cast(values, std::index_sequence_for<T...>());
    }

  private:
    template <std::size_t... i>
    static bool load(PyObject* from, std::optional<Tuple>& to, std::index_sequence<i...>) {
        if (!PySequence_Check(from)) return false;
        const Held items(PySequence_Fast(from, ""));
        if (!items.object) return PyErr_Clear(), false;
        if (PySequence_Fast_GET_SIZE(items.object) != sizeof...(T)) return false;
        std::tuple<std::optional<T>...> values;
        PyObject** item = PySequence_Fast_ITEMS(items.object);
        if (!(Convert<T>::load(item[i], std::get<i>(values)) && ...)) return false;
        return to.emplace(std::move(*std::get<i>(values))...), true;
    }
    template <std::size_t... i>
    static PyObject* cast(const Tuple& values, std::index_sequence<i...>) {
        const std::array<PyObject*, sizeof...(T)> items{Convert<T>::cast(std::get<i>(values))...};
        PyObject* tuple = (items[i] && ...) ? PyTuple_New(sizeof...(T)) : nullptr;
        if (tuple) return (PyTuple_SET_ITEM(tuple, i, items[i]), ...), tuple;
        return (Py_XDECREF(items[i]), ...), nullptr;
    }
};

template <class... T>
struct Convert<std::tuple<T...>, std::enable_if_t<(sizeof...(T) > 0)>>
    : ConvertTuple<std::tuple<T...>, T...> {};
template <class A, class B>
struct Convert<std::pair<A, B>> : ConvertTuple<std::pair<A, B>, A, B> {};

#ifdef OCTET_TENSORS
/// The head of torch's THPVariable; whoever defines OCTET_TENSORS has compared the two.
struct Variable {
    PyObject_HEAD at::Tensor cdata;
};

/// Set when the module is imported; a subclass of torch.Tensor counts, as does a Parameter.
inline PyObject* tensor_class = nullptr;

template <>
struct Convert<at::Tensor> {
    static std::string type() { return "torch.Tensor"; }
    static bool load(PyObject* from, std::optional<at::Tensor>& to) {
        const int is_tensor = PyObject_IsInstance(from, tensor_class);
        if (is_tensor < 0) PyErr_Clear();
        if (is_tensor <= 0) return false;
        return to.emplace(reinterpret_cast<Variable*>(from)->cdata), true;
    }
    static PyObject* cast(const at::Tensor& value) { return THPVariable_Wrap(value); }
};

/// Collects torch's warnings while a function runs, and gives them to Python at its end.
struct Warnings {
    struct Handler : c10::WarningHandler {
        std::vector<c10::Warning> collected;
        void process(const c10::Warning& warning) override { collected.push_back(warning); }
    } handler;
    c10::WarningUtils::WarningHandlerGuard guard{&handler};

    /// False where Python made an error of one.
    bool show() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        bool fine = true;
        for (const auto& warning : handler.collected) {
            const bool old =
                std::holds_alternative<c10::Warning::DeprecationWarning>(warning.type());
            PyObject* category = old ? PyExc_DeprecationWarning : PyExc_UserWarning;
            fine = fine && PyErr_WarnEx(category, warning.msg().c_str(), 1) == 0;
        }
        if (!type) return fine;
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
        return true;
    }
};

inline void raise() { torch::translate_exception_to_python(std::current_exception()); }
#else
struct Warnings {
    bool show() { return true; }
};

inline void raise() {
    try {
        throw;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
}
#endif

template <class R, class... Args>
std::string signature(const char* name, R (*)(Args...)) {
    std::string text;
    int i = 0;
    ((text +=
      (i ? ", arg" : "arg") + std::to_string(i) + ": " + Convert<std::decay_t<Args>>::type(),
      ++i),
     ...);
    std::string result = "None";
    if constexpr (!std::is_void_v<R>) result = Convert<std::decay_t<R>>::type();
    return name + ("(" + text + ") -> ") + result;
}

inline PyObject* refuse(const std::string& name, const std::string& signature,
                        PyObject* const* given, Py_ssize_t count) {
    std::string text = name +
                       "(): incompatible function arguments. The following argument types are "
                       "supported:\n    1. " +
                       signature.substr(name.size()) + "\n\nInvoked with: ";
    for (Py_ssize_t i = 0; i < count; ++i) {
        const Held shown(PyObject_Repr(given[i]));
        const char* utf8 = shown.object ? PyUnicode_AsUTF8(shown.object) : nullptr;
        text += (i ? ", " : "") + std::string(utf8 ? utf8 : "<repr raised Error>");
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, text.c_str());
    return nullptr;
}

/// An argument as its parameter takes it: a copy that is moved from, or a reference to it.
template <class Parameter, class T>
Parameter&& forward(std::optional<T>& value) {
    return static_cast<Parameter&&>(*value);
}

template <class R, class... Args, std::size_t... i>
PyObject* invoke(const char* name, R (*function)(Args...), PyObject* const* given, Py_ssize_t count,
                 std::index_sequence<i...>) {
    std::tuple<std::optional<std::decay_t<Args>>...> values;
    if (count != sizeof...(Args) ||
        !(Convert<std::decay_t<Args>>::load(given[i], std::get<i>(values)) && ...)) {
        return refuse(name, signature(name, function), given, count);
    }
    Warnings warnings;
    PyObject* result = nullptr;
    try {
        if constexpr (std::is_void_v<R>) {
            function(forward<Args>(std::get<i>(values))...);
            Py_INCREF(Py_None);
            result = Py_None;
        } else {
            result =
                Convert<std::decay_t<R>>::cast(function(forward<Args>(std::get<i>(values))...));
        }
    } catch (const std::exception&) {
        raise();
    } catch (...) {
        PyErr_SetString(PyExc_RuntimeError, "Caught an unknown exception!");
    }
    if (warnings.show()) return result;
    Py_XDECREF(result);
    return nullptr;
}

/// `function` as a Python callable; the name serves messages.
template <class R, class... Args>
PyObject* call(const char* name, R (*function)(Args...), PyObject* const* given, Py_ssize_t count) {
    return invoke(name, function, given, count, std::index_sequence_for<Args...>());
}

// Not shared with the other libraries of this process, which have functions of the same names.
namespace {

/// `function` as Python is told of it; the number keeps two names of one function apart.
template <int number, auto function>
PyMethodDef entry(const char* name, const char* doc) {
    static const char* const known = name;
    static const std::string text = signature(name, function) + "\n\n" + doc + "\n";
    PyObject* (*call)(PyObject*, PyObject* const*,
                      Py_ssize_t) = [](PyObject*, PyObject* const* given, Py_ssize_t count) {
        return octet_binding::call(known, function, given, count);
    };
    return {name, (PyCFunction)(void (*)())call, METH_FASTCALL, text.c_str()};
}

/// Creates the module with these functions, the last of which is the empty one that ends them;
/// `free` where they may run without Python's lock.
template <bool free, std::size_t n>
PyObject* module(const char* name, const PyMethodDef (&entries)[n]) {
#ifdef OCTET_TENSORS
    const Held torch(PyImport_ImportModule("torch"));
    if (!torch.object) return nullptr;
    tensor_class = PyObject_GetAttrString(torch.object, "Tensor");
    if (!tensor_class) return nullptr;
#endif
    static PyMethodDef methods[n];  // Python keeps a pointer to them
    for (std::size_t i = 0; i < n; ++i) methods[i] = entries[i];
    static PyModuleDef definition = {
        PyModuleDef_HEAD_INIT, name, nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
    PyObject* const made = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    if (free && made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
    return made;
}

}  // namespace

}  // namespace octet_binding
