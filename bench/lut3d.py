"""How fast do colours go through a 3-D table, and how do apply_lut3d's peers compare?

Bytes that must move for N pixels of s-byte elements: 6 N s forward (and 6 N s again for the
gradient to the image, 3 N s of them read). Peers: F.grid_sample, once on a grid of float32 that
lies ready ("grid_sample"), and once from the image and back to its dtype ("with conversion");
eager PyTorch and torch.compile of the reference; on the CPU OpenColorIO and colour-science, where
they are installed. Limit: a copy of as many bytes. The photograph is scikit-image's astronaut,
tiled to 12 megapixels; noise has no neighbours that share a cell.
"""

from functools import partial

import numpy as np
import torch
import torch._functorch.config
import torch.nn.functional as F

import harness
import loader

SIZE = (3000, 4000)
CPU_SIZE = (1500, 2000)
DTYPES = [torch.uint8, torch.float16, torch.float32]
METHODS = ["trilinear", "tetrahedral"]


def make_image(kind, size, dtype, device):
    """(H, W, 3) of a photograph, tiled, or of noise."""
    if kind == "noise":
        make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
        levels = torch.randint(0, 256, (*size, 3), dtype=torch.uint8, **make)
    else:
        from skimage import data

        photo = torch.from_numpy(np.ascontiguousarray(data.astronaut()))
        times = [-(-n // m) for n, m in zip(size, photo.shape, strict=False)]
        levels = photo.repeat(*times, 1)[: size[0], : size[1]].contiguous().to(device)
    return levels if dtype == torch.uint8 else (levels / 255).to(dtype)


def make_lut(S, device):
    """A look as graders make them: a curve to each channel, mixed, plus a little noise."""
    axis = torch.linspace(0, 1, S)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)
    mix = torch.tensor([[0.9, 0.08, 0.02], [0.05, 0.9, 0.05], [0.0, 0.12, 0.88]])
    noise = torch.rand(S, S, S, 3, generator=torch.Generator().manual_seed(0))
    curve = (grid.pow(0.8) * (3 - 2 * grid)).clamp(0, 1)
    return (curve @ mix.T + 0.01 * noise).clamp(0, 1).to(device)


def grid_of(image):
    """Where F.grid_sample is to look: (1, 1, H, W, 3) in [-1, 1], blue first."""
    x = image.float() / 255 if image.dtype == torch.uint8 else image.float()
    return (x.flip(-1) * 2 - 1)[None, None]


def by_grid_sample(grid, volume):
    """(1, 3, 1, H, W)."""
    return F.grid_sample(volume, grid, padding_mode="border", align_corners=True)


def by_conversion(image, volume):
    """The same from the image, and as an image of its dtype."""
    out = by_grid_sample(grid_of(image), volume)[0, :, 0].movedim(0, -1)
    return (out * 255 + 0.5).byte() if image.dtype == torch.uint8 else out.to(image.dtype)


def by_opencolorio(image, lut, method):
    """OpenColorIO's CPU processor of the table, on all its threads but one: it has one."""
    try:
        import PyOpenColorIO as ocio
    except ImportError:
        return None
    S = len(lut)
    transform = ocio.Lut3DTransform(S)
    transform.setData(lut.float().flatten().numpy())
    transform.setInterpolation(
        ocio.INTERP_LINEAR if method == "trilinear" else ocio.INTERP_TETRAHEDRAL
    )
    depth = {torch.uint8: ocio.BIT_DEPTH_UINT8, torch.float16: ocio.BIT_DEPTH_F16}.get(
        image.dtype, ocio.BIT_DEPTH_F32
    )
    processor = ocio.Config.CreateRaw().getProcessor(transform)
    cpu = processor.getOptimizedCPUProcessor(depth, depth, ocio.OPTIMIZATION_DEFAULT)
    H, W, _ = image.shape
    source, result = image.numpy(), np.empty_like(image.numpy())
    layout = {"numChannels": 3, "width": W, "height": H, "bitDepth": depth}
    size = image.element_size()
    sides = {"chanStrideBytes": size, "xStrideBytes": 3 * size, "yStrideBytes": 3 * size * W}
    before, after = (ocio.PackedImageDesc(x, **layout, **sides) for x in (source, result))

    def run():
        cpu.apply(before, after)
        return torch.from_numpy(result)

    return run


def by_colour(image, lut, method):
    """colour-science, in float64, of floating images."""
    try:
        from colour import algebra
    except ImportError:
        return None
    if image.dtype != torch.float32:
        return None
    function, table = getattr(algebra, f"table_interpolation_{method}"), lut.numpy()
    return lambda: torch.from_numpy(function(image.numpy(), table))


def contenders_of(image, lut, method):
    """Name to function, for the forward."""
    volume = lut.permute(3, 0, 1, 2)[None].contiguous()
    runs = {"loader": lambda: loader.apply_lut3d(image, lut, method)}
    if method == "trilinear":
        grid = grid_of(image)
        runs["grid_sample"] = lambda: by_grid_sample(grid, volume)
        runs["with conversion"] = lambda: by_conversion(image, volume)
    runs["eager"] = lambda: loader.apply_lut3d_reference(image, lut, method)
    compiled = torch.compile(loader.apply_lut3d_reference, dynamic=False)
    runs["compile"] = lambda: compiled(image, lut, method)
    if image.device.type == "cpu":
        for name, make in (("opencolorio", by_opencolorio), ("colour", by_colour)):
            if run := make(image, lut, method):
                runs[name] = run
    return runs


def check(runs, image):
    """Every contender agrees with loader's before it is timed."""
    ours = runs["loader"]().float()
    allowed = 1 if image.dtype == torch.uint8 else 4e-3 if image.dtype == torch.float16 else 1e-4
    for name, run in runs.items():
        out = run().float()
        out = out[0, :, 0].movedim(0, -1) if out.dim() == 5 else out
        if out.shape == ours.shape and name != "grid_sample":
            worst = (out - ours).abs().max().item()
            assert worst <= allowed, f"{name} is off by {worst}"


def backwards(image, lut, method):
    """Name to function of each direction; the graph is kept."""
    image, lut = image.detach().requires_grad_(), lut.detach().requires_grad_()
    grad_out = torch.rand_like(image)
    volume = lut.detach().permute(3, 0, 1, 2)[None].contiguous().requires_grad_()
    grid = grid_of(image.detach()).requires_grad_()
    for direction, ours, theirs in (
        ("backward to image", [image], [grid]),
        ("backward to lut", [lut], [volume]),
        ("backward to both", [image, lut], [grid, volume]),
    ):
        parts = [x if any(x is y for y in ours) else x.detach() for x in (image, lut)]
        out = loader.apply_lut3d(*parts, method)
        runs = {
            "loader": lambda out=out, ours=ours: torch.autograd.grad(
                out, ours, grad_out, retain_graph=True
            )
        }
        if method == "trilinear":
            parts = [x if any(x is y for y in theirs) else x.detach() for x in (grid, volume)]
            sampled = by_grid_sample(*parts)
            back = grad_out.movedim(-1, 0)[None, :, None].float().contiguous()
            runs["grid_sample"] = lambda out=sampled, at=theirs, back=back: torch.autograd.grad(
                out, at, back, retain_graph=True
            )
        yield direction, runs


def measure(kind, size, S, dtype, method, timer, backward):
    """One row for each direction."""
    torch.compiler.reset()
    image, lut = make_image(kind, size, dtype, timer.device), make_lut(S, timer.device)
    runs = contenders_of(image, lut, method)
    check(runs, image)
    directions = [("forward", runs)]
    if backward and dtype != torch.uint8:
        directions += backwards(image, lut, method)
    bytes_moved = 2 * image.numel() * image.element_size()
    target = torch.empty_like(image)
    for direction, contenders in directions:
        contenders["copy"] = lambda: target.copy_(image)
        row = {
            "operator": "apply_lut3d",
            "direction": direction,
            "case": f"{method}, {S}, {kind}, {' x '.join(map(str, size))}",
            "dtype": str(dtype)[6:],
            "bytes": bytes_moved,
            "us": timer(contenders),
        }
        show(row)
        yield row


def show(row):
    """One line for a case."""
    us = {name: times["median"] for name, times in row["us"].items()}
    ours = us["loader"]
    peers = "  ".join(f"{us[n] / ours:.2f}x {n}" for n in us if n not in ("loader", "copy"))
    print(
        f"{row['direction']:<18} {row['case']:<40} {row['dtype']:<8}{ours:10.1f} us "
        f"{100 * us['copy'] / ours:4.0f} % of a copy  {peers}",
        flush=True,
    )


def main(arguments=None):
    """Run the cases and keep the results."""
    parser = harness.parser("lut3d", 20, "uint8, S = 33")
    options = parser.parse_args(arguments)
    timer, limit = harness.start(options)
    size = SIZE if options.device == "cuda" else CPU_SIZE
    cases = {
        f"{method}, {S}, {kind}, {dtype}": partial(
            measure, kind, size, S, dtype, method, timer, S == 33 and kind != "noise"
        )
        for dtype in DTYPES[: 1 if options.quick else 3]
        for S in ((33,) if options.quick else (33, 65))
        for kind in ("photograph", "noise")
        for method in METHODS
    }
    rows = harness.each("lut3d", "apply_lut3d", options, cases)
    harness.finish("lut3d", "apply_lut3d", rows, options, copy_bytes_per_us=limit)
