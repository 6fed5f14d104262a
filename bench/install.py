"""How long is a new user's way to a first result? From a clean clone, in environments of their own.

Each way is gone by the commands that docs/install.md has. torch is not downloaded: environments
see that of the Python which runs this, and of those given by --torch. What is timed is the command,
and the processor's time in it and all that it starts, which a busy machine does not change.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, circumstances, keep

FIRST = """
import torch, loader
feats, points = torch.rand(1000, 8, 4), torch.rand(1000, 3)
out = loader.trilinear_interpolation(feats, points)
torch.testing.assert_close(out, loader.trilinear_interpolation_reference(feats, points))
"""
VERSION = "import torch; print(torch.__version__)"
PLACE = "import sysconfig; print(sysconfig.get_path('purelib'))"


class Way:
    """A new user's folder and home, in which commands are timed."""

    def __init__(self, folder: Path, name: str, python: str):
        self.name, self.folder, self.rows = name, folder, []
        (folder / "home").mkdir(parents=True)
        self.python = folder / "env/bin/python"
        subprocess.run([python, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (packages,) = folder.glob("env/lib/python*/site-packages")
        (packages / "torch.pth").write_text(said(python, "-c", PLACE))

    def step(self, step: str, *words, cwd: Path | None = None, **changes) -> None:
        """Time a command, which has to end well."""
        label = f"{self.name}: {step}"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LOADER_", "TORCH_CUDA"))}
        env |= {"HOME": str(self.folder / "home"), "CUDA_VISIBLE_DEVICES": ""} | changes
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(
            [*map(str, words)], cwd=cwd or self.folder / "home", env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{label}:\n{done.stdout}")
        seconds, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row = {"way": self.name, "step": step, "seconds": round(seconds, 2), "cpu": round(used, 2)}
        self.rows.append(row)
        print(f"{label}: {seconds:.1f} s, {used:.1f} s of processor", flush=True)

    def install(self, step: str, *words) -> None:
        """Time pip, which leaves torch alone."""
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-deps"]
        self.step(step, *pip, *words)

    def first(self, step: str, **changes) -> None:
        """Time a process that imports torch and loader and has one operator's result."""
        self.step(step, self.python, "-c", FIRST, **changes)


def said(*words) -> str:
    """Return what a program says."""
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def from_source(way: Way, clone: Path) -> None:
    """Install the clone; the operator is compiled when it is first used."""
    way.install("`pip install .`", clone)
    way.first("first result, in another folder")
    way.first("the same in a later process")


def prebuilt(way: Way, wheel: Path) -> None:
    """Install a wheel with builds inside where there is no compiler: PATH has no program at all."""
    bare = {"PATH": "/nonexistent", "CUDA_HOME": "/nonexistent"}
    way.install("`pip install` of the wheel", "--no-index", wheel)
    way.first("first result", **bare)
    way.first("the same in a later process", **bare)


def new_operator(way: Way, clone: Path) -> None:
    """Make an operator and run its test."""
    way.step(
        "`python -m loader new cube`", sys.executable, "-m", "loader", "new", "cube", cwd=clone
    )
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "tests/test_cube.py"]
    way.step("`pytest tests/test_cube.py`, which builds it", *test, cwd=clone)


def table(record: dict) -> str:
    """Return the table for docs/install.md."""
    busy = record["load"] > record["cores"]
    other = f" The machine was busy (load average {record['load']}): go by the processor's seconds."
    lines = [
        f"On {record['device']}, {record['cores']} cores, Python {record['python']}, "
        f"{record['date']}.{other * busy}",
        f"The wheel: {record['wheel']['name']}, {record['wheel']['bytes'] / 1e6:.1f} MB.",
        "",
        "| | | seconds | of processor |",
        "|---|---|---|---|",
    ]
    for row in record["rows"]:
        lines.append(f"| {row['way']} | {row['step']} | {row['seconds']:.1f} | {row['cpu']:.1f} |")
    return "\n".join(lines)


def made(folder: Path) -> Path:
    """Make a wheel for the CPU."""
    words = ["wheel", "--cpu", "--out", str(folder / "made")]
    subprocess.run([sys.executable, "-m", "loader", *words], cwd=folder / "clone", check=True)
    return next((folder / "made").glob("*.whl"))


def main(arguments=None) -> None:
    """Go all ways, and keep the times."""
    parser = argparse.ArgumentParser(prog="python -m loader bench install")
    parser.add_argument("--wheel", type=Path, help="of `python -m loader wheel`; made for the CPU")
    parser.add_argument("--torch", nargs="*", default=[], metavar="PYTHON", help="with other torch")
    parser.add_argument("--results", type=Path, help="folder of the result files")
    options = parser.parse_args(arguments)
    load = round(os.getloadavg()[0])
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
        wheel = options.wheel or made(folder)
        torchs = {
            said(python, "-c", VERSION): python for python in (sys.executable, *options.torch)
        }
        names = [("source wheel", sys.executable, from_source, folder / "clone")]
        names += [
            (f"prebuilt wheel, torch {v}", python, prebuilt, wheel) for v, python in torchs.items()
        ]
        names += [("an operator of one's own", sys.executable, new_operator, folder / "clone")]
        rows = []
        for number, (name, python, go, what) in enumerate(names):
            print(f"way {number + 1} of {len(names)}: {name}", flush=True)
            way = Way(folder / str(number), name, python)
            go(way, what)
            rows += way.rows
        size = {"name": wheel.name, "bytes": wheel.stat().st_size}
    facts = circumstances("cpu", []) | {"cores": os.cpu_count(), "load": load, "wheel": size}
    print(f"kept in {keep('install', 'cpu', facts, rows, options.results)}")
