"""The doctor's findings, each with the fault made for real.

A compiler, nvcc, ninja or driver that is faulty is a small program in its place that says what the
real one says. What only a process can have, such as a file system that cannot lock, is made by a
library of ours that comes before libc.
"""

import html
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from loader.jit.machine import toolchain
from loader.jit.tools import doctor as d
from loader.jit.tools.doctor import checkout, compilers, disk, examine, report
from loader.jit.tools.doctor import context as c
from loader.jit.tools.doctor.checks import CHECKS as ALL

FACTS = {
    "torch": "2.11.0+cu130",
    "git": "70d99e998b4955e0",
    "cuda": "13.0",
    "numpy": "2.4.6",
    "setuptools": "81.0.0",
    "flags": ["-gencode=arch=compute_90,code=sm_90"],
}
CHECKS = dict(ALL)
NVCC_13 = "Cuda compilation tools, release 13.0, V13.0.88"
KNOWN = "\n".join(f"compute_{n}" for n in (75, 80, 86, 90, 100, 103, 110, 120, 121))
NO_NAMESPACE = subprocess.run(
    ["unshare", "-rm", "true"], capture_output=True, check=False
).returncode
needs_namespace = pytest.mark.skipif(NO_NAMESPACE != 0, reason="mounting is not allowed here")

# The package `loader` without its body, which would build.
ALONE = f"""
import sys, types
package = types.ModuleType("loader"); package.__path__ = [{str(ROOT)!r}]
sys.modules["loader"] = package
from pathlib import Path
from loader.jit.tools import doctor as d
from loader.jit.tools.doctor import context as c, examine
from loader.jit.tools.doctor.checks import CHECKS
facts = {FACTS!r}
def look(subject, cache, **changes):
    folder, probe, refusal = examine.make_probe(Path(cache))
    context = c.Context(
        Path({str(ROOT)!r}), Path(cache), folder, probe, refusal, "9.0", lambda: facts | changes
    )
    finding = examine.guarded(subject, dict(CHECKS)[subject], context)
    __import__("shutil").rmtree(probe)
    print(*(finding.state, finding.found, finding.cure), sep="|")
"""

# What libc says, changed as the environment asks.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <time.h>
int flock(int fd, int operation) {
    const char* how = getenv("FAKE_FLOCK");
    if (how && !strcmp(how, "lies")) return 0;
    if (how) { errno = atoi(how); return -1; }
    int (*real)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    return real(fd, operation);
}
static int change(struct statvfs* disk) {
    if (getenv("FAKE_FREE_MB")) disk->f_bavail = atol(getenv("FAKE_FREE_MB")) * 1048576 / disk->f_frsize;
    if (getenv("FAKE_INODES")) disk->f_files = 1 << 20, disk->f_favail = atol(getenv("FAKE_INODES"));
    return 0;
}
int statvfs(const char* path, struct statvfs* disk) {
    int (*real)(const char*, struct statvfs*) = (int (*)(const char*, struct statvfs*))dlsym(RTLD_NEXT, "statvfs");
    return real(path, disk) ? -1 : change(disk);
}
int statvfs64(const char* path, struct statvfs64* disk) { return statvfs(path, (struct statvfs*)disk); }
int clock_gettime(clockid_t clock, struct timespec* now) {
    int (*real)(clockid_t, struct timespec*) = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME && getenv("FAKE_CLOCK")) now->tv_sec += atol(getenv("FAKE_CLOCK"));
    return status;
}
"""

# NVIDIA's management library with one GPU of capability 9.0.
NVML = """
#include <stdlib.h>
static int number(const char* name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }
int nvmlInit_v2(void) { return number("FAKE_INIT", 0); }
int nvmlShutdown(void) { return 0; }
const char* nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "Unknown Error"; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { *version = number("FAKE_DRIVER", 13000); return 0; }
int nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void** device) { *device = 0; return 0; }
int nvmlDeviceGetCudaComputeCapability(void* device, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    names = (
        "CXX",
        "CC",
        "NVCC_CCBIN",
        "PYTORCH_NVCC",
        "TORCH_CUDA_ARCH_LIST",
        "MAX_JOBS",
        "LOADER_NATIVE",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that compiles C code to a library of that name, once; its path."""
    folder = tmp_path_factory.mktemp("libraries")

    def make(name: str, code: str) -> Path:
        path = folder / name
        if not path.exists():
            command = ["cc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-o", str(path), "-ldl"]
            subprocess.run(command, input=code, text=True, check=True)
        return path

    return make


@pytest.fixture
def context(tmp_path):
    cache, probe = tmp_path / "cache", tmp_path / "cache" / ".doctor-probe"
    probe.mkdir(parents=True)
    return c.Context(ROOT, cache, cache, probe, None, "9.0", lambda: FACTS)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """A function that puts a shell script on PATH under a name; its path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)

    def make(name: str, script: str) -> str:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def nvcc(tool, monkeypatch):
    """A function that puts an nvcc in place that tells its version and compiles, or says why not."""

    def make(version: str = NVCC_13, known: str = KNOWN, refusal: str = "") -> None:
        fail = f"echo {shlex.quote(refusal)} >&2; exit 1" if refusal else "exit 0"
        script = f'case "$*" in --version) echo "{version}";; --list-gpu-arch) echo "{known}";; *) {fail};; esac'
        monkeypatch.setenv("PYTORCH_NVCC", tool("fake-nvcc", script))

    return make


def look(subject: str, context: c.Context, **facts) -> tuple[str, str, str]:
    """State, finding and cure of one check."""
    if facts:
        context = replace(context, facts=lambda: FACTS | facts)
    finding = examine.guarded(subject, CHECKS[subject], context)
    assert (finding.state == "ok") == (finding.cure == "") or "not checked" in finding.found
    return finding.state, finding.found, finding.cure


def run_alone(code: str, *before: str, **changes) -> list[str]:
    """Run code after ALONE in a process of its own; state, finding and cure that it prints."""
    env = {**os.environ, **{name: str(value) for name, value in changes.items()}}
    command = [*before, sys.executable, "-c", ALONE + code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n").split("|")


def ask_torch(path: Path, monkeypatch, name: str, code: str) -> dict:
    """What torch says with such a module `name` in the way of the real one."""
    (path / name).mkdir(parents=True)
    (path / name / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(path)
    return examine.ask_torch("9.0")


# The whole


def run_main(*arguments: str, caches: tuple, **changes):
    code = f"code = d.main({[*arguments]!r}, Path({str(ROOT)!r}), tuple(map(Path, {[*map(str, caches)]!r})))\n"
    code += "assert 'torch' not in sys.modules\nsys.exit(code)"
    env = {**os.environ, **{name: str(value) for name, value in changes.items()}}
    command = [sys.executable, "-c", ALONE + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_machine_that_builds(tmp_path):
    """Every check says something, nothing is left behind, nobody is named."""
    cache = tmp_path / "not" / "yet"
    done = run_main("--json", caches=(cache,), HOME=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["ok"]) == (0, "", True), done.stdout
    assert [finding["subject"] for finding in report["findings"]] == [*CHECKS]
    assert {"python", "platform", "torch", "cuda"} <= {*report["versions"]}
    assert not [*tmp_path.iterdir()]
    assert str(tmp_path) not in done.stdout and "~/not/yet" in done.stdout
    assert not [f for f in report["findings"] if "Error" in f["found"]]


def test_a_torch_that_does_not_import(tmp_path):
    """The rest is checked all the same, and what needs torch says so."""
    (tmp_path / "torch").mkdir()
    missing = "libcudart.so.13: cannot open shared object file: No such file or directory"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({missing!r})")
    done = run_main(caches=(tmp_path / "cache",), PYTHONPATH=tmp_path, COLUMNS=200)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert f"ERROR torch does not import: ImportError: {missing}" in " ".join(done.stdout.split())
    (unchecked,) = (line for line in lines if line.startswith("warning  nvcc  "))
    assert unchecked.endswith("not checked: torch does not import")
    assert "a trial library compiles" in done.stdout
    assert lines[-1].startswith("A build would not work: 1 error")


def test_a_torch_that_crashes(tmp_path, monkeypatch):
    facts = ask_torch(tmp_path, monkeypatch, "torch", "import os; os.kill(os.getpid(), 11)")
    assert facts == {"torch_error": "error: killed by SIGSEGV"}


def test_the_table_is_as_wide_as_the_terminal_and_leaves_commands_whole(monkeypatch):
    command = "$ pip install " + " ".join(f"'package-{i}==13.0.*'" for i in range(9))
    findings = [
        d.Finding("ninja", "ok", "1.13"),
        d.Finding("C++ compiler", "error", "words " * 40, f"{'cure ' * 30}\n{command}"),
    ]
    whole = d.Report(findings, {})
    monkeypatch.setenv("COLUMNS", "70")
    lines = str(whole).splitlines()
    assert repr(whole) == str(whole)  # at a prompt
    assert lines[0] == "ok       ninja         1.13"
    assert lines[1].startswith("ERROR    C++ compiler  words words")
    assert [line.strip() for line in lines if len(line) > 70] == [command]
    assert (
        lines[2].startswith(" " * 23 + "words") and lines[-1] == "A build would not work: 1 error."
    )
    page = d.Report([d.Finding("a", "warning", "<b>", "$ x > y")], {})._repr_html_()
    assert html.escape("<b>") in page and "<code>x &gt; y</code>" in page and "<b>," not in page


def test_a_bug_report_names_no_user(monkeypatch):
    monkeypatch.setattr(
        report.pwd, "getpwuid", lambda _: type("", (), {"pw_dir": "/home/ann", "pw_name": "ann"})
    )
    found = "/home/ann/x /scratch/ann/y /home/anna/z annotated"
    (finding,) = json.loads(d.Report([d.Finding("disk", "ok", found)], {}).json())["findings"]
    assert finding["found"] == "~/x /scratch/USER/y /home/anna/z annotated"


def test_a_check_that_fails_itself_is_a_warning():
    def check(context):
        raise KeyError("oops")

    finding = examine.guarded("disk", check, None)
    assert finding == d.Finding("disk", "warning", "not checked: KeyError: 'oops'")


def test_a_tool_that_hangs_is_ended_with_what_it_started(tool, monkeypatch, context):
    monkeypatch.setattr(c, "TIMEOUT", 0.3)
    monkeypatch.setenv("CXX", tool("slow-c++", "sleep 60 & sleep 60"))
    started = time.monotonic()
    state, found, _ = look("C++ compiler", context)
    assert (state, time.monotonic() - started < 5) == ("error", True)
    assert "does not end within 0.3 s" in found


# Python and its packages


def test_python_too_old(monkeypatch, context):
    assert look("Python", context)[0] == "ok"
    monkeypatch.setattr(examine.platform, "python_version", lambda: "3.9.18")
    state, found, _ = look("Python", context)
    assert state == "error" and found.startswith("3.9.18") and "3.10 or newer" in found


def test_headers_missing(monkeypatch, context, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    state, found, cure = look("Python.h", context)
    assert state == "warning" and f"{tmp_path}/Python.h is missing" in found
    assert f"python{sysconfig.get_python_version()}-dev" in cure


def test_torch_too_old(context):
    state, found, cure = look("torch", context, torch="2.9.1+cu128", cuda="12.8")
    assert state == "error" and "2.10 or newer is needed" in found and "'torch>=2.10'" in cure
    assert look("torch", context)[1] == "2.11.0+cu130 (git 70d99e99), CUDA 13.0"


def test_numpy_that_torch_cannot_use(tmp_path, monkeypatch, context):
    """A package with the names of NumPy but without its C interface, as a broken upgrade leaves."""
    code = "__version__ = '1.21.0'\nclass ndarray: pass\ndef zeros(n): return ndarray()\n"
    code += "def __getattr__(name):\n    if name[:2] == '__': raise AttributeError(name)\n    return type(name, (), {})\n"
    facts = ask_torch(tmp_path, monkeypatch, "numpy", code)
    state, found, cure = look("NumPy", context, **facts)
    assert (state, found) == (
        "warning",
        "torch cannot use NumPy 1.21.0: RuntimeError: Numpy is not available",
    )
    assert "--force-reinstall numpy" in cure


def test_numpy_that_torch_does_not_import_with(tmp_path, monkeypatch, context):
    facts = ask_torch(tmp_path, monkeypatch, "numpy", "__version__ = '1.21.0'")
    state, found, cure = look("torch", context, **facts)
    assert state == "error" and "module 'numpy' has no attribute" in found
    assert cure == "$ pip install --force-reinstall numpy"


def test_no_numpy_is_no_fault(context):
    error = "ModuleNotFoundError: No module named 'numpy'"
    assert look("NumPy", context, numpy="", numpy_error=error)[0] == "ok"


@pytest.mark.parametrize(
    "code, state, says",
    [
        (
            "raise ModuleNotFoundError(\"No module named 'setuptools'\")",
            "error",
            "No module named 'setuptools'",
        ),
        ("__version__ = '39.0'", "error", "39.0; torch.utils.cpp_extension does not import"),
    ],
    ids=["missing", "too old to import"],
)
def test_setuptools(code, state, says, tmp_path, monkeypatch, context):
    facts = ask_torch(tmp_path, monkeypatch, "setuptools", code)
    got, found, cure = look("setuptools", context, **{"setuptools": "", **facts})
    assert (got, says in found) == (state, True), found
    assert "'setuptools>=70'" in cure


def test_setuptools_old_but_working(context):
    state, found, cure = look("setuptools", context, setuptools="65.5.0")
    assert (state, found) == ("warning", "65.5.0; 70 or newer is expected") and ">=70" in cure


@pytest.mark.parametrize(
    "script, says",
    [
        (None, "neither installed nor on PATH"),
        ("echo 1.2.0", "1.2.0, {}; too old"),
        (
            "echo 'ninja: Permission denied' >&2; exit 126",
            "{} does not run: ninja: Permission denied",
        ),
        ("echo 1.10.0", None),
    ],
)
def test_ninja(script, says, tool, monkeypatch, context):
    monkeypatch.setitem(sys.modules, "ninja", None)  # as where its package is not installed
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    path = tool("ninja", script) if script else monkeypatch.setenv("PATH", "/nonexistent")
    state, found, cure = look("ninja", context)
    assert state == ("error" if says else "ok")
    assert found == (says or "1.10.0, {}").format(path)
    assert cure == ("$ pip install ninja" if says else "")


# The C++ compiler


def test_no_compiler(monkeypatch, context):
    monkeypatch.setenv("PATH", "/nonexistent")
    state, found, cure = look("C++ compiler", context)
    assert (state, found) == ("error", "`c++` is not on PATH") and "apt install g++" in cure


@pytest.mark.parametrize(
    "flags, says, cure",
    [
        ("-nostdinc++", "string: No such file or directory", "$ apt install g++"),
        ("-fuse-ld=none-such", "error: ", "set CXX to a compiler that works"),
        ("-lnone-such", "cannot find -lnone-such", "set CXX to a compiler that works"),
    ],
)
def test_a_compiler_that_fails(flags, says, cure, monkeypatch, context):
    monkeypatch.setenv("CXX", f"g++ {flags}")
    state, found, got = look("C++ compiler", context)
    assert state == "error" and says in found and got.startswith(cure), (found, got)


@pytest.mark.parametrize(
    "says, cure",
    [
        ("c++: error: unrecognized command line option '-std=c++17'", "it is too old"),
        ("trial.cpp:1:0: error: bad value ('native') for '-march=' switch", "LOADER_NATIVE=0"),
        (
            "/usr/include/c++/12/cstdlib:75:15: fatal error: stdlib.h: No such file or directory",
            "$ apt install libc6-dev",
        ),
        ("trial.cpp:1:10: fatal error: 'string' file not found", "$ apt install g++"),
        ("collect2: fatal error: cannot find 'ld'", "$ apt install binutils"),
        ("/usr/bin/ld: cannot find -lstdc++: No such file or directory", "$ apt install g++"),
        (
            "/tmp/cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device",
            "make room there, or set TMPDIR",
        ),
    ],
)
def test_what_compilers_say(says, cure, tool, monkeypatch, context):
    monkeypatch.setenv("CXX", tool("odd-c++", f"echo {shlex.quote(says)} >&2; exit 1"))
    state, found, got = look("C++ compiler", context)
    assert state == "error" and found.endswith(says.split(": ", 1)[1]) and cure in got, (found, got)


def test_a_library_that_this_cpu_cannot_run(tool, monkeypatch, context):
    script = '[ "$1" = --version ] && exit; for last; do :; done; echo "int trial(int n) { __builtin_trap(); }" | cc -shared -fPIC -x c - -o "$last"'
    monkeypatch.setenv("CXX", tool("future-c++", script))
    state, found, cure = look("C++ compiler", context)
    assert state == "error" and "killed by SIG" in found and "LOADER_NATIVE=0" in cure


def test_a_library_that_does_not_load(tool, monkeypatch, context):
    monkeypatch.setenv(
        "CXX", tool("empty-c++", '[ "$1" = --version ] && exit; for last; do :; done; : > "$last"')
    )
    state, found, _ = look("C++ compiler", context)
    assert state == "error" and "does not load" in found and "file too short" in found


@needs_namespace
def test_a_cache_on_a_disk_mounted_noexec(tmp_path):
    code = f"""
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", {str(tmp_path)!r}], check=True)
look("C++ compiler", {str(tmp_path)!r})"""
    state, found, cure = run_alone(code, "unshare", "-rm")
    assert state == "error" and "failed to map segment" in found
    assert cure.startswith("the disk is mounted noexec: set LOADER_CACHE_DIR")


# nvcc


def test_flags_of_the_user_that_the_compiler_refuses(monkeypatch, context):
    monkeypatch.setenv("CXXFLAGS", "-fno-such-flag")
    state, found, _ = compilers.check_compiler(context)
    assert state == "error" and "-fno-such-flag" in found
    monkeypatch.setenv("CXXFLAGS", "'-DX")
    state, found, cure = checkout.check_settings(context)
    assert (state, cure) == ("error", "$ unset CXXFLAGS") and "CXXFLAGS" in found


def test_no_nvcc(monkeypatch, context):
    monkeypatch.setattr(toolchain, "cuda_home", lambda: None)
    state, found, cure = look("nvcc", context)
    assert (state, found) == ("warning", "not found: only the CPU part is built")
    wheels = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
    assert cure.endswith("$ pip install " + " ".join(f"'{name}==13.0.*'" for name in wheels))
    assert "pip" not in look("nvcc", context, cuda="12.8")[2]  # no such wheels then
    assert look("nvcc", replace(context, architectures=""))[0] == "ok"
    assert look("nvcc", context, cuda=None)[:2] == ("ok", "not needed: torch is built without CUDA")
    monkeypatch.setenv("PYTORCH_NVCC", "/none/nvcc")
    assert look("nvcc", context)[1:] == (
        "/none/nvcc not found: only the CPU part is built",
        "unset PYTORCH_NVCC",
    )


def test_nvcc_that_does_not_run(tool, monkeypatch, context):
    says = "nvcc: error while loading shared libraries: libdl.so.2: cannot open shared object file"
    monkeypatch.setenv("PYTORCH_NVCC", tool("fake-nvcc", f"echo '{says}'; exit 127"))
    state, found, cure = look("nvcc", context)
    assert state == "error" and says in found and "CUDA toolkit 13.0" in cure
    assert look("nvcc", replace(context, architectures=""))[0] == "warning"


def test_cuda_home_without_nvcc(nvcc, monkeypatch, context, tmp_path):
    nvcc()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    state, found, cure = look("nvcc", context)
    assert (state, cure) == ("warning", "$ unset CUDA_HOME") and "has no bin/nvcc" in found


@pytest.mark.parametrize(
    "release, state, says",
    [
        ("13.0", "ok", "13.0"),
        ("13.1", "warning", "most likely"),
        ("12.8", "error", "major versions"),
    ],
)
def test_nvcc_of_another_version_than_torch(release, state, says, nvcc, context):
    nvcc(f"Cuda compilation tools, release {release}, V{release}.61")
    got, found, cure = look("nvcc and torch", context)
    assert got == state and says in found and bool(cure) == (state != "ok")


GNU = "/usr/include/crt/host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than 11 are not supported! The nvcc flag '-allow-unsupported-compiler' can be used"
CLANG = "/usr/include/crt/host_config.h:151:2: error: #error -- unsupported clang version! clang version must be less than 21 and greater than 3.2 ."


def test_nvcc_that_refuses_the_compiler(nvcc, tool, monkeypatch, context):
    """The compiler to take is one that is here, where one is."""
    nvcc(refusal=GNU.replace("11", "4"))
    tool("g++-3", "exit 0")
    state, found, cure = look("nvcc and C++", context)
    assert state == "error" and "gcc versions later than 4 are not supported!" in found
    assert found.startswith("with nvcc's default compiler: ")
    assert cure == "let nvcc use g++-3, which is here:\n$ export NVCC_CCBIN=g++-3"
    monkeypatch.setenv("CC", "gcc")
    assert look("nvcc and C++", context)[2].endswith("$ export CC=g++-3")
    assert look("nvcc and C++", replace(context, architectures=""))[0] == "warning"


def test_the_compiler_to_install_for_nvcc(nvcc, context):
    nvcc(refusal=GNU.replace("11", "5"))
    cure = look("nvcc and C++", context)[2]
    assert cure == "let nvcc use g++-5 (or older)\n$ apt install g++-5\n$ export NVCC_CCBIN=g++-5"
    nvcc(refusal=CLANG)
    cure = look("nvcc and C++", context)[2]
    assert re.search(r"\$ export NVCC_CCBIN=clang\+\+-(20|1\d|\d)$", cure)
    nvcc(refusal="sh: 1: cicc: not found")
    assert "'nvidia-nvvm==13.0.*'" in look("nvcc and C++", context)[2]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_real_nvcc_and_a_compiler_that_is_too_new(tool, monkeypatch, context):
    assert look("nvcc and C++", context)[0] == "ok"
    monkeypatch.setenv("CC", tool("g++-99", 'exec g++ -U__GNUC__ -D__GNUC__=99 "$@"'))
    state, found, cure = look("nvcc and C++", context)
    assert state == "error" and "unsupported GNU version! gcc versions later than" in found
    assert "g++-" in cure and "$ export CC=g++-" in cure
    monkeypatch.setenv("CC", "/none/g++")
    assert "unset CC, or set CC to a C++ compiler that is there" in look("nvcc and C++", context)[2]


def test_architectures(nvcc, monkeypatch, context):
    nvcc()
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert look("architectures", context)[:2] == ("ok", "9.0, from TORCH_CUDA_ARCH_LIST")
    old = look("architectures", context, flags=["-gencode=arch=compute_61,code=sm_61"])
    assert old[0] == "error" and "knows those from 7.5 to 12.1" in old[1] and "older CUDA" in old[2]
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    new = look("architectures", context, flags=["-gencode=arch=compute_130,code=sm_130"])
    assert new[0] == "error" and new[2].endswith("$ export TORCH_CUDA_ARCH_LIST=12.1+PTX")


def test_architectures_that_cannot_be_checked(context):
    facts = {name: value for name, value in FACTS.items() if name != "flags"}
    state, found, _ = look("architectures", replace(context, facts=lambda: facts))
    assert state == "warning" and found.startswith("not checked: torch.utils.cpp_extension")


def test_an_architecture_list_that_torch_refuses(context, monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "sm_90")
    facts = examine.ask_torch("sm_90")
    assert facts["torch"] and not facts.get("extension_error")
    state, found, cure = look("architectures", replace(context, architectures="sm_90"), **facts)
    assert state == "error" and "Unknown CUDA arch (sm_90)" in found and "'8.0;9.0+PTX'" in cure


# Driver and GPU


def test_driver_and_gpu(made, tmp_path):
    library = made("libnvidia-ml.so.1", NVML)
    env = {"LD_LIBRARY_PATH": library.parent, "CUDA_VISIBLE_DEVICES": "0"}

    def ask(subject: str, facts: str = "", **changes) -> list[str]:
        return run_alone(f"look({subject!r}, {str(tmp_path)!r}{facts})", **env | changes)

    assert ask("driver") == ["ok", "supports CUDA 13.0", ""]
    old = ask("driver", FAKE_DRIVER=12040)
    assert old[:2] == ["warning", "supports CUDA 12.4, torch needs 13.0: the GPU cannot be used"]
    assert old[2] == "install a newer driver, or a torch built for CUDA 12"
    broken = ask("driver", FAKE_INIT=18)
    assert broken[:2] == ["warning", "does not start: Driver/library version mismatch"]
    assert ask("GPU") == ["ok", "compute capability 9.0", ""]
    hidden = ask("GPU", CUDA_VISIBLE_DEVICES="")
    assert hidden[0] == "warning" and hidden[1].endswith("hidden by CUDA_VISIBLE_DEVICES=''")
    without = ask("GPU", ", cuda=None")
    assert without[0] == "warning" and "torch is built without CUDA" in without[1]


@needs_namespace
@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="this machine has a driver")
def test_a_gpu_without_driver_library(tmp_path):
    """As in a container that was given the device alone."""
    code = f"""
import subprocess
subprocess.run("mount -t tmpfs none /dev && touch /dev/nvidia0", shell=True, check=True)
look("driver", {str(tmp_path)!r})"""
    state, found, cure = run_alone(code, "unshare", "-rm")
    assert state == "warning" and found.startswith("/dev/nvidia0 is there")
    assert "NVIDIA_DRIVER_CAPABILITIES" in cure


# Settings, sources, and the disk


@pytest.mark.parametrize(
    "name, value, state",
    [
        ("LOADER_BUILD", "sometimes", "error"),
        ("LOADER_CACHE_LIMIT", "2XB", "error"),
        ("LOADER_CACHE_LIMIT", "2GiB", "ok"),
        ("LOADER_CACHE_DIR", ":", "error"),
        ("CXX", 'g++ "', "error"),
        ("MAX_JOBS", "many", "warning"),
        ("MAX_JOBS", "0", "warning"),
        ("MAX_JOBS", "3", "ok"),
    ],
)
def test_settings(name, value, state, monkeypatch, context):
    monkeypatch.setenv(name, value)
    got, found, cure = look("settings", context)
    assert got == state
    if state != "ok":
        assert name in found and repr(value) in found and cure == f"$ unset {name}"


def test_sources_from_the_future(tmp_path, context):
    (tmp_path / "ops").mkdir()
    late = tmp_path / "ops" / "it's late.cpp"
    late.touch()
    context = replace(context, root=tmp_path)
    assert look("sources", context)[0] == "ok"
    os.utime(late, (time.time() + 3600,) * 2)
    state, found, cure = look("sources", context)
    assert state == "warning" and str(late) in found
    subprocess.run(cure[2:], shell=True, check=True)
    assert look("sources", context)[0] == "ok"


@pytest.mark.parametrize(
    "subject, fault, state, says",
    [
        ("disk", {"FAKE_FREE_MB": 50}, "error", "50 MB free"),
        ("disk", {"FAKE_FREE_MB": 500}, "warning", "500 MB free"),
        ("disk", {"FAKE_FREE_MB": 5000, "FAKE_INODES": 7}, "error", "only 7 files"),
        ("temporary files", {"FAKE_FREE_MB": 50}, "error", "set TMPDIR"),
        ("file locks", {"FAKE_FLOCK": 37}, "error", "No locks available"),
        ("file locks", {"FAKE_FLOCK": 95}, "error", "Operation not supported"),
        ("file locks", {"FAKE_FLOCK": "lies"}, "error", "two can hold the same lock at once"),
        ("file locks", {}, "ok", "flock works ("),
        ("clock", {"FAKE_CLOCK": 3600}, "warning", "3600 s behind"),
        ("clock", {"FAKE_CLOCK": -60}, "warning", "60 s ahead of"),
        ("clock", {}, "ok", "agrees"),
    ],
)
def test_the_disk(subject, fault, state, says, made, tmp_path):
    shim = made("shim.so", SHIM)
    said = run_alone(f"look({subject!r}, {str(tmp_path)!r})", LD_PRELOAD=shim, **fault)
    assert said[0] == state and says in "|".join(said), said
    assert state == "ok" or said[2]


@needs_namespace
def test_a_full_disk(tmp_path):
    """A real one, of one MB."""
    code = f"""
import subprocess
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", {str(tmp_path)!r}], check=True)
look("disk", {str(tmp_path)!r})"""
    state, found, _ = run_alone(code, "unshare", "-rm")
    assert (state, found) == ("error", f"1 MB free in {tmp_path}")


def test_the_type_of_a_file_system_is_named(tmp_path):
    mounts = f"none / ext4 rw 0 0\nserver:/x {tmp_path}/a\\040b nfs4 rw 0 0\n"
    (tmp_path / "a b" / "c").mkdir(parents=True)
    assert disk.file_system(tmp_path / "a b" / "c", mounts) == "nfs4"
    assert disk.file_system(tmp_path, mounts) == "ext4"


# Rights


@pytest.fixture
def mine():
    """A folder of a user who is not root; this process is that user meanwhile."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid() or 65534
    folder.chmod(0o755)
    os.chown(folder, user, -1)
    before = os.geteuid()
    os.seteuid(user)
    yield folder
    os.seteuid(before)
    subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
    shutil.rmtree(folder)


def look_at_cache(cache: Path) -> tuple[str, str, str]:
    folder, probe, refusal = examine.make_probe(cache)
    context = c.Context(ROOT, cache, folder, probe, refusal, "", lambda: FACTS)
    try:
        if refusal:
            assert look("file locks", context)[1].startswith("not checked")
            assert look("clock", context)[1].startswith("not checked")
        return look("cache", context)
    finally:
        probe.rmdir()


def test_a_cache_that_can_be_written(mine):
    assert look_at_cache(mine) == ("ok", f"{mine} can be written", "")
    assert look_at_cache(mine / "a" / "b") == ("ok", f"{mine / 'a' / 'b'} will be created", "")
    (mine / "store").mkdir(mode=0o700)
    assert look_at_cache(mine)[0] == "ok" and os.listdir(mine) == ["store"]
    assert os.listdir(mine / "store") == []


def test_a_cache_that_cannot_be_written(mine):
    (mine / "store").mkdir(mode=0o500)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and "Permission denied (store); what is built there serves" in found
    (mine / "store").chmod(0o700)
    mine.chmod(0o555)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and "Permission denied" in found and "set LOADER_CACHE_DIR" in cure
    assert look_at_cache(mine / "not" / "yet")[0] == "error"
    mine.chmod(0o755)
    (mine / "file").write_text("")
    state, found, _ = look_at_cache(mine / "file")
    assert state == "error" and "Not a directory" in found


@pytest.mark.parametrize("name", ["store", "work"])
def test_a_cache_that_others_can_write(name, mine):
    (mine / name).mkdir()
    (mine / name).chmod(0o777)
    state, found, cure = look_at_cache(mine)
    assert (
        state == "error" and "can be written by others (mode 777)" in found and "chmod 700" in cure
    )
    (mine / name).rmdir()
    (mine / name).symlink_to("/tmp")
    state, found, cure = look_at_cache(mine)
    assert (state, cure) == ("error", "remove it") and "no link" in found


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_a_cache_of_somebody_else(mine):
    (mine / "store").mkdir(mode=0o755)
    user = os.geteuid()
    os.seteuid(0)
    os.chown(mine / "store", 1234, -1)
    os.seteuid(user)
    state, found, cure = look_at_cache(mine)
    assert state == "error" and "belongs to user 1234, not to you" in found
    assert cure == "set LOADER_CACHE_DIR to a folder of your own"


def test_a_parent_that_everybody_can_write(mine):
    (mine / "cache").mkdir()
    mine.chmod(0o777)
    state, found, cure = look_at_cache(mine / "cache")
    assert state == "warning" and found.startswith(f"{mine} can be written by everybody")
    subprocess.run(cure[2:], shell=True, check=True)
    assert look_at_cache(mine / "cache")[0] == "ok"
    mine.chmod(0o1777)
    assert look_at_cache(mine / "cache")[0] == "ok"


def test_layers_that_are_only_read(mine):
    assert disk.check_layer(mine / "none", None)[0] == "warning"
    mine.chmod(0o555)
    assert disk.check_layer(mine, None) == ("ok", f"{mine} is read")
    mine.chmod(0o755)
    (mine / "store").mkdir()
    (mine / "store").chmod(0o777)
    assert disk.check_layer(mine, None)[0] == "error"
