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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import BuildError
from ..machine import files
from ..machine.forks import Lock
from ..machine.toolchain import Toolchain

_FORMAT = 1  # raise when the questions, or the form of the answers, change
# What stands in torch's command lines for what a caller brings.
_NAME, _INCLUDE, _CXX, _CUDA, _LINK = "@name@", "/@include@", "@cxx@", "@cuda@", "@link@"
_one_at_a_time = Lock()


@dataclass(frozen=True)
class Flags:
    """Command lines without the compiler, the input and the output.

    Attributes:
        lines: by kind (`cxx`, `cuda`, `link`, and each with `+cuda` where a part of the unit is
            CUDA), words in which marks stand for what a caller brings.
        linker: has the compiler use the fastest linker that works with it.
        quicker: lets g++ compile in half the time, to the same end.
    """

    lines: dict[str, list[str]]
    linker: tuple[str, ...]
    quicker: tuple[str, ...]

    def cxx(self, name: str, includes: list[str], extra: list[str], with_cuda: bool) -> list[str]:
        """Return the arguments for a C++ source of the module `name`."""
        line = self.lines["cxx+cuda" if with_cuda else "cxx"]
        return _filled(line, name, includes, {_CXX: extra})

    def cuda(self, name: str, includes: list[str], extra: list[str]) -> list[str]:
        """Return the arguments for a CUDA source; a `-std=` in `extra` takes the place of ours."""
        line = self.lines["cuda+cuda"]
        if any(flag.startswith("-std=") for flag in extra):
            line = [word for word in line if not word.startswith("-std=")]
        return _filled(line, name, includes, {_CUDA: extra})

    def link(self, extra: list[str], with_cuda: bool, standalone: bool = False) -> list[str]:
        """Return the arguments for the linker, behind the objects."""
        kind = ("program" if standalone else "link") + ("+cuda" if with_cuda else "")
        return _filled(self.lines[kind], "", [], {_LINK: extra})


def check_compiler(toolchain: Toolchain) -> None:
    """Raise BuildError without a C++ compiler."""
    if toolchain.cxx is None:
        command = os.environ.get("CXX") or "c++"
        raise BuildError(
            f"no C++ compiler: `{command}` is not on PATH; install one "
            "(Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17"
        )


def _filled(line: list[str], name: str, includes: list[str], parts: dict) -> list[str]:
    words: list[str] = []
    for word in line:
        if word in parts:
            words += parts[word]
        elif word == f"-I{_INCLUDE}":
            words += [f"-I{folder}" for folder in includes]
        else:
            words.append(word.replace(_NAME, name))
    return words


@cache
def of(toolchain: Toolchain, work: Path) -> Flags:
    """Return the flags of this toolchain, from the folder `work` where they are kept.

    Raises: BuildError where torch.utils.cpp_extension cannot be used.
    """
    import torch

    asked = [_FORMAT, toolchain.identity, toolchain.cuda_home, os.environ.get("PATH")]
    asked += [torch.__file__, os.environ.get("CUDA_INC_PATH"), os.environ.get("CUDNN_HOME")]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    place = work / f"flags-{digest}.json"
    kept = files.read_record(place)
    if kept is None:
        with _one_at_a_time:
            kept = {"lines": _ask_torch(toolchain)}
        kept |= {"linker": _linker(toolchain), "quicker": _quicker(toolchain)}
        files.write_record(place, kept)
    return Flags(kept["lines"], tuple(kept["linker"]), tuple(kept["quicker"]))


def _ask_torch(toolchain: Toolchain) -> dict[str, list[str]]:
    """Have torch make its command lines, and take them before it writes them to a file."""
    lines: dict[str, list[str]] = {}
    with _cpp_extension(toolchain) as extension:
        for with_cuda in (False, True) if toolchain.nvcc and toolchain.cuda_home else (False,):
            suffix = "+cuda" if with_cuda else ""
            taken: dict = {}
            write, extension._write_ninja_file = (
                extension._write_ninja_file,
                lambda *_, taken=taken, **facts: taken.update(facts),
            )
            try:
                extension._write_ninja_file_to_build_library(
                    path="",
                    name=_NAME,
                    sources=["a.cpp", "b.cu"] if with_cuda else ["a.cpp"],
                    extra_cflags=[_CXX],
                    extra_cuda_cflags=[_CUDA],
                    extra_sycl_cflags=[],
                    extra_ldflags=[_LINK],
                    extra_include_paths=[_INCLUDE],
                    with_cuda=with_cuda,
                    with_sycl=False,
                    is_standalone=False,
                )
            finally:
                extension._write_ninja_file = write
            lines[f"cxx{suffix}"] = _words(taken["cflags"])
            lines[f"cuda{suffix}"] = _words(taken["cuda_cflags"] or [])
            for kind, standalone in (("link", False), ("program", True)):
                libraries = extension._prepare_ldflags([], with_cuda, False, False, standalone)
                shared = [] if standalone else ["-shared"]
                lines[f"{kind}{suffix}"] = [*shared, _LINK, *_words(libraries)]
    return lines


def _words(flags: list[str]) -> list[str]:
    return [word for flag in flags for word in shlex.split(flag)]


@contextlib.contextmanager
def _cpp_extension(toolchain: Toolchain) -> Iterator:
    """torch.utils.cpp_extension, told of our CUDA and architectures, and silent."""
    changed = {"TORCH_CUDA_ARCH_LIST": toolchain.architectures or "9.0", "CC": None}
    before = {name: os.environ.get(name) for name in changed}
    silent = logging.root.manager.disable
    try:
        for name, value in changed.items():
            _set(name, value)
        logging.disable(logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                from torch.utils import cpp_extension
            except ImportError as error:
                raise BuildError(
                    f"torch.utils.cpp_extension cannot be imported: {error}; "
                    "pip install -U setuptools"
                ) from None
            home, cpp_extension.CUDA_HOME = cpp_extension.CUDA_HOME, toolchain.cuda_home
            try:
                yield cpp_extension
            finally:
                cpp_extension.CUDA_HOME = home
    finally:
        logging.disable(silent)
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _accepts(command: list[str]) -> bool:
    trial = [*command, "-x", "c++", "/dev/null"]
    return subprocess.run(trial, capture_output=True, check=False).returncode == 0


def _quicker(toolchain: Toolchain) -> list[str]:
    """Kernels write the case of neighbouring elements out by hand; g++ would copy all other loops
    for that case as well. clang has no such flag, and fails where it is given.
    """
    flags = ["-fno-version-loops-for-strides"]
    return flags if _accepts([*toolchain.command("CXX"), *flags, "-fsyntax-only"]) else []


def _linker(toolchain: Toolchain) -> list[str]:
    """lld, gold, or the compiler's own choice."""
    for name in ("lld", "gold"):
        trial = ["-shared", "-fPIC", f"-fuse-ld={name}", "-o", "/dev/null"]
        if shutil.which(f"ld.{name}") and _accepts([*toolchain.command("CXX"), *trial]):
            return [f"-fuse-ld={name}", "-Wl,--as-needed"]
    return ["-Wl,--as-needed"]


def cuda_runtime(folder: Path, toolchain: Toolchain) -> list[str]:
    """Give the CUDA runtime the name that -lcudart looks for, which NVIDIA's wheels lack."""
    libraries = [Path(toolchain.cuda_home or "") / name for name in ("lib64", "lib")]
    if any((path / "libcudart.so").exists() for path in libraries):
        return []
    for found in (file for path in libraries for file in path.glob("libcudart.so.*")):
        link = folder / "libcudart.so"
        draft = folder / f".cudart-{os.getpid()}-{os.urandom(4).hex()}"
        draft.symlink_to(found)
        os.replace(draft, link)
        return [f"-L{folder}"]
    return []
