"""Why a unit was built: the difference between two manifests, in words."""

from pathlib import Path
from typing import Any

from ..machine.sources import Unit
from .key import key as key_of
from .store import MANIFEST, Store

_TOLD = {
    "cxx": "C++ compiler",
    "architectures": "GPU architectures",
    "machine": "instruction set",
    "cpu": "CPU",
    "cflags": "C++ flags",
    "cuda_flags": "CUDA flags",
    "ldflags": "linker flags",
    "cuda_runtime": "torch's CUDA",
    "levels": "levels of x86-64",
}


def differences(before: dict, after: dict) -> list[str]:
    """Return what changed from one manifest to another, a line each; none where they are equal."""
    lines = []
    old, new = before["files"], after["files"]
    for path in sorted({*old, *new}):
        if old.get(path) != new.get(path):
            change = "added" if path not in old else "removed" if path not in new else "changed"
            lines.append(f"{path} {change}")
    a, b = before["toolchain"], after["toolchain"]
    lines += [
        f"{_TOLD.get(fact, fact)} {_change(fact, a.get(fact), b.get(fact))}"
        for fact in sorted({*a, *b})
        if (a.get(fact) or None) != (b.get(fact) or None)
    ]
    if before["format"] != after["format"]:
        lines.append(f"format of loader's cache {before['format']} -> {after['format']}")
    return lines


def _change(fact: str, before: Any, after: Any) -> str:
    if isinstance(before or after, list):
        old, new = before or [], after or []
        changes = [f"without {x}" for x in old if x not in new]
        changes += [f"with {x}" for x in new if x not in old]
        return ", ".join(changes) or "in another order"
    if fact == "cpu":
        return "-> any" if not after else "any -> this one" if not before else "another one"
    if fact in ("cxx", "nvcc", "torch") and before and after:
        old, new = before.split()[0], after.split()[0]
        same = f"{new}, another build of it" if fact == "torch" else f"{old} was replaced"
        return same if old == new else f"{old} -> {new}"
    return f"{before or 'none'} -> {after or 'none'}"


def why_built(store: Store, unit: Unit, inputs: dict) -> list[str]:
    """Return what is new in `inputs` since the build of this unit that was used last: of the same
    library, the unit's or its rest, where there is one.
    """
    library = inputs["unit"]

    def used(build: tuple[Path, dict]) -> tuple[bool, float]:
        entry, recorded = build
        return recorded.get("root") == str(unit.root), (entry / MANIFEST).stat().st_mtime

    builds = [*store.entries(library)] or [*store.entries(unit.name)]
    last = max(builds, key=used, default=None)
    if last is None:
        return ["the first build of it in this cache"]
    if lines := differences(last[1]["inputs"], inputs):
        return lines
    if not store.has(library, key_of(inputs)):
        return ["this part of it has not been built yet"]
    if store.verified(library, key_of(inputs)):
        return ["another process has built it meanwhile"]
    return ["its library was missing or damaged"]
