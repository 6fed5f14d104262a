"""How long the viewer takes for a picture, and from a saved edit of a kernel to the new picture.

    python -m loader bench viewer_frames [--repeats 30] [--edits 5]

Frames are those of the window's own thread on two cores: sampled, coloured, rounded to bytes. The
photograph is scikit-image's astronaut, tiled to 4K, seen whole and one to one; the volume is the
MNI152 template. Beside them plain PyTorch on the same pixels, once each. Edits are made in a copy
of the sources, while a window in memory shows what `square` makes of the photograph: the time is
from the write of the file to the paint of the first picture in which a pixel has changed.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

CORES = 2
PHOTO = (3840, 2160)
WINDOW, PANE = (1920, 1080), (640, 540)
_EDITED = """struct Edited {
    template <typename A>
    HD A operator()(A x) const {
        return x * x * A(@share@);
    }
};
void square_cpu("""


def write_photo(path: Path) -> Path:
    """Return a file with a photograph of 4K."""
    import numpy as np
    from PIL import Image
    from skimage import data

    tile = data.astronaut()
    times = [-(-n // m) for n, m in zip(PHOTO[::-1], tile.shape, strict=False)]
    pixels = np.tile(tile, (*times, 1))[: PHOTO[1], : PHOTO[0]]
    Image.fromarray(pixels).save(path, quality=92)
    return path


def frames(folder: str, repeats: int) -> list[dict]:
    """Each case: milliseconds a frame, and of it sampling; plain PyTorch beside it."""
    import torch

    from loader.viewer.core import scene, sources, tables
    from loader.viewer.core.flat import Flat, Warp
    from loader.viewer.core.planes import PLANES, Planes
    from loader.viewer.core.scene import Look

    torch.set_num_threads(CORES)
    photo = scene.Scene(sources.open_file(write_photo(Path(folder) / "photo.jpg")))
    brain = scene.Scene(sources.open_file(sources.brain()))
    whole = Flat.fit(PHOTO, WINDOW)
    close = Flat(PHOTO, (1920, 1080), 1.0, 0.2)
    bent = Flat(PHOTO, (1920, 1080), 0.5, 0.0, Warp("swirl", (1920, 1080), 1000, 0.5))
    volume = brain.source
    planes = Planes.fit(volume, dict.fromkeys(PLANES, PANE)).turned("axial", 0.3)
    film = tables.ready_made()["Film"]
    cases = [
        ("4K photograph, whole", photo, whole, (Look(name) for name in scene.INTERPOLATIONS)),
        ("4K photograph, one to one, turned", photo, close, (Look(), Look("cubic"))),
        ("4K photograph, whole, a colour table", photo, whole, (Look(table=film),)),
        ("4K photograph, whole, a swirl", photo, bent, (Look(),)),
        (
            "three planes of the brain",
            brain,
            planes,
            (Look(name, window=volume.usual) for name in scene.INTERPOLATIONS),
        ),
    ]
    rows = []
    for case, of, camera, looks in cases:
        screens = dict.fromkeys(PLANES, PANE) if of is brain else {"photo": WINDOW}
        for look in looks:
            rows.append({"case": case, "interpolation": look.interpolation})
            rows[-1] |= _frame(of, camera, look, screens, repeats)
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _frame(of, camera, look, screens: dict, repeats: int) -> dict:
    """Medians of repeats, the first left out, which also loads; plain PyTorch once."""
    found = [of.render(camera, look, screens) for _ in range(repeats + 1)]
    times = [frame.milliseconds for frame in found[1:]]
    row = {
        "points": found[0].points,
        "median": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "sampling": statistics.median(frame.sampling for frame in found[1:]),
    }
    if look.interpolation == "linear" and look.table is None:
        compared = of.compare(found[-1])
        row |= {"pytorch": compared.reference, "difference": compared.largest}
    return row


def edits(folder: str, repeats: int) -> list[dict]:
    """Seconds from a saved edit to its picture, with the kernel right and not as the reference."""
    from PySide6.QtWidgets import QApplication

    from loader.viewer.qt.settings import Settings
    from loader.viewer.qt.window import Window

    app, place = QApplication([]), Path(folder)
    window = Window(Settings(place / "settings.ini"))
    window.show()
    window.open(write_photo(place / "photo.jpg"))
    window.choices.use_operator("square")
    kernel = Path("kernels/square_cpu.cpp")
    good = kernel.read_text()

    def wait(true) -> None:
        while not true():
            app.processEvents()
            time.sleep(0.001)

    def picture():
        frame = window.view.frame if window.view else None
        return frame and frame.look.operator and frame.panes["photo"].picture

    wait(lambda: picture() is not None)
    end = time.monotonic() + 15  # the process that tries edits is ready
    wait(lambda: time.monotonic() > end)
    taken, compiled = [], []
    for number in range(repeats + 1):
        before = picture()
        end = time.monotonic() + 2
        wait(lambda end=end: time.monotonic() > end)
        text = good.replace("void square_cpu(", _EDITED.replace("@share@", f"{0.9 - number / 20}"))
        begun = time.perf_counter()
        kernel.write_text(text.replace("elementwise_cpu<Square>", "elementwise_cpu<Edited>"))
        wait(lambda before=before: not picture().equal(before))
        window.view.repaint()
        taken.append(time.perf_counter() - begun)
        compiled.append(_compiled())
        print(json.dumps({"edit": number, "seconds": taken[-1]}), flush=True)
    window.close()
    row = {"case": "CPU kernel of square", "median": statistics.median(taken[1:])}
    row |= {"least": min(taken[1:]), "most": max(taken[1:]), "runs": repeats}
    print(json.dumps(row | {"compile": statistics.median(compiled[1:])}), flush=True)
    return [row | {"compile": statistics.median(compiled[1:])}]


def _compiled() -> float:
    """Seconds of the compiler in the last edit."""
    from loader.jit.live.reload import history

    return max(history()[-1].rebuilt.compiled.values())


def table(record: dict) -> str:
    """The page's table of frames, and of edits."""
    from tables import circumstances_text

    lines = [
        f"Milliseconds a frame on {circumstances_text(record)}; a window of "
        f"{' x '.join(map(str, WINDOW))} pixels, three planes of {' x '.join(map(str, PANE))}:",
        "",
        "| | interpolation | median | least | most | points/s, sampling | plain PyTorch |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if "interpolation" not in row:
            continue
        times = [f"{row[name]:.1f}" for name in ("median", "least", "most")]
        rate = f"{row['points'] / row['sampling'] / 1e3:.0f} million"
        peer = f"{row['pytorch']:.0f}" if "pytorch" in row else ""
        lines.append(
            "| " + " | ".join([row["case"], row["interpolation"], *times, rate, peer]) + " |"
        )
    for row in record["rows"]:
        if "runs" in row:
            lines += [
                "",
                f"From a saved edit of the {row['case']} to its picture: {row['median']:.2f} s "
                f"({row['least']:.2f} to {row['most']:.2f}, {row['runs']} edits), of which the "
                f"compiler takes {row['compile']:.2f} s.",
            ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure in processes of two cores, and keep the results."""
    parser = argparse.ArgumentParser(
        prog="python -m loader bench viewer_frames", description=__doc__
    )
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--edits", type=int, default=5)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    import loader
    from harness import ROOT, circumstances, keep, rows_of

    loader.build("grid_sample", "apply_lut3d", "square")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for room in ("jit", "include", "ops", "kernels", "viewer"):
            shutil.copytree(ROOT / room, f"{folder}/copy/{room}")
        shutil.copy(ROOT / "loader.py", f"{folder}/copy")
        caches = [*map(str, loader._session.caches), f"{folder}/cache"]
        environment = {**os.environ, "LOADER_CACHE_DIR": ":".join(caches), "LOADER_BUILD": "lazy"}
        environment["OMP_WAIT_POLICY"] = "passive"  # as `python -m loader view` has it
        environment |= {"QT_QPA_PLATFORM": "offscreen", "CUDA_VISIBLE_DEVICES": ""}
        for which, count in (("frames", options.repeats), ("edits", options.edits)):
            code = (
                "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))"
                f"[:{CORES}]); sys.path[:0] = [{folder + '/copy'!r}]; import loader; "
                f"sys.path.insert(0, {str(Path(__file__).parent)!r}); "
                f"import viewer_frames; viewer_frames.{which}({folder!r}, {count})"
            )
            rows += rows_of(code, f"{folder}/copy", environment)
    rows = [row for row in rows if "case" in row]
    facts = circumstances("cpu", ["grid_sample", "apply_lut3d", "square"])
    print(
        keep(
            "viewer_frames",
            "cpu",
            {**facts, "cores": CORES, "threads": CORES},
            rows,
            options.results,
        )
    )
