"""`loader.operator`: a kernel and its reference as an operator, in every mode of torch."""

import pytest
import torch
from torch import Tensor

import loader

SOURCE = """
__global__ void cubed(double* out, const double* x, double factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = factor * x[i] * x[i] * x[i];
}
__global__ void cubed_backward(double* out, const double* g, const double* x, double factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = 3 * factor * x[i] * x[i] * g[i];
}
"""
CALLS: list[str] = []


def cube(x: Tensor, factor: float = 2.0) -> Tensor:
    """The reference."""
    return factor * x**3


@pytest.fixture(scope="module")
def module():
    return loader.source_module(SOURCE, device="cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["reference", "kernel"])
def cubed(request, module):
    """An operator whose kernel is from a string; its backward too, or by the reference."""

    def kernel(x, factor):
        CALLS.append("forward")
        out = torch.empty_like(x)
        module.cubed(out, x, factor, x.numel(), grid=-(-x.numel() // 64), block=64)
        return out

    def backward(grad, x, factor):
        CALLS.append("backward")
        out = torch.empty(x.shape, dtype=x.dtype)
        grid = -(-x.numel() // 64)
        module.cubed_backward(out, grad, x, factor, x.numel(), grid=grid, block=64)
        return out

    return loader.operator(
        cube,
        kernel=kernel,
        backward=backward if request.param else None,
        name=f"tests::cube_{request.param}",
    )


@pytest.fixture
def x():
    return torch.rand(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_values_gradients_and_their_gradients(cubed, x):
    """By the kernels where there are such, to second order, in reverse and forward mode."""
    CALLS.clear()
    x.requires_grad_()
    out = cubed(x)
    assert torch.equal(out, 2 * (x * x * x)) or torch.allclose(out, cube(x), rtol=1e-15)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, 6 * x**2)
    assert CALLS[0] == "forward"
    assert ("backward" in CALLS) == cubed.op.name().endswith("True")
    assert torch.autograd.gradcheck(cubed, (x, 3.0), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(cubed, (x, 3.0), check_fwd_over_rev=True)


def test_check_holds_kernel_against_reference_and_runs_opcheck(cubed, x):
    cubed.check(x)
    cubed.check(x.t(), factor=3.0)


def test_a_wrong_kernel_is_found_by_check(x):
    wrong = loader.operator(cube, kernel=lambda x, factor: factor * x**2, name="tests::wrong")
    with pytest.raises(AssertionError, match="not close"):
        wrong.check(x)
    wrong = loader.operator(
        cube, kernel=cube, backward=lambda g, x, factor: g * x, name="tests::wrong"
    )
    with pytest.raises(AssertionError, match="not close"):
        wrong.check(x)


def test_compiled_it_still_calls_the_kernels(cubed, x):
    """In one graph, forward and backward; as torch.export has it too."""
    x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: cubed(x.t(), factor=3.0).sin().sum(), fullgraph=True, backend="aot_eager"
    )
    CALLS.clear()
    compiled(x).backward()
    torch.testing.assert_close(x.grad, 9 * x.detach() ** 2 * (3 * x.detach() ** 3).cos())
    assert "forward" in CALLS

    class Module(torch.nn.Module):
        def forward(self, x):
            return cubed(x) + 1

    program = torch.export.export(Module(), (x.detach(),))
    torch.testing.assert_close(program.module()(x.detach()), cube(x.detach()) + 1)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
def test_transforms_of_functions(cubed, x):
    """vmap calls it for each member; grad, jvp and hessian go through both derivatives."""
    torch.testing.assert_close(torch.vmap(cubed)(x), cube(x))
    torch.testing.assert_close(torch.vmap(cubed, in_dims=1)(x), cube(x).t())
    assert torch.vmap(cubed)(x[:0]).shape == (0, 3)
    total = torch.func.grad(lambda x: cubed(x).sum())
    torch.testing.assert_close(total(x), 6 * x**2)
    torch.testing.assert_close(torch.vmap(total)(x), 6 * x**2)
    hessian = torch.func.hessian(lambda x: cubed(x).sum())(x[0])
    torch.testing.assert_close(hessian, (12 * x[0]).diag())


def test_several_results_and_arguments_without_gradients(x):
    """Integers, None and options among the arguments, an integer among the results."""

    @loader.operator(name="tests::pick")
    def pick(
        x: Tensor, at: Tensor, bias: Tensor | None = None, *, scale: int = 1
    ) -> tuple[Tensor, Tensor]:
        picked = x[at] * scale
        return (picked if bias is None else picked + bias), at + 1

    at = torch.tensor([3, 0])
    x.requires_grad_()
    value, number = pick(x, at, scale=2)
    value.sum().backward()
    expected = torch.zeros_like(x)
    expected[at] = 2
    assert torch.equal(x.grad, expected)
    assert number.tolist() == [4, 1] and not number.requires_grad
    bias = torch.ones(3, dtype=x.dtype, requires_grad=True)
    pick(x, at, bias)[0].sum().backward()
    assert bias.grad.tolist() == [2.0] * 3
    pick.check(x.detach(), at, bias.detach(), scale=3)


def test_an_operator_that_writes_says_so(x):
    """Declared it works, compiled too; undeclared it is refused."""

    def add_one(x: Tensor) -> None:
        x.add_(1)

    before = x.clone()
    written = loader.operator(add_one, kernel=add_one, name="tests::add_one", mutates=["x"])
    assert written(x) is None
    assert torch.equal(x, before + 1)
    compiled = torch.compile(lambda x: written(x * 1), fullgraph=True, backend="aot_eager")
    compiled(x)
    written.check(x)
    with pytest.raises(ValueError, match="writes to x has no gradient"):
        loader.operator(add_one, name="tests::add_one", mutates=["x"], backward=add_one)

    def secretly(x, factor):
        x.mul_(2)
        return x**3

    hidden = loader.operator(cube, kernel=secretly, name="tests::hidden")
    with pytest.raises(RuntimeError, match="the kernel wrote to its argument x; return a new"):
        hidden(x)


def test_defined_again_it_is_replaced(x):
    """As in a cell that is run again, also with other arguments."""
    for factor in (1.0, 2.0):

        def reference(x: Tensor) -> Tensor:
            return x * factor  # noqa: B023

        again = loader.operator(reference, name="tests::again")
        y = x.clone().requires_grad_()
        again(y).sum().backward()
        assert torch.equal(y.grad, torch.full_like(x, factor))
        assert torch.equal(torch.ops.tests.again(x), x * factor)

    @loader.operator(name="tests::again")
    def other(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    assert torch.equal(other(x, x), 2 * x)


def test_a_kernel_for_one_device_leaves_others_to_the_reference(x):
    only = loader.operator(cube, kernel={"cuda": cube}, name="tests::only")
    torch.testing.assert_close(only(x), cube(x))
    meta = only(x.to("meta"))
    assert (meta.shape, meta.device.type) == (x.shape, "meta")


KERNELS = {
    "the shape of the reference's, (5, 3), got (3, 5)": lambda x, f: (f * x**3).t().clone(),
    "the dtype of the reference's, torch.float64, got torch.float32": lambda x, f: x.float(),
    "must be a Tensor, as the reference's, got None": lambda x, f: None,
    "shares memory with an argument": lambda x, f: x.view(5, 3),
}


@pytest.mark.parametrize("message", KERNELS)
def test_a_result_of_another_kind_is_refused(message, x):
    """In the first call with arguments of a kind."""
    bad = loader.operator(cube, kernel=KERNELS[message], name="tests::bad")
    with pytest.raises(RuntimeError) as refused:
        bad(x)
    assert message in str(refused.value)


def unannotated(x, y: Tensor) -> Tensor:
    return x


def number(x: Tensor) -> float:
    return 1.0


def nothing(x: Tensor) -> None:
    return None


def any_number(*x: Tensor) -> Tensor:
    return x[0]


def lists(x: list[Tensor]) -> Tensor:
    return x[0]


def abs_of(x):
    return x.abs()


REFUSED = {
    "argument x of the reference must be annotated": (unannotated, {}),
    "the reference must return tensors, got float": (number, {}),
    "the reference must return tensors, got ()": (nothing, {}),
    "the reference must name its arguments": (any_number, {}),
    "must be tensors, not lists": (lists, {}),
    "mutates names z, which is no argument": (nothing, {"mutates": ["z"]}),
    'must be "namespace::name", as "mine::cube", got \'cube\'': (cube, {"name": "cube"}),
    "the namespace of 'aten::cube' is taken": (cube, {"name": "aten::cube"}),
    "kernel must be a function, got int": (cube, {"kernel": 3}),
    "kernel must be a dict by type of device, as 'cuda', got 'gpu'": (
        cube,
        {"kernel": {"gpu": cube}},
    ),
    "reference must be a function, got int": (3, {}),
    "the reference must be a function of Python": (torch.sin, {"name": "mine::sin"}),
    "backward must be a function, got int": (cube, {"backward": 3}),
    "kernel must take the arguments (x, factor) by position": (cube, {"kernel": abs_of}),
    "kernel for 'cuda' must take the arguments": (cube, {"kernel": {"cuda": abs_of}}),
    "backward must take the arguments (grad, x, factor)": (cube, {"backward": abs_of}),
    "mutates must be names of arguments; write ['x']": (nothing, {"mutates": "x"}),
    "tests_taken::square is registered already": (cube, {"name": "tests_taken::square"}),
}
TAKEN = torch.library.Library("tests_taken", "DEF")
TAKEN.define("square(Tensor x) -> Tensor")


@pytest.mark.parametrize("message", REFUSED)
def test_what_makes_no_operator_is_refused_in_a_sentence(message):
    reference, options = REFUSED[message]
    with pytest.raises((TypeError, ValueError)) as refused:
        loader.operator(reference, **options)
    assert message in str(refused.value)


def test_wrong_calls(x):
    """As of a function of Python."""
    call = loader.operator(cube, name="tests::calls")
    for args, named, message in (
        ((), {}, "argument x is missing"),
        ((x, 1.0, 2), {}, "takes 2 arguments, got 3"),
        ((x,), {"x": x}, "x is given twice"),
        ((x,), {"y": x}, "y is none of its arguments"),
    ):
        with pytest.raises(TypeError, match=message):
            call(*args, **named)


def test_a_wrong_backward_is_refused(x):
    """Another number of gradients, or one of another shape."""
    x.requires_grad_()
    for gradients, message in (
        ((x, x), "backward must return 1 gradients, one for each tensor argument, got 2"),
        (x[0], r"backward must return for x a gradient of its shape, \(5, 3\), got \(3,\)"),
        (x.float(), "a gradient of its dtype, torch.float64, got torch.float32"),
        (3, "a gradient of its shape"),
    ):
        bad = loader.operator(
            cube, backward=lambda g, x, f, r=gradients: r, name="tests::backwards"
        )
        with pytest.raises(RuntimeError, match=message):
            bad(x).sum().backward()


@pytest.mark.cuda
def test_kernels_of_the_gpu(x):
    """One from a string; the reference serves the CPU."""
    module = loader.source_module(SOURCE)

    def kernel(x, factor):
        out = torch.empty_like(x)
        module.cubed(out, x, factor, x.numel(), grid=-(-x.numel() // 64), block=64)
        return out

    cubed = loader.operator(cube, kernel={"cuda": kernel}, name="tests::on_the_gpu")
    cubed.check(x.cuda())
    cubed.check(x)
    y = x.cuda().requires_grad_()
    torch.compile(lambda y: cubed(y).sin().sum(), fullgraph=True)(y).backward()
    torch.testing.assert_close(y.grad, 6 * y**2 * (2 * y**3).cos())


def positive(x: Tensor) -> Tensor:
    return x[x > 0]


def by_its_sum(x: Tensor) -> Tensor:
    return x * x.sum().item()


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (positive, "depends on values"),
        (by_its_sum, r"asks a tensor for a value .* without item\(\)"),
        (by_numpy, "must be plain PyTorch"),
    ],
)
def test_a_reference_that_cannot_be_run_without_data_is_refused(reference, message, x):
    bad = loader.operator(reference, kernel=reference, name="tests::without_data")
    with pytest.raises(NotImplementedError, match=message):
        bad(x)


def test_a_reference_that_writes_is_refused(x):
    """Where it serves instead of a kernel."""

    def doubled(x: Tensor) -> Tensor:
        return x.mul_(2)

    with pytest.raises(RuntimeError, match="the reference wrote to its argument x"):
        loader.operator(doubled, name="tests::doubled")(x)
