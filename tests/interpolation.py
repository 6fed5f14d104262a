"""What is tested of both interpolation operators; test_X.py adds the facts of its own."""

import math
import random

import pytest
import torch
from battery import DTYPES, OperatorTests
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

# N, F: empty in either, single, odd tails, each narrow kernel, 16-byte vectors, several to a thread.
CASES = [(0, 4), (5, 0), (1, 1), (300, 1), (37, 3), (129, 2), (513, 4), (200, 8), (67, 12), (70, 32),
         (130, 64), (33, 65), (9, 256), (5, 1000)]  # fmt: skip
LAYOUTS = ["plain", "every other feature", "one cell for all", "corners last", "off by one element",
           "corners last, cells apart", "rows apart", "cells apart"]  # fmt: skip


class InterpolationTests(OperatorTests):
    """`name`, and `D` axes."""

    D: int
    backward_refuses = (
        (lambda grad: grad[:3], "grad_out must be (N, F) = (4, 3), got (3, 3)"),
        (lambda grad: grad[0], "grad_out must be (N, F) = (4, 3), got (3,)"),
        (lambda grad: grad.double(), "grad_out must have the dtype of feats, float32, got float64"),
    )

    @property
    def K(self):
        return 2**self.D

    def sample(self, N, F, device="cpu", dtype=torch.float32, points_dtype=None, layout="plain"):
        """Features in [-1, 1) in one of several layouts in memory, points within the cell."""
        make = {"device": device, "generator": torch.Generator(device).manual_seed(N + 31 * F)}

        def uniform(*shape):
            return (torch.rand(*shape, **make) * 2 - 1).to(dtype)

        feats = {
            "plain": lambda: uniform(N, self.K, F),
            "every other feature": lambda: uniform(N, self.K, 2 * F)[:, :, ::2],
            "one cell for all": lambda: uniform(1, self.K, F).expand(N, -1, -1),
            "corners last": lambda: uniform(N, F, self.K).transpose(1, 2),
            "corners last, cells apart": lambda: uniform(N, F + 2, self.K)[:, :F].transpose(1, 2),
            "off by one element": lambda: uniform(N * self.K * F + 1)[1:].view(N, self.K, F),
            "rows apart": lambda: uniform(N, self.K, F + 3)[:, :, 2:-1],
            "cells apart": lambda: uniform(N, 3 * self.K, F)[:, self.K : 2 * self.K],
        }[layout]()
        points = (torch.rand(N, self.D, **make) * 2 - 1).to(points_dtype or torch.float32)
        return feats, points, uniform(N, F)

    def small(self, device="cpu", dtype=torch.float64, seed=0):
        feats, points, _ = self.sample(4, 3, device, dtype, dtype)
        return [(1 - 0.1 * seed) * feats, (1 - 0.2 * seed) * points]

    def large(self, device):
        return [[*self.sample(4096, 32, device)[:2]]]

    def cases(self, tensors):
        grad_out = torch.ones_like(tensors[0][:, 0]).requires_grad_()
        feats, points = tensors
        yield "", tensors
        yield "", [x.detach()[:0].requires_grad_() for x in tensors]
        yield "_backward", (grad_out, feats, points, True, True)
        yield "_backward", (grad_out, None, points, True, False)
        yield "_backward", (grad_out, feats, points, False, True)

    def expected(self, feats, points, grad_out, where):
        """Forward and both gradients by the reference, in float64."""
        feats, points = (x.detach().to(where).double().requires_grad_() for x in (feats, points))
        out = self.form("_reference")(feats, points)
        return out.detach(), *torch.autograd.grad(out, (feats, points), grad_out.to(where).double())

    def check(self, feats, points, grad_out, where="cpu"):
        """Forward and backward lie within rounding of the float64 reference.

        The sum has 2^D terms, each a product of up to D + 1 rounded factors: at most 2^D + 3 D
        roundings of the accumulating type, and one of the result's. Features are at most 1 and the
        weights add up to 1; a gradient to points adds up F features.
        """
        out, to_feats, to_points = self.expected(feats, points, grad_out, where)
        eps = torch.finfo(feats.dtype).eps
        work = min(eps, torch.finfo(torch.float32).eps)  # double accumulates in double
        exact = {"rtol": eps, "atol": (self.K + 3 * self.D) * work, "check_dtype": False}
        fw, bw = self.form("_fw"), self.form("_bw")
        assert_close(fw(feats, points).to(where).double(), out, **exact)
        grad_feats, grad_points = bw(grad_out, feats, points, (True, True))
        assert grad_feats.dtype == feats.dtype and grad_points.dtype == points.dtype
        assert_close(grad_feats.to(where).double(), to_feats, **exact)
        tolerance = (feats.shape[2] + self.K + 3 * self.D) * max(
            work, torch.finfo(points.dtype).eps if points.dtype.itemsize == 2 else 0
        )
        rounding = torch.finfo(points.dtype).eps
        assert_close(grad_points.to(where).double(), to_points, rtol=rounding, atol=tolerance)
        assert torch.equal(bw(grad_out, feats, points), grad_feats)
        assert torch.equal(bw(grad_out, feats, points, (False, True)), grad_points)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("N, F", CASES)
    def test_matches_the_reference(self, N, F, dtype, device):
        self.check(*self.sample(N, F, device, dtype))

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("F", [1, 3, 4, 8, 32, 256])
    def test_any_strides(self, layout, dtype, F, device):
        feats, points, grad_out = self.sample(45, F, device, dtype, layout=layout)
        points = torch.stack([points, points], 2)[..., 0]
        self.check(feats, points, grad_out)
        self.check(feats, points, grad_out[:1, :1].expand(45, F))
        self.check(feats, points[:1].expand(45, -1), grad_out.t().contiguous().t())

    @pytest.mark.cuda
    @pytest.mark.parametrize("seed", range(10))
    def test_random_widths_alignments_and_strides(self, seed):
        """Each of the GPU's ways through memory, with tiles of many points, of one and of part."""
        draw = random.Random(seed)
        for _ in range(20):
            F = draw.choice((draw.randint(1, 40), round(math.exp(draw.uniform(0, 9)))))
            N, shift = 1 + draw.randrange(max(2, 200_000 // (self.K * F))), draw.randint(0, 15)
            dtype = draw.choice(DTYPES)
            feats, points, grad_out = self.sample(
                N, F, "cuda", dtype, draw.choice(DTYPES), draw.choice(LAYOUTS)
            )
            if feats.is_contiguous():
                room = torch.empty(feats.numel() + shift, dtype=dtype, device="cuda")
                feats = room[shift:].view(feats.shape).copy_(feats)
            wide = torch.empty(N, F + shift + 2, dtype=dtype, device="cuda")
            self.check(feats, points, wide[:, shift : shift + F].copy_(grad_out))

    @pytest.mark.cuda
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("F", [1, 2, 3, 4, 8])
    def test_narrow_cells_wherever_they_begin(self, F, dtype):
        """Words of memory that cells begin and end within, also of a block's last points."""
        for shift in range(16):
            for N in (1, 255, 300):
                feats, points, grad_out = self.sample(
                    N, F, "cuda", dtype, DTYPES[(shift + shift // 4) % 4]
                )
                room = torch.empty(feats.numel() + shift, dtype=dtype, device="cuda")
                feats = room[shift:].view(feats.shape).copy_(feats)
                self.check(feats, points, grad_out, "cuda")

    @pytest.mark.cuda
    @pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "one cell for all"])
    @pytest.mark.parametrize("F", [1, 5, 9, 12, 27, 32, 50, 131, 700, 1030, 2100])
    def test_large_calls(self, F, layout):
        """What is large goes other ways through memory on a GPU."""
        for dtype in DTYPES:
            N = 36_000_000 // (self.K * F * dtype.itemsize)
            self.check(*self.sample(N, F, "cuda", dtype, layout=layout), "cuda")

    @pytest.mark.parametrize("points_dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_points_of_another_dtype(self, dtype, points_dtype, device):
        for F in (1, 4, 20):
            self.check(*self.sample(64, F, device, dtype, points_dtype))

    def test_reproduces_each_corner(self, device):
        """At a corner of the cell the result is that corner's features, exactly."""
        feats, _, _ = self.sample(self.K, 5, device)
        for k in range(self.K):
            bits = [k >> self.bit(axis) & 1 for axis in range(self.D)]
            point = torch.tensor([[2.0 * b - 1 for b in bits]], device=device).expand(self.K, -1)
            assert torch.equal(self.form()(feats, point), feats[:, k])

    def test_centre_is_the_mean(self, device):
        feats = torch.arange(self.K * 6.0, device=device).view(1, self.K, 6)
        assert torch.equal(self.form()(feats, torch.zeros(1, self.D, device=device)), feats.mean(1))

    def test_weights_add_up_to_one(self, device):
        _, points, _ = self.sample(1000, 4, device, points_dtype=torch.float64)
        ones = torch.ones(1000, self.K, 4, device=device, dtype=torch.float64)
        assert_close(self.form()(ones, points), ones[:, 0], rtol=0, atol=self.K * 2.3e-16)

    def test_reproduces_every_multilinear_function(self, device):
        """a + b x + c y + ... + h x y z is met exactly, inside the cell and outside of it."""
        generator = torch.Generator().manual_seed(7)
        factors = torch.rand(self.K, dtype=torch.float64, generator=generator)

        def function(x):  # (..., D) -> (...)
            terms = [
                factor * torch.stack([x[..., a] for a in range(self.D) if m >> a & 1]).prod(0)
                if m
                else factor + 0 * x[..., 0]
                for m, factor in enumerate(factors)
            ]
            return sum(terms)

        corners = torch.tensor(
            [[2.0 * (k >> self.bit(a) & 1) - 1 for a in range(self.D)] for k in range(self.K)],
            dtype=torch.float64,
        )
        points = torch.rand(500, self.D, dtype=torch.float64, generator=generator) * 6 - 3
        feats = function(corners)[None, :, None].expand(500, -1, 1).contiguous()
        out = self.form()(feats.to(device), points.to(device))[:, 0].cpu()
        assert_close(out, function(points), rtol=1e-13, atol=1e-13)

    @pytest.mark.parametrize("F", [1, 4, 33])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
    def test_coordinates_that_are_no_numbers_stay_in_their_row(self, bad, F, device):
        feats, points, grad_out = self.sample(40, F, device)
        points[7, 1] = bad
        out = self.form()(feats, points)
        grads = self.form("_bw")(grad_out, feats, points, (True, True))
        for x in (out, *grads):
            rest = torch.cat([x[:7], x[8:]])
            assert rest.isfinite().all()
        if bad != 1e30:
            assert not out[7].isfinite().any()

    def test_more_than_2_31_elements(self):
        """Offsets beyond 32 bits, on memory that one row stands for."""
        F = 64
        N = 2**31 // (self.K * F) + 100
        row = torch.rand(1, self.K, F, dtype=torch.float16)
        points = torch.zeros(N, self.D, dtype=torch.float16)
        points[-3:] = 0.5
        out = self.form()(row.expand(N, -1, -1), points)
        assert torch.equal(out[-3:], self.form()(row.expand(3, -1, -1), points[-3:]))

    @pytest.mark.cuda
    @pytest.mark.parametrize("F", [4, 32])
    def test_more_than_2_31_elements_in_memory(self, F):
        N = 2**31 // (self.K * F) + 1000
        feats = torch.empty(N, self.K, F, device="cuda", dtype=torch.float16)
        feats[-700:] = self.sample(700, F, "cuda", torch.float16)[0]
        points = torch.rand(N, self.D, device="cuda") * 2 - 1
        tail = self.form()(feats[-700:].clone(), points[-700:].clone())
        assert torch.equal(self.form()(feats, points)[-700:], tail)
        grad_out = torch.rand(N, F, device="cuda").half()
        grads = self.form("_bw")(grad_out, feats, points, (True, True))
        tails = self.form("_bw")(
            grad_out[-700:].clone(), feats[-700:].clone(), points[-700:].clone(), (True, True)
        )
        for x, tail in zip(grads, tails, strict=True):
            assert torch.equal(x[-700:], tail)

    def bad_input(self):
        K, D = self.K, self.D
        feats, points = torch.rand(4, K, 2), torch.rand(4, D)
        corners = f"stack the corners of a cell along dimension 1, {self.corner_order}"
        return (
            ((feats[0], points), {}, RuntimeError, f"feats must be (N, {K}, F), got ({K}, 2); {corners}"),
            ((feats[:, 1:], points), {}, RuntimeError, f"feats must be (N, {K}, F), got (4, {K - 1}, 2); {corners}"),
            ((feats, points[:3]), {}, RuntimeError, f"feats (N, {K}, F) and points (N, {D}) must have the same N, got (4, {K}, 2) and (3, {D})"),
            ((feats, points[:, 1:]), {}, RuntimeError, f"points must be (N, {D}), got (4, {D - 1})"),
        )  # fmt: skip

    def test_a_wrong_shape_reads_the_same_without_data(self):
        """What torch.compile and torch.export get; the cure comes with the data."""
        for arguments, _, kind, message in self.bad_input():
            with FakeTensorMode() as mode, pytest.raises(kind) as caught:
                self.raw()(*map(mode.from_tensor, arguments))
            assert f"{self.name}: {message.split(';')[0]}" in str(caught.value)

    def test_integers_cannot_require_gradients(self):
        """torch itself refuses, before the operator is called."""
        with pytest.raises(RuntimeError, match="floating point"):
            self.form()(torch.ones(1, self.K, 1).int().requires_grad_(), torch.zeros(1, self.D))
