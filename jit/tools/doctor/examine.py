"""Running the checks, side by side, and asking torch what it says of itself."""

import contextlib
import importlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ...build.steps import Steps
from ...build.workshop import behind, in_turns
from ...errors import BuildError
from ...machine import child, settings, toolchain
from . import software, system
from .context import Check, Context, TorchMissing, begin, end_all, last_line, run
from .report import Finding, Report

CHECKS = software.CHECKS | system.CHECKS  # by subject, in the order of the report


def doctor(root: Path, caches: tuple[Path, ...]) -> Report:
    """Look at everything that a build into the last of `caches` needs; takes a few seconds."""
    folder, probe, refusal = make_probe(caches[-1])
    brought = root / settings.PREBUILT
    layers = [("cache", partial(system.layer, layer)) for layer in caches[:-1] if layer != brought]
    checks: list[tuple[str, Check]] = [*CHECKS.items(), *layers]
    checks += [("prebuilt", system.prebuilt)] * brought.is_dir()
    architectures = ""
    with contextlib.suppress(Exception):  # the GPU's check will fail on the same, and say so
        architectures = toolchain.architectures(probe)
    steps = Steps("looking", dict.fromkeys((subject for subject, _ in checks), 0.0))
    begin()

    def look() -> tuple[list[Finding], dict[str, Any]]:
        with steps, ThreadPoolExecutor(len(checks) + 1) as pool:  # most of the time they wait
            torch = pool.submit(ask_torch, architectures)
            context = Context(root, caches[-1], folder, probe, refusal, architectures, torch.result)

            def step(subject: str, check: Check) -> Finding:
                steps.show(subject)
                found = guarded(subject, check, context)
                steps.end(subject)
                return found

            return [*pool.map(step, *zip(*checks, strict=True))], torch.result()

    looking = behind(look)
    try:
        in_turns(looking)
    except BaseException:
        end_all()
        in_turns(looking)  # which starts no more
        raise
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    findings, of_torch = looking.result()
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    return Report(findings, versions | of_torch)


def make_probe(cache: Path) -> tuple[Path, Path, str | None]:
    """Return the nearest folder there is, one for trials, and why that is not in the former."""
    folder = cache
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        return folder, Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder)), None
    except OSError as error:
        return folder, Path(tempfile.mkdtemp(prefix="loader-doctor-")), error.strerror


def guarded(subject: str, check: Check, context: Context) -> Finding:
    """Return the finding of a check; one that fails itself must not hide the others'."""
    try:
        return Finding(subject, *check(context))
    except TorchMissing:
        return Finding(subject, "warning", "not checked: torch does not import")
    except BuildError as error:  # that a build would meet as well
        found, _, cure = str(error).partition("; ")
        found = found.replace(str(context.probe), str(context.cache))
        return Finding(subject, "error", found, cure)
    except Exception as error:
        return Finding(subject, "warning", f"not checked: {type(error).__name__}: {error}")


def ask_torch(architectures: str) -> dict[str, Any]:
    """Return what torch says of itself, in a process of its own, or why it does not import."""
    # GPUs are hidden from it: to initialise CUDA takes seconds.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": architectures or "9.0"}
    _, said = run(child.command("tools.doctor.examine.print_facts", body=False), 3, **hidden)
    for line in said.splitlines():
        if line.startswith("FACTS "):
            return json.loads(line.removeprefix("FACTS "))
    return {"torch_error": last_line(said)}


def print_facts() -> None:
    """What `ask_torch` has another process do."""
    of, facts = importlib.import_module, {}
    asks: dict[str, Callable[[], Any]] = {
        "setuptools": lambda: of("setuptools").__version__,
        "torch": lambda: of("torch").__version__,
        "cuda": lambda: of("torch").version.cuda,
        "git": lambda: of("torch").version.git_version,
        "numpy": lambda: of("numpy").__version__,
        "from_numpy": lambda: of("torch").from_numpy(of("numpy").zeros(1)).shape,
        "extension": lambda: of("torch.utils.cpp_extension").__name__,
        "flags": lambda: of("torch.utils.cpp_extension")._get_cuda_arch_flags(),
    }
    for name, ask in asks.items():
        try:
            facts[name] = ask()
        except BaseException as error:
            facts[f"{name}_error"] = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            if name == "torch":
                break
    print("\nFACTS", json.dumps(facts))
