"""The key of a build: a digest over everything that the library depends on."""

import hashlib
import json

from .toolchain import Toolchain
from .units import Sources, Unit

# Raise when the layout of a store entry, or the way a library is made, changes.
FORMAT = 1


def manifest(unit: Unit, toolchain: Toolchain, sources: Sources) -> dict:
    """All that enters the key, as plain data: the sources' digests and the toolchain's identity."""
    files: dict[str, str] = {}
    for source in built_sources(unit, toolchain):
        files.update(sources.closure(source))
    return {
        "format": FORMAT,
        "unit": unit.name,
        "files": dict(sorted(files.items())),
        "toolchain": toolchain.identity,
    }


def built_sources(unit: Unit, toolchain: Toolchain) -> tuple[str, ...]:
    """The sources that this toolchain builds: without architectures there is no CUDA part."""
    with_cuda = toolchain.nvcc and toolchain.architectures
    return unit.sources if with_cuda else unit.for_cpu().sources


def key(manifest: dict) -> str:
    """SHA-256 of the manifest, cut to 160 bits."""
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]
