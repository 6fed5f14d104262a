"""Faults of a machine, made for real, for the tests of the doctor's findings.

A compiler, nvcc or driver that is faulty is a small program in its place that says what the
real one says. What only a process can have, such as a file system that cannot lock, is made by a
library of ours that comes before libc.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT

from loader.jit.tools.doctor import context as c
from loader.jit.tools.doctor import examine
from loader.jit.tools.doctor.examine import CHECKS

FACTS = {
    "torch": "2.11.0+cu130",
    "git": "70d99e998b4955e0",
    "cuda": "13.0",
    "numpy": "2.4.6",
    "setuptools": "81.0.0",
    "flags": ["-gencode=arch=compute_90,code=sm_90"],
}
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
from loader.jit.tools import cli
from loader.jit.tools.doctor import context as c, examine
from loader.jit.tools.doctor.examine import CHECKS
facts = {FACTS!r}
def look(subject, cache, **changes):
    folder, probe, refusal = examine.make_probe(Path(cache))
    context = c.Context(
        Path({str(ROOT)!r}), Path(cache), folder, probe, refusal, "9.0", lambda: facts | changes
    )
    finding = examine.guarded(subject, CHECKS[subject], context)
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
