"""Running the checks, side by side, and asking torch what it says of itself."""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ...machine import toolchain
from .checks import CHECKS
from .context import Context, Found, TorchMissing, last_line, run
from .disk import check_layer
from .report import Finding, Report

# What torch says of itself. GPUs are hidden from it: to initialise CUDA takes seconds.
_TORCH = """
import json, sys, warnings
sys.path[:] = json.loads(sys.argv[1])
facts = {}
def note(name, ask):
    try:
        facts[name] = ask()
    except BaseException as error:
        facts[name + "_error"] = f"{type(error).__name__}: {error}".strip().split("\\n")[0]
def numpy():
    import numpy
    facts["numpy"] = numpy.__version__
    torch.from_numpy(numpy.zeros(1))
    return numpy.__version__
def extension():
    import torch.utils.cpp_extension
    note("flags", torch.utils.cpp_extension._get_cuda_arch_flags)
with warnings.catch_warnings(record=True):
    note("setuptools", lambda: __import__("setuptools").__version__)
    note("torch", lambda: __import__("torch").__version__)
    if "torch" in facts:
        import torch
        facts |= {"cuda": torch.version.cuda, "git": torch.version.git_version}
        note("numpy", numpy)
        note("extension", extension)
print("\\nFACTS", json.dumps(facts))
"""


def doctor(root: Path, caches: tuple[Path, ...]) -> Report:
    """Look at everything that a build into the last of `caches` needs; takes a few seconds."""
    folder, probe, refusal = make_probe(caches[-1])
    layers = [("cache", partial(check_layer, layer)) for layer in caches[:-1]]
    checks: list[tuple[str, Callable[[Context], Found]]] = [*CHECKS, *layers]
    try:
        with ThreadPoolExecutor(len(checks) + 1) as pool:  # most of the time they wait
            architectures = _try_architectures(probe)
            torch = pool.submit(ask_torch, architectures)
            context = Context(root, caches[-1], folder, probe, refusal, architectures, torch.result)
            findings = [*pool.map(lambda check: guarded(check[0], check[1], context), checks)]
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    return Report(findings, versions | torch.result())


def make_probe(cache: Path) -> tuple[Path, Path, str | None]:
    """Return the nearest folder there is, one for trials, and why that is not in the former."""
    folder = cache
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        return folder, Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder)), None
    except OSError as error:
        return folder, Path(tempfile.mkdtemp(prefix="loader-doctor-")), error.strerror


def _try_architectures(probe: Path) -> str:
    try:
        return toolchain.architectures(probe)
    except Exception:
        return ""  # check_gpu will fail on the same, and say so


def main(arguments: list[str], root: Path, caches: tuple[Path, ...]) -> int:
    """`python -m loader doctor`: print the report; exit status 0 only if a build would work."""
    parser = argparse.ArgumentParser(
        prog="python -m loader doctor", description="Check all that a build needs."
    )
    parser.add_argument("--json", action="store_true", help="for bug reports")
    options = parser.parse_args(arguments)
    report = doctor(root, caches)
    text = report.json() if options.json else str(report)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0 if report.ok else 1


def guarded(subject: str, check: Callable[[Context], Found], context: Context) -> Finding:
    """Return the finding of a check; one that fails itself must not hide the others'."""
    try:
        return Finding(subject, *check(context))
    except TorchMissing:
        return Finding(subject, "warning", "not checked: torch does not import")
    except Exception as error:
        return Finding(subject, "warning", f"not checked: {type(error).__name__}: {error}")


def ask_torch(architectures: str) -> dict:
    """Return what torch says of itself, in a process of its own, or why it does not import."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": architectures or "9.0"}
    command = [sys.executable, "-c", _TORCH, json.dumps(sys.path)]
    _, said = run(command, 3, **hidden)
    for line in said.splitlines():
        if line.startswith("FACTS "):
            return json.loads(line.removeprefix("FACTS "))
    return {"torch_error": last_line(said)}
