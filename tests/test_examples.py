"""The examples run as a user runs them, on small problems, and their pictures are pictures."""

import importlib.util
import itertools
import os
import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, ended, start_program

import loader


def run(name, *options, **environment):
    program = [ROOT / "examples" / name, *options]
    return ended(start_program(program, os.getcwd(), os.environ | environment))


def check_picture(path):
    pyplot = pytest.importorskip("matplotlib.image", reason="matplotlib draws the pictures")
    image = pyplot.imread(path)
    assert min(image.shape[:2]) > 300 and len(np.unique(image)) > 30


@pytest.fixture
def common(monkeypatch):
    """What the examples share, as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setenv("MPLBACKEND", "Agg")  # which it sets
    yield importlib.import_module("common")
    del sys.modules["common"]


@pytest.fixture
def example(common):
    """The brain's example as a module."""
    for package in ("matplotlib", "nibabel", "scipy"):
        pytest.importorskip(package, reason="the example needs it")
    file = ROOT / "examples" / "resample_brain.py"
    spec = importlib.util.spec_from_file_location("resample_brain", file)
    module = importlib.util.module_from_spec(spec)
    path = [*sys.path]
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_times_show_the_least_and_the_median(common):
    times = common.Samples([16.0, 0.5, 0.52])
    assert str(times) == "0.50 ms (median 0.52)"


def test_peers_are_timed_in_turns(common):
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "ab"}
    times = common.take_turns(runs, dict.fromkeys("ab", "cpu"), rounds=3)
    assert called[4:] == ["a", "b"] * 3
    assert [*times] == ["a", "b"] and all(len(samples) == 3 for samples in times.values())


@pytest.mark.parametrize(("others", "says"), [(0.4, False), (2.0, True)])
def test_a_busy_machine_is_said_to_be(common, monkeypatch, capsys, others, says):
    """In ten seconds of two processors this process took four, and the others so much of them."""
    seen = iter([(100.0, 50.0, 1.0), (110.0, 54.0 + 2 * others, 5.0)])
    monkeypatch.setattr(common.Others, "_now", staticmethod(lambda: next(seen)))
    monkeypatch.setattr(common.os, "cpu_count", lambda: 2)
    common.Others().report()
    said = "this machine was busy: other processes took 20 % of its processors meanwhile"
    assert (said in capsys.readouterr().out) == says


def test_what_this_process_does_is_not_counted_as_others(common):
    begun = common.Others._now()
    while sum(os.times()[:4]) < begun[2] + 0.2:
        pass
    ended = common.Others._now()
    took = round(ended[2] - begun[2], 2)  # the system counts in hundredths of a second
    assert ended[0] > begun[0] and ended[1] - begun[1] >= 0.15 and took >= 0.2


def test_resample_brain(tmp_path):
    pytest.importorskip("nibabel", reason="nibabel reads the brain")
    picture = tmp_path / "new" / "brain.png"
    done = run("resample_brain.py", "--points", 60000, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64,000 points from 197 x 233 x 189 voxels")
    # A float32 grid is good for some 2e-5 voxels, gathered cells for the last bits of a value.
    peers = (("eager PyTorch", 1e-4), ("SciPy", 1e-4), ("eager, of", 2e-6), ("SciPy, of", 1e-6))
    for peer, allowed in peers:
        share = re.search(rf"difference from {peer} .* ([\d.e+-]+) of the range", done.stdout)
        assert float(share[1]) <= allowed
    rates = re.findall(r"([\d.]+) million points/s \(median ([\d.]+)\)$", done.stdout, re.MULTILINE)
    assert len(rates) == 7 and all(float(best) >= float(usual) > 0 for best, usual in rates)
    assert re.search(r"peak memory [\d,]+ MiB", done.stdout)
    check_picture(picture)


@pytest.mark.parametrize(
    "device, message", [("tpu", "invalid choice: 'tpu'"), ("cuda", "torch sees no GPU")]
)
def test_resample_brain_says_what_it_lacks(device, message):
    pytest.importorskip("nibabel", reason="nibabel reads the brain")
    done = run("resample_brain.py", "--device", device, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr


def test_resampling_is_scipys_up_to_the_border(example):
    """On voxels, on the last planes, and one float64 beyond them, where zeros begin."""
    volume = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(0)) + 1
    ticks = [
        [np.nextafter(0, -1), 0, 0.25, n - 2, np.nextafter(n - 1, 0), n - 1, np.nextafter(n - 1, n)]
        for n in volume.shape
    ]
    positions = torch.tensor([*itertools.product(*ticks)], dtype=torch.float64)
    out = example.resample_cells(volume, positions, loader.trilinear_interpolation).numpy()
    expected = example.ndimage.map_coordinates(
        volume.double().numpy(), positions.T.numpy(), order=1, mode="constant", cval=0.0
    )
    assert ((expected == 0) == (out == 0)).all() and (expected > 0).any() and (expected == 0).any()
    assert np.abs(out - expected).max() <= 8 * torch.finfo(torch.float32).eps * volume.max()
    _, points, _ = example.gather_cells(volume, positions)
    assert points.abs().max() == 1


def test_the_float32_grid_is_as_exact_as_is_said(example):
    """Within the example's bound of SciPy, inside and up to two voxels outside of a volume."""
    make = torch.Generator().manual_seed(0)
    volume = torch.rand(40, 300, 70, generator=make) + 1
    sizes = torch.tensor(volume.shape)
    positions = torch.rand(20000, 3, generator=make, dtype=torch.float64) * (sizes + 3) - 2
    grid = example.normalised(volume, positions)
    out = example.resample(volume, grid, loader.grid_sample).numpy()
    expected = example.ndimage.map_coordinates(
        volume.double().numpy(), positions.T.numpy(), order=1, mode="grid-constant"
    )
    off, bound = np.abs(out - expected).max(), example.rounding_of_grid(volume)
    assert off <= bound + 8 * torch.finfo(torch.float32).eps * volume.max()
    assert off > bound / 20 and bound < 1e-4 * volume.max()


def test_fit_volume(tmp_path):
    """The program compares the errors itself; what it prints says the same."""
    picture = tmp_path / "fit.png"
    done = run("fit_volume.py", "--steps", 250, "--out", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"^(\w+) +([\d.e+-]+) -> +([\d.e+-]+)", done.stdout, re.MULTILINE)
    assert [name for name, *_ in errors] == ["loss", "volume", "offsets"]
    assert all(float(last) < float(first) / 5 for _, first, last in errors)
    check_picture(picture)


def test_fit_volume_fails_where_nothing_was_recovered(tmp_path):
    done = run("fit_volume.py", "--steps", 2, "--out", tmp_path / "fit.png")
    assert done.returncode == 1 and "not recovered" in done.stderr


def test_convolve_photo(tmp_path):
    pytest.importorskip("skimage", reason="scikit-image has the photograph")
    done = run("convolve_photo.py", "--device", "cpu", "--out", tmp_path / "photo.png")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("difference from SciPy") == 3
    assert len(re.findall(r"19 x 19: [\d.]+ ms \(median [\d.]+\) on cpu", done.stdout)) == 3
    check_picture(tmp_path / "photo.png")


def test_grade_photo(tmp_path):
    for package in ("colour", "matplotlib", "PyOpenColorIO", "skimage"):
        pytest.importorskip(package, reason="the example needs it")
    done = run("grade_photo.py", "--device", "cpu", "--out", tmp_path / "graded.png")
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^(trilinear|tetrahedral) +(uint8|float32) .* largest ([\d.e+-]+)",
        done.stdout,
        re.MULTILINE,
    )
    assert len(found) == 4
    assert all(float(off) <= (1 if dtype == "uint8" else 1e-5) for _, dtype, off in found)
    check_picture(tmp_path / "graded.png")
    assert (tmp_path / "graded.cube").stat().st_size > 33**3 * 6


def test_fit_image(tmp_path):
    """A few steps learn much of the photograph; how much is wanted takes some more."""
    pytest.importorskip("skimage", reason="scikit-image has the photograph")
    done = run("fit_image.py", "--device", "cpu", "--steps", 60, "--out", tmp_path / "fit.png")
    first, last = re.search(r"PSNR ([\d.]+) dB -> .* -> ([\d.]+) dB", done.stdout).groups()
    assert float(last) > 18 > float(first) + 10
    learned = float(last) >= 30
    assert done.returncode == (0 if learned else 1), done.stderr
    assert learned or "not learned" in done.stderr
    check_picture(tmp_path / "fit.png")


def test_warp_kornia(tmp_path):
    pytest.importorskip("kornia", reason="the example shows its code unmodified")
    out = tmp_path / "warp.png"
    done = run("warp_kornia.py", "--device", "cpu", "--batch", 1, "--turns", 1, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("allowed)") == 4 and done.stdout.count(" (median ") == 16
    check_picture(out)
