"""Building one unit again after an edit: only what changed, and nothing but compiler and linker.

Works on the folder and the ninja file that the unit's first build left behind (worker.py), so it
needs neither a second process with torch in it nor torch's own `load()`: an edit of a kernel costs
the compilation of that file and a link, of the library that takes the place of the one in use
(swap.cpp). The one for the store is linked from the same objects meanwhile.
"""

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ..build.builder import cores, end, work_folder
from ..build.worker import drop_stale_objects
from ..cache.explain import FOR_EDIT
from ..cache.key import built_sources, key, manifest
from ..cache.lock import FileLock
from ..cache.store import Store
from ..errors import BuildError
from ..errors.diagnose import explain_failure
from ..machine.sources import Sources
from ..operators.session import Session

SWAP = Path(__file__).with_name("swap.cpp")
_QUIETLY = SWAP.parents[2] / "include" / "quietly.h"  # which it includes
_numbers = count()

_PTXAS = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '\w+'\n"
    r"(?:.*Function properties for.*\n)?"
    r"(?:.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n)?"
    r".*Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Resources:
    """What one CUDA kernel takes, by ptxas."""

    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes of static shared memory


@dataclass
class Rebuilt:
    """A unit that was built again; its lock is held until it is kept or discarded.

    Attributes:
        inputs: the manifest of the sources that it is made of; `key` its digest.
        swap: the library that can take the place of the one in use.
        compiled: seconds that each file took which was compiled.
        resources: of the kernels in the CUDA files, by mangled name, where those were compiled.
    """

    inputs: dict
    key: str
    swap: Path
    seconds: float
    compiled: dict[str, float]
    resources: dict[str, Resources]
    _lock: FileLock
    _linker: subprocess.Popen
    _library: Path

    def keep(self, store: Store, **facts) -> None:
        """Put it into the store, for the next process."""
        try:
            _, said = self._linker.communicate()
            if self._linker.returncode:
                raise BuildError(f"the library for the store could not be linked:\n{said.strip()}")
            store.publish(self._library, self.inputs, **facts)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the libraries, and let others build the unit again."""
        if self._linker.returncode is None:
            self._linker.kill()
            self._linker.communicate()
        self._library.unlink(missing_ok=True)
        self.swap.unlink(missing_ok=True)
        self._lock.release()


def rebuild(session: Session, name: str, jobs: int = 0) -> Rebuilt:
    """Compile what changed of a unit and link it, in its work folder; BuildError if that fails.

    Where the folder cannot be used, since another toolchain or nobody made it or a build there was
    killed, the unit is built from nothing.
    """
    begun = time.perf_counter()
    unit, toolchain = session.units[name], session.toolchain
    for attempt in range(5):
        inputs = manifest(unit, toolchain, Sources(unit.root, toolchain.header_folders))
        folder = work_folder(session.caches[-1] / "work", unit, inputs)
        sources = built_sources(unit, toolchain)
        usable = not attempt and _usable(folder, unit, sources)
        if not usable and not attempt:
            if errors := session.build([name], {name: FOR_EDIT}):
                raise errors[name]
            if not _usable(folder, unit, sources):
                raise BuildError(
                    f"{name}: there is nothing to build an edit upon in {folder}; its path has "
                    "characters in it that a shell could misread, move the cache or the sources",
                    name,
                )
        lock = FileLock(Path(f"{folder}.lock"))
        try:
            lock.take(wait=True)
            lock.note(pid=os.getpid())
            drop_stale_objects(unit, sources, folder, toolchain)
            compiled, output = _ninja(folder, name, unit.root, unit.sources, jobs)
            if manifest(unit, toolchain, Sources(unit.root, toolchain.header_folders)) != inputs:
                lock.release()
                continue
            own = f"{name}-{os.getpid()}-{next(_numbers)}.so"
            library, swap = folder / f"edit-{own}", folder / f"swap-{own}"
            linker = _link(folder, swap, swap_object(folder.parent))
            said = linker.communicate()[1]
            if linker.returncode:
                raise _failed(name, said, folder.parent, unit.root, unit.sources)
            linker = _link(folder, library)
        except BaseException:
            lock.release()
            raise
        stems = {Path(s).stem + (".cuda.o" if s.endswith(".cu") else ".o"): s for s in sources}
        times = {stems[o]: seconds for o, seconds in compiled.items() if o in stems}
        took = time.perf_counter() - begun
        resources = _resources(output)
        return Rebuilt(inputs, key(inputs), swap, took, times, resources, lock, linker, library)
    raise BuildError(f"{name}: its sources kept changing while they were compiled", name)


def swap_object(work: Path) -> Path:
    """swap.cpp compiled, in the folder `work`."""
    text = SWAP.read_bytes() + _QUIETLY.read_bytes()
    found = work / f"swap-{hashlib.sha256(text).hexdigest()[:16]}.o"
    if not found.exists():
        draft = found.with_name(f"{found.name}-{os.getpid()}")
        command = [*shlex.split(os.environ.get("CXX") or "c++"), "-O1", "-fPIC", "-std=c++17"]
        command += ["-fvisibility=hidden", "-c", "-x", "c++", str(SWAP), "-o", str(draft)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BuildError(f"{SWAP.name} could not be compiled:\n{done.stderr.strip()}")
        os.replace(draft, found)
    return found


def _link(folder: Path, library: Path, *more: Path) -> subprocess.Popen:
    """Link the objects of a folder, and `more`, as its ninja file would."""
    text = (folder / "build.ninja").read_text()
    objects = [str(folder / found) for found in _rule(text, "build .*?: link (.*)").split()]
    command = [*_words(_rule(text, "cxx = (.*)")), *objects, *map(str, more)]
    command += [*_words(_rule(text, "ldflags = (.*)")), "-ldl", "-o", str(library)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def _failed(name: str, output: str, work: Path, root: Path, sources: tuple[str, ...]) -> BuildError:
    """What a person wants to read of a failed build, whose output is kept in `work`."""
    log = work / f"{name}.log"
    with contextlib.suppress(OSError):
        log.write_text(output)
    causes = explain_failure(output, root, sources)
    text = f"{name} could not be built:\n{causes}\nThe whole output is in {log}"
    return BuildError(text, name, str(log))


def _usable(folder: Path, unit, sources: tuple[str, ...]) -> bool:
    """Whether a build of exactly these sources ended in the folder, and can be gone on with."""
    try:
        text = (folder / "build.ninja").read_text()
    except OSError:
        return False
    named = set(re.findall(r"^build \S+\.o: \w+ (.*)$", text, re.MULTILINE))
    return named == {str(unit.root / s) for s in sources} and not (folder / "building").exists()


def _ninja(
    folder: Path, name: str, root: Path, sources: tuple[str, ...], jobs: int
) -> tuple[dict[str, float], str]:
    """Have ninja make the objects: seconds by output, and what the compilers printed."""
    log, mark = folder / ".ninja_log", folder / "building"
    before = set(log.read_text().splitlines()) if log.exists() else set()
    mark.touch()
    command = [_ninja_program(), "-C", str(folder), "-j", str(jobs or cores())]
    command += _rule((folder / "build.ninja").read_text(), "build .*?: link (.*)").split()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        end(process)  # the mark stays: compilers may have left half an object
        raise
    if process.returncode < 0:
        raise BuildError(f"{name}: its build was ended by signal {-process.returncode}", name)
    mark.unlink()
    if process.returncode:
        raise _failed(name, output, folder.parent, root, sources)
    compiled = {}
    for line in log.read_text().splitlines():
        if line not in before and line[:1].isdigit():
            start, stop, _, made, *_ = line.split("\t")
            compiled[made] = (int(stop) - int(start)) / 1e3
    return compiled, output


def _ninja_program() -> str:
    with contextlib.suppress(ImportError):
        import ninja

        program = os.path.join(ninja.BIN_DIR, "ninja")
        if os.path.exists(program):
            return program
    return shutil.which("ninja") or "ninja"


def _rule(ninja_file: str, pattern: str) -> str:
    found = re.search(f"^{pattern}$", ninja_file, re.MULTILINE)
    return found[1] if found else ""


def _words(text: str) -> list[str]:
    """What stands in a ninja file, as the words that a shell would make of it."""
    return shlex.split(text.replace("$$", "$"))


def _resources(output: str) -> dict[str, Resources]:
    """What ptxas said of each kernel."""
    found = {}
    for entry in _PTXAS.finditer(output):
        numbers = [int(entry[group] or 0) for group in ("registers", "stores", "loads", "shared")]
        found[entry["kernel"]] = Resources(numbers[0], numbers[1] + numbers[2], numbers[3])
    return found
