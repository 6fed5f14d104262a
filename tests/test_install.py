"""Loader installed: what a wheel holds, what a command needs, where builds go."""

import email
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
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


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
OFFLINE = ["--no-deps", "--no-index", "--no-build-isolation"]


def run(*command) -> str:
    """What a program says; it has to end well."""
    command = [*map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment_with(folder: Path, *what) -> Path:
    """An environment in which pip has installed something; its Python. torch is there, too."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin/python"
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    run(*PIP, "--python", python, "install", *OFFLINE, *what)
    return python


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The sdist, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("packed")
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def test_the_sdist_has_every_file_that_the_checkout_needs(packed):
    with tarfile.open(packed[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    rooms = ("bench", "docs", "include", "jit", "kernels", "ops", "tests", "viewer")
    files = [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    files += [*(ROOT / "examples").glob("*.*"), *ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    files += [
        ROOT / name
        for name in ("loader.py", "nn.py", "distributed.py", "Makefile", "LICENSE", ".ci/run")
    ]
    kept = {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc"}
    made = {name for name in kept if name.startswith("docs/notebooks/")}  # by docs/made.py
    assert not kept - made - names
    assert not [name for name in names if "cache" in name.split("/")[0] or ".venv" in name]


def test_the_wheel_has_one_package_and_one_command(packed):
    with zipfile.ZipFile(packed[1]) as archive:
        names, read = archive.namelist(), lambda name: archive.read(name).decode()
        (info,) = {
            name.split("/")[0] for name in names if ".dist-info/" in name.partition("/jit/")[0]
        }
        metadata = email.message_from_string(read(f"{info}/METADATA"))
        assert "Root-Is-Purelib: true\nTag: py3-none-any\n" in read(f"{info}/WHEEL")
    data = info.replace(".dist-info", ".data")
    assert {name.split("/")[0] for name in names} == {"loader", info, data}
    assert [name for name in names if name.startswith(data)] == [f"{data}/scripts/octet"]
    assert {"loader/__init__.py", "loader/py.typed", "loader/jit/tools/cli.py"} <= {*names}
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert "GPU" in " ".join(metadata.get_all("Classifier"))
    extras = {"examples", "notebook", "progress", "viewer", "watch"}
    assert extras <= {*metadata.get_all("Provides-Extra")}
    run(sys.executable, "-m", "twine", "check", "--strict", *packed)
    run(sys.executable, "-m", "check_wheel_contents", packed[1])


@pytest.fixture(scope="module")
def installed(tmp_path_factory, packed):
    """An environment with a wheel of loader, and the folder of loader in it."""
    folder = tmp_path_factory.mktemp("installed")
    python = environment_with(folder / "env", packed[1])
    (folder / "home").mkdir()
    (loader,) = folder.glob("env/lib/python*/site-packages/loader")
    return python, loader


def test_a_checkout_is_installed_for_work_under_one_name(tmp_path):
    """`pip install -e`: no file of ours is copied, and `jit` or `tests` are no packages."""
    python = environment_with(tmp_path / "env", "-e", ROOT)
    code = "from importlib.util import find_spec; import json; print(json.dumps("
    code += "[(found := find_spec(n)) and found.origin for n in ('loader', 'jit', 'nn', 'tests')]))"
    done = called(python, "-c", code, home=tmp_path)
    assert json.loads(done.stdout) == [str(ROOT / "loader.py"), None, None, None], done.stderr
    listed = called(tmp_path / "env/bin/octet", "cache", home=tmp_path)
    assert str(ROOT / "tmp_build") in listed.stdout, listed.stderr
    copied = [*tmp_path.glob("env/lib/python*/site-packages/loader*")]
    assert not copied


def test_the_command_works_where_torch_does_not(installed):
    """`octet` and `python -m loader`, which the doctor has to do in an installed copy, too."""
    python, loader = installed
    broken = loader.parents[4] / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise ImportError('libcudart.so.99 is missing')")
    home, path = loader.parents[4] / "home", {"PYTHONPATH": str(broken)}
    done = called(python, "-m", "loader", "doctor", "--json", home=home, **path)
    assert done.returncode == 1 and done.stderr == ""
    found = {each["subject"]: each for each in json.loads(done.stdout)["findings"]}
    assert "libcudart.so.99" in found["torch"]["found"] and found["cache"]["state"] == "ok"
    listed = called(python.parent / "octet", "cache", home=home, **path)
    assert listed.returncode == 0 and f"{home}/.cache/octet: 0 B" in listed.stdout


USE = (
    "import loader, torch; print(loader.square(torch.tensor(3.0)).item(), *loader._session.caches)"
)


def test_an_installed_copy_is_used_by_who_cannot_write_it_and_leaves_nothing(installed):
    python, loader = installed
    home = loader.parents[4] / "home"
    before = sorted(loader.rglob("*"))
    protect(loader, 0o500)
    done = called(*BOUND, python, "-c", USE, home=home)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"9.0 {home}/.cache/octet\n"
    (home / "loader.py").write_text("import os; print(os.environ['PYTHONPATH'])")
    done = called(*BOUND, python.parent / "octet", "run", home / "loader.py", home=home)
    assert done.stdout == f"{loader}/jit/tools/children\n", done.stderr
    (home / "loader.py").unlink()
    assert sorted(loader.rglob("*")) == before
    protect(loader, 0o700)
    bench = called(python, "-m", "loader", "bench", "interpolation", home=home)
    assert bench.returncode == 1
    assert bench.stderr == (
        "loader: bench: the benchmarks are in loader's checkout; this copy is installed\n"
    )
    done = called(python, "-c", f"{USE}; loader.build('add2')", home=home)
    assert done.returncode == 0 and done.stdout == f"9.0 {home}/.cache/octet\n", done.stderr
    run(*PIP, "--python", python, "uninstall", "-y", "octet-loader")
    assert not loader.exists()
    done = called(python, "-c", "import loader", home=home)
    assert "ModuleNotFoundError: No module named 'loader'" in done.stderr
