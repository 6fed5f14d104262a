"""grid_sample's ways through layouts, threads, kernels that follow each other, and large sizes."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from battery import DTYPES
from sampling import (
    LAST,
    PADDINGS,
    all_of,
    by_torch,
    check,
    check_gradients,
    in_float32,
    mostly_close,
    places,
    sample,
    torchs,
)
from torch.testing import assert_close

import loader
from loader import grid_sample, grid_sample_bw


def test_large_enough_for_several_threads(device):
    """The work is split by points, images, channels or slabs of an axis: the same results."""
    for size, points in (
        ((1, 1, 40, 300), (200, 400)), ((1, 3, 50, 60), (150, 150)), ((3, 2, 50, 60), (100, 150)),
        ((1, 16, 20, 21, 22), (20, 30, 30)), ((1, 40, 30, 30), (50, 60)), ((5, 4, 30, 30), (40, 60)),
    ):  # fmt: skip
        input, grid = sample(size, points, device, torch.float32, reach=1.1)
        for dtype, last in itertools.product(DTYPES[::2], (False, True)):
            image = input.to(dtype)
            image = image.contiguous(memory_format=LAST[len(points)]) if last else image
            check(image, grid, "bilinear", "border")
        for mode in ("bilinear", "bicubic") if device == "cpu" else ():
            results = [all_of(grid_sample, input, grid, mode)]
            threads = torch.get_num_threads()
            for count in (1, 3):
                torch.set_num_threads(count)
                results.append(all_of(grid_sample, input, grid, mode))
                torch.set_num_threads(threads)
                assert all(map(torch.equal, results[0], results[-1]))


def test_scattered_or_not(device):
    """Large images of many channels are read otherwise where neighbouring points are far apart."""
    for size, points in (((1, 5, 40, 40, 40), (20, 40, 40)), ((1, 17, 400, 400), (300, 300))):
        input, grid = sample(size, points, device, torch.float32)
        near = torch.eye(len(points), len(points) + 1)[None]
        near = F.affine_grid(near, (1, 1, *points), align_corners=False)
        check(input, grid, "bilinear", "zeros")
        check(input, near.to(device), "bilinear", "zeros")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("C", [4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 21, 25, 31, 65, 79])
def test_any_number_of_channels_side_by_side(C, dtype):
    """In vectors on the CPU, the last of which reaches back to channels that one has had."""
    for size, points, mode in (
        ((2, C, 9, 11), (7, 41), "bicubic"), ((2, C, 9, 11), (7, 41), "bilinear"),
        ((1, C, 5, 6, 7), (3, 9, 10), "bilinear"),
    ):  # fmt: skip
        input, grid = sample(size, points, dtype=dtype, reach=1.3)
        image = LAST[len(points)]
        for padding in PADDINGS:
            check(input.contiguous(memory_format=image), grid, mode, padding)
    input, grid = sample((1, C, 9, 11), (7, 41), dtype=dtype, reach=0.5)
    input = input.contiguous(memory_format=torch.channels_last)
    size = torch.tensor([11, 9], dtype=dtype)
    pixels = (grid * size / 2).floor() + 0.3  # of which no tap has a weight of about zero
    grid = pixels * 2 / size
    for c in {0, C // 2, C - 4, C - 2, C - 1}:  # of which one has an infinite pixel
        image = input.clone()
        image[0, c, 4, 5] = torch.inf
        out, to_input, to_grid = all_of(grid_sample, image, grid, "bicubic")
        expected = all_of(torchs, image, grid, "bicubic")
        assert out[:, c].isfinite().logical_not().any() and out[:, :c].isfinite().all()
        assert_close((out, to_input), expected[:2], equal_nan=True)
        assert_close(to_grid, expected[2], equal_nan=True, rtol=1e-4, atol=1e-4 * C)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("C", [1, 2, 3, 5])
def test_bicubic_pixels_side_by_side_or_apart(C, dtype):
    """In vectors of points on the CPU, of which those at a border read pixels that do not count."""
    input, grid = sample((2, C, 5, 6), (7, 41), dtype=dtype, reach=1.5)
    size = torch.tensor([6, 5], dtype=dtype)
    grid = ((grid * size / 2).floor() + 0.3) * 2 / size  # no tap has a weight of about zero
    input[0, C // 2, 2, 3] = torch.inf
    apart = input.new_full((2, 5, 6, C + 2), torch.nan)[..., 1:-1].permute(0, 3, 1, 2)
    images = input, input.contiguous(memory_format=torch.channels_last), apart.copy_(input)
    for image, padding in itertools.product(images, PADDINGS):
        found = all_of(grid_sample, image, grid, "bicubic", padding)
        expected = all_of(torchs, image, grid, "bicubic", padding)
        assert found[0].isfinite().any()
        assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, points",
    [
        ((2, 3, 61, 67), 200_000),  # channels of an odd number of pixels, which begin anywhere
        ((3, 2, 40, 64), 100_000),
        ((1, 5, 23, 21, 19), 90_000),
        ((1, 33, 141, 203), 500_000),
        ((2, 72, 16, 20, 24), 30_000),
        ((1, 32, 19, 18), 400_000),  # words that all would lie in the same banks
        ((1, 3, 1811, 1907), 30_000),  # few points of large channels: one channel after the other
        ((1, 5, 201, 203, 207), 80_000),
    ],
)
def test_channels_turned_on_a_gpu(size, points, dtype, path):
    """A GPU turns channels last, reads and adds to them together; or takes one after the other."""
    dims = len(size) - 2
    dense = torch.rand(size, device="cuda").to(dtype)
    grid = places(path, size[0], points, dims, "cuda").to(dtype)
    slices = torch.rand(*size[:-1], size[-1] + 1, device="cuda").to(dtype)[..., 1:]
    for image in (dense, dense.contiguous(memory_format=LAST[dims]), slices):
        options = "bilinear", "border", True
        theirs = torchs(image.float(), grid.float(), *options)
        mostly_close(grid_sample(image, grid, *options), theirs, 256)
        small = max(size) < 100 and dtype == torch.float32
        check_gradients(image, grid, "reflection", by_torch if small else in_float32)


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, points",
    [
        ((2, 3, 61, 67), 100_000),
        ((1, 5, 340, 503), 400_000),
        ((1, 18, 90, 85), 60_000),
        ((1, 41, 84, 91), 100_000),
        ((2, 3, 13, 21, 19), 30_000),
        ((1, 7, 31, 29, 23), 20_000),
    ],
)
def test_bicubic_of_channels_turned_on_a_gpu(size, points, dtype, path):
    """As each channel alone, of which there is nothing to turn.

    Few points lie beyond a border: clamped to one pixel, they would add up to sums whose last bits
    depend on their order.
    """
    dims, C = len(size) - 2, size[1]
    dense = torch.rand(size, device="cuda").to(dtype)
    grid = places(path, size[0], points, dims, "cuda").nan_to_num(0.3, 2, -2).div(1.1).to(dtype)
    slices = torch.rand(*size[:-1], size[-1] + 1, device="cuda").to(dtype)[..., 1:]
    eps = torch.finfo(dtype).eps
    for image in (dense, dense.contiguous(memory_format=LAST[dims]), slices):
        if dtype == torch.float32:
            leaf = image.detach().requires_grad_()
            told = str(loader.explain(grid_sample, leaf, grid, "bicubic"))
            assert "words of four channels save more" in told
        out = grid_sample(image, grid, "bicubic", "border", True)
        grad_out = torch.rand_like(out)

        def gradients(c, mask, image=image, grad_out=grad_out):
            arguments = grad_out[:, c], image[:, c], grid, "bicubic", "border", True
            found = grid_sample_bw(*arguments, output_mask=mask)
            return found if all(mask) else (found, found)

        to_input, to_grid = gradients(slice(None), (True, True))
        (lone_input, _), (_, lone_grid) = (
            gradients(slice(None), mask) for mask in ((True, False), (False, True))
        )
        whole = 0
        for c in range(C):
            one = slice(c, c + 1)
            alone = grid_sample(image[:, one], grid, "bicubic", "border", True)
            assert_close(out[:, one], alone, rtol=2 * eps, atol=max(eps, 2e-6))
            each, slopes = gradients(one, (True, True))
            whole = whole + slopes.float()
            atol = (2 * eps if dtype != torch.float32 else 2e-5) * float(each.abs().max())
            for found in (to_input, lone_input):
                assert_close(found[:, one], each, rtol=2 * eps, atol=atol)
        for found in (to_grid, lone_grid):
            mostly_close(found, whole, C * max(size[2:]))


@pytest.mark.cuda
@pytest.mark.parametrize("path", ["anywhere", "in order"])
@pytest.mark.parametrize(
    "size, points",
    [
        ((1, 3, 2800, 2800), 8_000_000),
        ((2, 3, 2800, 2800), 8_000_000),
        ((1, 3, 249, 220), 20_000_000),
    ],
)
def test_points_that_few_blocks_share_out(size, points, path):
    """As in parts, which are too few points for a look to leave kernels idle."""
    image = torch.rand(size, device="cuda")
    grid = places(path, size[0], points, 2, "cuda")
    assert "a look at the points" in str(loader.explain(grid_sample, image, grid))
    whole = grid_sample(image, grid)
    grad_out = torch.rand_like(whole)
    parts = [grid.split(250_000, 1), grad_out.split(250_000, 2)]
    assert_close(whole, torch.cat([grid_sample(image, part) for part in parts[0]], 2))

    def slopes(grid, grad_out):
        return grid_sample_bw(grad_out, image, grid, output_mask=(False, True))

    found = slopes(grid, grad_out)
    expected = torch.cat([*map(slopes, *parts)], 1)
    assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size, points",
    [((1, 33, 431, 401), 70_000), ((2, 13, 809, 503), 40_000), ((1, 5, 131, 141, 151), 90_000)],
)
def test_words_that_begin_anywhere(size, points, dtype):
    """A GPU reads channels side by side in words, wherever these begin."""
    dims = len(size) - 2
    room = torch.rand(size[0], size[1] + 1, *size[2:], device="cuda").to(dtype)
    room = room.contiguous(memory_format=LAST[dims])
    grid = places("anywhere", size[0], points, dims, "cuda").to(dtype)
    for image in (room[:, 1:], room[:, 1:].contiguous(memory_format=LAST[dims])):
        for options in (("bilinear", "zeros", False), ("bilinear", "border", True)):
            planar = grid_sample(image.contiguous(), grid, *options)
            rtol = max(1e-5, 1.01 * torch.finfo(dtype).eps)
            assert_close(grid_sample(image, grid, *options), planar, rtol=rtol, atol=1e-5)
            found, expected = (
                grid_sample_bw(planar, x, grid, *options, output_mask=(False, True))
                for x in (image, image.contiguous())
            )
            mostly_close(found, expected, max(size[2:]))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize(
    "size, points", [((3, 7, 1210, 1301), 60_000), ((1, 5, 161, 203, 207), 140_000)]
)
def test_nearest_sums_one_channel_after_the_other(size, points, both, dtype):
    """Of far more pixels than points: whole numbers add up to the same as in each channel alone."""
    input = torch.zeros(size, device="cuda", dtype=dtype)
    grid = places("anywhere", size[0], points, len(size) - 2, "cuda").to(dtype)
    grad_out = torch.randint(-4, 5, (*size[:2], *grid.shape[1:-1]), device="cuda").to(dtype)

    def gradients(channels):
        arguments = grad_out[:, channels], input[:, channels], grid, "nearest", "border"
        return grid_sample_bw(*arguments, output_mask=(True, both))

    found = gradients(slice(None))
    found, slopes = found if both else (found, None)
    assert not both or not slopes.any()
    for c in range(size[1]):
        alone = gradients(slice(c, c + 1))
        assert torch.equal(found[:, c : c + 1], alone[0] if both else alone)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "mode, dims", [("bilinear", 2), ("bilinear", 3), ("nearest", 2), ("bicubic", 2)]
)
def test_ways_on_a_gpu(mode, dims, dtype):
    """Few channels and several in each layout, rows exchanged, grids that are apart or of float32,
    points exactly at borders and far beyond; few points, also of so many channels that threads share
    a point, and so many that other kernels serve them.
    """
    work = torch.promote_types(dtype, torch.float32)
    sizes = [*itertools.product((1, 3, 4, 6), (40, 2400)), (20, 40), (69, 40)]
    for (C, wide), padding in itertools.product(sizes, PADDINGS):
        points = (37, wide) if dims == 2 else (4, 9, wide)
        input, grid = sample((2, C, 21, 19, 23)[: 2 + dims], points, "cuda", dtype, reach=1.6)
        ends = torch.tensor([1.0, -1.0, 3.0, -3.0, 0.0], device="cuda").to(grid)
        grid.view(-1)[: 5 * dims] = ends.repeat(dims)
        room = torch.empty(*grid.shape[:-1], dims + 1, dtype=dtype, device="cuda")
        grids = grid, room[..., :dims].copy_(grid), grid.float()
        last = input.contiguous(memory_format=LAST[dims])
        options = mode, padding, C == 3
        for image, at in zip(
            (input, last, last.transpose(-1, -2), input[..., 1:]),
            itertools.cycle(grids if dtype != torch.float64 else grids[:2]),
        ):
            leaves = [x.to(work).detach().requires_grad_() for x in (image, at)]
            with torch.backends.cudnn.flags(enabled=False):
                theirs = torchs(*leaves, *options)
            grad_out = torch.randn(theirs.shape, device="cuda").to(dtype)
            expected = torch.autograd.grad(theirs, leaves, grad_out.to(work))
            mostly_close(grid_sample(image, at, *options), theirs, 23)
            both = grid_sample_bw(grad_out, image, at, *options, output_mask=(True, True))
            alone = grid_sample_bw(grad_out, image, at, *options, output_mask=(False, True))
            for ours, expected_one in zip((*both, alone), (*expected, expected[1]), strict=True):
                mostly_close(ours, expected_one, 23)


@pytest.mark.cuda
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(1, 2, 65, 85), (2, 3, 120, 260), (1, 5, 31, 29, 27)])
def test_kernels_that_follow_each_other(size, dtype, mode):
    """Zeros, sums and their rounding overlap on a GPU: by calls in a row that find other values in
    the same memory, and in a CUDA graph, whole numbers add up to the same bits each time.
    """
    dims, points = len(size) - 2, 4096
    torch.manual_seed(5)
    input = torch.zeros(size, device="cuda", dtype=dtype)
    pixel = torch.stack([torch.randint(0, n, (size[0], points)) for n in size[:1:-1]], -1)
    whole = 2 * pixel / (torch.tensor(size[:1:-1]) - 1) - 1  # the pixels themselves, aligned
    at = torch.arange(size[0]).repeat_interleave(points), *pixel.flatten(0, 1).unbind(-1)[::-1]
    grid = whole.view(size[0], *[1] * (dims - 1), points, dims).cuda()
    options = mode, "border", True

    def gradient(grad_out):
        return grid_sample_bw(grad_out, input, grid, *options, output_mask=(True, False))

    grad_outs = [torch.randint(-3, 4, (size[0], size[1], points)).float() for _ in range(40)]
    expected = []
    for grad_out in grad_outs:
        sums = torch.zeros(size[0], *size[2:], size[1])
        sums.index_put_(at, grad_out.movedim(1, -1).flatten(0, 1), accumulate=True)
        expected.append(sums.movedim(-1, 1).to(input).cpu())
    shape = size[0], size[1], *[1] * (dims - 1), points
    on_gpu = [x.view(shape).to(input) for x in grad_outs]
    tolerance = {"rtol": 0, "atol": 0 if mode == "nearest" else 1e-3}
    for found, one in zip([gradient(x) for x in on_gpu], expected, strict=True):
        assert_close(found.cpu(), one, **tolerance)
    held, graph = on_gpu[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradient(held)
    for x, one in zip(on_gpu, expected, strict=True):
        held.copy_(x)
        graph.replay()
        assert_close(found.cpu(), one, **tolerance)


def test_more_than_2_31_elements():
    """Offsets beyond 32 bits, on memory that one pixel or row stands for."""
    row = torch.arange(200.0)
    grid = torch.tensor([[-1.0, 0.9], [-0.5, 1.0], [1.0, -1.0]]).view(1, 1, 3, 2)
    for C in (1, 6):
        images = [row.expand(1, C, size, 200) for size in (2**24, 3)]
        assert_close(*(grid_sample(x, grid, "bilinear", "border", True) for x in images))
    tall = torch.zeros(1).as_strided((1, 1, 40, 3), (0, 0, 0, 0))
    strided = torch.rand(3).as_strided((1, 3, 2**16, 2**16), (3, 1, 0, 0))
    out = grid_sample(strided, torch.rand(1, 5, 7, 2) - 0.5)
    assert_close(out, strided[:, :, :5, :7])
    assert grid_sample(tall, grid).abs().sum() == 0
    places = torch.tensor([[-1.0, 0.9, 0.3], [-0.5, 1.0, -0.2], [1.0, -1.0, 0.0]]).view(
        1, 1, 1, 3, 3
    )
    for C in (1, 6):
        strided = torch.rand(C).as_strided((1, C, 2**11, 2**11, 2**11), (0, 1, 0, 0, 0))
        out = grid_sample(strided, places / 2, "bicubic")
        assert_close(out, strided[:, :, :1, :1, :3])


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_more_pixels_along_an_axis_than_float32_numbers(mode):
    """Their places are rounded, at most to outside; what lies behind the image stays unread."""
    for size in (2**24 + 2, 2**24 + 4, 2**24 + 6):
        memory = torch.full((2 * size + 64,), 7.0)
        image = memory[: 2 * size].fill_(1.0).view(1, 1, 2, size)
        grid = torch.tensor([[1.0, 1.0], [1.0, 0.5], [-1.0, 1.0], [0.0, 0.0]]).view(1, 1, 4, 2)
        for options in itertools.product((mode,), PADDINGS, (False, True)):
            out, to_image, _ = all_of(grid_sample, image, grid, *options)
            assert ((out >= 0) & (out <= 1)).all()
            assert to_image.sum().isfinite()


@pytest.mark.parametrize("C", [1, 2, 6])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_more_images_than_a_launch_of_a_gpu_takes(C, mode, device):
    """As those beyond its 65,535 alone."""
    first = 65500
    x, grid = torch.rand(first + 100, C, 3, 4), torch.rand(first + 100, 1, 5, 2) * 2 - 1
    found = []
    for images in (slice(None), slice(first, None)):
        leaves = [part[images].to(device).requires_grad_() for part in (x, grid)]
        out = grid_sample(*leaves, mode)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for every, some in zip(*found, strict=True):
        assert_close(every[first:], some)


@pytest.mark.cuda
@pytest.mark.parametrize("last", [False, True])
def test_more_than_2_31_elements_in_memory(last):
    input = torch.zeros(1, 8, 2**14 + 64, 2**14, device="cuda", dtype=torch.float16)
    input = input.contiguous(memory_format=torch.channels_last) if last else input
    corner = input[..., -20:, -30:]
    corner.copy_(torch.rand(corner.shape, device="cuda"))
    x = torch.linspace(-0.9, 0.9, 25, dtype=torch.float64, device="cuda")
    grid = torch.stack(torch.meshgrid(x, x, indexing="xy"), -1)[None]
    sizes = torch.tensor([2**14, 2**14 + 64], device="cuda")
    span = torch.tensor([30, 20], device="cuda")
    whole = (1 - (1 - grid) * (span - 1) / (sizes - 1)).float()
    small = (1 - (1 - whole.double()) * (sizes - 1) / (span - 1)).float()
    assert_close(
        grid_sample(input, whole, align_corners=True), grid_sample(corner, small, align_corners=True),
        rtol=0, atol=2e-2,
    )  # fmt: skip
    grad_out = torch.ones(1, 8, 25, 25, device="cuda", dtype=torch.float16)
    ours = grid_sample_bw(grad_out, input, whole, align_corners=True)
    expected = grid_sample_bw(grad_out, corner, small, align_corners=True)
    assert_close(ours[..., -20:, -30:], expected, rtol=0, atol=5e-2)
    assert ours[..., :-20, :].abs().amax() == 0


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_point_gives_the_same_bits_beside_others(mode, padding):
    """On the CPU, where a block of points that all lie inside goes a way of its own."""
    input, grid = sample((1, 1, 33, 47), (1, 4096), dtype=torch.float32, reach=0.9)
    near = grid[0, 0, ::7].abs() * 0.98 ** torch.arange(len(grid[0, 0, ::7]))[:, None]
    grid[0, 0, ::7] = near - 1 + 1 / torch.tensor([47, 33])  # ever less beyond the first pixels
    beside = torch.stack([grid, torch.full_like(grid, 1.3)], 3).flatten(2, 3)
    for align_corners in (False, True):
        results = []
        for points in (grid, beside):
            leaf = points.clone().requires_grad_()
            out = grid_sample(input, leaf, mode, padding, align_corners)
            results.append((out.detach()[0, 0], *torch.autograd.grad(out.sum(), leaf)[0]))
        for alone, mates in zip(*results, strict=True):
            assert torch.equal(alone, mates[:, ::2])
