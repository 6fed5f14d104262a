"""The examples run as a user runs them, on small problems, and their pictures are pictures."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT


def run(name, *options):
    command = [sys.executable, ROOT / "examples" / name, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


def check_picture(path):
    pyplot = pytest.importorskip("matplotlib.image", reason="matplotlib draws the pictures")
    image = pyplot.imread(path)
    assert min(image.shape[:2]) > 300 and len(np.unique(image)) > 30


def test_resample_brain(tmp_path):
    pytest.importorskip("nibabel", reason="nibabel reads the brain")
    picture = tmp_path / "new" / "brain.png"
    done = run("resample_brain.py", "--side", 40, "--out", picture)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("64,000 points from 197 x 233 x 189 voxels")
    for text in ("the PyTorch reference", "map_coordinates", "points/s", "peak memory"):
        assert text in done.stdout
    check_picture(picture)


def test_resample_brain_says_what_it_lacks():
    pytest.importorskip("nibabel", reason="nibabel reads the brain")
    done = run("resample_brain.py", "--device", "tpu")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "invalid choice: 'tpu'" in done.stderr


def test_fit_volume(tmp_path):
    picture = tmp_path / "fit.png"
    done = run("fit_volume.py", "--steps", 150, "--out", picture)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "offsets" in done.stdout
    check_picture(picture)
