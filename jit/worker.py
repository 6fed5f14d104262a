"""The process that compiles: `torch.utils.cpp_extension.load` in a child for each unit.

A process of its own, because load() changes the environment, prints, holds a lock file that
outlives a kill, and at the end loads the library it made: all of that stays out of the user's
process, and a library that does not load is found here. Units are built side by side in forks,
which share the one import of torch.

Per unit and toolchain there is one mutable folder in `work/`, where ninja keeps its objects. Who
holds the lock beside it may touch it. A folder whose builder died is set aside whole, since the
compilers that it started may still be writing there.
"""

import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import traceback
import uuid
import warnings
from pathlib import Path

from .key import built_sources, key, manifest
from .store import Store, make_private
from .toolchain import Toolchain
from .units import Sources, Unit


def main() -> None:
    """Build the units that the parent names on stdin; report on stdout, a JSON object a line."""
    order = json.load(sys.stdin)
    sys.path[:] = order["sys_path"]
    events = os.dup(1)
    os.dup2(2, 1)

    def report(unit: str, state: str, **facts) -> None:
        os.write(events, (json.dumps({"unit": unit, "state": state, **facts}) + "\n").encode())

    facts = order["toolchain"]
    toolchain = Toolchain(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()})
    _prepare_environment(toolchain, order)
    warnings.simplefilter("ignore")
    import torch.utils.cpp_extension  # noqa: F401  once here, for all the forks

    linker = _linker_flags()
    waiting = [Unit(u["name"], Path(order["root"]), tuple(u["sources"])) for u in order["units"]]
    running: set[int] = set()
    while waiting or running:
        while waiting and len(running) < order["side_by_side"]:
            unit = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                _build_and_exit(unit, toolchain, linker, Path(order["cache"]), report)
            running.add(pid)
        pid, _ = os.wait()
        running.discard(pid)


def _prepare_environment(toolchain: Toolchain, order: dict) -> None:
    """What load() reads from the environment: where the tools are, which GPUs, how many jobs."""
    path = [os.path.dirname(sys.executable)]
    try:
        import ninja

        path.append(ninja.BIN_DIR)
    except ImportError:
        pass  # then a ninja on PATH has to serve
    os.environ["PATH"] = os.pathsep.join([*path, os.environ.get("PATH", "")])
    os.environ["MAX_JOBS"] = str(order["jobs"])
    if toolchain.cuda_home:
        os.environ["CUDA_HOME"] = toolchain.cuda_home
    # load() fails with an IndexError where there is neither a list nor a GPU.
    os.environ["TORCH_CUDA_ARCH_LIST"] = toolchain.architectures or "9.0"


def _build_and_exit(
    unit: Unit, toolchain: Toolchain, linker: list[str], cache: Path, report
) -> None:
    """The life of a fork: one unit, then `_exit`, so that nothing of the parent's runs twice."""
    started = time.perf_counter()
    try:
        state, facts = "done", {"key": build(unit, toolchain, linker, cache, report)}
    except Exception as error:
        log = cache / "work" / f"{unit.name}.log"
        text = str(error) if isinstance(error, (RuntimeError, OSError)) else traceback.format_exc()
        try:
            log.write_text(text)
        except OSError:
            log = None
        # A line has to fit what a pipe takes in one piece; the log has the rest.
        state, facts = "failed", {"error": text[:2000], "log": str(log) if log else None}
    report(unit.name, state, seconds=round(time.perf_counter() - started, 2), **facts)
    os._exit(0)


def build(unit: Unit, toolchain: Toolchain, linker: list[str], cache: Path, report) -> str:
    """Compile `unit` and publish it, unless another process has meanwhile; its key.

    The sources are digested before and after: where somebody saved an edit in between, the library
    may be made of either and is built again. A kill leaves a `building` mark in the work folder.
    """
    store = Store(cache)
    work = cache / "work"
    make_private(work)
    inputs = manifest(unit, toolchain, Sources(unit.root))
    folder = work / f"{unit.name}-{_folder_name(unit, inputs)}"
    with open(f"{folder}.lock", "a+") as lock:
        _acquire(lock, unit, report)
        for _ in range(5):
            inputs = manifest(unit, toolchain, Sources(unit.root))
            if store.verified(unit.name, key(inputs)):
                return key(inputs)
            report(unit.name, "compiling")
            library = _compile(unit, toolchain, linker, folder)
            if manifest(unit, toolchain, Sources(unit.root)) == inputs:
                store.publish(library, inputs, key(inputs))
                return key(inputs)
    raise RuntimeError("the sources kept changing while they were compiled; import loader again")


def _folder_name(unit: Unit, inputs: dict) -> str:
    """Changes with the toolchain and the checkout, not with an edit."""
    return key({"toolchain": inputs["toolchain"], "root": str(unit.root)})[:12]


def _acquire(lock, unit: Unit, report) -> None:
    """Hold the lock, waiting for whoever has it; the system frees it when its holder dies."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        report(unit.name, "waiting", holder=lock.read(20).strip())
        fcntl.flock(lock, fcntl.LOCK_EX)
    lock.seek(0)
    lock.truncate()
    lock.write(str(os.getpid()))
    lock.flush()


def _compile(unit: Unit, toolchain: Toolchain, linker: list[str], folder: Path) -> Path:
    """Run load() in the work folder; the library it made there."""
    from torch.utils.cpp_extension import load

    mark = folder / "building"
    if mark.exists():
        aside = folder.with_name(f"abandoned-{uuid.uuid4().hex}")
        os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    mark.touch()
    (folder / "lock").unlink(missing_ok=True)  # torch's own, which a kill leaves behind for ever
    sources = built_sources(unit, toolchain)
    _drop_stale_objects(unit, sources, folder)
    with_cuda = sources != unit.for_cpu().sources
    define = ["-DOCTET_CUDA"] if with_cuda else []
    try:
        load(
            name=unit.name,
            sources=[str(unit.root / source) for source in sources],
            extra_cflags=[*toolchain.cflags, *define],
            extra_cuda_cflags=[*toolchain.cuda_flags, *define],
            extra_ldflags=[*linker, *(_cuda_runtime(folder, toolchain) if with_cuda else [])],
            extra_include_paths=[str(unit.root / "include")],
            build_directory=str(folder),
            with_cuda=with_cuda,
            is_python_module=False,
        )
    finally:
        mark.unlink()  # the compilers have ended, well or not
    return folder / f"{unit.name}.so"


def _drop_stale_objects(unit: Unit, sources: tuple[str, ...], folder: Path) -> None:
    """Delete the objects whose sources differ in content from what they were made of.

    ninja goes by time alone and would keep an object when a file came back with an older date.
    """
    record = folder / "made_of.json"
    now = {source: Sources(unit.root).closure(source) for source in sources}
    try:
        before = json.loads(record.read_text())
    except (OSError, ValueError):
        before = {}
    for source in sources:
        if before.get(source) != now[source]:
            stem = Path(source).stem
            (folder / (f"{stem}.cuda.o" if source.endswith(".cu") else f"{stem}.o")).unlink(
                missing_ok=True
            )
    record.write_text(json.dumps(now))


def _linker_flags() -> list[str]:
    """The fastest linker that works with this compiler: lld, gold, or its own choice."""
    command = shlex.split(os.environ.get("CXX") or "c++")
    for name in ("lld", "gold"):
        if shutil.which(f"ld.{name}"):
            trial = [*command, "-shared", "-fPIC", f"-fuse-ld={name}", "-x", "c++", "/dev/null"]
            trial += ["-o", "/dev/null"]
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return [f"-fuse-ld={name}", "-Wl,--as-needed"]
    return ["-Wl,--as-needed"]


def _cuda_runtime(folder: Path, toolchain: Toolchain) -> list[str]:
    """The CUDA runtime under the name that -lcudart looks for, which NVIDIA's wheels lack."""
    libraries = [Path(toolchain.cuda_home) / name for name in ("lib64", "lib")]
    if any((path / "libcudart.so").exists() for path in libraries):
        return []
    for found in (file for path in libraries for file in path.glob("libcudart.so.*")):
        link = folder / "libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        return [f"-L{folder}"]
    return []
