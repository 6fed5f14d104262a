"""What the tests of grid_sample share: samples, what torch makes of them, places, comparisons."""

import itertools
import math

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from loader import grid_sample, grid_sample_bw, grid_sample_reference

PADDINGS = ["zeros", "border", "reflection"]
MODES = ["bilinear", "nearest", "bicubic"]
KINDS = [*itertools.product(MODES, (2, 3))]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=LAST[x.dim() - 2]),
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda x: x[:1, :, :1].expand(x.shape),
    "cropped": lambda x: F.pad(x, (2, 3, 1, 4))[..., 1:-4, 2:-3],
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
}


def sample(size, points, device="cpu", dtype=torch.float64, grid_dtype=None, reach=1.5):
    """An image or volume, and points in it and beyond its borders."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(sum(size))}
    grid = (
        torch.rand(size[0], *points, len(points), **make, dtype=torch.float64) * 2 * reach - reach
    )
    input = torch.randn(size, **make, dtype=torch.float64)
    return input.to(dtype), grid.to(grid_dtype or dtype)


def torchs(input, grid, mode="bilinear", padding="zeros", align_corners=False):
    """F.grid_sample; of bicubic volumes, which torch has from 2.15 on, what it makes of their images
    and then of the column of results.
    """
    if mode != "bicubic" or input.dim() == 4:
        return F.grid_sample(input, grid, mode, padding, align_corners)
    N, C, D = input.shape[:3]
    points = grid.flatten(1, -2)
    P = points.shape[1]
    options = mode, padding, align_corners
    rows = F.grid_sample(input.flatten(1, 2), points[:, None, :, :2], *options)
    columns = rows.view(N, C, D, P).movedim(3, 1).reshape(N * P, C, D, 1)
    heights = F.pad(points[..., 2:], (1, 0)).view(N * P, 1, 1, 2)
    out = F.grid_sample(columns, heights, *options).view(N, P, C)
    return out.transpose(1, 2).reshape(N, C, *grid.shape[1:-1])


def all_of(function, input, grid, *options):
    """The output and the gradients to input and grid, of the same grad_out each time."""
    leaves = [x.detach().requires_grad_() for x in (input, grid)]
    out = function(*leaves, *options)
    make = {"device": out.device, "generator": torch.Generator(out.device).manual_seed(1)}
    grad_out = torch.randn(out.shape, **make).bfloat16().to(out.dtype)  # the same in every type
    return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def check(input, grid, *options, fixed=False):
    """All results lie within rounding of the reference in a wider type.

    Coordinates in pixels have rounding errors of the size times eps, in 16-bit types of float32; a
    result sums up to 16 taps and C channels, a gradient to the input up to P points. `fixed`: sums
    of 64 bits for the largest that there may be, whose last one is worth more than float64's.
    """
    work = torch.promote_types(input.dtype, torch.float32)
    ours = all_of(grid_sample, input, grid, *options)
    theirs = all_of(grid_sample_reference, input.to(work), grid.to(work), *options)
    for x, y in zip(ours, theirs, strict=True):
        fine, own = torch.finfo(work).eps, torch.finfo(x.dtype).eps
        scale = float(y.abs().max()) if y.numel() else 0.0
        fine = max(200 * fine, own * 2**-10, 2.0**-36 if fixed else 0)
        assert_close(x.to(y.dtype), y, rtol=own, atol=fine * max(scale, 1))


def second_of(function, input, grid, *options):
    """Gradients of the first derivatives to grad_out, input and grid, of what arrives for each."""
    leaves = [x.detach().requires_grad_() for x in (input, grid)]
    out = function(*leaves, *options)
    leaves.insert(0, torch.linspace(-1, 1, out.numel()).view_as(out).to(out).requires_grad_())
    first = torch.autograd.grad(out, leaves[1:], leaves[0], create_graph=True)
    for wanted in ((0,), (1,), (0, 1)):
        loss = sum(first[i].pow(2).sum() for i in wanted)
        yield torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)


def mostly_close(ours, theirs, pixels):
    """But for a few values, where a rounded place is another pixel's or cell's."""
    work = theirs.dtype
    tolerance = 4 * torch.finfo(ours.dtype).eps + 64 * pixels * torch.finfo(work).eps
    off = (ours.to(work) - theirs).abs() > tolerance * theirs.abs().max()
    assert off.float().mean() < 0.01


def places(path, B, points, dims, device):
    """(B, points, 1[, 1], dims): anywhere, beside each other, or nearly all in one place; some at
    borders, beyond them and nowhere.
    """
    at = torch.rand(B, points, dims, device=device) * 2.2 - 1.1
    if path == "in order":
        at = at.sort(1).values
    if path == "crowded":
        at[:, points // 16 :] = 0.3 + 0.01 * at[:, points // 16 :]
    strange = torch.tensor([1.0, -1.0, 0.0, math.nan, math.inf, -3.0], device=device)
    at[:, torch.arange(len(strange)) * (points // len(strange)), 0] = strange
    return at.view(B, points, *[1] * (dims - 1), dims)


def check_gradients(input, grid, padding, expected_by, mode="bilinear"):
    """Both gradients, alone and together, against those that `expected_by` gives."""
    grad_out = torch.rand(*input.shape[:2], *grid.shape[1:-1], device=input.device).to(input.dtype)
    expected = expected_by(grad_out, input, grid, padding, mode)
    for mask in ((True, False), (True, True)):
        found = grid_sample_bw(grad_out, input, grid, mode, padding, output_mask=mask)
        to_input = found[0] if mask[1] else found
        rtol = 2e-5 if input.dtype == torch.float32 else 1.01 * torch.finfo(input.dtype).eps
        assert_close(to_input.to(expected[0]), expected[0], rtol=rtol, atol=1e-5)
        if mask[1]:
            mostly_close(found[1], expected[1].float(), max(input.shape[2:]))


def by_torch(grad_out, input, grid, padding, mode):
    """By PyTorch in float64."""
    leaves = [x.double().requires_grad_() for x in (input, grid)]
    out = F.grid_sample(*leaves, mode, padding, align_corners=False)
    return torch.autograd.grad(out, leaves, grad_out.double())


def in_float32(grad_out, input, grid, padding, mode):
    """By the kernels for float32, which find the same places."""
    tensors = [x.float() for x in (grad_out, input, grid)]
    return grid_sample_bw(*tensors, mode, padding, output_mask=(True, True))
