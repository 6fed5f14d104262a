"""The same CUDA source on the CPU: `__global__` bodies looped over grid and block, by g++.

For small cases: to learn and to test where there is no GPU. One thread of the grid runs after the
other, so what needs several at a time is refused, with its line.
"""

import ctypes
import os
import re
import shlex
import subprocess
from pathlib import Path

from ..errors import BuildError
from ..errors.cxx import blanked
from ..machine.forks import Lock
from ..machine.sources import HOME
from ..machine.toolchain import FLAGS, words
from .nvrtc import FILE
from .text import Kernel, kernels

GUARD = "jit/source/guard.cpp"  # of faults in kernels, from loader's home
_MARK = "__attribute__((__used__))"  # what include/emulate.h makes of __global__
OPTIONS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-w"]
_NO_HEADERS = "cuda_runtime.h", "cuda.h", "device_launch_parameters.h", "assert.h", "cassert"
_REFUSED = re.compile(
    r"\b(?P<shared>__shared__)|\b(?P<barrier>__sync\w+|__cluster\w*|__nanosleep)"
    r"|\b(?P<warp>__shfl\w*|__ballot\w*|__any_sync|__all_sync|__any|__all|__activemask|__match_\w+"
    r"|__reduce_\w+_sync|warpSize|wmma|__vote\w*)"
    r"|\b(?P<groups>cooperative_groups|cg(?=::))"
    r"|\b(?P<texture>tex[123]D\w*|texCubemap\w*|surf[123]D\w+|cudaTextureObject_t|cudaSurfaceObject_t"
    r"|texture(?=\s*<))"
    r"|\b(?P<asm>asm|__asm__|__asm)\b|(?P<launch><<<)"
    r"|\b(?P<half>__half2?|__nv_bfloat162?|__nv_fp8\w*)\b"
    r"|\b(?P<clock>clock(?:64)?|globaltimer)\s*\("
)
_TOLD = {
    "shared": "shared memory",
    "barrier": "barriers",
    "warp": "warps",
    "groups": "cooperative groups",
    "texture": "textures and surfaces",
    "asm": "inline PTX",
    "launch": "launches from within a kernel",
    "half": "CUDA's 16-bit and 8-bit types",
    "clock": "the GPU's clocks",
}
_HEADERS = re.compile(
    r"^[ \t]*#[ \t]*include[ \t]*[<\"]"
    r"((?:cuda_(?:fp|bf)\w+\.h|cooperative_groups|curand|cub/|thrust/|cuda/|mma\.h|nv/|nvtx|cu[A-Z])[^>\"]*)",
    re.MULTILINE,
)


class Unsupported(NotImplementedError):
    """A source that does not run on the CPU; `line` is that of its text, 0 in a header."""

    def __init__(self, what: str, file: str, line: int):
        self.what, self.file, self.line = what, file, line
        super().__init__(what)


def compile(
    source: str,
    folder: Path,
    folders: tuple[str, ...],
    prologue: str,
    names: tuple[str, ...],
) -> tuple[Path, list[dict]]:
    """A library in `folder` that runs the kernels of a source, and which they are.

    `prologue` stands before the source and ends with a `#line`; `folders` have headers.

    BuildError with the compiler's output; Unsupported for what only a GPU can run.
    """
    for match in _HEADERS.finditer(blanked(source, strings=False)):
        line = source.count("\n", 0, match.start()) + 1
        raise Unsupported(f"<{match[1]}>, a header for GPUs", FILE, line)
    (folder / FILE).write_text(source)
    (folder / "unit.cpp").write_text(f'#include "emulate.h"\n{prologue}{source}\n')
    (folder / "none").mkdir()
    for header in _NO_HEADERS:
        (folder / "none" / header).touch()
    paths = [f"-I{path}" for path in (folder / "none", *folders)]
    text = _run(["-E", "-x", "c++", *paths, "unit.cpp"], folder)
    own = _own_lines(text)
    _refuse(own)
    found = kernels("\n".join(line for *_, line in own), _MARK)
    found = [kernel for kernel in found if not kernel.template]
    found += [Kernel(name, (), False) for name in names]
    launchers = "\n".join(_launcher(i, kernel.name) for i, kernel in enumerate(found))
    (folder / "unit.ii").write_text(f'{text}\n# 1 "kernels"\n{launchers}\n')
    guard = ["-x", "c++", str(HOME / GUARD)]
    _run(["-x", "c++-cpp-output", "unit.ii", *guard, "-shared", "-o", "kernels.so"], folder)
    return folder / "kernels.so", [{"name": k.name, "parameters": k.parameters} for k in found]


def _run(arguments: list[str], folder: Path) -> str:
    """Return what the C++ compiler prints; BuildError with its complaints where it fails."""
    command = os.environ.get("CXX") or "c++"
    program = [command] if os.path.isfile(command) else shlex.split(command)
    command = [*program, *words(FLAGS), *OPTIONS, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except OSError as error:
        raise BuildError(
            f"source_module: no C++ compiler: {program[0]}: {error.strerror}; apt install g++, or "
            "set CXX"
        ) from None
    if done.returncode:
        raise BuildError(done.stderr or f"{program[0]} ended with {done.returncode}")
    return done.stdout


def _own_lines(text: str) -> list[tuple[str, int, str]]:
    """File, number and text of each preprocessed line that is neither the system's nor ours."""
    found, file, number, own = [], "", 0, False
    for line in text.split("\n"):
        if marker := re.match(r'# (\d+) "(.*?)"((?: \d)*)$', line):
            file, number = marker[2], int(marker[1])
            foreign = "3" in marker[3] or file.startswith("<") or file == "unit.cpp"
            own = not foreign and not file.endswith("emulate.h")
        else:
            if own:
                found.append((file, number, line))
            number += 1
    return found


def _refuse(lines: list[tuple[str, int, str]]) -> None:
    """Unsupported for the first line with something that needs a GPU."""
    code = blanked("\n".join(line for *_, line in lines)).split("\n")
    for (file, number, _), text in zip(lines, code, strict=True):
        if match := _REFUSED.search(text):
            kind = match.lastgroup
            raise Unsupported(f"{match[kind]} ({_TOLD[kind]})", file, number)


def _launcher(number: int, name: str) -> str:
    show, kernel = 'extern "C" __attribute__((visibility("default")))', f"octet_kernel<&{name}>"
    return (
        f"{show} const char* octet_run_{number}(const unsigned* shape, void** at) "
        f"{{ return {kernel}::run(shape, at); }}\n"
        f"{show} const char* octet_type_{number}() {{ return {kernel}::type(); }}\n"
        f"{show} int octet_sizes_{number}(size_t* out) {{ return {kernel}::sizes(out); }}"
    )


_launch = Lock()  # one at a time: handlers of faults, and the grid's variables, are shared


class Library:
    """A loaded library of `compile`."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))

    def type(self, number: int) -> str:
        """A kernel's type as the compiler encodes it, such as `PFvPfiE`."""
        tell = self._library[f"octet_type_{number}"]
        tell.restype = ctypes.c_char_p
        return tell().decode()

    def sizes(self, number: int) -> list[int]:
        """Bytes of each parameter."""
        sizes = (ctypes.c_size_t * 1024)()
        return sizes[: self._library[f"octet_sizes_{number}"](sizes)]

    def run(self, number: int, shape: tuple[int, ...], arguments: int) -> str | None:
        """Run a kernel over grid and block; None, or what failed in it."""
        call = self._library[f"octet_run_{number}"]
        call.restype, call.argtypes = ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_void_p)
        with _launch:
            said = call(ctypes.byref((ctypes.c_uint * 6)(*shape[:6])), arguments)
        return said.decode(errors="replace") if said else None
