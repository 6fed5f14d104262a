"""Where builds go: beside loader.py, or into the user's cache where that will not do."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import ROOT

from loader.jit.machine import settings

# Root may write what nobody may; without this right it is as any other user.
BOUND = [] if os.geteuid() else ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]


def environment(home: Path, **changes) -> dict:
    cleared = (
        "LOADER_CACHE_DIR",
        "XDG_CACHE_HOME",
        "TORCH_CUDA_ARCH_LIST",
        "PYTHONDONTWRITEBYTECODE",
    )
    env = {name: text for name, text in os.environ.items() if name not in cleared}
    return env | {"HOME": str(home), "LOADER_BUILD": "lazy", "CUDA_VISIBLE_DEVICES": ""} | changes


def protect(folder: Path, mode: int) -> None:
    for path in [folder, *(path for path in folder.rglob("*") if path.is_dir())]:
        path.chmod(mode)


def called(*command, home: Path, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*map(str, command)], env=environment(home, **changes), cwd=home, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip


def caches(root: Path, home: Path, **changes) -> list[str]:
    """The folders that a process without the right to write everywhere would use."""
    code = "import pathlib, runpy, sys; found = runpy.run_path(sys.argv[1])['cache_dirs']"
    code += "; print(*found(pathlib.Path(sys.argv[2])), sep='\\n')"
    done = called(*BOUND, sys.executable, "-c", code, settings.__file__, root, home=home, **changes)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def place(tmp_path):
    """Two checkouts, the second with a store, and a home."""
    for name in ("home", "new/tmp_build", "built/tmp_build/store"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("new", "built"):
        (tmp_path / name / "loader.py").touch()
    yield tmp_path
    protect(tmp_path, 0o700)


def test_a_checkout_that_can_be_written_holds_its_builds(place):
    for name in ("new", "built"):
        assert caches(place / name, place / "home") == [f"{place}/{name}/tmp_build"]
    named = f"~/one{os.pathsep}two"
    assert caches(place / "new", place / "home", LOADER_CACHE_DIR=named) == [
        f"{place}/home/one", f"{place}/new/two"
    ]  # fmt: skip


def test_a_checkout_that_cannot_be_written_is_read_and_the_users_cache_is_written(place):
    for name in ("new", "built"):
        protect(place / name, 0o500)
    own = f"{place}/home/.cache/octet"
    assert caches(place / "new", place / "home") == [own]
    assert caches(place / "built", place / "home") == [f"{place}/built/tmp_build", own]
    other = {"XDG_CACHE_HOME": f"{place}/home/other"}
    assert caches(place / "new", place / "home", **other) == [f"{place}/home/other/octet"]
    relative = {"XDG_CACHE_HOME": "not/absolute"}  # which its standard says to ignore
    assert caches(place / "new", place / "home", **relative) == [own]


def test_a_user_without_a_home_gets_a_folder_of_the_system_s(place):
    for name in ("new", "home"):
        protect(place / name, 0o500)
    (place / "passing").mkdir()
    passing = f"{place}/passing/octet-{os.geteuid()}"
    changes = {"TMPDIR": f"{place}/passing"}
    assert caches(place / "new", place / "home", **changes) == [passing]
    Path(passing).mkdir()
    assert caches(place / "new", place / "home", **changes) == [passing]
    Path(passing).rmdir()
    Path(passing).symlink_to(place)  # by somebody who was there before
    assert caches(place / "new", place / "home", **changes) == [f"{place}/home/.cache/octet"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """An environment with a wheel of loader, and the folder of loader in it."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    source = folder / "source"
    source.mkdir()
    for name in ("jit", "ops", "kernels", "include", "tests", "viewer"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("loader.py", "nn.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    offline = ["--no-deps", "--no-index"]
    made = [*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    subprocess.run(made, check=True)
    python = folder / "env/bin/python"
    (wheel,) = folder.glob("octet_loader-*.whl")
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True)
    (loader,) = folder.glob("env/lib/python*/site-packages/loader")
    (loader.parent / "torch.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "home").mkdir()
    return python, loader, [*pip, "--python", python]


USE = (
    "import loader, torch; print(loader.square(torch.tensor(3.0)).item(), *loader._session.caches)"
)


def test_an_installed_copy_is_used_by_who_cannot_write_it_and_leaves_nothing(installed):
    python, loader, pip = installed
    home = loader.parents[4] / "home"
    before = sorted(loader.rglob("*"))
    protect(loader, 0o500)
    done = called(*BOUND, python, "-c", USE, home=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"9.0 {home}/.cache/octet\n"
    assert sorted(loader.rglob("*")) == before
    protect(loader, 0o700)
    bench = called(python, "-m", "loader", "bench", "interpolation", home=home)
    assert bench.returncode == 1
    assert bench.stderr == (
        "loader: bench: the benchmarks are in loader's checkout; this copy is installed\n"
    )
    done = called(python, "-c", f"{USE}; loader.build('add2')", home=home)
    assert done.returncode == 0 and done.stdout == f"9.0 {home}/.cache/octet\n", done.stderr
    subprocess.run([*pip, "uninstall", "-y", "octet-loader"], check=True)
    assert not loader.exists()
    done = called(python, "-c", "import loader", home=home)
    assert "ModuleNotFoundError: No module named 'loader'" in done.stderr
