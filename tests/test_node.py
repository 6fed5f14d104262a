"""The quick way into operators, jit/operators/node.cpp: it gives what Python gives, and no more."""

import copy
import gc
import itertools
import os
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from conftest import ROOT
from torch.autograd.graph import saved_tensors_hooks
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import loader
from loader.jit.operators.node import NODE


def rand(*shape):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


# Tensors and options of each operator.
CALLS = {
    "square": ((rand(5),), {}),
    "add2": ((rand(5), rand(5)), {}),
    "trilinear_interpolation": ((rand(3, 8, 2), rand(3, 3)), {}),
    "bilinear_interpolation": ((rand(3, 4, 2), rand(3, 2)), {}),
    "grid_sample": ((rand(1, 2, 4, 5), rand(1, 3, 3, 2)), {"align_corners": True}),
    "apply_lut3d": ((rand(4, 3), rand(3, 3, 3, 3)), {"interpolation": "tetrahedral"}),
    "hash_grid_encoding": ((rand(4, 2), rand(2, 32, 2)), {"per_level_scale": 1.5}),
    "convolve2d": ((rand(5, 6), rand(3, 2)), {"boundary": "reflect"}),
}


@pytest.fixture(autouse=True, scope="module")
def node():
    """Built, as it would be after some hundred calls."""
    assert NODE.build() is None
    yield
    NODE.use(True)


@pytest.fixture(params=sorted(CALLS))
def operator(request, device):
    """A name, the operator with its options, and leaves for it."""
    tensors, options = CALLS[request.param]
    function = getattr(loader, request.param)
    leaves = [x.to(device, copy=True).requires_grad_() for x in tensors]
    return request.param, lambda *xs: function(*xs, **options), leaves


def in_python(run):
    """What comes of it without the node."""
    NODE.use(False)
    try:
        return run()
    finally:
        NODE.use(True)


def is_quick(out) -> bool:
    """Whether a result has the node, and not one that is made in Python."""
    return "Function" in str(type(out.grad_fn)) and not hasattr(out.grad_fn, "saved_tensors")


def test_every_operator_is_in_the_table():
    assert {*CALLS} == {*loader._session.units}


def test_bits_are_those_of_python(operator):
    """Forward and all gradients, whichever tensors want one."""
    _, call, leaves = operator
    for flags in ([True] * len(leaves), [True, False], [False, True], [False, False]):
        for x, wanted in zip(leaves, flags, strict=False):
            x.requires_grad_(wanted)

        def run():
            out = call(*leaves)
            if not out.requires_grad:
                return [out]
            wanting = [x for x in leaves if x.requires_grad]
            return [out, *torch.autograd.grad(out.square().sum(), wanting)]

        found, expected = run(), in_python(run)
        # On a GPU the order of atomic additions moves a gradient by a last bit.
        exact = {"rtol": 0, "atol": 0} if leaves[0].is_cpu else {}
        assert_close(found, expected, **exact)
        assert is_quick(found[0]) == found[0].requires_grad


def test_gradients_one_by_one(operator):
    """What torch.autograd.grad does not ask for is not given; the others are the same."""
    _, call, leaves = operator
    every = torch.autograd.grad(call(*leaves).sum(), leaves)
    for x, expected in zip(leaves, every, strict=True):
        (alone,) = torch.autograd.grad(call(*leaves).sum(), x)
        assert_close(alone, expected)


def test_options_are_told_apart():
    """By value and type, however many there are."""
    image, grid = CALLS["grid_sample"][0]
    for mode in ("bilinear", "nearest", "bicubic"):
        for padding in ("zeros", "border", "reflection"):
            for align in (False, True, None, 0, 1):
                found = [loader.grid_sample(image, 2 * grid, mode, padding, align) for _ in "ab"]
                expected = loader.grid_sample_reference(image, 2 * grid, mode, padding, bool(align))
                assert_close(found, [expected] * 2)
    points, table = CALLS["hash_grid_encoding"][0]
    for scale in (2, 2.0, 1.5, True):
        if scale is True:
            with pytest.raises(TypeError, match="per_level_scale must be a number, got bool"):
                loader.hash_grid_encoding(points, table, per_level_scale=scale)
        else:
            found = loader.hash_grid_encoding(points, table, per_level_scale=scale)
            expected = loader.hash_grid_encoding_reference(points, table, per_level_scale=scale)
            assert_close(found, expected)


def test_saved_tensors_hooks_see_what_is_kept(operator):
    """And the backward computes with what they give back."""
    _, call, leaves = operator
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)

    def run():
        kept = []

        def pack(x):
            kept.append(x)
            return x.detach().clone()

        with saved_tensors_hooks(pack, lambda x: x):
            out = call(*leaves)
        packed = len(kept)
        return packed, torch.autograd.grad(out.square().sum(), leaves)

    (packed, found), (in_slow_way, _) = run(), in_python(run)
    assert packed == in_slow_way
    assert_close(found, expected)
    with torch.autograd.graph.save_on_cpu():
        out = call(*leaves)
    assert_close(torch.autograd.grad(out.square().sum(), leaves), expected)
    again = checkpoint(lambda *xs: call(*xs).square().sum(), *leaves, use_reentrant=False)
    assert_close(torch.autograd.grad(again, leaves), expected)
    # The operator's own is the last tensor kept: at it checkpoint ends the second run by an error.
    out = checkpoint(call, *leaves, use_reentrant=False)
    assert_close(torch.autograd.grad(out.square().sum(), leaves), expected)


def test_a_hooks_error_is_the_calls(operator):
    name, call, leaves = operator
    called = []

    def pack(x):
        called.append(x)
        raise KeyError("mine")

    with saved_tensors_hooks(pack, lambda x: x):
        if name == "add2":  # keeps nothing
            call(*leaves)
            return
        with pytest.raises(KeyError, match="mine"):
            call(*leaves)
    assert len(called) == 1


def test_backward_twice(operator):
    name, call, leaves = operator
    out = call(*leaves)
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    assert_close(torch.autograd.grad(out.sum(), leaves), first)
    if name == "add2":  # keeps nothing
        return
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward(torch.ones_like(out))


def test_changed_in_place(operator):
    name, call, leaves = operator
    out = call(*leaves)
    with torch.no_grad():
        leaves[-1].add_(1)
    if name == "add2":
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_gradients_that_do_not_arrive(operator):
    """An undefined one is zero."""
    _, call, leaves = operator

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return None

    Nothing.apply(call(*leaves)).sum().backward()
    assert all(x.grad is not None and not x.grad.any() for x in leaves)


def test_graphs_of_gradients(operator):
    """create_graph makes the graph that Python makes; gradients of it are right."""
    _, call, leaves = operator
    how = {"atol": 1e-5, "nondet_tol": 0 if leaves[0].is_cpu else 1e-12}
    assert torch.autograd.gradcheck(call, leaves, check_batched_grad=True, **how)
    assert torch.autograd.gradgradcheck(call, leaves, **how)
    out = call(*leaves)
    assert is_quick(out)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    assert all(x.requires_grad for x in first)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # in torch's jvp
def test_transforms_and_modes(operator):
    """Each goes the slow way, and gives what it gives there."""
    name, call, leaves = operator
    tensors = [x.detach() for x in leaves]
    seen = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    op = getattr(torch.ops.octet, name).default
    expected = call(*tensors)
    with Mode():
        assert_close(call(*tensors), expected, rtol=0, atol=0)
    assert op in seen
    seen.clear()
    with Function():
        assert_close(call(*tensors), expected, rtol=0, atol=0)
    assert op in seen
    out = call(*[x.as_subclass(Subclass) for x in tensors])
    assert type(out) is Subclass
    assert_close(out.as_subclass(torch.Tensor), expected, rtol=0, atol=0)
    batched = torch.vmap(call)(*[x.expand(2, *x.shape) for x in tensors])
    assert_close(batched, expected.expand(2, *expected.shape))
    gradient = torch.func.grad(lambda *xs: call(*xs).square().sum())(*tensors)
    assert_close(gradient, torch.autograd.grad(call(*leaves).square().sum(), leaves)[0])
    tangents = [torch.ones_like(x) for x in tensors]
    jvp = torch.func.jvp(call, tuple(tensors), tuple(tangents))[1]
    with torch.autograd.forward_ad.dual_level():
        duals = map(torch.autograd.forward_ad.make_dual, tensors, tangents)
        assert_close(torch.autograd.forward_ad.unpack_dual(call(*duals)).tangent, jvp)
    assert jvp.any() and call(*[x.to("meta") for x in tensors]).is_meta
    with torch.inference_mode():
        assert_close(call(*tensors), expected, rtol=0, atol=0)
        assert call(*tensors).is_inference()
    with torch.device("meta"):  # a mode, for what is made without a device
        assert call(*tensors).device == tensors[0].device


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_registered_operators_meet_no_python(operator):
    """Where no gradient is wanted, which is so within compiled graphs; with one it is as ever."""
    name, call, leaves = operator
    registered, given = getattr(torch.ops.octet, name).default, []

    class Given(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is registered:
                given.append(args)
            return op(*args, **(kwargs or {}))

    with Given(), torch.no_grad():
        expected = call(*leaves)
    (args,) = given
    options, met = args[len(leaves) :], []
    with torch.no_grad():
        sys.setprofile(
            lambda frame, event, _: met.append(frame.f_code) if event == "call" else None
        )
        try:
            out = registered(*leaves, *options)
        finally:
            sys.setprofile(None)
    assert torch.equal(out, expected) and not out.requires_grad
    assert [code.co_name for code in met] == ["__call__"]  # OpOverload's own
    loss = registered(*leaves, *options).square().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    ours = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
    assert_close(grads, ours)
    twice = [torch.autograd.grad(sum(x.sum() for x in y), leaves) for y in (grads, ours)]
    assert_close(*twice)
    # Where Python is the dispatcher, which comes first at every turn.
    given = *leaves, *options
    torch.library.opcheck(registered, given, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own
def test_compiled(operator):
    """torch.compile sees the operator, without a break; compiled autograd takes the node."""
    name, call, leaves = operator
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    assert_close(compiled(*leaves), call(*leaves))
    assert sum(f"octet.{name}" in node for node in graphs[0]) == 1
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    how = torch.compile(backend="eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(how):
        call(*leaves).square().sum().backward()
    assert_close([x.grad for x in leaves], [*expected])


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_names_the_forward(operator):
    _, call, leaves = operator
    with (
        pytest.warns(UserWarning, match="Traceback of forward call"),
        torch.autograd.detect_anomaly(),
    ):
        out = call(*leaves)
        with pytest.raises(RuntimeError, match="returned nan values"):
            out.backward(torch.full_like(out, float("nan")))


def test_hooks(operator):
    _, call, leaves = operator
    out, seen = call(*leaves), []
    out.retain_grad()
    out.register_hook(lambda grad: 2 * grad)
    out.grad_fn.register_prehook(lambda grads: seen.append("before"))
    out.grad_fn.register_hook(lambda *grads: seen.append("after"))
    out.sum().backward()
    assert seen == ["before", "after"] and (out.grad == 2).all()
    assert_close([x.grad for x in leaves], [*torch.autograd.grad(2 * call(*leaves).sum(), leaves)])


def test_bad_input_has_the_messages_of_python(operator):
    """Also where the operator takes it, but under torch.vmap alone."""
    _, call, leaves = operator
    call(*leaves)
    changes = torch.Tensor.long, torch.Tensor.to_sparse, lambda x: [1.0]
    changes = *changes, lambda x: x[None], lambda x: x[None, None]
    for i, bad in itertools.product(range(len(leaves)), changes):

        def message(i=i, bad=bad):
            try:
                return call(*leaves[:i], bad(leaves[i].detach()), *leaves[i + 1 :])
            except Exception as error:
                return type(error), str(error)

        found, expected = message(), in_python(message)
        assert type(found) is type(expected)
        assert isinstance(found, torch.Tensor) or found == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_a_lack_of_memory_in_the_backward_has_torchs_class():
    x = torch.ones(1 << 26, device="cuda", requires_grad=True)
    out = loader.square(x).sum()
    torch.cuda.empty_cache()
    most = torch.cuda.memory_reserved() + (1 << 25)
    torch.cuda.set_per_process_memory_fraction(most / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"allocate 256\.00 MiB on cuda:0"):
            out.backward()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")
def test_after_a_kernel_that_failed_the_error_is_that_kernels():
    """No memory can be had either, but it is not lacking."""
    code = """
import torch, loader
x = torch.ones(1 << 20, device="cuda")
loader.square(x)
x[torch.full((1,), 1 << 40, device="cuda")]  # asserts on the device
try:
    torch.cuda.synchronize()
except RuntimeError:
    for copies in 64, 128:  # of 4 MiB
        try:
            loader.square(x.expand(copies, -1))
        except RuntimeError as error:
            print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    words = "RuntimeError CUDA error: device-side assert triggered (of a kernel that ran before"
    assert len(said) == 2 and all(line.startswith(words) for line in said), done


def test_threads(operator):
    """Forward and backward of many threads at once."""
    _, call, leaves = operator
    expected = torch.autograd.grad(call(*leaves).square().sum(), leaves)
    failed = []

    def work():
        try:
            for _ in range(50):
                own = [x.detach().clone().requires_grad_() for x in leaves]
                assert_close(torch.autograd.grad(call(*own).square().sum(), own), expected)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_nothing_is_kept_alive(operator):
    """Neither by a graph that is gone, nor by one whose backward has run."""
    _, call, leaves = operator
    inner = [x * 1 for x in leaves]
    watched = [weakref.ref(x) for x in inner]
    out = call(*inner)
    out.sum().backward()
    del inner
    gc.collect()
    assert not any(ref() is not None for ref in watched)
    inner = [x * 1 for x in leaves]
    watched = [weakref.ref(x) for x in inner]
    out = call(*inner)
    del inner, out
    gc.collect()
    assert not any(ref() is not None for ref in watched)


def test_parameters_and_copies(operator):
    """nn.Parameter is a plain tensor; what comes out can be copied as PyTorch's own results can."""
    _, call, leaves = operator
    parameters = [torch.nn.Parameter(x.detach()) for x in leaves]
    out = call(*parameters)
    assert is_quick(out) and type(out) is torch.Tensor
    assert_close(copy.deepcopy(out.detach()), out.detach())
    out.sum().backward()
    assert all(x.grad is not None for x in parameters)


def test_a_forked_child(operator):
    """Its graphs are made; backward in a child is what torch itself refuses."""
    _, call, leaves = operator
    if leaves[0].is_cuda:
        pytest.skip("CUDA does not go on in a forked child")
    expected = call(*leaves).detach()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others are not there
        out = call(*leaves)
        os._exit(0 if is_quick(out) and torch.equal(out.detach(), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
