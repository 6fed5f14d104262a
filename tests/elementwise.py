"""What is tested of every elementwise operator; test_X.py adds the facts of its own."""

import inspect
from itertools import product

import pytest
import torch
from torch.testing import assert_close

import loader

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LAYOUTS = {
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.flatten()[0],
    "plain": lambda x: x,
    "odd length": lambda x: x.flatten()[: x.numel() - 3],
    "off by one element": lambda x: x.flatten()[1:],
    "transposed": lambda x: x.transpose(0, 2),
    "every other": lambda x: x[:, ::2, ::3],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "nine dimensions": lambda x: x.flatten()[: 2 * 3**9].view(3, 3, 3, 3, 3, 3, 3, 3, 3, 2)[
        ..., ::2
    ].permute(8, 7, 6, 5, 4, 3, 2, 1, 0, 9)[::2, 1:, ::2, 1:, ::2, 1:, ::2, 1:, ::2],
}  # fmt: skip


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


class ElementwiseTests:
    """`name`, how many `inputs` it takes, and the `library` that has it: loader, or another."""

    name: str
    inputs: int
    library = loader

    @pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
    def device(self, request):
        """As in conftest.py, which an operator of another folder does without."""
        return request.param

    def form(self, suffix=""):
        return getattr(self.library, self.name + suffix)

    def sample(self, device="cpu", dtype=torch.float32, layout="plain"):
        generator = torch.Generator(device).manual_seed(1)
        make = {"device": device, "generator": generator}
        return [
            LAYOUTS[layout](torch.randn(40, 33, 31, **make).to(dtype)) for _ in range(self.inputs)
        ]

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_matches_the_reference(self, layout, dtype, device):
        """Within a rounding for each input; a memory format that is dense is kept."""
        args = self.sample(device, dtype, layout)
        out = self.form()(*args)
        expected = self.form("_reference")(*(x.double() for x in args))
        eps = torch.finfo(dtype).eps * self.inputs
        assert out.dtype == dtype and out.shape == args[0].shape
        assert out.stride() == torch.empty_like(args[0]).stride()
        assert_close(out.double(), expected, rtol=eps, atol=eps * 1e-3)
        assert torch.equal(self.form("_fw")(*args), out)

    @pytest.mark.parametrize("layout", ["plain", "transposed", "every other", "expanded", "scalar"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients_match_the_reference(self, layout, dtype, device):
        leaves = [x.detach().requires_grad_() for x in self.sample(device, dtype, layout)]
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        out, expected = self.form()(*leaves), self.form("_reference")(*doubles)
        weight = torch.linspace(-1, 1, max(out.numel(), 1), device=device).view(out.shape).to(dtype)
        grads = torch.autograd.grad(out, leaves, weight)
        wanted = torch.autograd.grad(expected, doubles, weight.double())
        for grad, reference in zip(grads, wanted, strict=True):
            eps = torch.finfo(dtype).eps * self.inputs
            assert_close(grad.double(), reference, rtol=2 * eps, atol=eps * 1e-3)

    def test_gradients_only_where_they_are_asked_for(self, device):
        """In every combination, under autograd and by `X_bw`, whose default is all."""
        args, bw = self.sample(device), self.form("_bw")
        (grad_out,) = self.sample(device)[:1]
        every = bw(grad_out, *args)
        every = every if isinstance(every, tuple) else (every,)
        assert len(every) == self.inputs
        for mask in [m for m in product((True, False), repeat=self.inputs) if any(m)]:
            leaves = [x.requires_grad_(m) for x, m in zip(args, mask, strict=True)]
            wanted = [x for x in leaves if x.requires_grad]
            expected = [x for x, m in zip(every, mask, strict=True) if m]
            grads = torch.autograd.grad(self.form()(*leaves), wanted, grad_out)
            assert all(map(torch.equal, grads, expected))
            if self.inputs > 1:
                some = bw(grad_out, *args, output_mask=mask)
                some = some if isinstance(some, tuple) else (some,)
                assert len(some) == len(expected) and all(map(torch.equal, some, expected))
        if self.inputs > 1:
            with pytest.raises(ValueError, match=r"output_mask must be \w+ flags, for"):
                bw(grad_out, *args, output_mask=(False,) * self.inputs)

    def test_help_shows_every_form(self):
        for suffix, mentions in (("", "Args:"), ("_fw", "without gradients"), ("_bw", "grad_out")):
            form = self.form(suffix)
            parameters = [*inspect.signature(form).parameters]
            names = parameters[1:] if suffix == "_bw" else parameters
            assert names[: self.inputs] == [*inspect.signature(self.form()).parameters]
            assert form.__name__ == self.name + suffix and mentions in form.__doc__

    def test_mixed_layouts(self, device):
        args = self.sample(device)
        args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
        assert_close(self.form()(*args), self.form("_reference")(*args))

    def test_gradients(self, device):
        args = [x[:2, :3, 0].double().requires_grad_() for x in self.sample(device)]
        assert torch.autograd.gradcheck(self.form(), args)
        assert torch.autograd.gradgradcheck(self.form(), args)

    @pytest.mark.filterwarnings("ignore")  # what torch.compile itself says
    def test_compiles_as_one_graph(self, device):
        args = [x[:3].requires_grad_() for x in self.sample(device)]
        run = torch.compile(lambda *x: self.form()(*x) * 2, fullgraph=True)
        grads = torch.autograd.grad(run(*args).sum(), args)
        assert_close(run(*args), self.form("_reference")(*args) * 2)
        assert_close(grads, torch.autograd.grad((self.form("_reference")(*args) * 2).sum(), args))

    @pytest.mark.filterwarnings("ignore")  # what torch.compile itself says
    def test_the_kernels_alone_compile_as_one_graph(self, device):
        args = self.sample(device)
        for suffix in ("_fw", "_bw"):
            form, given = self.form(suffix), args if suffix == "_fw" else [args[0], *args]
            run = torch.compile(lambda *x: form(*x), fullgraph=True, backend="aot_eager")  # noqa: B023
            assert_close(run(*given), form(*given))

    def test_function_transforms(self):
        args = [x[:4, :5, 0] for x in self.sample()]
        assert_close(torch.func.vmap(self.form())(*args), self.form()(*args))

        def loss(*x):
            return self.form()(*x).square().sum()

        each = torch.func.vmap(torch.func.grad(loss))(*args)
        assert_close(each, torch.func.grad(loss)(*args))

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own
    def test_forward_mode_raises(self):
        """There is no rule for tangents; dropping one silently would be a wrong derivative."""
        args = tuple(x[:2, :3, 0] for x in self.sample())
        with pytest.raises(RuntimeError, match="jvp"):
            torch.func.jvp(self.form(), args, args)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_registered_operator_passes_opcheck(self, dtype, device):
        args = [x[:3, :2].requires_grad_() for x in self.sample(device, dtype)]
        torch.library.opcheck(getattr(torch.ops.octet, self.name).default, args)
        torch.library.opcheck(
            getattr(torch.ops.octet, self.name).default,
            [x.detach().transpose(0, 1).requires_grad_() for x in args],
        )

    def test_bad_input_gets_one_clear_message(self):
        first = self.first
        rest = [torch.ones(3)] * (self.inputs - 1)
        for bad, kind, message in (
            (torch.ones(3).int(), RuntimeError, f"{first} must be float32, float64, float16 or bfloat16, got int32; convert it, e.g. {first}.float()"),
            (torch.ones(3).to_sparse(), RuntimeError, f"{first} must be a dense tensor, got a sparse or packed one; use {first}.to_dense()"),
            (torch.ones(3).numpy(), TypeError, f"{first} must be a torch.Tensor, got ndarray; convert it with torch.from_numpy()"),
            (None, TypeError, f"{first} must be a torch.Tensor, got NoneType"),
        ):  # fmt: skip
            with pytest.raises(kind) as caught:
                self.form()(bad, *rest)
            assert str(caught.value) == f"{self.name}: {message}"
        with pytest.raises(RuntimeError, match="is on the meta device"):
            self.form()(torch.ones(3, device="meta"), *rest)


class BackwardTests:
    """What is tested of an elementwise operator with a backward kernel."""

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_registered_backward_passes_opcheck(self, dtype, device):
        backward = getattr(torch.ops.octet, f"{self.name}_backward").default
        args = [x[:3, :2].requires_grad_() for x in self.sample(device, dtype)]
        grad_out = args[0].detach().requires_grad_()
        last = [True] * self.inputs, [False, *[True] * (self.inputs - 1)]
        for mask in last if self.inputs > 1 else [None]:
            torch.library.opcheck(backward, (grad_out, *args, *([] if mask is None else [mask])))

    def test_backward_refuses_what_does_not_fit(self):
        args, first = [torch.ones(4)] * self.inputs, self.first
        for grad_out, message in (
            (torch.ones(3), f"{first} must have the shape of grad_out, (3,), got (4,); expand it first, e.g. with torch.broadcast_tensors"),
            (torch.ones(4).double(), f"{first} must have the dtype of grad_out, float64, got float32; convert one of them with .to()"),
        ):  # fmt: skip
            with pytest.raises(RuntimeError) as caught:
                self.form("_bw")(grad_out, *args)
            assert str(caught.value) == f"{self.name}: {message}"
        with pytest.raises(TypeError, match=r"grad_out must be a torch\.Tensor, got float"):
            self.form("_bw")(1.0, *args)

    def test_third_derivative(self):
        args = [x[:2, :3, 0].double().requires_grad_() for x in self.sample()]

        def third(function):
            y = function(*args).pow(3).sum()
            for _ in range(3):
                grads = torch.autograd.grad(y, args, create_graph=True)
                y = sum(grad.pow(2).sum() for grad in grads)
            return grads

        assert_close(third(self.form()), third(self.form("_reference")))
        twice = torch.func.grad(lambda *x: torch.func.grad(self.loss)(*x).pow(2).sum())
        expected = torch.autograd.grad(
            torch.autograd.grad(self.loss(*args), args[0], create_graph=True)[0].pow(2).sum(), args
        )
        assert_close(twice(*(x.detach() for x in args)), expected[0])

    def loss(self, *args):
        return self.form()(*args).pow(3).sum()
