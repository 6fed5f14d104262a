"""apply_lut3d beside NumPy, SciPy, colour-science and plain PyTorch."""

import numpy as np
import pytest
import torch
from battery import DTYPES, OperatorTests
from scipy.interpolate import RegularGridInterpolator
from torch.testing import assert_close

from loader import apply_lut3d, apply_lut3d_bw, apply_lut3d_fw, apply_lut3d_reference

METHODS = ["trilinear", "tetrahedral"]
# One pixel, a group of four and a rest, several blocks, a plain and a batched image.
SHAPES = [(), (1,), (7,), (1001,), (37, 50), (2, 3, 20, 31)]
LAYOUTS = {
    "plain": lambda x: x,
    "planar": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand(-1, x.shape[1], -1, -1),
    "one channel for all": lambda x: x[..., :1].expand(-1, -1, -1, 3),
    "with alpha": lambda x: torch.cat([x, x], -1)[..., :3],
    "reversed channels": lambda x: x.flip(-1).contiguous().as_strided(x.shape, x.stride()),
    "off by one element": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "cropped": lambda x: torch.nn.functional.pad(x, (0, 0, 2, 3, 1, 4))[:, 1:-4, 2:-3],
    "too many strides": lambda x: torch.stack(
        [x.reshape(2, 2, 5, 2, 3, 3, 3)] * 2, -1)[..., 0].permute(1, 0, 3, 2, 5, 4, 6),
}  # fmt: skip


def sample(shape, S, device="cpu", dtype=torch.float32, lut_dtype=torch.float32):
    """Colours in [-0.1, 1.1), or 0 to 255, and a table in [0, 1)."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(S + len(shape))}
    if dtype == torch.uint8:
        image = torch.randint(0, 256, (*shape, 3), dtype=dtype, **make)
    else:
        image = (torch.rand(*shape, 3, **make) * 1.2 - 0.1).to(dtype)
    return image, torch.rand(S, S, S, 3, **make).to(lut_dtype)


def check(image, lut, method):
    """The forward lies within rounding of the float64 reference on the CPU.

    A place in a cell is S - 1 times a coordinate, and its error as many times larger; the table's
    slope is at most 1 to a cell, and three axes and some roundings of the sum add up.
    """
    ours = apply_lut3d_fw(image, lut, method)
    assert ours.is_contiguous() and ours.dtype == image.dtype and ours.shape == image.shape
    if image.dtype == torch.uint8:
        return check_bytes(ours, image, lut, method)
    exact = apply_lut3d_reference(image.cpu().double(), lut.cpu().double(), method)
    eps = torch.finfo(image.dtype).eps
    work = min(eps, torch.finfo(torch.float32).eps)
    atol = (3 * len(lut) + 8) * work
    assert_close(ours.cpu().double(), exact, rtol=eps, atol=atol)


def check_bytes(ours, image, lut, method):
    """Levels are those of float64, but where these lie on the edge between two."""
    exact = apply_lut3d_reference(image.cpu().double() / 255, lut.cpu().double(), method)
    level = exact.clamp(0, 1) * 255 + 0.5
    error = 255 * (3 * len(lut) + 8) * 2.0**-23 * max(1, lut.abs().max().item())
    off = ours.cpu() != level.floor()
    assert ((level - level.round()).abs()[off] < error).all()
    assert ((ours.cpu().double() - level.floor()).abs() <= 1).all()


class TestApplyLut3d(OperatorTests):
    name = "apply_lut3d"
    grows = {0: 0}
    options = {"interpolation": "tetrahedral"}
    variants = tuple({"interpolation": method} for method in METHODS)
    dtypes = f"uint8, {OperatorTests.dtypes}"
    rounding = {"rtol": 1e-4, "atol": 1e-4}
    backward_refuses = (
        (lambda grad: grad[:1], "grad_out must have the shape of image, (2, 5, 3), got (1, 5, 3)"),
        (lambda grad: grad.double(), "grad_out must have the dtype of image, float32, got float64"),
    )

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        image, lut = sample((2, 5), 3, device, dtype, dtype)
        return [(1 - 0.1 * seed) * image, (1 - 0.2 * seed) * lut]

    def more_memory(self, tensors):
        """The table with four floats to an entry, and the sums of its gradient in eight copies."""
        return (1 + 8) * 16 * len(tensors[1]) ** 3

    def large(self, device):
        real, lut = sample((300, 400), 33, device)
        return [[real, lut], [*sample((1500, 1400), 33, device, torch.uint8)]]

    def cases(self, tensors):
        image, lut = tensors
        grad_out = image.detach().clone().requires_grad_()
        for method in METHODS:
            yield "", (image, lut, method)
            yield "", (image.detach().half(), lut, method)
            yield "", ((image.detach() > 0.5).byte(), lut.detach(), method)
            for fixed in (True, False):
                yield "_backward", (grad_out, image, lut, method, True, True, fixed)

    def bad_input(self):
        image, lut = torch.rand(4, 5, 3), torch.rand(3, 3, 3, 3)
        return (
            ((image.movedim(-1, 0), lut), {}, RuntimeError, "image must be (..., 3), got (3, 4, 5); move the channels last, e.g. image.movedim(-3, -1)"),
            ((torch.tensor(1.0), lut), {}, RuntimeError, "image must be (..., 3), got (); move the channels last, e.g. image.movedim(-3, -1)"),
            ((image, lut[0]), {}, RuntimeError, "lut must be (S, S, S, 3), indexed [r, g, b], got (3, 3, 3)"),
            ((image, lut[:2]), {}, RuntimeError, "lut must be (S, S, S, 3), indexed [r, g, b], got (2, 3, 3, 3)"),
            ((image, lut[:1, :1, :1]), {}, RuntimeError, "lut must have 2 to 1024 entries along an axis, got shape (1, 1, 1, 3)"),
            ((image, lut.byte()), {}, RuntimeError, "lut must be float32, float64, float16 or bfloat16, got uint8; convert it, e.g. lut.float()"),
            ((image, lut), {"interpolation": "nearest"}, ValueError, "interpolation must be 'trilinear' or 'tetrahedral', got 'nearest'"),
            ((image, lut), {"interpolation": None}, ValueError, "interpolation must be 'trilinear' or 'tetrahedral', got None"),
        )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("S", [2, 3, 17, 33, 52, 65])
def test_matches_the_reference(S, method, device):
    for dtype in (torch.float32, torch.float64, torch.uint8):
        for shape in SHAPES:
            check(*sample(shape, S, device, dtype), method)


@pytest.mark.parametrize("lut_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8], ids=str)
def test_few_pixels_give_what_many_give(dtype, lut_dtype, device):
    """Few are read from the table as it lies, many from a copy of it."""
    image, lut = sample((20,), 7, device, dtype, lut_dtype)
    for table in (
        lut,
        lut.transpose(0, 2),
        lut.flip(3).contiguous().flip(3),
        lut[:1].expand(7, -1, -1, -1),
    ):
        for method in METHODS:
            few = apply_lut3d(image, table, method)
            many = apply_lut3d(image.repeat(5000, 1), table, method)[-20:]
            assert_close(few, many, rtol=0, atol=0 if device == "cpu" else 4 * 2.0**-23)


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("S", [9, 17, 25, 26, 27, 33, 34, 38, 39])
def test_large_images(S, method):
    """Through the L1 cache, and with the table in shared memory, where it fits; an odd rest."""
    half, brain, whole = torch.float16, torch.bfloat16, torch.float32
    for dtype, lut_dtype in ((whole, whole), (half, half), (brain, brain), (half, whole)):
        image, lut = sample((2**21 + 2**16 + 3,), S, "cuda", dtype, lut_dtype)
        exact = apply_lut3d_reference(image.double(), lut.double(), method)
        eps = torch.finfo(dtype).eps
        for part in (slice(None), slice(2**17 + 1)):
            ours = apply_lut3d(image[part], lut, method).double()
            assert_close(ours, exact[part], rtol=eps, atol=(3 * S + 8) * 2.0**-23)
        alike = image.sort(0).values  # what a look at some pixels tells from noise
        close = {"rtol": eps, "atol": (3 * S + 8) * 2.0**-23}
        exact = apply_lut3d_reference(alike.double(), lut.double(), method)
        assert_close(apply_lut3d(alike, lut, method).double(), exact, **close)
        strided = lut.transpose(0, 2).contiguous().transpose(0, 2)
        assert torch.equal(apply_lut3d(image, strided, method), apply_lut3d(image, lut, method))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8], ids=str)
@pytest.mark.parametrize("lut_dtype", DTYPES, ids=str)
def test_any_dtypes(dtype, lut_dtype, device):
    for method in METHODS:
        check(*sample((61, 7), 9, device, dtype, lut_dtype), method)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, dtype, device):
    image, lut = sample((4, 5, 18), 6, device, dtype)
    image, lut = LAYOUTS[layout](image), lut.transpose(0, 2)
    for method in METHODS:
        ours = apply_lut3d(image, lut, method)
        assert torch.equal(ours, apply_lut3d(image.contiguous(), lut.contiguous(), method))
        check(image, lut, method)
        if dtype == torch.uint8:
            continue
        grads = apply_lut3d_bw(image, image, lut, method, (True, True))
        dense = image.contiguous(), image.contiguous(), lut.contiguous()
        for ours, same in zip(grads, apply_lut3d_bw(*dense, method, (True, True)), strict=True):
            assert ours.is_contiguous()
            assert_close(ours, same, rtol=0, atol=0 if device == "cpu" else 1e-4)


def test_trilinear_equals_scipy():
    image, lut = sample((500,), 11, dtype=torch.float64, lut_dtype=torch.float64)
    points = image.clamp(0, 1).numpy()
    scipy = RegularGridInterpolator([np.linspace(0, 1, 11)] * 3, lut.numpy())(points)
    assert_close(apply_lut3d(image, lut), torch.from_numpy(scipy), rtol=0, atol=1e-14)


def test_tetrahedral_equals_its_definition():
    """The walk from the lowest corner to the highest, along the axes in falling order of t."""
    image, lut = sample((300,), 5, dtype=torch.float64, lut_dtype=torch.float64)
    image[:4] = torch.tensor([[0.3, 0.3, 0.3], [0.4, 0.4, 0.1], [0, 1, 1], [0.5, 0.25, 0.75]])
    for x, ours in zip(image.clamp(0, 1).numpy(), apply_lut3d(image, lut, METHODS[1]), strict=True):
        cell = np.minimum(np.floor(x * 4), 3).astype(int)
        t, at = x * 4 - cell, cell.copy()
        value = lut[tuple(at)].numpy().copy()
        for axis in np.argsort(-t, kind="stable"):
            before = lut[tuple(at)].numpy()
            at[axis] += 1
            value += t[axis] * (lut[tuple(at)].numpy() - before)
        assert_close(ours.numpy(), value, rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_equals_colour_science(method):
    algebra = pytest.importorskip("colour.algebra", reason="needs pip install colour-science")
    image, lut = sample((1000,), 33, dtype=torch.float64, lut_dtype=torch.float64)
    image = image.clamp(0, 1)
    theirs = getattr(algebra, f"table_interpolation_{method}")(image.numpy(), lut.numpy())
    assert_close(apply_lut3d(image, lut, method), torch.from_numpy(theirs), rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_entries_come_back_exactly(method, device):
    """A colour on an entry becomes that entry; levels too, where 255 is a multiple of S - 1."""
    for S, dtype in ((33, torch.float32), (5, torch.float64), (52, torch.uint8), (4, torch.uint8)):
        _, lut = sample((), S, device)
        if dtype == torch.uint8:
            lut = (lut * 255).round() / 255
        axis = torch.linspace(0, 1, S, dtype=torch.float64, device=device)
        grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)
        if dtype == torch.uint8:
            assert torch.equal(
                apply_lut3d((grid * 255).round().byte(), lut, method), (lut * 255).round().byte()
            )
        else:
            assert torch.equal(apply_lut3d(grid.to(dtype), lut, method), lut.to(dtype))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_colours_outside_and_nan(dtype, method, device):
    """Moved to the border, a NaN to 0; no gradient where moved, and nothing read out of bounds."""
    _, lut = sample((), 7, device)
    inf, nan = float("inf"), float("nan")
    colours = [[-inf, 2, 0.5], [nan, nan, nan], [1e30, -1e30, 1], [0.25, nan, inf], [-0.0, 1, 1]]
    image = torch.tensor(colours, dtype=dtype, device=device)
    held = image.nan_to_num(0, posinf=1, neginf=0).clamp(0, 1)
    assert torch.equal(apply_lut3d(image, lut, method), apply_lut3d(held, lut, method))
    grad = apply_lut3d_bw(torch.ones_like(image), image, lut, method)
    assert torch.equal(grad != 0, (image >= 0) & (image <= 1))


@pytest.mark.parametrize("method", METHODS)
def test_tables_that_are_wide_or_not_finite(method, device):
    """Also on the path of whole numbers of large uint8 images, which such tables leave."""
    shape = (1500, 1400) if device == "cuda" else (100, 90)
    image, lut = sample(shape, 9, device, torch.uint8)
    for table in (lut * 100 - 50, lut * 3 - 1, torch.full_like(lut, 0.5), lut.round(), lut * 1e-3):
        check_bytes(apply_lut3d(image, table, method), image, table, method)
    for bad, level in ((float("inf"), 255), (float("-inf"), 0), (float("nan"), 0)):
        table = lut.clone()
        table[4:6, 4:6, 4:6] = bad
        # Within the cell and one tetrahedron: a weight of 0 makes an infinity a NaN.
        inside = ((image > 4 * 32) & (image < 5 * 31) & (image != image.roll(1, -1))).all(-1)
        assert inside.any()
        assert (apply_lut3d(image, table, method)[inside] == level).all()


@pytest.mark.cuda
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("S", [2, 16, 17, 32, 33, 34, 65, 129])
def test_whole_numbers_give_what_float32_gives(S, method):
    """Every level of every channel, and pictures whose size is no multiple of four pixels."""
    levels = torch.arange(256, dtype=torch.uint8, device="cuda")
    every = torch.stack(torch.meshgrid(levels, levels[::3], levels[::2], indexing="ij"), -1)
    noise, lut = sample((1447, 1451), S, "cuda", torch.uint8)
    for image in (every, noise):
        for table in (lut, lut * 1.3 - 0.1, lut.square(), torch.full_like(lut, 0.5)):
            whole = apply_lut3d(image, table, method)
            plain = apply_lut3d(image.transpose(0, 1), table, method).transpose(0, 1)
            assert torch.equal(whole, plain)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0, 3)], ids=str)
def test_empty_images(shape, device):
    """No pixels give no output, and a gradient of 0 to the table."""
    _, lut = sample((), 4, device)
    image = torch.empty(shape, device=device)
    assert apply_lut3d(image, lut).shape == shape
    to_image, to_lut = apply_lut3d_bw(image, image, lut, output_mask=(True, True))
    assert to_image.shape == shape and torch.equal(to_lut, torch.zeros_like(lut))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_match_the_reference(dtype, method, device):
    """Of float64 on the CPU.

    An entry's sum has its terms' roundings, and a place in a cell the coordinate's: S - 1 times
    larger, and again in the gradient to the image.
    """
    for shape, S in (((3, 333), 5), ((71, 70), 17), ((1,), 2)):
        image, lut = sample(shape, S, device, dtype)
        grad_out = (sample(shape, S + 1, device)[0] - 0.5).to(dtype)
        leaves = [x.detach().cpu().double().requires_grad_() for x in (image, lut)]
        expected = torch.autograd.grad(
            apply_lut3d_reference(*leaves, method), leaves, grad_out.cpu().double()
        )
        grads = apply_lut3d_bw(grad_out, image, lut, method, (True, True))
        eps, work = torch.finfo(dtype).eps, min(torch.finfo(dtype).eps, 2.0**-23)
        far = (expected[0] - grads[0].cpu()).abs() > eps * S + 16 * S * S * work
        # A colour that rounding moves over a face of its cell or tetrahedron has another slope.
        assert far.float().mean() < 1e-3
        atol = 3 * S * image.numel() * work
        assert_close(grads[1].cpu().double(), expected[1], rtol=2.0**-23, atol=atol)
        for k, mask in enumerate(((True, False), (False, True))):
            alone = apply_lut3d_bw(grad_out, image, lut, method, mask)
            assert_close(alone, grads[k], rtol=0, atol=atol if k else 0)


def test_whole_numbers_have_no_gradient():
    image, lut = sample((9,), 4, dtype=torch.uint8)
    assert not apply_lut3d(image, lut.requires_grad_()).requires_grad
    with pytest.raises(RuntimeError, match="a uint8 image has no gradients, as its output is"):
        apply_lut3d_bw(image, image, lut, output_mask=(False, True))


@pytest.mark.parametrize("method", METHODS)
def test_table_gradient_is_the_same_in_every_run(method, device):
    """On the CPU always, on a GPU where deterministic algorithms are asked for."""
    image, lut = sample((300, 400), 9, device)
    torch.use_deterministic_algorithms(True)
    try:
        for dtype in (torch.float32, torch.float64):
            x = image.to(dtype)
            runs = [apply_lut3d_bw(x, x, lut, method, (True, True)) for _ in range(3)]
            assert all(map(torch.equal, runs[0] * 2, runs[1] + runs[2]))
            small = apply_lut3d_bw(x * 1e-25, x, lut.double(), method, (False, True))
            exact = apply_lut3d_bw(
                x.cpu().double() * 1e-25,
                x.cpu().double(),
                lut.cpu().double(),
                method,
                (False, True),
            )
            eps = torch.finfo(dtype).eps
            assert_close(small.cpu() * 1e25, exact * 1e25, rtol=1e-12, atol=eps * 3e4)
            for bad in (
                [float("inf")],
                [float("-inf")],
                [float("nan")],
                [float("inf"), -float("inf")],
            ):
                spoilt = x.clone()
                spoilt[7, 8, 1 : 1 + len(bad)] = spoilt.new_tensor(bad)
                same = x.new_tensor([0.49, 0.47, 0.45]).expand(x.shape)
                grad = apply_lut3d_bw(spoilt, same, lut, method, (False, True))
                found = grad[~grad.isfinite()]
                assert len(found) and {*map(str, found.tolist())} == {*map(str, bad)}
    finally:
        torch.use_deterministic_algorithms(False)


def test_more_than_2_31_elements():
    """Offsets beyond 32 bits, in memory of which only the rows are ever touched."""
    rows, lut = sample((3, 100), 3, dtype=torch.uint8)
    far = torch.empty(2**32 + 300, dtype=torch.uint8).as_strided((3, 100, 3), (2**31, 3, 1))
    far.copy_(rows)
    assert torch.equal(apply_lut3d(far, lut), apply_lut3d(rows, lut))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16], ids=str)
def test_more_than_2_31_elements_in_memory(dtype):
    row, lut = sample((2**20 + 4,), 33, "cuda", dtype)
    image = row.repeat(800, 1, 1)
    out, expected = apply_lut3d(image, lut), apply_lut3d(row, lut)
    assert torch.equal(out[-1], expected) and torch.equal(out[511], expected)
    if dtype != torch.uint8:
        grads = apply_lut3d_bw(image, image, lut, output_mask=(True, True))
        one = apply_lut3d_bw(row, row, lut, output_mask=(True, True))
        assert torch.equal(grads[0][-1], one[0])
        # A running sum of n like addends in float32 is off by up to n eps / 2 of itself: 1 % for
        # the 187 000 of an inner entry, of which roundings to either side leave a part.
        assert_close(grads[1], one[1] * 800, rtol=4e-3, atol=1)
        torch.use_deterministic_algorithms(True)  # sums in fixed point lose nothing
        try:
            many = apply_lut3d_bw(image, image, lut, output_mask=(False, True))
            few = apply_lut3d_bw(row, row, lut, output_mask=(False, True))
        finally:
            torch.use_deterministic_algorithms(False)
        assert_close(many, few * 800, rtol=1e-3, atol=1)


def test_the_registered_operator_refuses_another_method():
    # torch 2.15 makes a RuntimeError of whatever C++ throws
    with pytest.raises((ValueError, RuntimeError), match="interpolation must be 'trilinear'"):
        torch.ops.octet.apply_lut3d(*sample((4,), 3), "linear")
