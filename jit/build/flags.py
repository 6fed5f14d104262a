"""Flags, include folders and libraries as torch.utils.cpp_extension gives them to its compilers.

To import that module costs 0.3 s and asks setuptools, so its answer is kept in the work folder, as
are those of the compiler to the few questions that we have.
"""

import contextlib
import hashlib
import json
import logging
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, product, takewhile
from pathlib import Path
from typing import Any
from unittest import mock  # which torch has imported

from ..errors import BuildError
from ..machine import files
from ..machine.child import start
from ..machine.forks import Lock
from ..machine.toolchain import Toolchain
from .workshop import behind

_FORMAT = 3  # raise when the questions, or the form of the answers, change
_NAME, _INCLUDE, _EXTRA = "@name@", "/@include@", "@extra@"  # what a caller brings, in the answers
_one_at_a_time = Lock()


@dataclass(frozen=True)
class Flags:
    """Command lines without the compiler, the input and the output.

    `lines` has them by kind (`cxx`, `cuda`, `link`, `program`, and with `+cuda` where a part of the
    unit is CUDA), words in which marks stand for what a caller brings.
    """

    lines: dict[str, list[str]]
    linker: list[str]  # has the compiler use the fastest linker that works with it
    quicker: list[str]  # lets g++ compile in half the time, to the same end
    together: list[str]  # lets ptxas do a source's kernels at once, to the same code of each

    def cxx(self, name: str, includes: list[str], extra: list[str], with_cuda: bool) -> list[str]:
        """Return the arguments for a C++ source of the module `name`."""
        return _filled(self.lines["cxx" + "+cuda" * with_cuda], extra, includes, name)

    def cuda(self, name: str, includes: list[str], extra: list[str]) -> list[str]:
        """Return the arguments for a CUDA source; a `-std=` in `extra` takes the place of ours."""
        line = self.lines["cuda+cuda"]
        if any(flag.startswith("-std=") for flag in extra):
            line = [word for word in line if not word.startswith("-std=")]
        return _filled(line, extra, includes, name)

    def link(self, extra: list[str], with_cuda: bool, standalone: bool = False) -> list[str]:
        """Return the arguments for the linker, behind the objects."""
        return _filled(self.lines[_linked(standalone) + "+cuda" * with_cuda], extra)


def check_compiler(toolchain: Toolchain) -> None:
    """Raise BuildError without a C++ compiler."""
    if toolchain.cxx is None:
        command = os.environ.get("CXX") or "c++"
        raise BuildError(
            f"no C++ compiler: `{command}` is not on PATH; install one "
            "(Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17",
            kind="missing_compiler",
        )


def _linked(standalone: bool) -> str:
    return "program" if standalone else "link"


def _filled(
    line: list[str], extra: list[str], includes: Iterable[str] = (), name: str = ""
) -> list[str]:
    given = {_EXTRA: extra, f"-I{_INCLUDE}": [f"-I{folder}" for folder in includes]}
    return [w for word in line for w in given.get(word, [word.replace(_NAME, name)])]


@cache
def of(toolchain: Toolchain, work: Path) -> Flags:
    """Return this toolchain's flags, which `work` keeps; BuildError without torch's module."""
    import torch

    asked = [_FORMAT, toolchain.identity, toolchain.cuda_home, os.environ.get("PATH")]
    asked += [torch.__file__, os.environ.get("CUDA_INC_PATH"), os.environ.get("CUDNN_HOME")]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    place = work / f"flags-{digest}.json"
    with _one_at_a_time:  # all units ask at once
        kept = files.read_record(place)
        if kept is None:
            with_nvcc = bool(toolchain.nvcc and toolchain.cuda_home)
            nvcc = toolchain.command("PYTORCH_NVCC") if with_nvcc else []
            # Meanwhile torch's module is imported.
            of_compiler = behind(_ask_compiler, toolchain.command("CXX"))
            of_ptxas = behind(_ask_ptxas, nvcc)
            with _cpp_extension(toolchain) as extension:
                kept = [_ask_torch(extension, with_nvcc), *of_compiler.result(), of_ptxas.result()]
            files.write_record(place, kept)
    return Flags(*kept)


def _ask_torch(extension: Any, with_nvcc: bool) -> dict[str, list[str]]:
    """Have torch make its command lines, and take them before it writes them to a file."""
    lines: dict[str, list[str]] = {}
    for with_cuda, standalone in product([False, True] if with_nvcc else [False], [True, False]):
        with mock.patch.object(extension, "_write_ninja_file") as write:
            libraries = extension._prepare_ldflags([_EXTRA], with_cuda, False, False, standalone)
            extension._write_ninja_file_to_build_library(
                path="",
                name=_NAME,
                sources=["a.cpp", "b.cu"] if with_cuda else ["a.cpp"],
                extra_cflags=[_EXTRA],
                extra_cuda_cflags=[_EXTRA],
                extra_sycl_cflags=[],
                extra_ldflags=libraries,
                extra_include_paths=[_INCLUDE],
                with_cuda=with_cuda,
                with_sycl=False,
                is_standalone=standalone,
            )
        kinds = {"cxx": "cflags", "cuda": "cuda_cflags", _linked(standalone): "ldflags"}
        for kind, name in kinds.items():
            flags = write.call_args.kwargs[name] or []
            lines[kind + "+cuda" * with_cuda] = [w for flag in flags for w in shlex.split(flag)]
    return lines


@contextlib.contextmanager
def _cpp_extension(toolchain: Toolchain) -> Iterator[Any]:
    """torch.utils.cpp_extension, told of our CUDA and architectures, and silent.

    But for warnings, of which it has none: their filters are the process's, and whoever has them
    put back, in a thread behind a caller, loses what the caller has set meanwhile.
    """
    changed = {"TORCH_CUDA_ARCH_LIST": toolchain.architectures or "9.0", "CC": None}
    before = {name: os.environ.get(name) for name in changed}
    logger = logging.getLogger("torch.utils.cpp_extension")
    silent = logger.disabled
    try:
        _set(changed)
        logger.disabled = True  # others' messages may come meanwhile
        try:
            from torch.utils import cpp_extension
        except (ImportError, Warning) as error:
            raise BuildError(
                f"torch.utils.cpp_extension cannot be imported: {error}; pip install -U setuptools",
                kind="machine",
            ) from None
        with mock.patch.object(cpp_extension, "CUDA_HOME", toolchain.cuda_home):
            yield cpp_extension
    finally:
        logger.disabled = silent
        _set(before)


def _set(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _ask_compiler(cxx: list[str]) -> list[list[str]]:
    """The flags for the linker, lld, gold or the compiler's own choice; and for a quicker g++.

    Kernels write the case of neighbouring elements out by hand; g++ would copy all other loops for
    that case as well. clang has no such flag, and fails where it is given.
    """

    def accepts(*flags: str) -> bool:
        return _works([*cxx, *flags, "-x", "c++", "/dev/null"])

    linkers = (f"-fuse-ld={name}" for name in ("lld", "gold") if shutil.which(f"ld.{name}"))
    works = (f for f in linkers if accepts("-shared", "-fPIC", f, "-o", "/dev/null"))
    quicker = "-fno-version-loops-for-strides"
    return [
        [*islice(works, 1), "-Wl,--as-needed"],
        [quicker] if accepts(quicker, "-fsyntax-only") else [],
    ]


def _ask_ptxas(nvcc: list[str]) -> list[str]:
    """The flag for as many threads as shorten a compilation, where nvcc's own ptxas knows it."""
    words = [*takewhile(lambda word: word[:1] != "-", nvcc)]
    found = shutil.which(words[-1]) if words else None  # behind ccache, before flags
    if not found:
        return []
    ptxas = os.path.join(os.path.dirname(os.path.realpath(found)), "ptxas")
    flag = f"--split-compile={min(4, os.cpu_count() or 1)}"
    there = os.access(ptxas, os.X_OK) and _works([ptxas, flag, "--version"])
    return ["-Xptxas", flag] if there else []


def _works(command: list[str]) -> bool:
    """Twice: what a busy machine refuses for once would be kept, and decide how all is built."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return any(start(command, **silent).wait() == 0 for _ in range(2))


def cuda_runtime(folder: Path, toolchain: Toolchain) -> list[str]:
    """Give the CUDA runtime the name that -lcudart looks for, which NVIDIA's wheels lack."""
    libraries = [Path(toolchain.cuda_home or "") / name for name in ("lib64", "lib")]
    found = [file for path in libraries for file in sorted(path.glob("libcudart.so*"))]
    if not found or any(file.name == "libcudart.so" for file in found):
        return []
    draft = folder / f".cudart-{os.getpid()}-{os.urandom(4).hex()}"
    draft.symlink_to(found[0])
    os.replace(draft, folder / "libcudart.so")
    return [f"-L{folder}"]
