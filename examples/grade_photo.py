"""Grade a real photograph through a real table: camera log to display, as film and video are.

OpenColorIO's studio config (ACES 2.0) is baked to a .cube file of 33^3 entries, from ARRI LogC3 to
an sRGB display; colour-science reads the file, and `loader.apply_lut3d` sends the photograph
through it, trilinear and tetrahedral, beside OpenColorIO's own CPU path from the same file.
The table expects what a camera records, and the photograph is ready for a display: so it is decoded
to linear light, exposed half a stop more, as ACES renders a white sheet darker than sRGB does, and
encoded as LogC3 by the same config.

    python examples/grade_photo.py [--device cuda] [--photo coffee] [--out picture.png]
"""

import sys
from pathlib import Path

import common
import torch

import loader

try:
    import colour
    import numpy as np
    import PyOpenColorIO as ocio
    from matplotlib import pyplot
    from skimage import data
except ImportError as missing:
    sys.exit(
        f"grade_photo: {missing}; "
        "pip install 'opencolorio==2.6.*' colour-science scikit-image matplotlib"
    )

CONFIG = "ocio://studio-config-latest"
CAMERA, PHOTO, LINEAR = "ARRI LogC3 (EI800)", "sRGB Encoded Rec.709 (sRGB)", "Linear Rec.709 (sRGB)"
DISPLAY, VIEW = "sRGB - Display", "ACES 2.0 - SDR 100 nits (Rec.709)"
STOPS = 0.5
METHODS = {"trilinear": ocio.INTERP_LINEAR, "tetrahedral": ocio.INTERP_TETRAHEDRAL}


def bake(config, size: int, file: Path) -> None:
    """Write the camera-to-display table as a .cube file."""
    baker = ocio.Baker()
    baker.setConfig(config)
    baker.setFormat("resolve_cube")
    baker.setInputSpace(CAMERA)
    baker.setDisplayView(DISPLAY, VIEW)
    baker.setCubeSize(size)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(baker.bake())


def apply_ocio(processor, image: np.ndarray) -> np.ndarray:
    """OpenColorIO's CPU path on a copy of an image (H, W, 3), uint8 or float32."""
    depth = ocio.BIT_DEPTH_UINT8 if image.dtype == np.uint8 else ocio.BIT_DEPTH_F32
    cpu = processor.getOptimizedCPUProcessor(depth, depth, ocio.OPTIMIZATION_LOSSLESS)
    (H, W, _), size, out = image.shape, image.itemsize, image.copy()
    cpu.apply(ocio.PackedImageDesc(out, W, H, 3, depth, size, 3 * size, 3 * size * W))
    return out


def camera_log(config, photo: np.ndarray) -> np.ndarray:
    """Return what a camera might have recorded where this display-ready photograph was taken."""
    light = apply_ocio(config.getProcessor(PHOTO, LINEAR), (photo / 255).astype(np.float32))
    return apply_ocio(config.getProcessor(LINEAR, CAMERA), light * np.float32(2**STOPS)).clip(0, 1)


def compare(image: np.ndarray, file: Path, device: str) -> dict[str, np.ndarray]:
    """The graded images of both methods and of OpenColorIO; differences and times are printed."""
    table = colour.read_LUT(str(file)).table
    lut = torch.from_numpy(table.astype(np.float32)).to(device)
    levels = np.floor(image * 255 + 0.5).astype(np.uint8)
    graded = {}
    for method, interpolation in METHODS.items():
        transform = ocio.FileTransform(str(file), interpolation=interpolation)
        processor = ocio.Config.CreateRaw().getProcessor(transform)
        for form in (levels, image):
            pixels = torch.from_numpy(form).to(device)
            ours = loader.apply_lut3d(pixels, lut, method).cpu().numpy()
            theirs = apply_ocio(processor, form)
            off = np.abs(ours.astype(np.float64) - theirs)
            runs = {
                "loader": lambda x=pixels, m=method: loader.apply_lut3d(x, lut, m),
                "OpenColorIO": lambda p=processor, f=form: apply_ocio(p, f),
            }
            pace = common.take_turns(runs, {"loader": device, "OpenColorIO": "cpu"})
            unit = "levels" if form is levels else "of 1"
            print(
                f"{method:<12} {form.dtype.name:<8} loader on {device} {pace['loader']}, "
                f"OpenColorIO {pace['OpenColorIO']}; differences: largest {off.max():.3g} {unit}, "
                f"{100 * (off > 0).mean():.2g} % of values"
            )
            # OpenColorIO rounds its own 8-bit results; float32 sums may differ in the last bits.
            if off.max() > (1 if form is levels else 1e-5):
                sys.exit(f"grade_photo: {method} differs from OpenColorIO by more than rounding")
        graded[method], graded["OpenColorIO, " + method] = ours, theirs
    return graded


def draw(photo: np.ndarray, log: np.ndarray, graded: dict[str, np.ndarray], file: Path) -> None:
    """Before, after by both methods and by OpenColorIO, and what differs."""
    ours, other = graded["trilinear"], graded["tetrahedral"]
    theirs = graded["OpenColorIO, tetrahedral"]

    def amplified(a, b, factor):
        return (np.abs(a - b) * factor).clip(0, 1)

    panels = (
        ("photograph", photo),
        ("as camera log (LogC3)", log),
        ("trilinear", ours),
        ("tetrahedral", other),
        ("OpenColorIO, tetrahedral", theirs),
        ("trilinear - tetrahedral, 100 times", amplified(ours, other, 100)),
    )
    height, width, _ = photo.shape
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 8 * height / width + 0.45), facecolor="black")
    for (title, image), axis in zip(panels, axes.flat, strict=True):
        axis.imshow(image if image.dtype == np.uint8 else image.clip(0, 1), interpolation="lanczos")
        axis.set_title(title, color="white", fontsize=11)
        axis.set_axis_off()
    figure.tight_layout()
    common.save(figure, file)


def main() -> None:
    """Bake, read, grade, compare, draw."""
    options = common.options(
        __doc__,
        "grade_photo",
        photo={"choices": ("coffee", "astronaut", "chelsea"), "default": "coffee"},
        size={"type": int, "default": 33, "help": "entries of the table along an axis"},
    )
    others = common.Others()
    config = ocio.Config.CreateFromFile(CONFIG)
    file = options.out.with_suffix(".cube")
    bake(config, options.size, file)
    photo = np.ascontiguousarray(getattr(data, options.photo)())
    log = camera_log(config, photo)
    sizes = " x ".join(map(str, photo.shape[:2]))
    print(f"{options.photo}, {sizes}, through {options.size}^3 entries: {CAMERA} to {VIEW}")
    graded = compare(log, file, options.device)
    others.report()
    draw(photo, log, graded, options.out)
    print(f"table: {file}\nbefore and after: {options.out}")


if __name__ == "__main__":
    main()
