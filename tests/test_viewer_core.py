"""The viewer without its window: files, cameras, operators and pictures, against their references."""

import ast
import gzip
import math
from pathlib import Path
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
import tifffile
import torch
from conftest import ROOT
from PIL import Image
from scipy import ndimage

import loader
from loader.viewer.core import edits, operators, sources, tables
from loader.viewer.core.flat import Flat, Warp
from loader.viewer.core.planes import PLANES, Planes, direction
from loader.viewer.core.scene import Look, Pane, Scene, Stopped, difference
from loader.viewer.core.sources import CannotOpen, Volume, open_file

# One on either side of a place between pixels is off by the rounding of a float32 grid.
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    """A photograph of 40 x 30 random pixels, and their values."""
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    file = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.fromarray(pixels).save(file)
    return open_file(file), torch.from_numpy(pixels / 255).float()


# An oblique, sheared placement of voxels, left-handed, of unequal steps.
AFFINE = np.array([[-1.9, 0.2, 0.1, 20], [0.3, 2.4, -0.5, -31], [0.1, 0.6, 3.1, -25], [0, 0, 0, 1]])


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    """A smooth volume of two times, placed by AFFINE, and its values (x, y, z, time)."""
    noise = np.random.default_rng(1).normal(size=(21, 26, 17, 2))
    values = (100 * ndimage.gaussian_filter(noise, (1, 1, 1, 0)) - 7).astype(np.float32)
    file = tmp_path_factory.mktemp("volume") / "volume.nii.gz"
    nibabel.save(nibabel.Nifti1Image(values, AFFINE), file)
    return open_file(file), values


def shown(scene, camera, look, **screens) -> dict[str, torch.Tensor]:
    """The colours of each screen."""
    frame = scene.render(camera, look, screens)
    return {name: pane.values for name, pane in frame.panes.items()}


class TestPhotograph:
    @pytest.mark.parametrize("interpolation", ["nearest", "linear", "cubic"])
    def test_one_to_one_gives_the_pixels_and_black_around(self, photo, interpolation):
        source, pixels = photo
        camera = Flat((40, 30), (20.0, 15.0), 1.0)
        found = shown(Scene(source), camera, Look(interpolation), photo=(48, 30))["photo"]
        torch.testing.assert_close(found[:, 4:44], pixels, **CLOSE)
        assert found[:, :3].abs().max() == 0 and found[:, -3:].abs().max() == 0

    def test_a_quarter_turn_is_clockwise(self, photo):
        source, pixels = photo
        camera = Flat((40, 30), (20.0, 15.0), 1.0).turned(math.pi / 2)
        found = shown(Scene(source), camera, Look("nearest"), photo=(30, 40))["photo"]
        torch.testing.assert_close(found, torch.rot90(pixels, -1), **CLOSE)

    @pytest.mark.parametrize("interpolation", ["nearest", "linear", "cubic"])
    def test_every_camera_agrees_with_the_reference(self, photo, interpolation):
        scene = Scene(photo[0])
        camera = Flat((40, 30), (17.3, 12.9), 3.7, 0.4, Warp("swirl", (18, 11), 14, 0.6))
        frame = scene.compare(scene.render(camera, Look(interpolation), {"photo": (90, 70)}))
        assert frame.panes["photo"].values.std() > 0
        assert frame.largest < 1e-5 and frame.reference > 0 and frame.points == 6300

    def test_what_is_under_the_mouse_stays_there_while_zooming(self):
        camera = Flat((400, 300), (170.0, 120.0), 0.7, 0.3)
        before = camera.to_photo(33, 71, (200, 100))
        for factor in (1.3, 0.2, 1e9, 1e-9):
            camera = camera.zoomed(factor, 33, 71, (200, 100))
            assert camera.to_photo(33, 71, (200, 100)) == pytest.approx(before)
            assert camera.to_screen(*before, (200, 100)) == pytest.approx((33, 71))
        assert camera.zoom == 1 / 64

    def test_moving_goes_with_the_mouse(self):
        camera = Flat((400, 300), (170.0, 120.0), 2.0, 0.3)
        held = camera.to_photo(50, 60, (200, 100))
        assert camera.panned(7, -4).to_photo(57, 56, (200, 100)) == pytest.approx(held)

    @pytest.mark.parametrize("kind", ["swirl", "lens", "ripple"])
    def test_a_warp_stays_within_its_circle(self, kind):
        x, y = torch.tensor([50.0, 59.9, 61.0, 90.0]), torch.tensor([50.0, 50.0, 50.0, 80.0])
        moved = torch.stack(Warp(kind, (50, 50), 10, 1.0).bend(x, y))
        torch.testing.assert_close(moved[:, 2:], torch.stack([x, y])[:, 2:])
        assert moved[:, 0].tolist() == [50, 50]

    def test_warps_bend_as_they_say(self):
        x, y = torch.tensor([55.0]), torch.tensor([50.0])
        swirled = torch.stack(Warp("swirl", (50, 50), 10, 0.5).bend(x, y)) - 50
        assert swirled.norm().item() == pytest.approx(5)
        angle = math.atan2(swirled[1], swirled[0])  # (1 - r)^2 of half a half turn
        assert angle == pytest.approx(math.pi / 2 / 4)
        (lensed, _) = Warp("lens", (50, 50), 10, 0.5).bend(x, y)
        assert lensed.item() == pytest.approx(50 + 5 * (1 - 0.5 / 4))  # looks closer: larger

    def test_far_away_it_is_averaged_and_keeps_its_place(self, tmp_path):
        stripes = np.zeros((256, 512, 3), np.uint8)
        stripes[:, 1::2] = 255
        stripes[:, 256:] = 51
        Image.fromarray(stripes).save(tmp_path / "stripes.png")
        scene = Scene(open_file(tmp_path / "stripes.png"))
        assert len(scene.source.levels) == 3
        camera = Flat((512, 256), (256, 128), 0.25)
        found = shown(scene, camera, Look(), photo=(128, 64))["photo"]
        assert found[:, 1:62].mean().item() == pytest.approx(0.5, abs=1e-3)  # not one stripe of two
        assert found[:, 66:].mean().item() == pytest.approx(0.2, abs=5e-3)

    def test_a_large_picture_is_the_same_as_its_parts(self, photo):
        """It is made in bands, with or without an operator."""
        scene, camera = Scene(photo[0]), Flat((40, 30), (20.0, 15.0), 20.0)
        look = Look("cubic", tables.ready_made()["Film"])
        whole = shown(scene, camera, look, photo=(700, 500))["photo"]
        part = shown(scene, camera, look, photo=(700, 20))["photo"]
        torch.testing.assert_close(whole[240:260], part, rtol=0, atol=0)
        again = shown(
            scene,
            camera,
            Look(
                "cubic",
                look.table,
                operator=operators.Operator("same", torch.clone, None, "(C, H, W)", ()),
            ),
            photo=(700, 500),
        )
        torch.testing.assert_close(again["photo"], whole, rtol=0, atol=0)


class TestVolume:
    @pytest.mark.parametrize(("interpolation", "order"), [("nearest", 0), ("linear", 1)])
    def test_planes_are_what_scipy_samples_at_the_same_places(self, volume, interpolation, order):
        source, values = volume
        screens = {"axial": (37, 29), "coronal": (31, 43), "sagittal": (40, 40)}
        camera = Planes.fit(source, screens)
        camera = camera.turned("axial", 0.35).turned("sagittal", -0.6).scrolled("coronal", 3.3)
        camera = camera.zoomed("axial", 1.7, 4, 9, (37, 29))
        low, high = float(values.min()), float(values.max())
        window = (0.0, high - low)
        found = shown(Scene(source), camera, Look(interpolation, window=window), **screens)
        inverse = np.linalg.inv(AFFINE)
        for plane, (width, height) in screens.items():
            points = [
                [camera.to_world(plane, x + 0.5, y + 0.5, (width, height)) for x in range(width)]
                for y in range(height)
            ]
            places = np.array(points) @ inverse[:3, :3].T + inverse[:3, 3]
            inside = ((places > 0.01) & (places < np.array(values.shape[:3]) - 1.01)).all(-1)
            ties = (abs(places - np.rint(places)) > 0.49).any(-1) & (order == 0)
            expected = ndimage.map_coordinates(
                values[..., 0].astype(np.float64), places.transpose(2, 0, 1), order=order
            )
            off = abs(found[plane][..., 0].numpy() - (expected - low) / (high - low))
            assert inside.sum() > 100
            assert off[inside & ~ties].max() < 1e-4, plane

    def test_a_voxel_is_seen_where_the_affine_puts_it(self, volume):
        source, values = volume
        camera = Planes.fit(source, {"axial": (100, 100)})
        voxel = np.array([15, 4, 9])
        world = AFFINE[:3, :3] @ voxel + AFFINE[:3, 3]
        camera = camera.focused("axial", *camera.to_screen("axial", world, (100, 100)), (100, 100))
        depth = (world - np.array(camera.focus)) @ camera.axes("axial")[2]
        camera = camera.scrolled("axial", depth)
        assert np.allclose(camera.focus, world)
        assert np.allclose(camera.voxel(source, world), voxel)
        assert source.value(voxel, 1) == pytest.approx(values[15, 4, 9, 1], abs=1e-4)
        for plane in PLANES:
            x, y = camera.to_screen(plane, world, (60, 50))
            assert np.allclose(camera.to_world(plane, x, y, (60, 50)), world)

    def test_letters_say_where_the_patient_is(self, volume):
        """A voxel on the patient's left is on the side that is marked L, whatever the affine."""
        camera = Planes.fit(volume[0], dict.fromkeys(PLANES, (100, 100)))
        assert camera.labels("axial") == ("L", "R", "A", "P")
        assert camera.labels("coronal") == ("L", "R", "S", "I")
        assert camera.labels("sagittal") == ("P", "A", "S", "I")
        mirrored = Planes(camera.focus, camera.centre, camera.zoom, mirrored=True)
        assert mirrored.labels("axial") == ("R", "L", "A", "P")
        left = np.array(camera.focus) - [10, 0, 0]
        assert camera.to_screen("axial", left, (100, 100))[0] < 50
        assert mirrored.to_screen("axial", left, (100, 100))[0] > 50

    def test_a_turned_plane_turns_clockwise_and_its_letters_with_it(self, volume):
        camera = Planes.fit(volume[0], {"axial": (100, 100)})
        right = np.add(camera.focus, (10, 0, 0))
        turned = camera.turned("axial", math.pi / 2)
        x, y = turned.to_screen("axial", right, (100, 100))
        assert (x, y) == pytest.approx((50, 50 + 10 * camera.zoom))
        assert turned.labels("axial") == ("P", "A", "L", "R")
        assert camera.turned("axial", 0.7).labels("axial")[1] == "RA"
        assert direction(np.array([0.1, 0.9, -0.4])) == "AI"

    def test_the_second_time_and_the_window(self, volume):
        source, _values = volume
        camera = Planes.fit(source, {"axial": (20, 20)})
        first, second = (
            shown(
                Scene(source),
                Planes(camera.focus, camera.centre, camera.zoom, time=time),
                Look(window=(10.0, 12.0)),
                axial=(20, 20),
            )["axial"]
            for time in (0, 1)
        )
        assert (first != second).any() and first.min() == 0 and first.max() == 1

    def test_a_volume_agrees_with_the_reference_in_every_interpolation(self, volume):
        source, _ = volume
        camera = Planes.fit(source, dict.fromkeys(PLANES, (40, 30))).turned("coronal", 0.2)
        for interpolation in ("nearest", "linear", "cubic"):
            scene = Scene(source)
            look = Look(interpolation, tables.ready_made()["Inferno"], window=source.usual)
            frame = scene.compare(scene.render(camera, look, dict.fromkeys(PLANES, (40, 30))))
            assert frame.largest < 1e-4 and len(frame.panes) == 3


class TestFiles:
    def test_what_a_photograph_may_be(self, tmp_path):
        rng = np.random.default_rng(2)
        grey = rng.integers(0, 65536, (12, 9), dtype=np.uint16)
        colours = rng.integers(0, 65536, (12, 9, 3), dtype=np.uint16)
        clear = rng.integers(0, 256, (12, 9, 4), dtype=np.uint8)
        Image.fromarray(grey).save(tmp_path / "grey.png")
        tifffile.imwrite(tmp_path / "colours.tif", colours)
        Image.fromarray(clear).save(tmp_path / "clear.png")
        expected = {
            "grey.png": np.repeat(grey[..., None] / 65535, 3, 2),
            "colours.tif": colours / 65535,
            "clear.png": clear[..., :3] / 255 * (clear[..., 3:] / 255),
        }
        for name, values in expected.items():
            (level,) = open_file(tmp_path / name).levels
            assert level.dtype == torch.float32 and level.is_contiguous(
                memory_format=torch.channels_last
            )
            off = level[0].permute(1, 2, 0).numpy() - values
            assert abs(off).max() < (2 / 255 if name == "clear.png" else 1e-6)

    def test_a_camera_that_was_held_upright(self, tmp_path):
        image = Image.fromarray(np.zeros((8, 16, 3), np.uint8))
        exif = image.getexif()
        exif[0x0112] = 6
        image.save(tmp_path / "upright.jpg", exif=exif)
        assert open_file(tmp_path / "upright.jpg").size == (8, 16)

    def test_a_stack_is_a_volume(self, tmp_path):
        stack = np.random.default_rng(3).normal(size=(5, 7, 6)).astype(np.float32)
        tifffile.imwrite(tmp_path / "stack.tif", stack)
        volume = open_file(tmp_path / "stack.tif")
        assert isinstance(volume, Volume) and volume.size == (6, 7, 5)
        assert volume.value([2, 3, 4]) == pytest.approx(stack[4, 3, 2], abs=1e-6)

    def test_the_least_value_is_black_and_values_are_the_files(self, volume):
        source, values = volume
        assert source.values.shape == (2, 1, 1, 17, 26, 21) and source.values.min() == 0
        assert source.least == values.min()
        assert source.spacing == pytest.approx(np.linalg.norm(AFFINE[:3, :3], axis=0))
        assert "21 x 26 x 17 voxels" in source.describe() and "2 times" in source.describe()

    def test_the_brain_lies_as_its_file_says(self):
        brain = open_file(sources.brain())
        assert brain.size == (197, 233, 189) and brain.spacing == (1, 1, 1)
        assert np.allclose(brain.corners().min(0), [-98, -134, -72])

    def test_progress_comes_often_and_ends_with_all(self, volume, tmp_path):
        file = tmp_path / "long.nii.gz"
        noise = np.random.default_rng(4).integers(0, 256, (64, 64, 64), dtype=np.uint8)
        nibabel.save(nibabel.Nifti1Image(noise, np.eye(4)), file)
        shares = []
        open_file(file, shares.append)
        assert len(shares) > 4 and shares == sorted(shares) and shares[-1] == 1

        def cancel(share):
            if share > 0.3:
                raise sources.Cancelled

        with pytest.raises(sources.Cancelled):
            open_file(file, cancel)

    def broken(self, folder: Path) -> dict[Path, str]:
        """Files that cannot be shown, and what is said of each."""
        good = folder / "good.png"
        Image.fromarray(np.random.default_rng(5).integers(0, 256, (64, 64, 3), np.uint8)).save(good)
        volume = folder / "good.nii.gz"
        nibabel.save(nibabel.Nifti1Image(np.ones((9, 9, 9), np.float32), np.eye(4)), volume)
        flat = nibabel.Nifti1Image(np.ones((9, 9, 9), np.float32), None)
        flat.header["srow_x"] = 0
        colours = np.zeros((4, 4, 4), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
        nibabel.save(nibabel.Nifti1Image(colours, np.eye(4)), folder / "colours.nii")
        nibabel.save(
            nibabel.Nifti1Image(np.ones((9, 9), np.float32), np.eye(4)), folder / "two.nii"
        )
        contents = {
            "half.png": good.read_bytes()[:3000],
            "text.jpg": b"no picture",
            "text.tif": b"no picture",
            "empty.png": b"",
            "half.nii.gz": volume.read_bytes()[:60],
            "text.nii.gz": b"no volume at all",
            "text.nii": b"no volume at all" * 40,
            "packed.nii.gz": gzip.compress(b"no volume at all" * 40),
            "what.xyz": b"",
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
        damaged = dict.fromkeys([*contents][:-1], "damaged, or no ")
        more = {
            "colours.nii": "colours",
            "two.nii": "three dimensions",
            "what.xyz": "ends in one of",
        }
        found = {folder / name: words for name, words in (damaged | more).items()}
        return found | {folder / "nowhere.png": "no such file"}

    def test_a_broken_file_gets_one_sentence(self, tmp_path):
        for path, words in self.broken(tmp_path).items():
            with pytest.raises(CannotOpen, match=words) as caught:
                open_file(path)
            text = str(caught.value)
            assert path.name in text and "\n" not in text and len(text) < 250, text

    def test_a_file_larger_than_memory_is_refused_before_it_is_read(self, tmp_path, monkeypatch):
        nibabel.save(nibabel.Nifti1Image(np.ones((9, 9, 9)), np.eye(4)), tmp_path / "a.nii.gz")
        header = nibabel.Nifti1Header()
        header.set_data_shape((30000, 30000, 30000))
        with gzip.open(tmp_path / "huge.nii.gz", "wb") as file:
            header["vox_offset"], header["magic"] = 352, b"n+1"
            file.write(header.binaryblock + b"\0" * 100)
        with pytest.raises(CannotOpen, match="GiB, and "):
            open_file(tmp_path / "huge.nii.gz")


class TestTables:
    def test_a_cube_file_reads_as_colour_science_reads_it(self, tmp_path):
        import colour

        rows = np.random.default_rng(6).random((5**3, 3))
        lines = ['TITLE "A look"', "# made by hand", "LUT_3D_SIZE 5", "DOMAIN_MIN 0.0 0.0 0.0"]
        lines += ["DOMAIN_MAX 1 1 1", "", *(" ".join(f"{x:.6f}" for x in row) for row in rows)]
        file = tmp_path / "look.cube"
        file.write_text("\n".join(lines))
        table = tables.read_cube(file)
        assert table.title == "A look"
        expected = colour.read_LUT(str(file)).table
        assert np.allclose(table.entries.numpy(), expected, atol=1e-7)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("LUT_1D_SIZE 4\n0 0 0", "curves"),
            ("LUT_3D_SIZE 2\n0 0 0", "takes 8 lines of three numbers, got 1"),
            ("LUT_3D_SIZE 2\n0 0", ":2: expected three numbers"),
            ("DOMAIN_MAX 2 2 2", ":1: the domain must be 0 to 1"),
            ("", "LUT_3D_SIZE 0"),
        ],
    )
    def test_what_is_no_table_is_said_with_its_line(self, tmp_path, text, words):
        (tmp_path / "a.cube").write_text(text)
        with pytest.raises(tables.CannotRead, match=words):
            tables.read_cube(tmp_path / "a.cube")

    @pytest.mark.parametrize("method", tables.METHODS)
    def test_colours_go_through_the_table_last(self, photo, method):
        source, pixels = photo
        table = tables.ready_made()["Teal and orange"]
        look = Look("nearest", table, method)
        camera = Flat((40, 30), (20.0, 15.0), 1.0)
        found = shown(Scene(source), camera, look, photo=(40, 30))["photo"]
        expected = loader.apply_lut3d_reference(pixels, table.entries, method)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        assert (found - pixels).abs().max() > 0.05

    def test_inferno_begins_black_and_ends_pale(self):
        ends = tables.inferno(torch.tensor([0.0, 1.0, math.nan]))
        assert ends[0].max() < 0.02 and ends[1].min() > 0.6 and ends[2].equal(ends[1])


class TestOperators:
    def test_those_are_offered_that_take_an_image(self):
        assert operators.offered(ROOT) == ["add2", "convolve2d", "square"]

    def test_a_convolution_blurs_each_channel(self, photo):
        _source, pixels = photo
        operator = operators.find("convolve2d")
        assert operator.more == ("kernel",)
        found = operator(pixels.permute(2, 0, 1))
        kernel = operators.blur().double().numpy()
        for channel, out in zip(pixels.permute(2, 0, 1), found, strict=True):
            expected = ndimage.convolve(channel.double().numpy(), kernel, mode="constant")
            assert abs(out.numpy() - expected).max() < 1e-5
        theirs = operator(pixels.permute(2, 0, 1), reference=True)
        assert (found - theirs).abs().max() < 1e-6

    def test_an_operator_comes_between_sampling_and_colours(self, photo):
        source, pixels = photo
        table = tables.ready_made()["Film"]
        look = Look("nearest", table, operator=operators.find("square"))
        camera = Flat((40, 30), (20.0, 15.0), 1.0)
        scene = Scene(source)
        frame = scene.compare(scene.render(camera, look, {"photo": (40, 30)}))
        expected = loader.apply_lut3d_reference(pixels**2, table.entries, "tetrahedral")
        torch.testing.assert_close(frame.panes["photo"].values, expected, rtol=0, atol=1e-6)
        assert frame.largest < 1e-6

    @pytest.mark.parametrize("layout", ["(N, C, H, W)", "(H, W, C)", "(H, W)"])
    def test_how_it_takes_an_image_is_found_out(self, layout):
        dims = {"(N, C, H, W)": 4, "(H, W, C)": 3, "(H, W)": 2}[layout]

        def mine(image):
            if image.dim() != dims or (dims == 3 and image.shape[-1] != 3):
                raise RuntimeError("mine: image must have another shape")
            return image * 2

        found = operators.find("mine", SimpleNamespace(mine=mine))
        assert found.layout == layout and found.reference is None
        x = torch.rand(3, 5, 7)
        assert found(x).equal(2 * x)

    def test_one_that_takes_no_image_is_refused_in_its_own_words(self):
        with pytest.raises(
            operators.NotForImages, match=r"not take an image: hash_grid_encoding: po"
        ):
            operators.find("hash_grid_encoding")
        with pytest.raises(operators.NotForImages, match="there is no such operator in loader"):
            operators.find("sqaure")


def test_the_largest_difference_and_its_place():
    ours = torch.zeros(4, 6, 3)
    theirs = ours.clone()
    theirs[2, 5, 1], theirs[0, 0, 0] = 0.5, -0.25
    found = difference(ours, theirs)
    assert (found.largest, found.at) == (0.5, (5, 2))
    assert found.picture.shape == (4, 6, 4)
    assert found.picture[2, 5].tolist()[:3] > found.picture[0, 0].tolist()[:3]
    assert found.picture[3, 3, :3].max() < 6  # black
    theirs[3, 1] = math.nan
    assert difference(ours, theirs).largest == math.inf
    assert difference(ours, theirs).at == (1, 3)
    assert difference(theirs, theirs).largest == 0


def test_pictures_are_rounded_as_screens_have_them(photo):
    source, pixels = photo
    camera = Flat((40, 30), (20.0, 15.0), 1.0)
    frame = Scene(source).render(camera, Look("nearest"), {"photo": (40, 30)})
    pane: Pane = frame.panes["photo"]
    assert pane.picture[..., 3].min() == 255
    expected = (pixels * 255).round().byte().flip(-1)
    assert pane.picture[..., :3].equal(expected)


def test_a_picture_nobody_waits_for_ends():
    scene = Scene(SimpleNamespace(to=lambda device: None))

    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        scene.render(Flat((4, 4), (2, 2), 1.0), Look(), {"photo": (9, 9)}, stop)


def edit(outcome="live", text="", verdict=None, **more):
    made = {"unit": "cube", "files": ["kernels/cube_cpu.cpp"], "notes": [], "seconds": 0.5}
    return SimpleNamespace(outcome=outcome, text=text, verdict=verdict, **(made | more))


def told(*of):
    return edits.notices(SimpleNamespace(edits=[*of]))


def test_edits_are_told_in_a_line_with_their_place():
    error = "cube could not be built:\n/home/me/mine/kernels/cube_cpu.cpp:12:7: error: 'oops' was not declared\n  12 | oops"
    failed, live, wrong, refused = told(
        edit("failed", error),
        edit(),
        edit(verdict=SimpleNamespace(outcome="wrong", text="\nfloat32: off by 0.5\nmore")),
        edit("refused", "it was ended by SIGSEGV: it touched memory outside its tensors"),
    )
    assert (failed.kind, failed.title) == ("failed", "kernels/cube_cpu.cpp:12")
    assert failed.text == "'oops' was not declared" and failed.line == 12
    assert failed.file == Path("/home/me/mine/kernels/cube_cpu.cpp")
    assert (live.kind, live.title) == ("live", "kernels/cube_cpu.cpp: in use")
    assert (wrong.kind, wrong.text) == ("differs", "float32: off by 0.5")
    assert refused.kind == "failed" and "refused" in refused.title and "SIGSEGV" in refused.text
    assert told(edit(files=[])) == []


def test_the_core_knows_no_window():
    for file in (ROOT / "viewer/core").glob("*.py"):
        names = [
            getattr(node, "module", None) or ".".join(a.name for a in node.names)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        assert not [n for n in names if "PySide6" in n or "qt" in n.split(".")], file
