"""What is tested of every elementwise operator; test_X.py adds the facts of its own."""

import random

import pytest
import torch
from torch.testing import assert_close

from loader.tests.battery import DTYPES, GPU, OperatorTests

LAYOUTS = {
    "empty": lambda x: x[:0],
    "scalar": lambda x: x.flatten()[0],
    "plain": lambda x: x,
    "odd length": lambda x: x.flatten()[: x.numel() - 3],
    "off by one element": lambda x: x.flatten()[1:],
    "rows apart": lambda x: x[:, :, 3:-1],
    "transposed": lambda x: x.transpose(0, 2),
    "every other": lambda x: x[:, ::2, ::3],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1),
    "windows": lambda x: x.flatten().unfold(0, 5, 2),
    "short rows": lambda x: x[:, :, 3:6],
    "one short row": lambda x: x[:1, :1, :6].expand(40, 33, -1),
    "nine dimensions": lambda x: x.flatten()[: 2 * 3**9].view(3, 3, 3, 3, 3, 3, 3, 3, 3, 2)[
        ..., ::2
    ].permute(8, 7, 6, 5, 4, 3, 2, 1, 0, 9)[::2, 1:, ::2, 1:, ::2, 1:, ::2, 1:, ::2],
}  # fmt: skip


def assert_rounded(out, exact, inputs):
    """Raise where `out` is further from `exact`, in float64, than rounding of a formula explains.

    What is computed on the way is rounded as inputs and results are, so an element may be off as
    if each of its inputs were off by an eps, and by two eps of itself.
    """
    moved = torch.zeros_like(exact)
    if exact.requires_grad:
        slopes = torch.autograd.grad(
            exact.sum(), inputs, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        moved = sum((x * slope).abs() for x, slope in zip(inputs, slopes, strict=True))
    eps, off = torch.finfo(out.dtype).eps, (out.double() - exact).abs()
    within = off <= eps * (2 * exact.abs() + moved + 1e-3)
    assert within.all(), f"off by {off[~within].max()} at {(~within).nonzero()[0].tolist()}"


class ElementwiseTests(OperatorTests):
    """`name`, how many `inputs` it takes, and the `library` that has it: loader, or another."""

    inputs: int
    first: str
    one_operation = False  # True where the formula and its derivatives round once for each input

    def sample(self, device="cpu", dtype=torch.float32, layout="plain"):
        generator = torch.Generator(device).manual_seed(1)
        make = {"device": device, "generator": generator}
        return [
            LAYOUTS[layout](torch.randn(40, 33, 31, **make).to(dtype)) for _ in range(self.inputs)
        ]

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_matches_the_reference(self, layout, dtype, device):
        """Within rounding; a memory format that is dense is kept."""
        args = self.sample(device, dtype, layout)
        out = self.form()(*args)
        doubles = [x.double().requires_grad_() for x in args]
        expected = self.form("_reference")(*doubles)
        assert out.dtype == dtype and out.shape == args[0].shape
        assert out.stride() == torch.empty_like(args[0]).stride()
        assert_rounded(out, expected, doubles)
        self.assert_one_rounding(out, expected, 1)
        assert torch.equal(self.form("_fw")(*args), out)

    def test_dimensions_lie_in_torchs_order(self):
        """Of random shapes, permuted, expanded, with windows that overlap."""
        draw = random.Random(self.name)
        for _ in range(300):
            x = torch.empty(draw.choices((1, 2, 2, 3), k=draw.randint(1, 6)))
            x = x.permute(*draw.sample(range(x.dim()), x.dim()))
            for d in range(x.dim()):
                if draw.random() < 0.4:
                    x = x.narrow(d, 0, 1).expand(
                        *x.shape[:d], draw.choice((2, 3)), *x.shape[d + 1 :]
                    )
            if x.size(-1) > 1 and draw.random() < 0.3:
                x = x.unfold(-1, 2, 1)
            x = x.permute(*draw.sample(range(x.dim()), x.dim()))
            out = self.form()(*[x] * self.inputs)
            assert out.stride() == torch.empty_like(x).stride(), (x.shape, x.stride())

    @GPU
    @pytest.mark.parametrize("columns", [1, 3, 7, 9, 64, 129, 1000])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_large_calls(self, dtype, columns):
        """What is large goes other ways through memory on a GPU."""
        rows = 2_300_000 // columns
        whole = torch.randn(rows, 2 * columns + 3, device="cuda").to(dtype)
        flat = whole.flatten()
        layouts = [
            whole[:, 1 : columns + 1],
            whole[:, : 2 * columns : 2],
            whole[:1, 2 : columns + 2].expand(rows, -1),
            flat[1 : rows * columns + 1].view(rows, columns),
            flat[: rows * columns].view(columns, rows).t(),
        ]
        for first in layouts:
            for second in layouts[: 1 if self.inputs == 1 else None]:
                args = [first, *[second] * (self.inputs - 1)]
                doubles = [x.double().requires_grad_() for x in args]
                assert_rounded(self.form()(*args), self.form("_reference")(*doubles), doubles)

    @GPU
    @pytest.mark.parametrize("shape", [(31, 190, 131), (700, 300, 3), (3, 1100, 260)])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_large_volumes(self, dtype, shape):
        """Rows, planes and tiles end within vectors, in three dimensions that do not merge."""
        whole = torch.randn(2 * shape[0], shape[1] + 3, shape[2] + 5, device="cuda").to(dtype)
        part = whole[::2, 1:-2, 2:-3]
        layouts = [
            part,
            part[..., :1].expand(shape),
            part[:1].expand(shape),
            part.contiguous().permute(0, 2, 1).contiguous().permute(0, 2, 1),
            part.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        ]
        for first in layouts:
            for second in layouts[: 1 if self.inputs == 1 else None]:
                args = [first, *[second] * (self.inputs - 1)]
                doubles = [x.double().requires_grad_() for x in args]
                assert_rounded(self.form()(*args), self.form("_reference")(*doubles), doubles)

    @pytest.mark.parametrize("layout", ["plain", "transposed", "every other", "expanded", "scalar"])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients_match_the_reference(self, layout, dtype, device):
        leaves = [x.detach().requires_grad_() for x in self.sample(device, dtype, layout)]
        doubles = [x.detach().double().requires_grad_() for x in leaves]
        out, expected = self.form()(*leaves), self.form("_reference")(*doubles)
        weight = torch.linspace(-1, 1, max(out.numel(), 1), device=device).view(out.shape).to(dtype)
        grads = torch.autograd.grad(out, leaves, weight)
        wanted = torch.autograd.grad(expected, doubles, weight.double(), create_graph=True)
        for grad, reference in zip(grads, wanted, strict=True):
            assert_rounded(grad, reference, doubles)
            self.assert_one_rounding(grad, reference, 2)

    def assert_one_rounding(self, out, exact, roundings):
        """Where the formula is one operation: within this many roundings for each input."""
        if self.one_operation:
            eps = torch.finfo(out.dtype).eps * self.inputs
            assert_close(out.double(), exact, rtol=roundings * eps, atol=eps * 1e-3)

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        generator = torch.Generator(device).manual_seed(seed)
        make = {"device": device, "generator": generator}
        return [torch.randn(2, 3, **make).to(dtype) for _ in range(self.inputs)]

    def large(self, device):
        return [self.sample(device)]

    def cases(self, tensors):
        yield "", tensors
        yield "", [x.detach().transpose(0, 1).requires_grad_() for x in tensors]

    def test_mixed_layouts(self, device):
        args = self.sample(device)
        args[0] = args[0].transpose(0, 1).contiguous().transpose(0, 1)
        assert_close(self.form()(*args), self.form("_reference")(*args))

    @pytest.mark.filterwarnings("ignore")  # what torch.compile itself says
    def test_the_kernels_alone_compile_as_one_graph(self, device):
        args = self.sample(device)
        for suffix in ("_fw", "_bw"):
            form, given = self.form(suffix), args if suffix == "_fw" else [args[0], *args]
            run = torch.compile(lambda *x: form(*x), fullgraph=True, backend="aot_eager")  # noqa: B023
            assert_close(run(*given), form(*given))

    def wrong_tensors(self):
        """Of the first; the others are compared with it."""
        yield from (
            case for case in super().wrong_tensors() if case[-1].startswith(f"{self.first} ")
        )


class BackwardTests(ElementwiseTests):
    """Of one with a backward kernel."""

    @property
    def backward_refuses(self):
        return (
            (lambda grad: grad[:1].expand(3, -1), f"{self.first} must have the shape of grad_out, (3, 3), got (2, 3); expand it first, e.g. with torch.broadcast_tensors"),
            (lambda grad: grad.double(), f"{self.first} must have the dtype of grad_out, float64, got float32; convert one of them with .to()"),
        )  # fmt: skip

    def cases(self, tensors):
        yield from super().cases(tensors)
        grad_out = tensors[0].detach().requires_grad_()
        last = [True] * self.inputs, [False, *[True] * (self.inputs - 1)]
        for mask in last if self.inputs > 1 else [None]:
            yield "_backward", (grad_out, *tensors, *([] if mask is None else [mask]))
