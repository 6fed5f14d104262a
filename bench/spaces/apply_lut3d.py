"""Images of any kind through tables of any size.

No sectors are counted: a table can be held in shared memory, as far as its colours are used.
"""

import torch
import torch.nn.functional as F

import loader

from . import Task, backward, choose, log_uniform, misaligned
from . import size as draw_size

DTYPES = {"uint8": 4, "float32": 4, "float16": 4, "bfloat16": 2, "float64": 1}
MOST_EAGER = 1 << 21  # pixels: the reference takes 24 times the memory


def draw(random, largest):
    """Return a case; tables of 17, 33 and 65 are what graders use."""
    dtype = choose(random, DTYPES)
    pixels = log_uniform(random, 1 << 12, largest // (6 * getattr(torch, dtype).itemsize))
    width = min(draw_size(random, 16, 8192), pixels)
    return {
        "size": [max(1, pixels // width), width],
        "S": random.choice((17, 33, 65)) if random.random() < 0.6 else draw_size(random, 2, 129),
        "dtype": dtype,
        "interpolation": random.choice(("trilinear", "tetrahedral")),
        "colours": choose(random, {"smooth": 4, "noise": 4, "flat": 1, "grainy": 3}),
        "layout": choose(random, {"plain": 6, "planar": 2, "of four": 2, "misaligned": 2}),
    }


def image_of(case, make):
    """Return (H, W, 3): noise, gradients with or without grain, or a colour."""
    H, W = case["size"]
    if case["colours"] == "noise":
        x = torch.rand(H, W, 3, **make)
    elif case["colours"] == "flat":
        x = torch.rand(1, 1, 3, **make).expand(H, W, 3).clone()
    else:
        few = torch.rand(1, 3, max(2, H // 200), max(2, W // 200), **make)
        x = F.interpolate(few, (H, W), mode="bilinear", align_corners=True)[0].movedim(0, -1)
        if case["colours"] == "grainy":
            x = (x + 0.02 * torch.randn(H, W, 3, **make)).clamp_(0, 1)
    dtype = getattr(torch, case["dtype"])
    x = (x * 255.99).to(dtype) if dtype == torch.uint8 else x.to(dtype)
    if case["layout"] == "planar":
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    if case["layout"] == "of four":
        return torch.cat([x, x[..., :1]], -1)[..., :3]
    x = x.contiguous()
    return misaligned(x, 1) if case["layout"] == "misaligned" else x


def by_grid_sample(image, volume):
    """The same by F.grid_sample, from the image and back to its dtype."""
    x = image.float() / 255 if image.dtype == torch.uint8 else image.to(volume.dtype)
    grid = (x.flip(-1) * 2 - 1)[None, None]
    out = F.grid_sample(volume, grid, padding_mode="border", align_corners=True)
    out = out[0, :, 0].movedim(0, -1)
    return (out * 255 + 0.5).byte() if image.dtype == torch.uint8 else out.to(image.dtype)


def tasks(case, make):
    """Return forward, and of floating images the gradients to the image and to the table."""
    image, S, method = image_of(case, make), case["S"], case["interpolation"]
    work = torch.float64 if image.dtype == torch.float64 else torch.float32
    lut = torch.rand(S, S, S, 3, **make).to(work if image.dtype == torch.uint8 else image.dtype)
    pixels, s = image.numel() // 3, image.element_size()
    functions = {"loader": lambda image, lut: loader.apply_lut3d(image, lut, method)}
    if method == "trilinear":
        functions["F.grid_sample"] = lambda image, lut: by_grid_sample(
            image, lut.to(work).permute(3, 0, 1, 2)[None].contiguous()
        )
    if pixels <= MOST_EAGER:
        functions["eager"] = lambda image, lut: loader.apply_lut3d_reference(image, lut, method)
    # Of a table no more than what the colours reach has to be read.
    table = min(lut.numel(), 24 * pixels) * lut.element_size()
    flops = (48 if method == "trilinear" else 24) * pixels
    read = pixels * s * (4 if case["layout"] == "of four" else 3)
    found = {
        "forward": Task(
            {who: lambda f=f: f(image, lut) for who, f in functions.items()},
            read + 3 * pixels * s + table,
            flops,
        )
    }
    if image.dtype != torch.uint8:
        grad_out = torch.rand(image.shape, **make).to(image.dtype)
        for what, which, moved in (
            ("image", 0, read + 6 * pixels * s + table),
            ("lut", 1, read + 3 * pixels * s + lut.numel() * s),
        ):
            runs = {w: backward(f, [image, lut], [which], grad_out) for w, f in functions.items()}
            found[f"backward to {what}"] = Task(runs, moved, flops)
    return found
