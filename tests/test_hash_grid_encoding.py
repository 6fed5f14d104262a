"""hash_grid_encoding beside plain PyTorch, and beside tiny-cuda-nn's conventions counted out."""

import math
import random

import pytest
import torch
from battery import DTYPES, OperatorTests
from torch.testing import assert_close

import loader
from loader import hash_grid_encoding, hash_grid_encoding_bw, hash_grid_encoding_fw
from loader import hash_grid_encoding_reference as reference

# N, D, L, T: one point; less and more than a block; dense levels only; hashed only, T = 1; an odd T.
CASES = [(1, 3, 1, 8), (130, 2, 3, 1 << 13), (300, 3, 5, 1 << 12), (70, 3, 2, 1), (260, 3, 4, 4099)]
LAYOUTS = {
    "every other element": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "off by one element": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand(x.shape),
}
SMALL = {"base_resolution": 3, "per_level_scale": 1.5}


def sample(N, D, L, T, F, dtype=torch.float32, points_dtype=None, device="cpu"):
    """Points, table and grad_out. Points are multiples of 2^-12, whose positions in levels are
    exact in float32: they lie in the cells in which the float64 reference has them.
    """
    make = {"device": device, "generator": torch.Generator(device).manual_seed(N + T)}
    points = torch.randint(0, 4097, (N, D), **make) / 4096
    points = points.to(points_dtype or torch.float32)
    table = torch.rand(L, T, F, **make) * 2 - 1
    grad_out = torch.rand(N, L * F, **make) * 2 - 1
    return points, table.to(dtype), grad_out.to(dtype)


def check(points, table, grad_out, **options):
    """Forward and both gradients lie within rounding of the float64 reference.

    Values are at most 1: a feature is 2^D products of D + 1 factors; a point's gradient sums L F
    terms of up to 2^D scale; a row's sums those of N points, each rounded to the sum so far.
    """
    N, D = points.shape
    (L, _, F), K = table.shape, 2**D
    leaves = [x.detach().cpu().double().requires_grad_() for x in (points, table)]
    expected = reference(*leaves, **options)
    wanted = torch.autograd.grad(expected, leaves, grad_out.cpu().double())
    out = hash_grid_encoding_fw(points, table, **options)
    grads = hash_grid_encoding_bw(grad_out, points, table, (True, True), **options)
    fixed = hash_grid_encoding_bw(grad_out, points, table, deterministic=True, **options)
    work = min(torch.finfo(table.dtype).eps, torch.finfo(torch.float32).eps)
    finest = options.get("base_resolution", 16) * options.get("per_level_scale", 2.0) ** (L - 1)
    largest = max(1, wanted[1].abs().max().item())
    atol = K * work, L * F * K * finest * work, N * largest * work
    pairs = (out, expected.detach()), (grads[0], wanted[0]), (grads[1], wanted[1])
    for (ours, theirs), most in zip(pairs, atol, strict=True):
        assert ours.is_contiguous()
        most += torch.finfo(ours.dtype).tiny
        assert_close(ours.cpu().double(), theirs, rtol=torch.finfo(ours.dtype).eps, atol=most)
    rtol = torch.finfo(table.dtype).eps
    assert_close(fixed.cpu().double(), wanted[1], rtol=rtol, atol=atol[2])


class TestHashGridEncoding(OperatorTests):
    name, options, variants = "hash_grid_encoding", SMALL, (SMALL,)
    grows = {0: 0}
    rounding = {"rtol": 1e-5, "atol": 1e-5}
    backward_refuses = (
        (lambda grad: grad[:3], "grad_out must be (N, L * F) = (5, 6), got (3, 6)"),
        (lambda grad: grad.double(), "grad_out must have the dtype of table, float32, got float64"),
    )

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        points, table, _ = sample(5, 3, 3, 64, 2, dtype, dtype, device)
        return [points * 0.9 + 0.013 * (1 + seed), (1 - 0.2 * seed) * table]

    def few(self, device="cpu"):
        """A dense level and a hashed one."""
        points, table, _ = sample(3, 2, 2, 12, 1, torch.float64, torch.float64, device)
        return [points * 0.9 + 0.013, table]

    def large(self, device):
        return [[*sample(5000, 3, 4, 1 << 12, 2, device=device)[:2]]]

    def cases(self, tensors):
        points, table = tensors
        along = torch.ones_like(points)
        grad_out = torch.ones(5, 6, device=table.device, dtype=table.dtype).requires_grad_()
        yield "", (points, table, None, 4, 1.5)
        yield "", (points, table, along.requires_grad_(), 4, 1.5)
        yield "", (points.detach()[:0], table.detach(), None, 4, 1.5)
        for fixed in (True, False):
            yield "_backward", (grad_out, points, table, None, 4, 1.5, True, True, fixed)

    def test_gradients_of_images(self, device):
        """In two dimensions."""
        points, table, _ = sample(5, 2, 3, 64, 2, torch.float64, torch.float64, device)
        leaves = (points * 0.9 + 0.013).requires_grad_(), table.requires_grad_()
        assert torch.autograd.gradcheck(self.call, leaves)
        assert torch.autograd.gradgradcheck(self.call, leaves)

    def bad_input(self):
        points, table = torch.rand(4, 3), torch.rand(2, 16, 2)
        return (
            ((points[0], table), {}, RuntimeError, "points must be (N, 2) or (N, 3), got (3,); join leading dimensions with .flatten(0, -2)"),
            ((points[:, :1], table), {}, RuntimeError, "points must be (N, 2) or (N, 3), got (4, 1); join leading dimensions with .flatten(0, -2)"),
            ((points, table[0]), {}, RuntimeError, "table must be (L, T, F), got (16, 2)"),
            ((points, table[..., :0]), {}, RuntimeError, "table (L, T, F) must have 1 to 1048576 features, got (2, 16, 0)"),
            ((points, table[:1, :1, :1].expand(1, 1, 1 << 21)), {}, RuntimeError, "table (L, T, F) must have 1 to 1048576 features, got (1, 1, 2097152)"),
            ((points, table[:0]), {}, RuntimeError, "table (L, T, F) must have 1 to 128 levels, got (0, 16, 2)"),
            ((points, table[:, :0]), {}, RuntimeError, "table (L, T, F) must have 1 to 2^31 rows to a level, got (2, 0, 2)"),
            ((points, table), {"base_resolution": 0}, ValueError, "base_resolution must be 1 or more, got 0"),
            ((points, table), {"base_resolution": 1.5}, TypeError, "base_resolution must be an integer, got float"),
            ((points, table), {"per_level_scale": -1.0}, ValueError, "per_level_scale must be a positive number, got -1.000000"),
            ((points, table), {"per_level_scale": "2"}, TypeError, "per_level_scale must be a number, got str"),
            ((points, table), {"per_level_scale": 1e10}, ValueError, "base_resolution * per_level_scale^l must stay below 2^31, got 16 * 10000000000.000000^1; use fewer levels or a smaller per_level_scale"),
        )  # fmt: skip


@pytest.mark.parametrize("F", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case, F, device):
    for dtype in DTYPES:
        check(*sample(*case, F, dtype, device=device))


@pytest.mark.parametrize("seed", range(8))
def test_any_number_of_features(seed, device):
    """Random ones, of random shapes, with derivatives of both orders."""
    pick = random.Random(seed).randint
    for dtype in DTYPES:
        shape = pick(1, 300), pick(2, 3), pick(1, 6), pick(1, 2000), pick(1, 40)
        check(*sample(*shape, dtype, device=device))
    points, table, _ = sample(2, pick(2, 3), 2, 9, pick(1, 40), *[torch.float64] * 2, device)
    leaves = (points * 0.9 + 0.013).requires_grad_(), table.requires_grad_()

    def encoding(*tensors):
        return hash_grid_encoding(*tensors, **SMALL)

    assert torch.autograd.gradcheck(encoding, leaves, nondet_tol=1e-12)
    assert torch.autograd.gradgradcheck(encoding, leaves, nondet_tol=1e-12)


@pytest.mark.parametrize("points_dtype", DTYPES, ids=str)
def test_any_dtypes(points_dtype, device):
    for dtype in DTYPES:
        check(*sample(150, 3, 3, 512, 2, dtype, points_dtype, device))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout, device):
    for dtype in DTYPES:
        for F in (1, 2, 8, 3, 12):
            points, table, grad_out = sample(150, 3, 3, 512, F, dtype, device=device)
            check(*(LAYOUTS[layout](x) for x in (points, table, grad_out)))


@pytest.mark.parametrize("L", [1, 3, 4, 5, 17])
def test_any_number_of_levels(L, device):
    """Levels are taken in groups, of which the last may be smaller."""
    for F in (1, 2, 8, 3, 12):
        for dtype in (torch.float32, torch.float16):
            check(*sample(129, 2, L, 300, F, dtype, torch.float64, device), per_level_scale=1.25)


def test_conventions(device):
    """Rows and weights of single corners, counted out by hand."""
    T = 64

    def touched(point, base, T=T):
        """Rows of level 0 with their weights."""
        points = torch.tensor([point], dtype=torch.float64, device=device)
        table = torch.zeros(1, T, 1, dtype=torch.float64, device=device)
        one = torch.ones(1, 1, dtype=torch.float64, device=device)
        grad = hash_grid_encoding_bw(one, points, table, base_resolution=base).flatten()
        return {i: grad[i].item() for i in grad.nonzero().flatten().tolist()}

    # 4 corners an axis: scale 3, and x = 0.25 lies at 0.25 * 3 + 0.5 = 1.25.
    assert touched([0.25, 0.5], 4) == {1 + 2 * 4: 0.75, 2 + 2 * 4: 0.25}
    assert touched([0.25, 0.5, 0.5], 4) == {1 + 2 * 4 + 2 * 16: 0.75, 2 + 2 * 4 + 2 * 16: 0.25}
    # The far end lies at 3.5: its last corner, 4, is the next line's first, and beyond the last
    # line it is modulo 4 * 4 rows, although T is 64.
    assert touched([1.0, 0.5], 4) == {3 + 2 * 4: 0.5, 4 + 2 * 4: 0.5}
    assert touched([0.5, 1.0], 4) == {2 + 3 * 4: 0.5, 2: 0.5}
    # 9 * 9 rows do not fit in 64: hashed. x = 0.3125 lies at 3.
    assert touched([0.3125, 0.6875], 9) == {(3 ^ 6 * 2654435761) % T: 1.0}
    # Rows of a dense level are rounded up to a multiple of 8, if T has as many.
    assert touched([1.0, 1.0], 3) == {2 + 2 * 3: 0.25, 3 + 2 * 3: 0.25, 2 + 3 * 3: 0.25, 12: 0.25}
    assert touched([1.0, 1.0], 3, T=9) == {8: 0.25, 0: 0.25, 2: 0.25, 3: 0.25}
    corner = [c * 2654435761 % 2**32 for c in (5, 7)], [c * 805459861 % 2**32 for c in (2,)]
    expected = {(1 ^ corner[0][0] ^ corner[1][0]) % T: 0.5, (1 ^ (6 * 2654435761) ^ corner[1][0]) % T: 0.5}  # fmt: skip
    assert touched([0.5 / 14, 5 / 14, 1.5 / 14], 15) == pytest.approx(expected)


def test_equals_a_loop_over_corners():
    """Plain Python on integers of 32 bits, for all levels, also beyond the unit cube."""
    points, table, _ = sample(20, 3, 6, 1000, 2, torch.float64, torch.float64)
    points = points * 4 - 1.5
    out = hash_grid_encoding(points, table, base_resolution=5, per_level_scale=1.75)
    for n, point in enumerate(points.tolist()):
        for l in range(6):
            scale = torch.tensor(5 * 1.75**l - 1, dtype=torch.float32).item()
            r = math.ceil(scale) + 1
            rows = min(-(-(r**3) // 8) * 8, 1000)
            sum_ = torch.zeros(2, dtype=torch.float64)
            for k in range(8):
                weight, corner = 1.0, []
                for d in range(3):
                    at = point[d] * scale + 0.5
                    side = k >> d & 1
                    corner.append((math.floor(at) + side) % 2**32)
                    weight *= at - math.floor(at) if side else 1 - (at - math.floor(at))
                x, y, z = corner
                if r**3 <= 1000:
                    row = (x + y * r + z * r * r) % 2**32 % rows
                else:
                    row = (x ^ (y * 2654435761) % 2**32 ^ (z * 805459861) % 2**32) % 1000
                sum_ += weight * table[l, row]
            assert_close(out[n, 2 * l : 2 * l + 2], sum_)


def test_strange_coordinates(device):
    """What is not finite gives NaN, in what it touches alone; the rest is as anywhere."""
    inf = math.inf
    values = torch.tensor([math.nan, inf, -inf, 1e30, -1e30, 3e9, -3e9, -0.0078125, 1.0, 123.5])
    points = torch.cartesian_prod(values, values, values).to(device)
    for dtype in DTYPES:
        table = sample(1, 3, 4, 1 << 12, 2, dtype, device=device)[1]
        at = points.double() if dtype == torch.float64 else points
        out = hash_grid_encoding(at, table)
        lost = ~points.isfinite().all(1)
        assert torch.equal(out.isnan().all(1), lost) and torch.equal(out.isnan().any(1), lost)
        eps = torch.finfo(dtype).eps
        assert_close(out, reference(at, table), rtol=2 * eps, atol=8 * eps, equal_nan=True)
        grad_out = torch.ones_like(out)
        for fixed in (False, True):
            ours = hash_grid_encoding_bw(grad_out, at, table, (True, True), deterministic=fixed)
            assert torch.equal(ours[0].isnan().any(1), lost)
            # All cells beyond 2^31 are one: the only NaN rows are its corners' and corner 0's.
            assert 0 < ours[1].isnan().sum() < ours[1].numel() / 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_spoils_the_rows_of_its_point(bad, device):
    points, table, grad_out = sample(100, 3, 2, 4096, 2, device=device)
    grad_out[17, 2] = bad
    reached = torch.zeros_like(grad_out)
    reached[17, 2] = 1
    ones = hash_grid_encoding_bw(reached, points + 2**-16, table) > 0
    for fixed in (False, True):
        grad = hash_grid_encoding_bw(grad_out, points + 2**-16, table, deterministic=fixed)
        assert torch.equal(~grad.isfinite(), ones)


def test_no_points(device):
    points, table, grad_out = sample(0, 3, 2, 64, 2, device=device)
    assert hash_grid_encoding(points, table).shape == (0, 4)
    for fixed in (False, True):
        grads = hash_grid_encoding_bw(grad_out, points, table, (True, True), deterministic=fixed)
        assert grads[0].shape == (0, 3) and torch.equal(grads[1], torch.zeros_like(table))


def test_eikonal_loss(device):
    """The gradient by the table of a loss on the gradient to the points, in 16 and 32 bits too."""
    for dtype in DTYPES:
        points, table, _ = sample(80, 3, 4, 1 << 10, 2, dtype, device=device)
        results = []
        for f, work in ((hash_grid_encoding, dtype), (reference, torch.float64)):
            exact = f is reference
            x = points.to(torch.float64 if exact else torch.float32, copy=True).requires_grad_()
            t = table.to(work, copy=True).requires_grad_()
            out = f(x, t, **SMALL).sum(1)
            (normal,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = (normal.double().norm(dim=1) - 1).square().mean()
            results.append(torch.autograd.grad(loss, (t, x)))
        for ours, theirs in zip(*results, strict=True):
            scale = theirs.abs().max().item()
            eps = torch.finfo(dtype if ours.dtype == dtype else torch.float32).eps
            assert_close(ours.double(), theirs, rtol=0, atol=8 * max(eps, 1.2e-7) * scale)


@pytest.mark.parametrize("F", [2, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_gradients(dtype, F, device):
    """Many points on few rows, in any order of the points, to the same bits."""
    points, table, grad_out = sample(20000, 3, 4, 300, F, dtype, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        leaf = table.requires_grad_()
        first, again = (
            torch.autograd.grad(hash_grid_encoding(points, leaf), leaf, grad_out)[0] for _ in "12"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, again)
    if device == "cuda":
        other = torch.randperm(len(points), device=device)
        shuffled = hash_grid_encoding_bw(
            grad_out[other], points[other], table.detach(), deterministic=True
        )
        assert torch.equal(first, shuffled)


def table_ways(points, table, **options):
    """Return how a call's gradient to the table is summed."""
    leaf = table.detach().requires_grad_()
    rows = loader.explain(hash_grid_encoding, points, leaf, **options).rows
    return [row[2] for row in rows if row[1] == "gradient to table"]


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order", "in one cell"])
@pytest.mark.parametrize("F", [1, 2, 3, 8, 12])
def test_many_points_to_few_rows(F, path):
    """Such levels are summed in shared memory; finer ones of the same group are not."""
    ways = {1 << 14: ["coarse levels summed in shared memory"], 50: ["sums in shared memory"]}
    for D, dtype in ((3, torch.float32), (2, torch.float64), (2, torch.float16)):
        for T, expected in ways.items():
            options = {"base_resolution": 4, "per_level_scale": 2.0 if T > 50 else 1.0}
            points, table, grad_out = sample(40_001, D, 7, T, F, dtype, device="cuda")
            if path == "in order":
                points = points.sort(0).values
            if path == "in one cell":
                points = (points * 4096 % 64) / 4096
            grad_out = torch.stack([grad_out, grad_out], 2)[..., 0]
            assert table_ways(points, table, **options) == expected
            check(points, table, grad_out, **options)


@pytest.mark.cuda
def test_few_rows_of_second_derivatives():
    """The gradient to the table by way of that to the points: weights are slopes."""
    made = sample(30_001, 3, 4, 512, 2, torch.float64, torch.float64, "cuda")
    points, table, grad_out = ((x * 0.9 + 0.013).requires_grad_() for x in made)
    assert table_ways(points, table, **SMALL) == ["sums in shared memory"]

    def second(points, table, grad_out):
        out = hash_grid_encoding(points, table, **SMALL)
        (slopes,) = torch.autograd.grad(out, points, grad_out, create_graph=True)
        return torch.autograd.grad(slopes.sin().sum(), table)[0]

    ours = second(points, table, grad_out)
    leaves = (x.detach().cpu().requires_grad_() for x in (points, table, grad_out))
    assert_close(ours.cpu(), second(*leaves), rtol=1e-9, atol=1e-9 * ours.abs().max().item())


@pytest.mark.cuda
def test_more_than_2_31_elements():
    """A table of 2^32 elements, whose second level begins at 2^31."""
    table = torch.zeros(2, 1 << 28, 8, device="cuda", dtype=torch.float16)
    table[1] = torch.rand(1, 8, device="cuda").half()
    points = torch.rand(1000, 3, device="cuda")
    out = hash_grid_encoding(points, table)
    expected = table[1, :1].expand(1000, 8)
    assert_close(out[:, 8:], expected, rtol=1e-3, atol=0)
    grad = hash_grid_encoding_bw(torch.ones_like(out), points, table)
    assert_close(grad[1].sum(0, dtype=torch.float32), torch.full((8,), 1000.0).cuda(), rtol=1e-2, atol=0)  # fmt: skip


def test_the_registered_operator_refuses_another_direction():
    points, table, _ = sample(4, 3, 2, 16, 2)
    with pytest.raises(RuntimeError, match="along must have the shape and dtype of points"):
        torch.ops.octet.hash_grid_encoding(points, table, points.double(), 16, 2.0)
