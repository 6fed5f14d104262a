"""A wheel with builds inside: what it serves, what it refuses, and long work that says how far it is."""

import contextlib
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, Checkout
from test_install import BOUND, called, environment_with, protect
from test_key import TOOLCHAIN

from loader.jit.build import steps
from loader.jit.cache import key
from loader.jit.machine import sources as units

GPU = TOOLCHAIN._replace(cpu="", cflags=("-O3",), architectures="8.0;9.0+PTX")
CPU = GPU._replace(architectures="")
BARE = TOOLCHAIN._replace(cxx=None, nvcc=None)


@pytest.fixture
def serves(tmp_path):
    """A function that tells if the build of a wheel, made with one toolchain, serves another."""
    for folder, file in (("ops", "thing.cpp"), ("kernels", "thing.cu")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("")
    (unit,) = units.discover(tmp_path).values()

    def ask(made, here):
        sources = units.Sources(tmp_path)
        return key.serves(key.manifest(unit, made, sources), unit, here, sources, brought=True)

    return ask


@pytest.mark.parametrize("here", [BARE, TOOLCHAIN, TOOLCHAIN._replace(cflags=("-Og", "-DX=1"))])
def test_a_wheel_serves_whatever_compilers_and_flags_there_are(serves, here):
    assert serves(GPU, here)
    assert serves(GPU, here._replace(torch="2.15.0 beef", cuda="13.2"))
    assert not serves(GPU, here._replace(machine="aarch64"))


@pytest.mark.parametrize(
    ("wanted", "served"),
    [
        ("9.0", True),
        ("8.0", True),
        ("8.6", True),
        ("12.0", True),
        ("7.5", False),
        ("9.0;7.5", False),
    ],
)
def test_a_gpu_runs_code_for_its_kind_and_ptx_of_older_ones(serves, wanted, served):
    assert serves(GPU, BARE._replace(architectures=wanted)) == served
    assert serves(CPU, BARE._replace(architectures=wanted)), "the CPU's alone, for want of nvcc"


def test_of_another_cuda_the_build_without_serves_unless_nvcc_can_add_it(serves):
    other = BARE._replace(torch="2.10.0 dead", cuda="12.8")
    assert not serves(GPU, other) and serves(CPU, other)
    assert not serves(CPU, other._replace(cxx=TOOLCHAIN.cxx, nvcc=TOOLCHAIN.nvcc))
    without = TOOLCHAIN._replace(nvcc=None, architectures="", cuda="")
    assert serves(CPU, without) and not serves(GPU, without)


MAKE = """
import sys
from loader.jit.tools import cli
sys.exit(cli.main(["wheel", "--cpu", "--out", "made"]))
"""
STUB = "import sys; p = sys.modules['loader'] = type(sys)('loader'); p.__path__ = ['.']\n"
USE = "import loader, torch; print(loader.square(torch.tensor(3.0)).item(), loader.receipt().units['square']['result'])"


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory):
    """An environment with a wheel of `square` for the CPU; what making it said."""
    folder = tmp_path_factory.mktemp("prebuilt")
    checkout = Checkout(folder, only="square")
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "py.typed",
        "tests",
        "viewer",
    ):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout.root / name)
    env = checkout.environment(LOADER_BUILD=None, CFLAGS="-march=native")
    done = subprocess.run(
        [sys.executable, "-c", STUB + MAKE], env=env, cwd=checkout.root, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout.root / "made").glob("*.whl")
    python = environment_with(folder / "env", wheel)
    (loader,) = folder.glob("env/lib/python*/site-packages/loader")
    (folder / "home").mkdir()
    return wheel, python, loader, done


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its levels are those of x86-64")
def test_a_wheel_says_what_it_is_for_and_what_is_in_it(prebuilt):
    wheel, _, loader, done = prebuilt
    assert re.fullmatch(r"octet_loader-[\d.]+\+cpu-py3-none-manylinux_2_\d+_x86_64.whl", wheel.name)
    assert "step 1 of 2: builds for any CPU\n" in done.stderr and "\x1b" not in done.stderr
    assert re.search(r"loader/prebuilt/store/square-\w{40} +4 ", done.stdout)
    (made,) = loader.glob("prebuilt/store/*")
    text = (made / "manifest.json").read_text()
    assert "native" not in text and "checkout" not in text
    built = {file.name: file.stat().st_mode & 0o777 for file in made.glob("*.so")}
    assert built == dict.fromkeys(["library.so", "library.v3.so", "library.v4.so"], 0o644)


def test_a_wheel_needs_no_compiler_and_writes_nothing_into_itself(prebuilt):
    """Under a mode that a cache of one's own must not have, since the Python beside it has it too."""
    _, python, loader, _ = prebuilt
    home, store = loader.parents[4] / "home", loader / "prebuilt"
    before = {path: path.stat().st_mtime for path in store.rglob("*")}
    bound = [shutil.which(BOUND[0]), *BOUND[1:]] if BOUND else []
    bare = {"PATH": "/nonexistent", "LOADER_BUILD": "never", "CFLAGS": "-O1"}
    protect(store, 0o575)
    done = called(*bound, python, "-c", USE, home=home, **bare)
    protect(store, 0o755)
    assert (done.returncode, done.stdout) == (0, "9.0 hit\n"), done.stderr
    assert {path for path in store.rglob("*")} == {*before}
    assert [path.name for path in (home / ".cache/octet").rglob("*") if path.suffix == ".so"] == []


def test_what_is_damaged_is_not_loaded_and_the_doctor_says_what_was_brought(prebuilt):
    """Without a compiler that ends in an error; no compiler is no error of the doctor's."""
    _, python, loader, _ = prebuilt
    home, bare = loader.parents[4] / "home", {"PATH": "/nonexistent", "CXX": ""}
    for library in loader.glob("prebuilt/store/*/library*.so"):
        library.write_bytes(library.read_bytes()[:-1] + b"?")
    done = called(python, "-c", USE, home=home, **bare)
    assert "no C++ compiler" in done.stderr
    looked = called(python, "-m", "loader", "doctor", home=home, **bare)
    assert re.search(r"ok +prebuilt +square: without CUDA\n", looked.stdout), looked.stdout
    said = " ".join(looked.stdout.split())  # it breaks lines as the longest path asks for
    assert "`c++` is not on PATH; the operators of this wheel do without" in said
    assert looked.returncode == 0


class Screen:
    """A terminal that stands in for stderr, and what was shown there."""

    def __init__(self):
        self._master, slave = pty.openpty()
        self.stream, self.shown = os.fdopen(slave, "w"), ""

    def wait_for(self, text):
        while text not in self.shown:
            assert select.select([self._master], [], [], 60)[0], f"{text!r} not in {self.shown!r}"
            self.shown += os.read(self._master, 4096).decode()

    def close(self):
        self.stream.close()
        os.close(self._master)


def test_a_terminal_has_one_line_of_how_far_a_work_is(monkeypatch):
    with contextlib.closing(Screen()) as screen:
        watch(screen, monkeypatch)
    assert screen.shown.count("\n") == 1 and "b queued" not in screen.shown


def watch(screen, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.stream)
    with steps.Steps("building", {"a": 1, "b": 3}) as work:
        work.show("a", "compiling")
        screen.wait_for("0 of 2 done; a compiling")
        work.end("a")
        work.show("b", "queued")
        screen.wait_for("1 of 2 done")
    print("next", file=screen.stream, flush=True)
    screen.wait_for("\r\x1b[Knext")  # where the line was


def test_elsewhere_a_long_work_has_plain_lines(monkeypatch, capsys):
    monkeypatch.setattr(steps.Steps, "plain", 0.0)
    with steps.Steps("building", {"a": 1, "b": 3}) as work:
        work.show("a", "compiling")
        said = ""
        while said.count("\n") < 2:
            said += capsys.readouterr().err
    assert re.fullmatch(r"(loader: building \d+ s: 0 of 2 done; a compiling\n)+", said)


def test_time_left_is_of_the_work_that_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(steps.time, "monotonic", lambda: now[0])
    work = steps.Steps("building", {"a": 1, "b": 3})
    now[0] = 110.0
    assert work.how_far() == "0 of 2 done"
    work.end("a")
    assert work.how_far() == "1 of 2 done, some 30 s left"
    unknown = steps.Steps("looking", {"a": 0, "b": 0})
    unknown.end("a")
    assert unknown.how_far() == "1 of 2 done"


def interrupted(words, env, cwd, begun) -> subprocess.CompletedProcess:
    """A command that got a Ctrl-C as soon as `begun()`."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loader", *words], env=env, cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not begun() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def slow_compiler(folder: Path) -> tuple[Path, Path]:
    """A compiler that never ends, and a file that is there once it was started to compile."""
    program, begun = folder / "slow-c++", folder / "begun"
    program.write_text(f'#!/bin/sh\ncase "$*" in *.cpp*) touch {begun}; sleep 600;; esac\n')
    program.chmod(0o755)
    return program, begun


@pytest.mark.parametrize("words", [["build"], ["doctor"]])
def test_an_interrupted_command_says_what_is_kept_and_leaves_nothing_running(
    words, checkout, tmp_path
):
    program, begun = slow_compiler(tmp_path)
    env = checkout.environment(LOADER_BUILD=None, CXX=program)
    done = interrupted(words, env, checkout.root, begun.exists)
    assert done.returncode == 130, done.stderr
    kept = {"build": "what is compiled is kept, and the same command goes on from there"}
    what = kept.get(words[0], "nothing of it is left over")
    assert done.stderr.endswith(f"loader: {words[0]}: interrupted; {what}\n")
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    assert not [*checkout.cache.glob(".doctor-*"), *tmp_path.glob(".doctor-*")]
    running = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert str(program) not in running.stdout


def test_recipe_workflow_and_templates_say_what_is_true():
    project = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', project, re.MULTILINE)[1]
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    assert recipe["context"]["version"] == version
    assert f"## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    needs = {need.partition(" ")[::2] for need in recipe["requirements"]["run"]}
    assert {("pytorch", ">=2.10"), ("setuptools", ">=70"), ("python", ">=3.10")} <= needs
    assert all(f'"{need}"' in project for need in ("torch>=2.10", "setuptools>=70"))
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = flow["jobs"].values()
    assert {"run": ".ci/run"} in job["steps"] and (ROOT / ".ci/run").exists()
    for name in ("bug", "slow"):
        form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
        (asked,) = (each for each in form["body"] if each["id"] == "doctor")
        assert "python -m loader doctor --json" in asked["attributes"]["description"]
        assert asked["validations"]["required"]
