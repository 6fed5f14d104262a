"""All that an extension's library depends on: what its key is a digest of."""

import hashlib
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
from ..machine import reads
from ..machine import toolchain as tools
from ..machine.sources import HOME, Sources
from .arguments import Extension, Source
from .flags import argv
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
    if linked := linked_files(extension, toolchain):
        facts["linked"] = linked
    return json.loads(json.dumps(facts | mends_wanted()))


def headers(extension: Extension, toolchain: tools.Toolchain) -> dict[str, str]:
    """Return SHA-256 of the sources, of the headers that they reach, and of our own binding.

    Of other files that flags have the compilers read, too, and where a header is included by a
    macro, of all that are the user's own.
    """
    words = _words((*extension.cflags, *extension.cuda_cflags))
    searched, forced = reads.headers(words)
    folders = [f for f in (*extension.include_paths, *searched) if not by_version(f, toolchain)]
    texts = {os.path.join("/", source.name): source.content for source in extension.sources}
    sources = Sources(Path("/"), (*folders, *toolchain.header_folders), texts)
    named = [path for path in (*forced, *reads.files(words)) if not by_version(path, toolchain)]
    paths, found = [*texts, *named], dict[str, str]()
    for path in paths:
        found |= sources.closure(path)
    if any(None in sources.foreign(path) for path in paths):
        beside = [source.folder for source in extension.sources if source.folder]
        for path in reads.headers_below([*beside, *folders]):
            found |= sources.closure(path)
    binding = str(HOME / "include" / "inline_binding.h")
    return dict(sorted(found.items())) | {"inline_binding.h": sources.closure(binding)[binding]}


def linked_files(extension: Extension, toolchain: tools.Toolchain) -> dict[str, str]:
    """Return SHA-256 of what flags have the linker read: static libraries, objects, scripts."""
    environment = os.environ.get("LIBRARY_PATH", "")
    words = argv(extension.ldflags) if environment else _words(extension.ldflags)
    return {
        path: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for path in sorted({*reads.files(words), *reads.archives(words, environment)})
        if not by_version(path, toolchain)
    }


def _words(flags: tuple[str, ...]) -> list[str]:
    """Flags as arguments, where one may have a whole path."""
    return argv(flags) if any("/" in flag for flag in flags) else []


def by_version(path: str, toolchain: tools.Toolchain) -> bool:
    """True for what is torch's, Python's or CUDA's, whose versions count."""
    whose = [os.path.dirname(torch.__file__), sysconfig.get_path("include"), toolchain.cuda_home]
    return any(f"{path}/".startswith(f"{folder}/") for folder in whose if folder)


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
