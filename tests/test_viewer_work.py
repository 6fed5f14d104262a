"""The viewer at work: broken and endless files, slow operators, edits of kernels, and its end."""

import gzip
import os
import shutil
import threading

import nibabel
import numpy as np
import pytest
from conftest import ROOT, ended, start_python
from viewing import Settings, Viewing, Window, application, drop, until, write_photo

import loader
from loader.jit.tools import cli
from loader.viewer.core.operators import Operator


@pytest.fixture
def viewing(tmp_path):
    """A window with nothing in it."""
    with Viewing(tmp_path) as found:
        yield found


@pytest.fixture
def photo(viewing):
    """One that shows a photograph of 120 x 80 pixels."""
    viewing.open_photo()
    return viewing


class TestWork:
    def test_a_broken_file_is_one_message_and_the_picture_stays(self, photo):
        before = photo.settle()
        (photo.folder / "bad.nii.gz").write_bytes(b"\x1f\x8b not really")
        drop(photo, photo.folder / "bad.nii.gz")
        until(photo.window.banner.isVisible)
        assert "bad.nii.gz: it is damaged" in photo.window.banner.text.text()
        assert photo.window.view.frame is before and photo.window.windowTitle().startswith("photo")
        photo.key("Escape")
        assert not photo.window.banner.isVisible()

    @pytest.fixture
    def endless(self, tmp_path):
        """A volume of zeros, whose reading takes seconds."""
        header = nibabel.Nifti1Header()
        header.set_data_shape((1024, 1024, 2048))
        header.set_data_dtype(np.uint8)
        header["vox_offset"], header["magic"] = 352, b"n+1"
        piece = gzip.compress(bytes(1 << 25), 1)
        file = tmp_path / "endless.nii.gz"
        file.write_bytes(gzip.compress(header.binaryblock + bytes(4), 1) + piece * 24)
        return file

    @pytest.mark.parametrize("how", ["button", "key"])
    def test_opening_shows_progress_and_can_be_cancelled(self, photo, endless, how, monkeypatch):
        monkeypatch.setattr("loader.viewer.core.sources._check_memory", lambda path, needed: None)
        before, opening = photo.settle(), photo.window.opening
        photo.window.open(endless)
        thread = opening.thread_now
        until(lambda: opening.bar.value() > 0)
        assert opening.isVisible() and "endless.nii.gz" in opening.label.text()
        photo.key("3")  # the window goes on
        assert photo.settle().look.interpolation == "cubic"
        if how == "button":
            photo.click(opening.button)
        else:
            photo.key("Escape")
        assert not opening.isVisible()
        until(lambda: thread.isFinished())
        assert photo.window.view.frame.camera == before.camera
        assert not photo.window.banner.isVisible()

    def test_only_the_newest_picture_is_rendered(self, photo):
        gate, begun = threading.Event(), threading.Event()

        def slow(x):
            begun.set()
            gate.wait(20)
            return x.clone()

        photo.settle()
        photo.window.choices.operator = Operator("slow", slow, None, "(C, H, W)", ())
        photo.window.request()
        until(begun.is_set)
        count = len(photo.frames)
        for _ in range(30):
            photo.key("Left")
        gate.set()
        frame = photo.settle()
        assert frame.camera == photo.window.photo.camera
        assert len(photo.frames) - count <= 2

    def test_closing_in_the_middle_of_everything_is_clean(self, photo, endless, monkeypatch):
        monkeypatch.setattr("loader.viewer.core.sources._check_memory", lambda path, needed: None)
        begun = threading.Event()

        def slow(x):
            begun.set()
            threading.Event().wait(0.3)
            return x.clone()

        photo.window.choices.operator = Operator("slow", slow, None, "(C, H, W)", ())
        photo.window.open(endless)
        thread = photo.window.opening.thread_now
        photo.key("F6")
        until(begun.is_set)
        photo.window.close()
        assert thread.isFinished() and photo.window.renderer.isFinished()
        assert not photo.window.stuck and not photo.window.isVisible()


def test_the_command_shows_a_file_and_ends_with_its_window(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTET_VIEWER_SETTINGS", str(tmp_path / "settings.ini"))
    kept = Settings(tmp_path / "settings.ini")
    kept.put("watch", False)
    kept.save()
    write_photo(tmp_path / "photo.png")
    from PySide6.QtCore import QTimer

    app, shown = application(), []

    def look():
        for window in app.topLevelWidgets():
            view = window.view if isinstance(window, Window) else None
            if view and view.frame and view.frame.look.operator and window.isVisible():
                shown.append((window.windowTitle(), view.frame.look.operator.name))
                window.close()

    timer = QTimer(interval=20)
    timer.timeout.connect(look)
    timer.start()
    assert cli.main(["view", str(tmp_path / "photo.png"), "--operator", "square"]) == 0
    timer.stop()
    assert shown == [("photo.png - Octet", "square")]


_LIVE = """
import sys, time, pathlib, torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from viewing import Viewing, until, write_photo
from loader.viewer.core.sources import brain

kernel = pathlib.Path("kernels/square_cpu.cpp")
good, folder = kernel.read_text(), pathlib.Path({folder!r})
write_photo(folder / "photo.png")
viewing = Viewing(folder, watch=True)
window, banner = viewing.window, viewing.window.banner
assert window.watching.is_on
told = []
window.watching.noticed.connect(told.append)
plain = viewing.open(folder / "photo.png").panes["photo"].values.clone()
window.choices.use_operator("square")
until(lambda: window.choices.operator)
squares = viewing.settle().panes["photo"].values.clone()
torch.testing.assert_close(squares, plain**2, rtol=0, atol=1e-6)

def edited(text):
    count = len(told)
    kernel.write_text(text)
    until(lambda: len(told) > count, "news of an edit")
    frame = viewing.settle()
    return told[-1], frame

other = "struct Fourth {{ template <typename A> HD A operator()(A x) const {{ return x * x * x * x; }} }};"
text = good.replace("void square_cpu", other + "\\nvoid square_cpu", 1)
notice, frame = edited(text.replace("elementwise_cpu<Square>", "elementwise_cpu<Fourth>"))
torch.testing.assert_close(frame.panes["photo"].values, plain**4, rtol=0, atol=1e-6)
assert notice.kind == "differs" and banner.isVisible() and "differs" in banner.title.text()

notice, frame = edited(good.replace("elementwise_cpu<Square>", "elementwise_cup<Square>"))
line = 1 + good[: good.index("elementwise_cpu<Square>")].count("\\n")
assert banner.title.text() == f"<b>kernels/square_cpu.cpp:{{line}}</b>", banner.title.text()
assert "elementwise_cup" in banner.text.text() and banner.open_button.isVisible()
torch.testing.assert_close(viewing.settle().panes["photo"].values, plain**4, rtol=0, atol=1e-6)

notice, frame = edited(good + "// mended\\n")
assert notice.kind == "live" and not banner.isVisible(), notice
torch.testing.assert_close(frame.panes["photo"].values, squares, rtol=0, atol=0)
assert "in use" in window.panel.watched.text()
viewing.key("W")
assert not window.watching.is_on
viewing.close()
print("shown")
"""


def test_an_edit_of_a_kernel_changes_the_picture_and_an_error_does_not(tmp_path):
    """In a copy of the sources, while the window shows what the kernel makes of a photograph."""
    root = tmp_path / "checkout"
    root.mkdir()
    for room in ("jit", "ops", "kernels", "include", "viewer"):
        shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "loader.py", root)
    loader.build("grid_sample", "square")
    stores = [*map(str, loader._session.caches), str(tmp_path / "cache")]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {
        "LOADER_CACHE_DIR": ":".join(stores),
        "LOADER_BUILD": "lazy",
        "CUDA_VISIBLE_DEVICES": "",
    }
    env["TORCH_CUDA_ARCH_LIST"] = ""
    code = _LIVE.format(tests=str(ROOT / "tests"), folder=str(tmp_path))
    done = ended(start_python(code, root, env))
    assert done.stdout == "shown\n", done.stderr
