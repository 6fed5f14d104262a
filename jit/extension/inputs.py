"""All that an extension's library depends on: what its key is a digest of."""

import json
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

import torch

from ..cache.key import FORMAT
from ..errors import cxx
from ..machine import toolchain as tools
from ..machine.sources import HOME, Sources
from .arguments import Extension, Source
from .mending import mends_wanted


def manifest(extension: Extension, toolchain: tools.Toolchain) -> dict:
    """Return all that the library depends on, as JSON gives it back."""
    # Without the operators' own flags: here all flags are the caller's.
    own = {"cflags", "ldflags", "cuda_flags", "nvcc"}
    made_by = {fact: value for fact, value in toolchain.identity.items() if fact not in own}
    flags = [*extension.cflags, *extension.cuda_cflags]
    made_by["cpu"] = tools.cpu_features() if any("native" in flag for flag in flags) else ""
    if extension.with_cuda:
        made_by["nvcc"] = toolchain.nvcc
    else:
        made_by["architectures"] = ""
    asked = {f.name: getattr(extension, f.name) for f in fields(extension) if f.compare}
    asked["order"] = [source.name for source in asked.pop("sources")]
    asked["functions"] = extension.functions and [*extension.functions.items()]  # in their order
    facts = {
        "format": FORMAT,
        "unit": extension.unit,
        "files": headers(extension, toolchain),
        "toolchain": made_by,
        "python": [sysconfig.get_config_var("SOABI"), sysconfig.get_path("include")],
        "asked": asked,
    }
    return json.loads(json.dumps(facts | mends_wanted()))


def headers(extension: Extension, toolchain: tools.Toolchain) -> dict[str, str]:
    """Return SHA-256 of the sources, of the headers that they reach, and of our own binding."""
    known = os.path.dirname(torch.__file__)  # torch's own headers go by its version
    folders = [folder for folder in extension.include_paths if not folder.startswith(known)]
    texts = {os.path.join("/", source.name): source.content for source in extension.sources}
    sources = Sources(Path("/"), (*folders, *toolchain.header_folders), texts)
    found: dict[str, str] = {}
    for path in texts:
        found |= sources.closure(path)
    binding = str(HOME / "include" / "inline_binding.h")
    return dict(sorted(found.items())) | {"inline_binding.h": sources.closure(binding)[binding]}


Find = Callable[[str, str], tuple[str, str] | None]


def quoted_headers(source: Source, folders: Sequence[str]) -> Find:
    """Return what finds a header of the user's own: path and text by its name.

    It lies beside the file that includes it, where that is told, or in one of these folders.
    """

    def find(name: str, by: str) -> tuple[str, str] | None:
        beside = [os.path.dirname(by)] if source.folder and by else []
        for folder in (*beside, *folders):
            path = os.path.join(folder, name)
            if os.path.isfile(path):
                with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
                    return path, file.read()
        return None

    return find


def with_headers(source: Source, find: Find) -> str:
    """Return a source's text behind those of the user's own headers that it reaches by quotes."""
    texts: dict[str, str] = {}

    def add(path: str, text: str) -> None:
        texts[path] = ""  # in case it includes itself
        for header in cxx.includes(text):
            if header.quoted and (found := find(header.name, path)):
                line = rf'(?m)^[ \t]*#[ \t]*include[ \t]*"{re.escape(header.name)}".*$'
                text = re.sub(line, "", text)
                if found[0] not in texts:
                    add(*found)
        del texts[path]
        texts[path] = text  # behind its headers

    add(source.name, source.text)
    return "\n".join(texts.values())
