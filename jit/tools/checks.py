"""What the doctor looks at: one check for each thing that a build needs.

A check returns its finding without the subject: state, what it found, and where something is wrong
the cure. What can be tried is tried, by the command that a build would run: versions that look
right are no proof.
"""

import ctypes
import fcntl
import os
import platform
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cache.store import check_private
from ..errors import BuildError
from ..machine import settings
from ..machine.toolchain import (
    CFLAGS,
    CUDA_FLAGS,
    FLAGS,
    LINK_FLAGS,
    _cuda_home,
    _gpu_capabilities,
    _identity,
    words,
)

TIMEOUT = 20  # seconds that a tool may take
Found = tuple[str, str] | tuple[str, str, str]  # state, found, cure
MOVE_CACHE = "set LOADER_CACHE_DIR to a folder of your own on a local disk"


@dataclass(frozen=True)
class Context:
    """What the checks look at."""

    root: Path
    cache: Path  # the folder that builds go to
    folder: Path  # that one, or its nearest parent that exists
    probe: Path  # for trials: in `folder`, or where nothing can be written there in the system's
    refusal: str | None  # why nothing can be written in `folder`
    architectures: str  # that a build would compile CUDA sources for, as Toolchain has them
    facts: Callable[[], dict]  # what torch says of itself

    @property
    def nvcc(self) -> list[str]:
        """The command that a build would run for CUDA sources; empty where it is not there."""
        home = _cuda_home()
        command = os.environ.get("PYTORCH_NVCC") or (home and os.path.join(home, "bin", "nvcc"))
        return shlex.split(command) if command and _identity(command) else []

    @property
    def cuda(self) -> str | None:
        """The version of CUDA that torch is built for; None where it has none."""
        facts = self.facts()
        if "torch" not in facts:
            raise _TorchMissing
        return facts["cuda"]


class _TorchMissing(Exception):
    """A check cannot tell without torch."""


def check_python(context: Context) -> Found:
    """The interpreter's version."""
    found = f"{platform.python_version()}, {sys.executable}"
    if _version(found) < (3, 10):
        return "error", f"{found}; 3.10 or newer is needed", "make an environment with a newer one"
    return "ok", found


def check_headers(context: Context) -> Found:
    """What modules made with pybind11 include; operators do without."""
    header = Path(sysconfig.get_path("include"), "Python.h")
    if header.exists():
        return "ok", str(header)
    package = f"python3-dev python{sysconfig.get_python_version()}-dev"
    found = f"{header} is missing; operators do without, modules made with pybind11 do not"
    return "warning", found, f"one of them has it:\n$ apt install {package}"


def check_torch(context: Context) -> Found:
    """Whether it imports and is new enough."""
    facts = context.facts()
    if error := facts.get("torch_error"):
        module = "numpy" if "numpy" in error.lower() else "torch"
        return "error", f"does not import: {error}", f"$ pip install --force-reinstall {module}"
    cuda = f"CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    found = f"{facts['torch']} (git {facts['git'][:8]}), {cuda}"
    if _version(found) < (2, 10):
        return "error", f"{found}; 2.10 or newer is needed", "$ pip install -U 'torch>=2.10'"
    return "ok", found


def check_numpy(context: Context) -> Found:
    """Whether torch can use the NumPy that is here."""
    context.cuda  # noqa: B018  not without torch
    facts = context.facts()
    error, version = facts.get("numpy_error"), facts.get("numpy", "")
    if not error:
        return "ok", version
    if "No module named 'numpy'" in error:
        return "ok", "not installed; operators do without"
    found = f"torch cannot use NumPy {version}: {error}"
    return "warning", found, "$ pip install --upgrade --force-reinstall numpy"


def check_setuptools(context: Context) -> Found:
    """What torch.utils.cpp_extension, which compiles, imports: that was tried."""
    facts, cure = context.facts(), "$ pip install 'setuptools>=70'"
    version = facts.get("setuptools", "")
    if error := facts.get("setuptools_error"):
        return "error", f"torch.utils.cpp_extension needs it: {error}", cure
    if error := facts.get("extension_error"):
        return "error", f"{version}; torch.utils.cpp_extension does not import: {error}", cure
    if _version(version) < (70,):
        return "warning", f"{version}; 70 or newer is expected", cure
    return "ok", version


def check_ninja(context: Context) -> Found:
    """Looked for where a build looks: beside Python, in its package, on PATH."""
    places, cure = [os.path.dirname(sys.executable)], "$ pip install ninja"
    try:
        import ninja

        places.append(ninja.BIN_DIR)
    except (ImportError, AttributeError):
        pass  # then one on PATH has to serve, as for a build
    path = shutil.which("ninja", path=os.pathsep.join([*places, os.environ.get("PATH", "")]))
    if path is None:
        return "error", "neither installed nor on PATH", cure
    works, said = _run([path, "--version"])
    if not works:
        return "error", f"{path} does not run: {_last_line(said)}", cure
    found = f"{said.strip()}, {path}"
    return ("ok", found) if _version(said) >= (1, 3) else ("error", f"{found}; too old", cure)


def check_compiler(context: Context) -> Found:
    """Compile and link a small library, and load it from the cache folder."""
    name = os.environ.get("CXX") or "c++"
    command = shlex.split(name)
    if _identity(name) is None:
        cure = "set CXX to a compiler that supports C++17, or install one\n$ apt install g++"
        return "error", f"`{name}` is not on PATH", cure
    works, said = _run([*command, "--version"])
    version = said.strip().splitlines()[0] if works and said.strip() else f"`{name}`"
    source, library = context.probe / "trial.cpp", context.probe / "trial.so"
    source.write_text(
        "#include <string>\n#include <vector>\n"
        'extern "C" __attribute__((visibility("default"))) int trial(int n) {\n'
        '    return std::vector<std::string>(n, "some text").size();\n}\n'
    )
    native = ["-march=native"] if settings.value("LOADER_NATIVE") == "1" else []
    flags = ["-std=c++17", "-fPIC", "-shared", *words(FLAGS), *CFLAGS, *native]
    works, said = _run([*command, *flags, str(source), "-o", str(library), *words(LINK_FLAGS)])
    if not works:
        return (
            "error",
            f"{version} fails: {_first_error(said)}",
            _cure(COMPILER_CURES, _first_error(said)),
        )
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).trial(3)"
    works, said = _run([sys.executable, "-I", "-S", "-c", load, str(library)])
    if not works:
        found = f"what {version} makes does not load: {_last_line(said)}"
        return "error", found, _cure(LOADING_CURES, found)
    return "ok", f"{version}; a trial library compiles, links and loads"


COMPILER_CURES = (
    ("No space left", "make room there, or set TMPDIR to a folder that has some"),
    (r"std=c\+\+17", "it is too old: install a newer one and set CXX\n$ apt install g++"),
    ("march|native", "set LOADER_NATIVE=0"),
    (r"(stdlib|stdio|features|wchar|limits)\.h", "$ apt install libc6-dev"),
    ("cannot find '?ld|'ld'|'as'|'collect2'", "$ apt install binutils"),
    (r"<?(vector|string)\b|stdc\+\+", "$ apt install g++"),
    ("", "set CXX to a compiler that works, or install one\n$ apt install g++"),
)
LOADING_CURES = (
    ("killed by SIGILL", "this CPU cannot run what -march=native makes\n$ export LOADER_NATIVE=0"),
    ("map segment|not permitted|Permission", f"the disk is mounted noexec: {MOVE_CACHE}"),
    ("", "set CXX to a compiler that works, or install one\n$ apt install g++"),
)


def check_nvcc(context: Context) -> Found:
    """The compiler of CUDA sources: without it, or without a GPU, only the CPU part is built."""
    if not context.cuda:
        return "ok", "not needed: torch is built without CUDA"
    named = {name: os.environ.get(name) for name in ("PYTORCH_NVCC", "CUDA_HOME")}
    if not context.nvcc:
        found = f"{named['PYTORCH_NVCC'] or ''} not found".strip()
        if not context.architectures:
            return "ok", f"{found}; not needed without a GPU"
        cure = "unset PYTORCH_NVCC" if named["PYTORCH_NVCC"] else nvcc_cure(context.cuda)
        return "warning", f"{found}: only the CPU part is built", cure
    release, said = _nvcc_release(context)
    if not release:
        found = f"{context.nvcc[0]} does not run: {_first_error(said)}"
        return _severity(context), found, nvcc_cure(context.cuda)
    found, home = f"{release}, {' '.join(context.nvcc)}", named["CUDA_HOME"]
    if home and not Path(home, "bin", "nvcc").exists():
        return "warning", f"{found}; CUDA_HOME={home} has no bin/nvcc", "$ unset CUDA_HOME"
    return "ok", found


def check_toolkit(context: Context) -> Found:
    """The version of nvcc against that of torch's CUDA."""
    release = _nvcc_release(context)[0] if context.cuda else ""
    if not release:
        return "ok", "not checked: no nvcc, or none needed"
    found, cure = f"nvcc {release}, torch {context.cuda}", nvcc_cure(context.cuda)
    if _version(release)[0] != _version(context.cuda)[0]:
        return _severity(context), f"{found}: the major versions must be the same", cure
    if release != context.cuda:
        return "warning", f"{found}: most likely that does no harm", cure
    return "ok", found


def nvcc_cure(cuda: str) -> str:
    """How to get the nvcc for torch's CUDA version; from 13 on there are wheels that suffice."""
    if _version(cuda) < (13,):
        return f"install the CUDA toolkit {cuda} and set CUDA_HOME to its folder"
    names = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
    command = " ".join(f"'{name}=={cuda}.*'" for name in names)
    return f"install the CUDA toolkit {cuda}, or its compiler alone:\n$ pip install {command}"


def _nvcc_release(context: Context) -> tuple[str, str]:
    """Version of nvcc, "" where it does not tell, and what it says."""
    works, said = _run([*context.nvcc, "--version"]) if context.nvcc else (False, "")
    release = re.search(r"release (\d+\.\d+)", said)
    return (release[1] if works and release else ""), said


def _severity(context: Context) -> str:
    """What a fault of nvcc is: where no architecture is asked for, a build does without nvcc."""
    return "error" if context.architectures else "warning"


def check_host_compiler(context: Context) -> Found:
    """Whether nvcc takes the C++ compiler that it would get, by compiling a kernel."""
    if not context.nvcc:
        return "ok", "not checked: no nvcc"
    source = context.probe / "trial.cu"
    source.write_text(
        "#include <vector>\n__global__ void fill(float* x) { *x = 1; }\n"
        "void launch(float* x) { fill<<<1, 1>>>(x); }\n"
    )
    host = ["-ccbin", *shlex.split(os.environ["CC"])] if "CC" in os.environ else []  # as torch does
    flags = [*host, "-std=c++17", "-Xcompiler", "-fPIC", *CUDA_FLAGS]
    works, said = _run([*context.nvcc, *flags, "-c", str(source), "-o", f"{source}.o"])
    name = os.environ.get("CC") or os.environ.get("NVCC_CCBIN") or "nvcc's default compiler"
    if not context.cuda:
        return "ok", "not needed: torch is built without CUDA"
    if works:
        return "ok", f"a trial kernel compiles with {name}"
    cure = _host_compiler_cure(said) or nvcc_cure(context.cuda)
    return _severity(context), f"with {name}: {_first_error(said)}", cure


def _host_compiler_cure(said: str) -> str:
    """Which compiler nvcc wants, where its message tells: one that is here, or one to install."""
    variable = "CC" if "CC" in os.environ else "NVCC_CCBIN"
    newest = re.search(r"gcc versions later than (\d+)", said)
    below = re.search(r"clang version must be less than (\d+)", said)
    if newest or below:
        kind, most = ("g++", int(newest[1])) if newest else ("clang++", int(below[1]) - 1)
        names = [f"{kind}-{n}" for n in range(most, most - 6, -1)]
        if name := next(filter(shutil.which, names), ""):
            return f"let nvcc use {name}, which is here:\n$ export {variable}={name}"
        package, name = names[0].replace("clang++", "clang"), names[0]
        cure = f"let nvcc use {name} (or older)\n$ apt install {package}\n"
        return f"{cure}$ export {variable}={name}"
    if "host compiler" in said or "No such file or directory" in said.partition("\n")[0]:
        unset = f"unset {variable}, or " if variable in os.environ else ""
        return f"{unset}set {variable} to a C++ compiler that is there\n$ apt install g++"
    return ""


def check_architectures(context: Context) -> Found:
    """Whether torch and nvcc know the GPUs that would be compiled for."""
    wanted, facts = context.architectures, context.facts()
    if not context.cuda or not wanted:
        return "ok", "none: only the CPU part is built"
    listed = bool(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    found = f"{wanted}, from {'TORCH_CUDA_ARCH_LIST' if listed else 'the GPUs here'}"
    cure = "set TORCH_CUDA_ARCH_LIST to a list such as '9.0' or '8.0;9.0+PTX'"
    if error := facts.get("flags_error"):
        return "error", f"{found}: torch refuses it: {error}", cure
    if "flags" not in facts:
        return "warning", "not checked: torch.utils.cpp_extension does not import"
    _, said = _run([*context.nvcc, "--list-gpu-arch"]) if context.nvcc else (True, "")
    known, needed = _numbers(said), _numbers(" ".join(facts.get("flags", ())))
    unknown = sorted({*needed} - {*known})
    if not known or not unknown:
        return "ok", found
    last = f"{known[-1] // 10}.{known[-1] % 10}"
    if unknown[0] < known[0]:
        cure = "GPUs as old as that need an older CUDA toolkit, and a torch built for it"
    elif not listed:
        cure = f"install a newer CUDA toolkit, or\n$ export TORCH_CUDA_ARCH_LIST={last}+PTX"
    first = f"{known[0] // 10}.{known[0] % 10}"
    return "error", f"{found}: this nvcc knows those from {first} to {last}", cure


def _numbers(text: str) -> list[int]:
    """Architectures in a text of nvcc's: 90 for compute_90."""
    return sorted({int(number) for number in re.findall(r"compute_(\d+)", text)})


def check_driver(context: Context) -> Found:
    """NVIDIA's driver against torch's CUDA."""
    devices = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        if not devices:
            return "ok", "none, and no GPU"
        found = f"{devices[0]} is there, but the driver's libnvidia-ml.so.1 is not"
        cure = "in a container: start it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return "warning", found, cure
    if status := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        found = f"does not start: {nvml.nvmlErrorString(status).decode(errors='replace')}"
        return "warning", found, "reload the driver or reboot; restart a container"
    number = ctypes.c_int()
    nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number))
    nvml.nvmlShutdown()
    major, minor = number.value // 1000, number.value % 1000 // 10
    found = f"supports CUDA {major}.{minor}"
    if context.cuda and major < _version(context.cuda)[0]:
        found += f", torch needs {context.cuda}: the GPU cannot be used"
        return "warning", found, f"install a newer driver, or a torch built for CUDA {major}"
    return "ok", found


def check_gpu(context: Context) -> Found:
    """Whether there is a GPU that torch may use."""
    found = ", ".join(f"compute capability {c}" for c in _gpu_capabilities())
    if not found:
        return "ok", "none: operators run on the CPU"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if hidden in ("", "-1", "NoDevFiles"):
        found += f", hidden by CUDA_VISIBLE_DEVICES={hidden!r}"
        return "warning", found, "$ unset CUDA_VISIBLE_DEVICES"
    if not context.cuda:
        return "warning", f"{found}, but torch is built without CUDA", "install one built for CUDA"
    return "ok", found


def check_settings(context: Context) -> Found:
    """Environment variables with values that are refused or ignored."""
    for setting in settings.SETTINGS:
        try:
            settings.value(setting.name)
        except ValueError as error:
            return "error", str(error), f"$ unset {setting.name}"
    for name in ("CXX", "CC", "PYTORCH_NVCC", *FLAGS, *LINK_FLAGS):
        try:
            shlex.split(os.environ.get(name, ""))
        except ValueError as error:
            return (
                "error",
                f"{name} must be words as in a shell, got {os.environ[name]!r}: {error}",
                f"$ unset {name}",
            )
    jobs = os.environ.get("MAX_JOBS", "1")
    if not (jobs.isdigit() and int(jobs)):
        found = f"MAX_JOBS must be a positive number, got {jobs!r}: it is ignored"
        return "warning", found, "$ unset MAX_JOBS"
    return "ok", "none has a value that is refused"


def check_cache(context: Context) -> Found:
    """Rights of the folder that builds go to."""
    refusal, built = context.refusal, context.cache / "store"
    fault = _check_private(context.cache)
    if fault:
        return fault
    for folder in (built, context.cache / "work"):
        refusal = refusal or (folder.exists() and _refusal(folder))
    if refusal:
        serves = "; what is built there serves" if built.is_dir() else ""
        found = f"nothing can be written in {context.folder}: {refusal}{serves}"
        return "error", found, MOVE_CACHE
    there = "can be written" if context.cache.exists() else "will be created"
    return "ok", f"{context.cache} {there}"


def check_layer(layer: Path, context: Context) -> Found:
    """Rights of a folder that builds are only read from."""
    if not layer.is_dir():
        return "warning", f"{layer} is no folder", "create it, or drop it from LOADER_CACHE_DIR"
    return _check_private(layer) or ("ok", f"{layer} is read")


def _check_private(cache: Path) -> Found | None:
    """A finding where others could put something into a cache: what lies there gets executed."""
    for folder in (cache / "store", cache / "work"):
        try:
            check_private(folder)
        except BuildError as error:
            found, _, cure = str(error).partition("; ")
            return "error", found, cure
        except OSError:
            continue  # not there, or not a folder: what tries to write says so
    for folder in (cache, *cache.parents):
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            found = (
                f"{folder} can be written by everybody, who may put their own {cache.name} there"
            )
            return "warning", found, f"$ chmod o-w {shlex.quote(str(folder))}"
    return None


def _refusal(folder: Path) -> str:
    """Why nothing can be written in a folder, found by trying; "" where it can."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".doctor-", dir=folder))
    except OSError as error:
        return f"{error.strerror} ({folder.name})"
    return ""


def check_disk(context: Context) -> Found:
    """Room for builds, a few MB each, with some to spare."""
    return _check_room(context.folder, MOVE_CACHE)


def check_temporary(context: Context) -> Found:
    """Room for the compilers' temporary files."""
    return _check_room(Path(tempfile.gettempdir()), "set TMPDIR to a folder that has some")


def _check_room(folder: Path, otherwise: str) -> Found:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize >> 20
    files = disk.f_favail if disk.f_files else 1 << 30  # some file systems have no limit
    found = f"{free:,} MB free in {folder}"
    found += f", for only {files} files" if files < 1000 else ""
    if free >= 1000 and files >= 1000:
        return "ok", found
    state = "error" if free < 100 or files < 100 else "warning"
    return state, found, f"make room there, or {otherwise}"


def check_flock(context: Context) -> Found:
    """Whether a lock shuts out others, and whether they get it afterwards."""
    if context.refusal:
        return "warning", "not checked: the cache folder cannot be written"
    kind = _file_system(context.probe, Path("/proc/self/mounts").read_text())
    path, fault = context.probe / "lock", None
    with open(path, "w") as first, open(path, "w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fault = "two can hold the same lock at once"
            except BlockingIOError:
                fcntl.flock(first, fcntl.LOCK_UN)
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            fault = f"flock fails: {error.strerror}"
    return ("error", f"{fault} ({kind})", MOVE_CACHE) if fault else ("ok", f"flock works ({kind})")


def _file_system(path: Path, mounts: str) -> str:
    """Type of the file system that a path is on, from the text of /proc/self/mounts."""
    kinds = {}
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        kinds[re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), place)] = kind
    path = path.resolve()
    return next((kinds[str(p)] for p in (path, *path.parents) if str(p) in kinds), "unknown")


def check_clock(context: Context) -> Found:
    """The clock of the cache's disk against this machine's: builds go by times of change."""
    if context.refusal:
        return "warning", "not checked: the cache folder cannot be written"
    file = context.probe / "clock"
    file.touch()
    ahead = file.stat().st_mtime - time.time()
    if abs(ahead) <= 2:
        return "ok", "that of the disk agrees with this machine's"
    found = f"that of the disk is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'}"
    return "warning", f"{found} this machine's: edits may go unseen", "set both clocks by NTP"


def check_sources(context: Context) -> Found:
    """Sources from the future count as newer than what is made of them, for ever."""
    rooms = [context.root / name for name in ("ops", "kernels", "include", "jit")]
    files = [file for room in rooms for file in sorted(room.rglob("*.*")) if file.is_file()]
    late = [str(file) for file in files if file.stat().st_mtime > time.time() + 2]
    if not late:
        return "ok", f"{len(files)} files, none with a time in the future"
    found = f"a time in the future, {len(late)} files, {late[0]} among them: looked at every time"
    return "warning", found, "$ touch " + " ".join(map(shlex.quote, late))


CHECKS = (
    ("Python", check_python),
    ("Python.h", check_headers),
    ("torch", check_torch),
    ("NumPy", check_numpy),
    ("setuptools", check_setuptools),
    ("ninja", check_ninja),
    ("C++ compiler", check_compiler),
    ("nvcc", check_nvcc),
    ("nvcc and torch", check_toolkit),
    ("nvcc and C++", check_host_compiler),
    ("architectures", check_architectures),
    ("driver", check_driver),
    ("GPU", check_gpu),
    ("settings", check_settings),
    ("sources", check_sources),
    ("disk", check_disk),
    ("temporary files", check_temporary),
    ("file locks", check_flock),
    ("clock", check_clock),
    ("cache", check_cache),
)


def _run(command: list[str], patience: int = 1, **environment) -> tuple[bool, str]:
    """Whether a command ends well, and all that it says."""
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C", **environment},
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=patience * TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # with the programs that it started
                return False, f"error: it does not end within {patience * TIMEOUT} s"
    except OSError as error:
        return False, f"error: {error.strerror}"
    if process.returncode < 0:
        said += f"\nerror: killed by {signal.Signals(-process.returncode).name}"
    return process.returncode == 0, said


def _first_error(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()] or ["it says nothing"]
    signs = re.compile(r"\b(error|fatal|undefined|cannot find)\b")
    return next((line for line in lines if signs.search(line)), lines[0])[:300]


def _last_line(said: str) -> str:
    return (said.strip() or "it says nothing").splitlines()[-1]


def _cure(cures: tuple[tuple[str, str], ...], error: str) -> str:
    """The first cure whose pattern is in the error."""
    return next(cure for pattern, cure in cures if re.search(pattern, error))


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
