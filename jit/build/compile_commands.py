"""`compile_commands.json` beside `ops/` and `kernels/`: how an editor's clangd parses each source.

With it clangd, and VS Code through it or through its C++ extension, finds torch's headers and ours
without being told. It is written where a build looks what there is to do, never by a warm import,
and only when it changes.
"""

import contextlib
import json
import os
import re
from pathlib import Path

import torch

from ..machine import files, settings
from ..machine.sources import HOME, Sources, include_folders, listed, source_folders
from ..machine.toolchain import Toolchain

NAME = "compile_commands.json"
_ARCHITECTURE = "8.0"  # where the machine names none: one that each clang since 11 knows


def write(root: Path, toolchain: Toolchain) -> None:
    """Bring a folder's file up to date; an installed copy, of which it would stay, has none."""
    if root == HOME and not settings.is_checkout(root):
        return
    file = root / NAME
    entries = map(json.dumps, commands(root, toolchain))  # whole, indented, it takes 13 ms
    text = "[\n" + ",\n".join(entries) + "\n]\n"
    with contextlib.suppress(OSError):
        if not file.exists() or file.read_text() != text:
            files.write(file, text)


def commands(root: Path, toolchain: Toolchain) -> list[dict]:
    """An entry for each source in `ops/` and `kernels/`, and for each header of ours they reach.

    What ends in .h is C++, also where CUDA alone includes it. Left to itself clangd would parse a
    header of C++ as CUDA where a `.cu` has the nearest name.
    """
    found = [f"{folder}/{file}" for folder in source_folders(root) for file in listed(folder)]
    sources = [os.path.relpath(path, root) for path in found]
    reached = Sources(root, toolchain.header_folders)
    entries: dict[str, list[str]] = {}
    for source in sources:
        for file in reached.closure(source):
            ours = not os.path.isabs(file) or file.startswith(f"{HOME}{os.sep}")
            if ours and file not in entries:
                entries[file] = _arguments(file, root, toolchain)
    return [
        {"directory": str(root), "file": os.path.join(root, file), "arguments": arguments}
        for file, arguments in sorted(entries.items())
    ]


def _arguments(file: str, root: Path, toolchain: Toolchain) -> list[str]:
    """The command line for one file, in words that clang knows.

    nvcc's, `-gencode`, `-Xcompiler` and the like, are errors to clangd.
    """
    include = os.path.join(os.path.dirname(torch.__file__), "include")
    shared = [f"-I{os.path.join(root, folder)}" for folder in include_folders(root)]
    shared += ["-isystem", include, "-isystem", f"{include}/torch/csrc/api/include"]
    shared += ["-DOCTET_CUDA"] if toolchain.nvcc else []
    last = ["-c", os.path.join(root, file)]
    if not file.endswith((".cu", ".cuh")):
        kind = [] if file.endswith(".cpp") else ["-x", "c++-header"]
        return ["c++", "-std=c++17", *kind, *shared, *toolchain.cflags, *last]
    # CUDA is often newer than clang, which then would say so in each file.
    words = ["clang++", "-std=c++17", "-x", "cuda", "-Wno-unknown-cuda-version"]
    words += [f"--cuda-path={toolchain.cuda_home}"] if toolchain.cuda_home else []
    words += [f"--cuda-gpu-arch=sm_{_newest(toolchain.architectures)}"]
    macros = [word for word in toolchain.cuda_flags if word.startswith(("-D", "-U", "-I"))]
    return [*words, *shared, *macros, *last]


def _newest(architectures: str) -> str:
    """The newest of architectures such as "8.0;9.0a+PTX", as `90a`."""
    found = re.findall(r"(\d+)\.(\d+)([af]?)", architectures or _ARCHITECTURE)
    major, minor, variant = max(found, key=lambda a: (int(a[0]), int(a[1])))
    return f"{major}{minor}{variant}"
