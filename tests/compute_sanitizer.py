"""One small call of every kernel: compute-sanitizer --tool memcheck python tests/compute_sanitizer.py."""

import sys

import torch

sys.path.insert(0, __file__.rsplit("/", 2)[0])

import loader

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def main():
    """All operators, dtypes, widths of a cell and gradients."""
    for name, D in (("trilinear_interpolation", 3), ("bilinear_interpolation", 2)):
        for dtype in DTYPES:
            for F in (1, 2, 3, 4, 8, 16, 33, 64):
                feats = torch.rand(131, 2**D, F, device="cuda").to(dtype)
                points = torch.rand(131, D, device="cuda") * 2 - 1
                out = getattr(loader, name)(feats, points)
                for mask in ((True, False), (False, True), (True, True)):
                    getattr(loader, name + "_bw")(out, feats, points, mask)
    for dtype in DTYPES:
        x = torch.rand(1001, device="cuda").to(dtype)
        for part in (x, x[1:], x[::2]):
            loader.square_bw(loader.square(part), loader.add2(part, part))
    for dtype in DTYPES:
        for size in ((3, 3), (5, 5), (7, 7), (9, 9), (4, 2), (19, 17)):
            image = torch.rand(2, 45, 140, device="cuda").to(dtype)
            kernel = torch.rand(size, device="cuda")
            for boundary in ("zero", "reflect", "nearest"):
                out = loader.convolve2d(image, kernel, "full", boundary)
                loader.convolve2d_bw(out, image, kernel, "full", boundary, (True, True))
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
