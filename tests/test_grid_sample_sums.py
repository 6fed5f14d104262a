"""How grid_sample sums the gradient to its input: few points, many points, 16 bits."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from sampling import (
    KINDS,
    LAST,
    LAYOUTS,
    by_torch,
    check_gradients,
    in_float32,
    mostly_close,
    places,
    sample,
)
from torch.testing import assert_close

import loader
from loader import grid_sample, grid_sample_bw

FEW = [
    (1, "zeros", None), (3, "reflection", "channels last"), (8, "border", "channels last"),
    (3, "zeros", "transposed"), (2, "border", "every other"), (5, "reflection", None),
]  # fmt: skip


@pytest.mark.parametrize("C, padding, layout", FEW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode, dims", KINDS)
def test_few_points_of_a_large_field_in_16_bits(mode, dims, dtype, C, padding, layout, device):
    """Sums in float32, rounded once, of the pixels that points touch; zero elsewhere. Most points
    lie beside each other, where sums in 16 bits would lose what is added. (On a GPU those of fewer
    points are in 16 bits.)
    """
    size = {2: (150, 160), 3: (36,) * 3} if device == "cpu" else {2: (15, 21), 3: (6, 7, 7)}
    points = (1,) * (dims - 1) + (40,)
    input, grid = sample((2, C, *size[dims]), points, device, dtype, None, 1.1)
    input = LAYOUTS[layout](input) if layout else input
    flat = grid.view(2, 40, dims)
    flat[:, 15:] = flat[:, 15:16] + (flat[:, 15:] - flat[:, 15:16]) * 1e-3
    strange = torch.tensor([1.0, -1.0, 0.0, math.nan, math.inf, -3.0], device=device)
    flat[:, : len(strange), 0] = strange.to(dtype)
    grad_out = (torch.rand(2, C, *points, device=device) + 1).to(dtype)
    upstream = [grad_out, torch.randn(grid.shape, device=device).to(dtype)]

    def gradients(image, at, both):
        """To the input, and those of a gradient to the grid."""
        given, mask = [x.to(image.dtype) for x in upstream], (True, both)
        found = grid_sample_bw(given[0], image, at, mode, padding, output_mask=mask)
        yield found[0] if both else found
        if mode == "nearest":
            return
        leaves = [x.detach().requires_grad_() for x in (image, at)]
        out = grid_sample(*leaves, mode, padding)
        (to_grid,) = torch.autograd.grad(out, leaves[1], given[0], create_graph=True)
        yield from torch.autograd.grad(to_grid, leaves[0], given[1])

    expected = [*gradients(input.float(), grid.float(), True)]
    for both in (True, False):
        for ours, theirs in zip(gradients(input, grid, both), expected, strict=True):
            close = {"rtol": 1.01 * torch.finfo(dtype).eps, "atol": 1e-5, "equal_nan": True}
            assert_close(ours, theirs.to(dtype), **close)
            assert (ours[theirs == 0] == 0).all()


@pytest.mark.parametrize("mode, shape, points", [
    ("bilinear", (3, 4, 1000, 800), 3000), ("nearest", (1, 3, 150, 160, 170), 300),
    ("bilinear", (1, 8, 110, 100, 110), 30_000), ("bicubic", (1, 8, 110, 100, 110), 3000),
])  # fmt: skip
def test_sums_of_more_than_a_process_keeps_are_made_slab_by_slab(mode, shape, points):
    """On the CPU; 38 to 49 MB of them here, of which 16 at once, in the order of points as ever."""
    batch, channels, *size = shape
    torch.manual_seed(0)
    image = torch.randn(shape, dtype=torch.float16)
    grid = torch.rand(batch, *[1] * (len(size) - 1), points, len(size)) * 2.2 - 1.1
    grad_out = torch.rand(batch, channels, *[1] * (len(size) - 1), points).half() - 0.5
    for order in (grid, grid.sort(-2).values):
        for layout in (torch.contiguous_format, LAST[len(size)]):
            at = image.contiguous(memory_format=layout)
            found = grid_sample_bw(grad_out, at, order, mode, output_mask=(True, False))[0]
            single = grid_sample_bw(
                grad_out.float(), at.float(), order, mode, output_mask=(True, False)
            )[0]
            assert_close(found, single.half(), rtol=1.01 * 2**-10, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize(
    "dtype, C",
    [(torch.float32, 1), (torch.float32, 3), (torch.float16, 2), (torch.float64, 5)],
)
@pytest.mark.parametrize("dims", [2, 3])
def test_many_points_of_few_pixels(dims, dtype, C, path):
    """Where neighbouring points lie apart, a GPU sums in shared memory."""
    for padding, last in (("zeros", False), ("border", True), ("reflection", False)):
        input, _ = sample((2, C, *(7, 19, 23)[-dims:]), (1,) * dims, "cuda", dtype)
        input = input.contiguous(memory_format=LAST[dims]) if last else input
        grid = places(path, 2, (2_200_000 if dims == 2 else 1_100_000) // C, dims, "cuda")
        check_gradients(input, grid.to(dtype), padding, by_torch)


def exactly(grad_out, input, grid, padding, mode):
    """By the kernels for exact sums and those for the gradient to the grid alone, in float32."""
    given = [x.float() for x in (grad_out, input, grid)]
    torch.use_deterministic_algorithms(True)
    try:
        to_input = grid_sample_bw(*given, mode, padding, output_mask=(True, False))
    finally:
        torch.use_deterministic_algorithms(False)
    return to_input, grid_sample_bw(*given, mode, padding, output_mask=(False, True))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("zoom", [-1, 0.3, 0.97, 1, 1.4, 2.3])
@pytest.mark.parametrize("dims", [2, 3])
def test_neighbours_in_rows_of_planes(dims, zoom, dtype):
    """Points that follow one another, by so many pixels, add up what goes to the same pixels."""
    size = (61, 67) if dims == 2 else (11, 31, 67)
    for C, turn, padding in itertools.product((1, 2, 3, 5), (0, 0.4), ("zeros", "reflection")):
        input = torch.rand(3, C, *size, device="cuda").to(dtype)
        pixels = torch.arange(101, device="cuda") * zoom * 2 / 67 - zoom
        at = [pixels + 0.1 / 67, pixels * turn, torch.full_like(pixels, 0.3)][:dims]
        shifts = torch.rand(3, 7, 1, dims, device="cuda") * 0.2
        grid = (torch.stack(at, -1) + shifts).view(3, *[1] * (dims - 2), 7, 101, dims).to(dtype)
        check_gradients(input, grid, padding, exactly)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("C", [2, 3])
def test_rows_of_a_bicubic_cells_pixels(C, dtype, path):
    """Of images whose two or three channels lie side by side: added to as one line."""
    for size, padding in itertools.product(((150, 161), (37, 31)), ("zeros", "border")):
        input = torch.rand(2, C, *size, device="cuda").to(dtype)
        input = input.contiguous(memory_format=torch.channels_last)
        grid = places(path, 2, 9000, 2, "cuda").nan_to_num(0.3, 2, -2).to(dtype)
        check_gradients(input, grid, padding, exactly, "bicubic")


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize(
    "mode, dtype, C",
    [("nearest", torch.float32, 1), ("nearest", torch.float16, 6), ("bilinear", torch.float32, 16)],
)
def test_hardly_any_pixels_of_many_points(mode, dtype, C, path):
    """Sums in shared memory too: of nearest points, and of points whose pixels are in one sector."""
    for size, points in (((3, 5), 30_000), ((6, 4, 3), 30_000), ((31, 40), 900_000)):
        dims, last = len(size), len(size) == 3
        input = torch.rand(2, C, *size, device="cuda").to(dtype)
        input = input.contiguous(memory_format=LAST[dims]) if last else input
        grid = places(path, 2, points, dims, "cuda").to(dtype)
        grad_out = torch.rand(2, C, points, *[1] * (dims - 1), device="cuda").to(dtype)
        expected, _ = exactly(grad_out, input, grid, "zeros", mode)
        for both in (False, True):
            found = grid_sample_bw(grad_out, input, grid, mode, output_mask=(True, both))
            rtol = 1e-4 if dtype == torch.float32 else 1.01 * torch.finfo(dtype).eps
            assert_close((found[0] if both else found).float(), expected, rtol=rtol, atol=1e-4)


def channel_by_channel(grad_out, input, grid, padding, mode):
    """By the kernels for one channel of a plane, at the same places."""
    pairs = zip(grad_out.split(1, 1), input.split(1, 1), strict=True)
    parts = [
        grid_sample_bw(
            g.contiguous(), x.contiguous(), grid, mode, padding, output_mask=(True, True)
        )
        for g, x in pairs
    ]
    return torch.cat([part[0] for part in parts], 1), sum(part[1].float() for part in parts)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [2, 3])
def test_words_of_a_pixels_channels_that_begin_anywhere(dims, dtype, mode):
    """A GPU adds to pixels of few channels, and of nearest points, a word of memory at a time."""

    def single(grad_out, input, *options):
        return channel_by_channel(grad_out.float(), input.float(), *options)

    small, large = ((41, 53), (301, 307)) if dims == 2 else ((11, 13, 17), (41, 47, 48))
    for C, last in itertools.product((2, 3, 4, 5, 7, 8, 9, 14), (True, False)):
        for size, points, path in ((small, 20_000, "in order"), (large, 23_000, "anywhere")):
            input = torch.rand(3, C, *size, device="cuda").to(dtype)
            input = input.contiguous(memory_format=LAST[dims]) if last else input
            grid = places(path, 3, points, dims, "cuda").to(dtype)
            check_gradients(input, grid, "border" if C % 2 else "zeros", single, mode)
    # What is not finite stays in its own pixels.
    input = torch.rand(1, 3, *large, device="cuda").to(dtype).contiguous(memory_format=LAST[dims])
    grid = torch.zeros(1, *[1] * (dims - 1), 1, dims, device="cuda", dtype=dtype)
    grad_out = torch.full((1, 3, *[1] * dims), math.nan, device="cuda", dtype=dtype)
    found = grid_sample_bw(grad_out, input, grid, mode, output_mask=(True, False))
    touched = found.isnan()
    assert touched.sum() == 3 * (2**dims if mode == "bilinear" else 1)
    assert touched[(..., *(slice(n // 2 - 1, n // 2 + 2) for n in large))].sum() == touched.sum()
    assert (found[~touched] == 0).all()


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "size, last", [((1, 1, 40, 33), False), ((3, 4, 7, 19), True), ((5, 3, 1, 50), False)]
)
def test_parts_of_many_points_have_sums_of_their_own(size, last, dtype, mode):
    """On the CPU; the same bits whatever the number of threads."""
    input = torch.rand(size, dtype=dtype)
    input = input.contiguous(memory_format=LAST[2]) if last else input
    grid = places("crowded", size[0], 30_001, 2, "cpu").to(dtype)
    grad_out = torch.rand(*size[:2], 30_001, 1, dtype=dtype)
    leaves = [x.double().requires_grad_() for x in (input, grid)]
    out = F.grid_sample(*leaves, mode, "zeros", align_corners=False)
    to_input, to_grid = torch.autograd.grad(out, leaves, grad_out.double())
    most = torch.get_num_threads()
    for mask in ((True, False), (True, True)):
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(grid_sample_bw(grad_out, input, grid, mode, output_mask=mask))
        torch.set_num_threads(most)
        results = [r if mask[1] else (r,) for r in results]
        assert all(map(torch.equal, results[0] * 2, results[1] + results[2]))
        # One may be nearest to another pixel.
        off = (results[0][0] - to_input).norm() / to_input.norm()
        assert off < (1e-5 if mode == "bilinear" else 5e-2)
    mostly_close(results[0][1], to_grid, max(size[2:]))


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, last",
    [
        ((2, 1, 40, 33), False),
        ((1, 2, 19, 50), True),
        ((2, 3, 20, 31), True),
        ((1, 3, 64, 9), False),
        ((2, 13, 12, 15), True),
        ((1, 2, 7, 9, 8), False),
    ],
)
def test_many_points_in_16_bits_give_what_float32_gives_rounded(size, last, dtype, mode):
    """On the CPU, to the bit: points and results are converted a few at a time."""
    dims = len(size) - 2
    image = torch.rand(size).to(dtype)
    image = image.contiguous(memory_format=LAST[dims]) if last else image
    grid = places("anywhere", size[0], 7_001, dims, "cpu").to(dtype)
    grad_out = torch.rand(*size[:2], 7_001, *[1] * (dims - 1)).to(dtype)
    apart = grid.movedim(-1, 1).contiguous().movedim(1, -1)  # all x, then all y
    turned = grad_out.movedim(1, -1).contiguous().movedim(-1, 1)
    for points, grads, input in (
        (grid, grad_out, image), (apart, turned, image), (grid, grad_out, image.float())
    ):  # fmt: skip
        grads = grads.to(input.dtype)
        given = grads, input, points
        alike = [x.float() for x in given]
        x, y = grid_sample(input, points, mode), grid_sample(*alike[1:], mode)
        pairs = [(x, y)]
        for mask in ((True, True), (True, False), (False, True)):
            results = [grid_sample_bw(*of, mode, output_mask=mask) for of in (given, alike)]
            pairs += zip(*results, strict=True) if all(mask) else [results]
        for x, y in pairs:
            assert_close(x, y.to(x.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.cuda
@pytest.mark.parametrize("C, last", [(1, False), (3, True), (4, True), (5, False), (24, True)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode, dims", KINDS)
def test_sums_in_16_bits(mode, dims, dtype, C, last):
    """A GPU adds to the gradient itself what so few points give: by words, pairs and elements."""
    size = {2: (170, 181), 3: (31, 33, 35)}[dims]
    input = torch.rand(2, C, *size, device="cuda").to(dtype)
    input = input.contiguous(memory_format=LAST[dims]) if last else input
    grid = torch.rand(2, *[1] * (dims - 1), 150, dims, device="cuda").to(dtype) * 2.2 - 1.1
    grad_out = torch.rand(2, C, *grid.shape[1:-1], device="cuda").to(dtype)
    arguments = [x.float() for x in (grad_out, input, grid)]
    expected = grid_sample_bw(*arguments, mode, "border", output_mask=(True, True))
    for both in (False, True):
        found = grid_sample_bw(grad_out, input, grid, mode, "border", output_mask=(True, both))
        to_input = found[0] if both else found
        assert_close(
            to_input.float(),
            expected[0],
            rtol=0,
            atol=8 * torch.finfo(dtype).eps * float(expected[0].abs().max()),
        )
        assert (to_input[expected[0] == 0] == 0).all()
        if both:
            mostly_close(found[1], expected[1], max(size))


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order", "crowded"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, last",
    [
        ((1, 3, 3601, 3709), False),
        ((1, 3, 3601, 3709), True),
        ((5, 1, 2200, 3401), False),
        ((2, 1, 300, 281, 273), False),
        ((1, 2, 300, 281, 273), True),
        ((1, 5, 199, 231, 207), False),
        ((1, 64, 1000, 1000), True),
        ((1, 47, 700, 1200), True),
        ((1, 20, 90, 150, 160), True),
    ],
)
def test_few_points_of_far_more_pixels(size, last, dtype, path):
    """A GPU sums runs of pixels in shared memory, but for those that too many points add to. Of many
    channels side by side it sets to zero and rounds the sums of pixels that points touch.
    """
    dims = len(size) - 2
    input = torch.rand(size, device="cuda").to(dtype)
    input = input.contiguous(memory_format=LAST[dims]) if last else input
    for padding, share in (("zeros", 45), ("border", 80), ("reflection", 110)):
        points = math.prod(size[2:]) // share
        grid = places(path, size[0], points, dims, "cuda").to(dtype)
        check_gradients(input, grid, padding, in_float32)
        if size[1] > 8 and points >= 1 << 14:  # of fewer, launches decide
            leaves = input.detach().requires_grad_(), grid
            told = str(loader.explain(loader.grid_sample, *leaves, padding_mode=padding))
            assert "of pixels that points touch" in told
        if size[1] < 8:
            grid = places(path, size[0], math.prod(size[2:]) // 20, dims, "cuda").to(dtype)
            check_gradients(input, grid, padding, in_float32, "nearest")
