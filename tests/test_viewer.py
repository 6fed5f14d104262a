"""The viewer's window, clicked, dragged and typed on: what it shows afterwards, value by value."""

import re
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import torch
from viewing import (  # whose libraries it has seen to
    CTRL,
    LEFT,
    RIGHT,
    SHIFT,
    QPoint,
    Qt,
    QTest,
    Viewing,
    drop,
    until,
    write_photo,
)

import loader
from loader.jit.tools import cli
from loader.viewer.core.operators import Operator
from loader.viewer.qt import actions
from loader.viewer.qt.commands import Commands

CLOSE = {"rtol": 0, "atol": 2e-3}  # of smooth pictures, after a move by whole pixels


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


@pytest.fixture
def volume(viewing):
    """One that shows a volume of 30 x 36 x 24 voxels, 2 mm, brighter to the right and upwards."""
    x, y, z = np.meshgrid(*map(np.arange, (30, 36, 24)), indexing="ij")
    values = (10 + x * 3 + y * 0.5 + z * 2).astype(np.float32)
    affine = np.diag([2.0, 2.0, 2.0, 1.0])
    affine[:3, 3] = -30, -36, -24
    nibabel.save(nibabel.Nifti1Image(values, affine), viewing.folder / "volume.nii.gz")
    viewing.open(viewing.folder / "volume.nii.gz")
    return viewing


def values(viewing, name="photo") -> torch.Tensor:
    """The colours on screen."""
    return viewing.settle().panes[name].values


class TestPhotograph:
    def test_it_opens_fitted_with_its_name_and_its_speed(self, photo):
        window, camera = photo.window, photo.window.photo.camera
        width, height = photo.canvas.screen_size()
        assert camera.zoom == min(width / 120, height / 80)
        assert window.windowTitle() == "photo.png - Octet"
        assert "ms per frame" in window.speed.text() and "points/s" in window.speed.text()
        middle = values(photo)[height // 2, width // 2]
        torch.testing.assert_close(middle, photo.pixels[40, 60], rtol=0, atol=0.02)
        assert not window.panel._volume.isVisible() and window.panel._photo.isVisible()

    def test_buttons_and_keys_choose_the_interpolation(self, photo):
        linear = values(photo)
        photo.click(photo.window.panel.interpolation.buttons["nearest"])
        nearest = values(photo)
        assert photo.frames[-1].look.interpolation == "nearest"
        photo.key("3")
        cubic = values(photo)
        assert photo.window.panel.interpolation.value == "cubic"
        assert len(nearest.flatten(0, 1).unique(dim=0)) <= 120 * 80 + 1  # with the black around
        assert 0 < (linear - cubic).abs().max() < (linear - nearest).abs().max()

    def test_a_drag_moves_the_picture_with_the_mouse(self, photo):
        before = values(photo)
        photo.drag(photo.canvas, (200, 200), (230, 185))
        after = values(photo)
        torch.testing.assert_close(after[:-15, 30:], before[15:, :-30], **CLOSE)

    def test_the_wheel_zooms_at_the_mouse(self, photo):
        before, zoom = values(photo), photo.window.photo.camera.zoom
        photo.wheel(photo.canvas, (150.5, 220.5), 3)
        after = values(photo)
        assert photo.window.photo.camera.zoom == pytest.approx(zoom * 1.2**3)
        torch.testing.assert_close(after[220, 150], before[220, 150], **CLOSE)
        photo.key("Home")
        torch.testing.assert_close(values(photo), before, rtol=0, atol=0)
        photo.key("0")
        assert photo.window.photo.camera.zoom == 1

    @pytest.mark.parametrize(("button", "modifier"), [(RIGHT, None), (LEFT, SHIFT)])
    def test_a_drag_around_the_middle_turns(self, photo, button, modifier):
        width, height = photo.canvas.screen_size()
        x, y = width // 2, height // 2
        modifier = modifier or Qt.KeyboardModifier.NoModifier
        photo.drag(photo.canvas, (x + 100, y), (x, y + 100), button, modifier)
        assert photo.window.photo.camera.angle == pytest.approx(np.pi / 2, abs=0.02)
        photo.key("R")
        photo.key("R", SHIFT)
        found = values(photo)[y + 40, x]  # what was on the right is below
        camera = photo.window.photo.camera
        seen = camera.to_photo(x + 0.5, y + 40.5, (width, height))
        expected = photo.pixels[int(seen[1]), int(seen[0])]
        torch.testing.assert_close(found, expected, rtol=0, atol=0.03)

    def test_control_and_a_drag_bend_it_where_it_begins(self, photo):
        before = values(photo)
        photo.drag(photo.canvas, (250, 200), (370, 200), LEFT, CTRL)
        warp = photo.window.photo.camera.warp
        assert warp.kind == "swirl" and warp.strength == pytest.approx(0.4, abs=0.01)
        screen = photo.canvas.screen_size()
        assert photo.window.photo.camera.to_screen(*warp.centre, screen) == pytest.approx(
            (250, 200)
        )
        after = values(photo)
        torch.testing.assert_close(after[200, 250], before[200, 250], rtol=0, atol=0.02)
        assert (after - before)[120:280, 170:330].abs().max() > 0.1
        radius = warp.radius
        photo.wheel(photo.canvas, (250, 200), -2, CTRL)
        assert photo.window.photo.camera.warp.radius == pytest.approx(radius / 1.12**2)
        panel = photo.window.panel
        assert panel.strength.value() == pytest.approx(400, abs=10)
        photo.choose(panel.warp, "lens")
        assert photo.window.photo.camera.warp.kind == "lens"
        panel.strength.setFocus()
        QTest.keyClick(panel.strength, Qt.Key.Key_PageDown)
        assert photo.window.photo.camera.warp.strength < 0.4
        photo.key("BracketRight")
        photo.choose(panel.warp, "none")
        torch.testing.assert_close(values(photo), before, rtol=0, atol=0)

    def test_arrows_move_and_plus_comes_closer(self, photo):
        camera = photo.window.photo.camera
        photo.key("Plus")
        assert photo.window.photo.camera.zoom == pytest.approx(camera.zoom * 1.25)
        photo.key("Minus")
        photo.key("Left")
        assert photo.window.photo.camera.centre[0] < camera.centre[0]
        photo.key("Down")
        assert photo.window.photo.camera.centre[1] > camera.centre[1]

    def test_the_place_under_the_mouse_is_told(self, photo):
        photo.settle()
        width, height = photo.canvas.screen_size()
        photo.move(photo.canvas, QPoint(width // 2, height // 2))
        told = photo.window.place.text()
        assert re.match(r"pixel (59\.9|60\.\d), (39\.9|40\.\d)   shown 0\.\d+", told), told
        photo.window.photo.canvas.left.emit()
        assert photo.window.place.text() == ""


class TestVolume:
    def test_a_click_slices_the_other_planes_there(self, volume):
        view, start = volume.window.volume, volume.settle().camera
        axial = view.canvases["axial"]
        place = QPoint(axial.width() * 2 // 5, axial.height() * 2 // 5)
        QTest.mouseClick(axial, LEFT, pos=place)
        right, front, up = view.camera.focus
        expected = start.to_world("axial", place.x(), place.y(), axial.screen_size())
        assert (right, front) == pytest.approx(tuple(expected[:2])) and up == start.focus[2]
        frame = volume.settle()
        x, y = view.camera.to_screen(
            "coronal", np.array(view.camera.focus), view.screens()["coronal"]
        )
        shown = frame.panes["coronal"].values[int(y), int(x), 0]
        brightness = 10 + (right + 30) / 2 * 3 + (front + 36) / 4 + (up + 24) - 10
        low, high = frame.look.window
        assert shown.item() == pytest.approx((brightness - low) / (high - low), abs=0.02)
        lines = dict(view.info.lines)
        assert lines["right, front, up"] == f"{right:.1f}, {front:.1f}, {up:.1f} mm"
        assert float(lines["value"]) == pytest.approx(brightness + 10, abs=5)

    def test_the_patients_left_is_dark_and_marked(self, volume):
        view, camera = volume.window.volume, volume.settle().camera
        frame = volume.frames[-1].panes["axial"].values[..., 0]
        width, height = view.screens()["axial"]
        across = int(camera.zoom * 20)
        left, right = (frame[height // 2, width // 2 + d].item() for d in (-across, across))
        assert left < right and camera.labels("axial")[:2] == ("L", "R")
        volume.key("X")
        assert volume.window.panel.mirrored.isChecked()
        mirrored = volume.settle().panes["axial"].values[..., 0]
        assert (
            mirrored[height // 2, width // 2 - across] > mirrored[height // 2, width // 2 + across]
        )
        assert view.camera.labels("axial")[:2] == ("R", "L")

    def test_wheel_and_keys_go_through_the_slices_of_one_plane(self, volume):
        view, start = volume.window.volume, volume.settle().camera
        volume.wheel(view.canvases["coronal"], (40, 40), 2)
        assert view.camera.focus == pytest.approx(np.add(start.focus, (0, 4, 0)))
        volume.key("BracketLeft")
        assert view.camera.focus == pytest.approx(np.add(start.focus, (0, 2, 0)))
        volume.key("N")
        assert view.active == "sagittal"
        volume.key("PageUp")
        assert view.camera.focus == pytest.approx(np.add(start.focus, (20, 2, 0)))
        volume.wheel(view.canvases["axial"], (40, 40), 1, CTRL)
        assert view.camera.zoom == pytest.approx(start.zoom * 1.2)

    def test_turning_one_plane_turns_them_all(self, volume):
        view, start = volume.window.volume, volume.settle().camera
        axial = view.canvases["axial"]
        x, y = map(round, start.to_screen("axial", np.array(start.focus), axial.screen_size()))
        volume.drag(axial, (x + 50, y), (x, y + 50), RIGHT)
        assert view.camera.labels("axial") == ("P", "A", "L", "R")
        assert view.camera.labels("coronal") == ("P", "A", "S", "I")
        assert view.camera.focus == start.focus
        volume.drag(axial, (30, 30), (50, 45), LEFT, Qt.KeyboardModifier.AltModifier)
        assert view.camera.centre != start.centre and view.camera.focus == start.focus

    def test_a_double_click_gives_a_plane_all_the_room(self, volume):
        view = volume.window.volume
        QTest.mouseDClick(view.canvases["coronal"], LEFT)
        until(lambda: [*volume.settle().panes] == ["coronal"])
        assert view.canvases["coronal"].width() > 0.9 * view.width()
        volume.key("E")
        until(lambda: len(volume.settle().panes) == 3)

    def test_sliders_choose_black_and_white(self, volume):
        panel, before = volume.window.panel, values(volume, "axial")
        panel.white.setFocus()
        for _ in range(3):
            QTest.keyClick(panel.white, Qt.Key.Key_PageDown)
        after = values(volume, "axial")
        assert after.mean() > before.mean() and panel.window()[1] < 180

    def test_the_value_of_the_voxel_under_the_mouse_is_told(self, volume):
        view = volume.window.volume
        size = view.canvases["axial"].screen_size()
        volume.settle()
        volume.move(view.canvases["axial"], QPoint(size[0] // 2, size[1] // 2))
        assert "mm   voxel 14, 18, 12: " in volume.window.place.text().replace("15, ", "14, ")


class TestChoices:
    def test_a_colour_table_from_a_file(self, photo):
        plain = values(photo)
        lines = [f"{r} {g} {1 - b}" for b in (0, 1) for g in (0, 1) for r in (0, 1)]
        file = photo.folder / "blue.cube"
        file.write_text("\n".join(["LUT_3D_SIZE 2", *lines]))
        drop(photo, file)
        found = values(photo)
        expected = torch.stack([plain[..., 0], plain[..., 1], 1 - plain[..., 2]], -1)
        torch.testing.assert_close(found, expected.clamp(0, 1), rtol=0, atol=1e-5)
        panel = photo.window.panel
        assert panel.table.currentText() == "blue"
        photo.click(panel.method.buttons["trilinear"])
        assert photo.settle().look.method == "trilinear"
        photo.choose(panel.table, "")
        torch.testing.assert_close(values(photo), plain, rtol=0, atol=0)
        photo.key("C")
        assert photo.settle().look.table.title == "Film"
        file.write_text("LUT_3D_SIZE 2")
        drop(photo, file)
        assert (
            "got 0" in photo.window.banner.text.text() and photo.settle().look.table.title == "Film"
        )

    def test_an_operator_by_name_and_what_is_none(self, photo):
        plain = values(photo)
        photo.choose(photo.window.panel.operator, "square")
        until(lambda: photo.window.choices.operator)
        torch.testing.assert_close(values(photo), plain**2, rtol=0, atol=1e-6)
        photo.window.choices.use_operator("hash_grid_encoding")
        until(photo.window.banner.isVisible)
        assert "hash_grid_encoding does not take an image" in photo.window.banner.title.text()
        assert photo.settle().look.operator.name == "square"
        assert photo.window.panel.operator.currentData() == "square"

    def test_split_and_difference(self, photo):
        photo.key("F6")
        frame = photo.settle()
        assert frame.reference > 0 and photo.canvas.comparison == "split"
        assert "largest difference" in photo.window.compared.text()
        middle = photo.canvas.width() // 2
        photo.drag(photo.canvas, (middle, 50), (middle - 90, 50))
        assert photo.canvas.split == pytest.approx((middle - 90) / photo.canvas.width(), abs=0.01)
        assert photo.window.photo.camera == frame.camera
        wrong = Operator("wrong", lambda x: x + 0.25, lambda x: x, "(C, H, W)", ())
        photo.window.choices.operator = wrong
        photo.click(photo.window.panel.comparison.buttons["difference"])
        frame = photo.settle()
        assert frame.largest == pytest.approx(0.25, abs=1e-4)
        assert photo.window.compared.text().endswith("largest difference 0.25")
        both = photo.canvas.grab().toImage()
        photo.key("F5")
        assert photo.canvas.grab().toImage() != both

    def test_an_operator_that_fails_leaves_the_last_picture(self, photo):
        def fails(x):
            raise RuntimeError("fails: no more of this")

        before = photo.settle()
        photo.window.choices.operator = Operator("fails", fails, None, "(C, H, W)", ())
        photo.window.request()
        until(photo.window.banner.isVisible)
        assert "fails: no more of this" in photo.window.banner.title.text()
        assert photo.window.view.frame is before
        photo.window.choices.use_operator("")
        until(lambda: not photo.window.banner.isVisible())

    def test_choices_are_kept(self, tmp_path):
        first = Viewing(tmp_path)
        first.key("3")
        first.key("F6")
        first.window.choices.use_table("Inferno")
        first.key("X")
        path = tmp_path / "photo.png"
        write_photo(path)
        first.open(path)
        first.close()
        second = Viewing(tmp_path)
        panel = second.window.panel
        assert (panel.interpolation.value, panel.comparison.value) == ("cubic", "split")
        assert panel.table.currentText() == "Inferno" and panel.mirrored.isChecked()
        (entry,) = second.window.recent_menu.actions()
        entry.trigger()
        until(lambda: second.window.scene)
        frame = second.settle()
        assert frame.look.interpolation == "cubic" and frame.look.table.title == "Inferno"
        second.close()

    def test_every_entry_of_the_menus_has_a_key_and_does_something(self, photo, monkeypatch):
        entries = [entry for menu in actions.MENUS.values() for entry in menu if entry]
        keys = [entry[1] for entry in entries]
        assert len(keys) == len({*keys}) and all(hasattr(Commands, e[2]) for e in entries)
        asked = []
        for dialog in ("ask_for_file", "ask_for_table", "ask_for_library", "ask_where_to_save"):
            monkeypatch.setattr(Commands, dialog, lambda self, d=dialog: asked.append(d))
        monkeypatch.setattr(Commands, "close", lambda self: asked.append("close"))
        monkeypatch.setattr(Commands, "open_brain", lambda self: asked.append("brain"))
        monkeypatch.setattr(Commands, "toggle_watching", lambda self: asked.append("watch"))
        bar = photo.window.menuBar()
        for menu in bar.actions():
            for action in menu.menu().actions():
                if not action.menu():
                    action.trigger()
        assert len(asked) == 7
        text = actions.help_text()
        assert all(f"<b>{key}</b>" in text for key in keys) and "Ctrl+drag" in text
        photo.settle()
        photo.window.save_picture(photo.folder / "saved.png")
        assert (photo.folder / "saved.png").stat().st_size > 1000


def test_a_folder_of_operators_offers_what_takes_an_image(photo, monkeypatch):
    """`choices` alone; loader.Library itself is tested where it is made."""
    folder = photo.folder / "mine"
    (folder / "ops").mkdir(parents=True)
    (folder / "ops/negative.cpp").write_text("")
    (folder / "ops/negative.py").write_text("def negative(x):\n    return 1 - x\n")
    library = SimpleNamespace(
        __name__="mine", negative=lambda x: 1 - x, negative_reference=lambda x: 1 - x
    )
    monkeypatch.setattr(loader, "Library", lambda path: library)
    plain = values(photo)
    drop(photo, folder)
    until(lambda: photo.window.choices.operator)
    torch.testing.assert_close(values(photo), 1 - plain, rtol=0, atol=1e-6)
    assert photo.window.panel.operator.currentText() == "negative (mine)"
    assert photo.window.settings.get("libraries", "") == str(folder)
    (photo.folder / "empty/ops").mkdir(parents=True)
    drop(photo, photo.folder / "empty")
    until(photo.window.banner.isVisible)
    assert "empty has no operator that takes an image" in photo.window.banner.title.text()


def test_with_nothing_open_it_says_what_to_do(viewing):
    window = viewing.window
    assert window.stack.currentWidget() is window.empty and window.windowTitle() == "Octet"
    for key in ("Home", "Plus", "R", "F6", "1", "N", "E", "BracketLeft"):
        viewing.key(key)
    assert not window.banner.isVisible()
    write_photo(viewing.folder / "photo.png")
    drop(viewing, viewing.folder / "photo.png")
    until(lambda: window.scene)
    assert viewing.settle().panes


def test_without_qt_the_command_says_how_to_get_it(monkeypatch, capsys):
    import sys

    for name in [n for n in sys.modules if n.startswith("loader.viewer.qt")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "PySide6.QtCore", None)
    assert cli.main(["view"]) == 1
    said = capsys.readouterr().err
    assert "pip install 'octet-loader[viewer]'" in said and said.count("\n") == 1
    error = ImportError("libEGL.so.1: cannot open shared object file: No such file or directory")
    assert "Qt needs libEGL.so.1 of the system" in cli._cure(error)
