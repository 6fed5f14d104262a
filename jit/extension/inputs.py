"""All that an extension's library depends on: what its key is a digest of."""

import hashlib
import os
import sysconfig
from pathlib import Path

import torch

import loader

from ..cache.key import FORMAT
from ..machine import toolchain as tools
from ..machine.sources import Sources, included
from .arguments import Extension


def manifest(extension: Extension, toolchain: tools.Toolchain) -> dict:
    """Return all that the library depends on."""
    made_by = dict(toolchain.identity)
    del made_by["cflags"], made_by["ldflags"]  # the operators' own; here all flags are the caller's
    flags = [*extension.cflags, *extension.cuda_cflags]
    made_by["cpu"] = tools.cpu_features() if any("native" in flag for flag in flags) else ""
    made_by.pop("cuda_flags", None)
    if extension.with_cuda:
        made_by["nvcc"] = toolchain.nvcc
    else:
        made_by.pop("nvcc", None)
        made_by["architectures"] = ""
    asked = {
        "functions": None if extension.functions is None else [*extension.functions.items()],
        "flags": [extension.cflags, extension.cuda_cflags, extension.ldflags],
        "include_paths": extension.include_paths,
        "form": [
            extension.with_cuda,
            extension.is_python_module,
            extension.is_standalone,
            extension.implicit_headers,
            extension.error_handling,
        ],
        "order": [source.name for source in extension.sources],
    }
    return {
        "format": FORMAT,
        "unit": extension.unit,
        "files": headers(extension, toolchain),
        "toolchain": made_by,
        "python": [sysconfig.get_config_var("SOABI"), sysconfig.get_path("include")],
        "asked": _plain(asked),
    }


def _plain(value):
    """Return a value as JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Texts(Sources):
    """Digests of sources that are in memory and of the headers on disk that they reach."""

    def __init__(self, extension: Extension, toolchain: tools.Toolchain):
        known = os.path.dirname(torch.__file__)  # torch's own headers go by its version
        folders = [folder for folder in extension.include_paths if not folder.startswith(known)]
        self._texts = {os.path.join("/", s.name): s.content for s in extension.sources}
        super().__init__(Path("/"), (*folders, *toolchain.header_folders))

    def _read_file(self, path: str):
        if path not in self._texts:
            return super()._read_file(path)
        content = self._texts[path]
        return hashlib.sha256(content).hexdigest(), included(content)


def headers(extension: Extension, toolchain: tools.Toolchain) -> dict[str, str]:
    """Return SHA-256 of the sources, of the headers that they reach, and of our own binding."""
    texts = _Texts(extension, toolchain)
    found: dict[str, str] = {}
    for source in extension.sources:
        found |= texts.closure(os.path.join("/", source.name))
    binding = os.path.join(loader.__path__[0], "include", "inline_binding.h")
    return dict(sorted(found.items())) | {"inline_binding.h": texts._read(binding)[0]}
