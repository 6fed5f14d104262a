"""The process that compiles: `torch.utils.cpp_extension.load` in a child for each unit.

A process of its own, because load() changes the environment, prints, holds a lock file that
outlives a kill, and at the end loads the library it made: all of that stays out of the user's
process, and a library that does not load is found here. Units are built side by side in forks,
which share the one import of torch.

Per unit and toolchain there is one mutable folder in `work/`, where ninja keeps its objects. Who
holds the lock beside it may touch it; the parent hands its locks down, so that they are held until
the build has ended, whatever becomes of the parent. A folder whose builder died is set aside whole,
since the compilers that it started may still be writing there.
"""

import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from ..cache.explain import FOR_EDIT, why_built
from ..cache.key import built_sources, key, manifest
from ..cache.lock import FileLock
from ..cache.store import DISK, Store, cannot_write
from ..machine.sources import HOME, Sources, Unit
from ..machine.toolchain import Toolchain

# Has ptxas tell registers and spills of each kernel, which `loader.reload()` shows.
_TELL_RESOURCES = ["-Xptxas", "-v"]
_LITTLE = 4 << 20  # bytes free, of which a build takes some


class Killed(RuntimeError):
    """A tool that was ended by a signal; what it started may still be running."""


def main() -> None:
    """Build the units that the parent names on stdin; report on stdout, a JSON object a line."""
    order = json.loads(sys.stdin.readline())
    sys.path[:] = order["sys_path"]
    events = os.dup(1)
    os.dup2(2, 1)

    def report(unit: str, state: str, **facts) -> None:
        line = json.dumps({"unit": unit, "state": state, **facts}) + "\n"
        with contextlib.suppress(BrokenPipeError):  # the parent is dead; others want the build
            os.write(events, line.encode())

    facts = order["toolchain"]
    toolchain = Toolchain(**{k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()})
    _prepare_environment(toolchain, order)
    warnings.simplefilter("ignore")
    import torch.utils.cpp_extension  # noqa: F401  once here, for all the forks

    linker, quicker = linker_flags(), _quicker_flags()
    store = Store([Path(cache) for cache in order["caches"]])
    waiting = order["units"]
    for task in waiting:
        os.set_inheritable(task["lock"], False)  # compilers that outlive us must not hold it
    locks = {u["name"]: FileLock(Path(u["folder"] + ".lock"), u["lock"]) for u in waiting}
    running: dict[int, str] = {}
    while waiting or running:
        while waiting and len(running) < order["side_by_side"]:
            task = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                for name, lock in locks.items():
                    if name != task["name"]:
                        lock.close()
                unit = Unit(task["name"], Path(order["root"]), tuple(task["sources"]))
                job = Job(
                    unit, toolchain, Path(task["folder"]), store, task["why"], linker, quicker
                )
                _build_and_exit(job, locks[unit.name], report)
            running[pid] = task["name"]
        pid, status = os.wait()
        name = running.pop(pid)
        locks.pop(name).release()
        if os.waitstatus_to_exitcode(status) != 0:
            report(name, "killed")
    os._exit(0)  # taking down an interpreter with torch in it would keep the parent waiting


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
    os.environ["TORCH_DONT_CHECK_COMPILER_ABI"] = "1"
    for name in ("CXX", "PYTORCH_NVCC"):
        if command := os.environ.get(name):
            words = [command] if os.path.isfile(command) else shlex.split(command)
            os.environ[name] = " ".join(map(quoted, words))
    if compiler := os.environ.get("CC"):
        os.environ["CC"] = quoted(compiler)
    if toolchain.cuda_home:
        os.environ["CUDA_HOME"] = toolchain.cuda_home
    # load() fails with an IndexError where there is neither a list nor a GPU.
    os.environ["TORCH_CUDA_ARCH_LIST"] = toolchain.architectures or "9.0"


def quoted(word: str) -> str:
    """A word as it has to stand in a ninja file, from where a shell reads it."""
    if "\n" in word:
        raise ValueError(f"a compiler or a flag has a line break in it, remove that: {word!r}")
    return shlex.quote(word).replace("$", "$$")


class Job:
    """One unit, to be compiled in its folder and published."""

    def __init__(
        self,
        unit: Unit,
        toolchain: Toolchain,
        folder: Path,
        store: Store,
        why: list[str],
        linker: list[str],
        quicker: list[str],
    ):
        self.unit, self.toolchain, self.folder = unit, toolchain, folder
        self.store, self.why, self.linker, self.quicker = store, why, linker, quicker
        self.seconds: dict[str, float] = {}

    def inputs(self) -> dict:
        """The manifest of the sources as they are now."""
        sources = Sources(self.unit.root, self.toolchain.header_folders)
        return manifest(self.unit, self.toolchain, sources)

    def run(self) -> str:
        """Compile and publish, unless another process has meanwhile; the key.

        The sources are digested before and after: where somebody saved an edit in between, the
        library may be made of either and is built again.
        """
        for _ in range(5):
            inputs = self.inputs()
            if self.why != [FOR_EDIT] and self.store.verified(self.unit.name, key(inputs)):
                return key(inputs)
            why = self.why or why_built(self.store, self.unit, inputs)
            library = self.compile()
            if self.inputs() == inputs:
                facts = {"why": why, "seconds": self.seconds, "root": str(self.unit.root)}
                self.store.publish(library, inputs, **facts)
                return key(inputs)
        raise RuntimeError("the sources kept changing while they were compiled; import again")

    def compile(self) -> Path:
        """Run load() in the work folder; the library it made there.

        A kill leaves the mark `building` in the folder, which is then not used again.
        """
        from torch.utils.cpp_extension import load

        unit, folder = self.unit, self.folder
        mark = folder / "building"
        if mark.exists():
            aside = folder.with_name(f"abandoned-{uuid.uuid4().hex}")
            os.rename(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        mark.touch()
        (folder / "lock").unlink(missing_ok=True)  # torch's own, which a kill leaves behind
        sources = built_sources(unit, self.toolchain)
        drop_stale_objects(unit, sources, folder, self.toolchain)
        with_cuda = sources != unit.for_cpu().sources
        define = ["-DOCTET_CUDA"] if with_cuda else []
        log = folder / ".ninja_log"
        before = log.read_text().splitlines() if log.exists() else []
        ended = False
        try:
            with _plain_paths(unit.root, folder, HOME) as (root, build_folder, home):
                link = [*self.linker, *self.toolchain.ldflags]
                link += cuda_runtime(build_folder, self.toolchain) if with_cuda else []
                load(
                    name=unit.name,
                    sources=[str(root / source) for source in sources],
                    extra_cflags=[*map(quoted, self.toolchain.cflags), *self.quicker, *define],
                    extra_cuda_cflags=[
                        *map(quoted, self.toolchain.cuda_flags),
                        *_TELL_RESOURCES,
                        *define,
                    ],
                    extra_ldflags=[*map(quoted, link)],
                    extra_include_paths=[str(at / "include") for at in dict.fromkeys((root, home))],
                    build_directory=str(build_folder),
                    with_cuda=with_cuda,
                    is_python_module=False,
                )
            ended = True
        except Exception as error:
            signal = -getattr(error.__cause__, "returncode", 0)
            if signal > 0:
                raise Killed(f"ninja was ended by signal {signal}") from error
            ended = True
            raise
        finally:
            if ended:
                mark.unlink()  # the compilers have ended too, well or not
        self._note_times(before)
        return folder / f"{unit.name}.so"

    def _note_times(self, before: list[str]) -> None:
        """How long compilers and linker took, by ninja's log: start, end (ms), time, output."""
        times: dict[str, list[int]] = {}
        for line in (self.folder / ".ninja_log").read_text().splitlines():
            if line not in before and line[:1].isdigit():
                start, end, _, output, *_ = line.split("\t")
                stage = "compile" if output.endswith(".o") else "link"
                times.setdefault(stage, []).extend((int(start), int(end)))
        self.seconds |= {stage: (max(t) - min(t)) / 1e3 for stage, t in times.items()}


def _build_and_exit(job: Job, lock: FileLock, report: Callable) -> None:
    """The life of a fork: one unit, then `_exit`, so that nothing of the parent's runs twice."""
    unit = job.unit.name
    try:
        report(unit, "compiling")
        report(unit, "done", key=job.run(), seconds=job.seconds)
    except Killed:
        os._exit(1)
    except Exception as error:
        log: Path | None = job.folder.parent / f"{unit}.log"
        known = isinstance(error, (RuntimeError, OSError, ValueError))
        text = str(error) if known else traceback.format_exc()
        if isinstance(error, OSError) and error.__cause__:
            text += f"\n{error.__cause__}"  # torch says which library, dlopen says why
        if "Bus error" in text and shutil.disk_usage(job.folder.parent).free < _LITTLE:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as a linker's map met it
        if isinstance(error, OSError) and error.errno in DISK:
            text = str(cannot_write(job.store.path.parent, error))
        try:
            log.write_text(text)
        except OSError:
            log = None
        # A line has to fit what a pipe takes in one piece; the log has the rest.
        failed = {"error": text[:2000], "log": str(log) if log else None}
        with contextlib.suppress(Exception):
            lock.note(pid=os.getpid(), key=key(job.inputs()), failed=failed)
        report(unit, "failed", **failed)
    finally:
        os._exit(0)


@contextlib.contextmanager
def _plain_paths(*folders: Path) -> Iterator[tuple[Path, ...]]:
    """Names for folders that neither ninja nor a shell could misread: links, where need be."""
    if re.fullmatch(r"[\w/.,+@%=-]+", "".join(map(str, folders)), re.ASCII):
        yield folders
        return
    parent = tempfile.gettempdir()
    if not re.fullmatch(r"[\w/.,+@%=-]+", parent, re.ASCII):
        parent = "/tmp"
    alias = Path(tempfile.mkdtemp(prefix="octet-", dir=parent))
    links = tuple(alias / name for name in ("source", "build", "loader")[: len(folders)])
    try:
        for link, folder in zip(links, folders, strict=True):
            link.symlink_to(folder)
        try:
            yield links
        except RuntimeError as error:
            text = str(error)
            for link, folder in zip(links, folders, strict=True):
                text = text.replace(str(link), str(folder))
            raise RuntimeError(text) from error.__cause__
    finally:
        shutil.rmtree(alias, ignore_errors=True)


def drop_stale_objects(
    unit: Unit, sources: tuple[str, ...], folder: Path, toolchain: Toolchain
) -> None:
    """Delete the objects whose sources differ in content from what they were made of.

    ninja goes by time alone and would keep an object when a file came back with an older date.
    """
    record = folder / "made_of.json"
    read = Sources(unit.root, toolchain.header_folders)
    now = {source: read.closure(source) for source in sources}
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


def _quicker_flags() -> list[str]:
    """What lets g++ compile in half the time, to the same end.

    Kernels write the case of neighbouring elements out by hand; it would copy all other loops for
    that case as well. clang has no such flag, and fails where it is given.
    """
    command = shlex.split((os.environ.get("CXX") or "c++").replace("$$", "$"))
    flags = ["-fno-version-loops-for-strides"]
    trial = [*command, *flags, "-fsyntax-only", "-x", "c++", "/dev/null"]
    done = subprocess.run(trial, capture_output=True, check=False)
    return flags if done.returncode == 0 else []


def linker_flags() -> list[str]:
    """The fastest linker that works with this compiler: lld, gold, or its own choice."""
    command = shlex.split((os.environ.get("CXX") or "c++").replace("$$", "$"))
    for name in ("lld", "gold"):
        if shutil.which(f"ld.{name}"):
            trial = [*command, "-shared", "-fPIC", f"-fuse-ld={name}", "-x", "c++", "/dev/null"]
            trial += ["-o", "/dev/null"]
            if subprocess.run(trial, capture_output=True, check=False).returncode == 0:
                return [f"-fuse-ld={name}", "-Wl,--as-needed"]
    return ["-Wl,--as-needed"]


def cuda_runtime(folder: Path, toolchain: Toolchain) -> list[str]:
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
