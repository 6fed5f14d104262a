"""One small call of every kernel: compute-sanitizer --tool memcheck python tests/compute_sanitizer.py."""

import os
import sys
from itertools import product

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor ends where its memory ends

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

from sampling import LAST, MODES, PADDINGS

import loader

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MASKS = ((True, False), (False, True), (True, True))
LINEAR_OR_NEAREST = MODES[:2]


def main():
    """All operators, dtypes, widths of a cell and gradients."""
    for name, D in (("trilinear_interpolation", 3), ("bilinear_interpolation", 2)):
        for dtype in DTYPES:
            for F in (1, 2, 3, 4, 8, 16, 33, 64):
                feats = torch.rand(131, 2**D, F, device="cuda").to(dtype)
                points = torch.rand(131, D, device="cuda") * 2 - 1
                out = getattr(loader, name)(feats, points)
                for mask in MASKS:
                    getattr(loader, name + "_bw")(out, feats, points, mask)
            for F, misaligned in product((5, 18, 75, 700), (True, False)):  # tiles of a larger call
                N, K = 5_000_000 // (2**D * F * dtype.itemsize), 2**D
                room = torch.rand(N * (K + 2) * F, device="cuda").to(dtype)
                if misaligned:
                    feats = room[1 : 1 + N * K * F].view(N, K, F)
                else:
                    feats = room.view(N, K + 2, F)[:, 1:-1]
                points = torch.rand(N, D, device="cuda") * 2 - 1
                out = getattr(loader, name)(feats, points)
                for mask in MASKS:
                    getattr(loader, name + "_bw")(out, feats, points, mask)
    for dtype in DTYPES:
        x = torch.rand(1001, device="cuda").to(dtype)
        for part in (x, x[1:], x[::2]):
            loader.square_bw(loader.square(part), loader.add2(part, part))
    convolutions()
    tables()
    hash_grids()
    grids()
    torch.cuda.synchronize()
    print("done")


def convolutions():
    """convolve2d: sizes of a kernel and dtypes; few pixels and many, rows on and off words."""
    sizes = (
        (3, 3),
        (5, 5),
        (7, 7),
        (9, 9),
        (4, 2),
        (4, 6),
        (8, 2),
        (6, 5),
        (2, 9),
        (19, 17),
        (33, 35),
    )
    for dtype, size, rows in product(DTYPES, sizes, ((45, 140), (150, 141))):
        image = torch.rand(2, *rows, device="cuda").to(dtype)
        kernels = torch.rand(size, device="cuda"), torch.rand(size, device="cuda").to(dtype)
        for boundary, kernel in product(("zero", "reflect", "nearest"), kernels):
            out = loader.convolve2d(image, kernel, "full", boundary)
            loader.convolve2d_bw(out, image, kernel, "full", boundary, (True, True))


def tables():
    """apply_lut3d: sizes of a table, methods, dtypes, both ways to sum the table's gradient."""
    for S, method in product((3, 33, 65), ("trilinear", "tetrahedral")):
        lut = torch.rand(S, S, S, 3, device="cuda")
        levels = torch.randint(0, 256, (601, 503, 3), dtype=torch.uint8, device="cuda")
        loader.apply_lut3d(levels, lut, method)
        for dtype in DTYPES:
            image = torch.rand(45, 31, 3, device="cuda").to(dtype)
            out = loader.apply_lut3d(image, lut, method)
            for exact in (False, True):
                torch.use_deterministic_algorithms(exact)
                loader.apply_lut3d_bw(out, image, lut, method, (True, True))
            torch.use_deterministic_algorithms(False)


def hash_grids():
    """hash_grid_encoding: dimensions, widths and sizes of a table, second derivative."""
    for dtype in DTYPES:
        for D, F, T in ((2, 1, 300), (3, 2, 512), (3, 4, 99), (2, 8, 64)):
            points = torch.rand(131, D, device="cuda").requires_grad_()
            table = torch.rand(5, T, F, device="cuda").to(dtype).requires_grad_()
            out = loader.hash_grid_encoding(points, table)
            (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
            slope.sum().backward()
            arguments = out.detach(), points.detach(), table.detach(), (True, True)
            for fixed in (False, True):
                loader.hash_grid_encoding_bw(*arguments, deterministic=fixed)


def grids():
    """grid_sample, of small fields and of what has kernels of its own."""
    kinds_of_grids()
    sums_in_a_block()
    slabs()
    words_anywhere()
    words_of_pixels()
    few_points()
    turned()


def anywhere(B, P, D, dtype=torch.float32):
    """(B, 1[, 1], P, D): some lie a little outside."""
    return torch.rand(B, *[1] * (D - 1), P, D, device="cuda").to(dtype) * 2.2 - 1.1


def field(*size, dtype=torch.float32, last=False):
    """(B, C, ...), its channels side by side or not."""
    x = torch.rand(*size, device="cuda").to(dtype)
    return x.contiguous(memory_format=LAST[x.dim() - 2]) if last else x


def backward(image, grid, mode="bilinear", masks=MASKS):
    """Gradients to the input, the grid and both."""
    out = torch.rand(*image.shape[:2], *grid.shape[1:-1], device="cuda").to(image.dtype)
    for mask in masks:
        loader.grid_sample_bw(out, image, grid, mode, output_mask=mask)


def kinds_of_grids():
    """Modes, paddings, dtypes, layouts, widths, gradients, second derivative.

    Points lie inside, around and far from the input, or nowhere.
    """
    nowhere = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e20, 1.0, -1.0])
    for D, C, dtype, last in product((2, 3), (1, 3, 16, 37), DTYPES, (False, True)):
        image = field(2, C, *(5, 7, 9)[:D], dtype=dtype, last=last)
        grid = torch.rand(2, *(4, 11, 13)[:D], D, device="cuda") * 3 - 1.5
        grid.view(-1, D)[: len(nowhere)] = nowhere[:, None].cuda()
        for mode, padding in product(MODES, PADDINGS):
            options = mode, padding, last  # align_corners: both, but not times both layouts
            out = loader.grid_sample(image, grid, *options)
            for fixed, mask in product((False, True), MASKS):
                torch.use_deterministic_algorithms(fixed)
                loader.grid_sample_bw(out, image, grid, *options, mask)
            torch.use_deterministic_algorithms(False)
            leaves = image.detach().requires_grad_(), grid.detach().requires_grad_()
            value = loader.grid_sample(*leaves, *options)
            slopes = torch.autograd.grad(value.sum(), leaves, create_graph=True)
            for fixed in (False, True):
                torch.use_deterministic_algorithms(fixed)
                torch.autograd.grad(slopes, leaves, slopes, retain_graph=True)
            torch.use_deterministic_algorithms(False)


def sums_in_a_block():
    """In shared memory: of small fields that many points add to, and of runs of pixels."""
    both = ((True, True),)
    for D, last, spread in product((2, 3), (False, True), (1.0, 1e-3)):  # anywhere, or crowded
        backward(
            field(1, 3, *(11, 13, 9)[:D], last=last), anywhere(1, 1_500_000, D) * spread, masks=both
        )
        exact = field(1, 17, *(11, 13, 9)[:D], dtype=torch.double, last=last)
        backward(exact, anywhere(1, 300_000, D, torch.double) * spread, masks=both)
        large = field(1, 3, *((3601, 3709), (240, 231, 243))[D - 2], dtype=torch.half, last=last)
        backward(large, (anywhere(1, 120_000, D) * spread).half(), masks=both)
    for mode in LINEAR_OR_NEAREST:
        image = field(1, 1, 3601, 3709, dtype=torch.half)
        backward(image, anywhere(1, 700_000, 2, torch.half), mode, ((True, False), (True, True)))


def slabs():
    """Of a field that the L2 cache does not hold, by one channel and by words of four."""
    for C, dtype, mode in product((1, 3), (torch.float32, torch.float16), LINEAR_OR_NEAREST):
        side = {(1, torch.float32): 241, (1, torch.float16): 281}.get((C, dtype), 161)
        image, grid = field(1, C, side, side, 260, dtype=dtype), anywhere(1, 8_000_000, 3, dtype)
        loader.grid_sample(image, grid, mode)
        backward(image, grid, mode)


def words_anywhere():
    """Words of channels that begin anywhere."""
    for C, dtype in product((5, 13, 33), DTYPES):
        image = field(1, C, 71, 90, 101, dtype=dtype, last=True)
        grid = anywhere(1, 70_000, 3, dtype)
        loader.grid_sample(image, grid)
        backward(image, grid, masks=((False, True),))


def words_of_pixels():
    """Words of a pixel's channels that are added to wherever they begin, up to the last one; lines
    of a bicubic cell's pixels.
    """
    for C, dtype in product((2, 3), (torch.float32, torch.half)):
        backward(field(2, C, 31, 33, dtype=dtype, last=True), anywhere(2, 9000, 2), "bicubic")
    sizes = product((2, 3), (2, 3, 5, 6, 7, 9, 12), (torch.float32, torch.half), LINEAR_OR_NEAREST)
    for D, C, dtype, mode in sizes:
        for size, points in (((9, 11, 13), 5000), ((61, 67, 71), 40_000)):
            image, grid = field(1, C, *size[:D], dtype=dtype, last=True), anywhere(1, points, D)
            backward(image, grid, mode)
            if mode == "nearest":  # turned
                backward(field(1, C, *size[:D], dtype=dtype), grid, mode, ((True, False),))
    for mode in LINEAR_OR_NEAREST:  # slabs
        image = field(1, 3, 161, 161, 260, last=True)
        backward(image, anywhere(1, 4_000_000, 3), mode, ((True, False), (True, True)))
        for D, C in product((2, 3), (1, 5, 16)):  # in shared memory
            backward(field(2, C, *(3, 5, 4)[:D]), anywhere(2, 20_000, D), mode)


def few_points():
    """Of many pixels: added to in 16 bits; one channel after the other; those that points touch."""
    for D, C, mode, last in product((2, 3), (3, 8), MODES, (False, True)):
        image = field(2, C, *((150, 160), (31, 32, 33))[D - 2], dtype=torch.half, last=last)
        grid = anywhere(2, 30, D, torch.half)
        loader.grid_sample(image, grid, mode)
        backward(image, grid, mode)
    image, grid = field(3, 7, 1210, 1301), anywhere(3, 60_000, 2)
    loader.grid_sample(image, grid, "nearest")
    backward(image, grid, "nearest", ((True, True),))
    for C in (47, 64):
        image = field(1, C, 700, 1201, dtype=torch.half, last=True)
        backward(image, anywhere(1, 20_000, 2, torch.half))


def turned():
    """Turned channels last, from channels that neighbour, from whole volumes and rows of them."""
    for C, dtype, begin in product((3, 5, 8, 20, 66), (torch.float32, torch.float16), (0, 1)):
        room, grid = field(1, C + begin, 13, 40, 131, dtype=dtype), anywhere(1, 300_000, 3)
        last = room[:, begin:].contiguous(memory_format=torch.channels_last_3d)
        for image in (room[:, begin:], room[:, begin:, ..., 1:], last):
            loader.grid_sample(image, grid)
            backward(image, grid)
    for D, C, dtype in product((2, 3), (3, 20), (torch.float32, torch.float16)):
        image = field(1, C, *((90, 131), (13, 40, 31))[D - 2], dtype=dtype)
        grid = anywhere(1, 40_000, D)
        loader.grid_sample(image, grid, "bicubic")
        backward(image, grid, "bicubic")
    # By a look: blocks claim points, of several images too.
    loader.grid_sample(field(2, 3, 2800, 2800), anywhere(2, 8_000_000, 2))


if __name__ == "__main__":
    main()
