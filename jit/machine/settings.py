"""The environment variables that loader reads: one table, parsed strictly."""

import os
import re
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """One variable: its name, default, the values it may have (none: see `values`), its meaning."""

    name: str
    default: str
    allowed: tuple[str, ...]
    meaning: str
    values: str = ""


SETTINGS = (
    Setting(
        "LOADER_BUILD",
        "background",
        ("background", "eager", "lazy", "never"),
        "when to compile what the cache lacks",
    ),
    Setting(
        "LOADER_CACHE_DIR",
        "tmp_build",
        (),
        "folder of the build cache, beside `loader.py`; of several the last is written to",
        "a folder, or several joined by `:`",
    ),
    Setting(
        "LOADER_CACHE_LIMIT",
        "2GiB",
        (),
        "above this a build removes what was not used for longest",
        "a size: `500MB`, `2GiB`",
    ),
    Setting("LOADER_NATIVE", "1", ("0", "1"), "compile for this CPU (`-march=native`)"),
)


def value(name: str) -> str:
    """The value of a setting; ValueError where it is not one of those allowed."""
    setting = next(s for s in SETTINGS if s.name == name)
    text = os.environ.get(name) or setting.default
    if setting.allowed and text not in setting.allowed:
        raise ValueError(f"{name} must be one of {', '.join(setting.allowed)}, got {text!r}")
    return text


def choose(name: str, text: str, unless_set: bool = False) -> None:
    """Give a setting a value for this process and those that it starts."""
    if not (unless_set and os.environ.get(name)):
        os.environ[name] = text


def cache_dirs(root: Path) -> tuple[Path, ...]:
    """The folders of the build cache, absolute; the last one is written to and need not exist."""
    named = [folder for folder in value("LOADER_CACHE_DIR").split(os.pathsep) if folder]
    if not named:
        raise ValueError(f"LOADER_CACHE_DIR must name a folder, got {value('LOADER_CACHE_DIR')!r}")
    return tuple(Path(os.path.abspath(root / os.path.expanduser(folder))) for folder in named)


def cache_limit() -> int:
    """The most bytes that the cache may take."""
    return size(value("LOADER_CACHE_LIMIT"), "LOADER_CACHE_LIMIT")


def size(text: str, name: str) -> int:
    """Bytes, from a text such as `500MB` or `2GiB`; ValueError names where it came from."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{name} must be a size such as 500MB or 2GiB, got {text!r}")
    number, prefix, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def age(text: str, name: str) -> float:
    """Seconds, from a text such as `30d` or `12h`; ValueError names where it came from."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([dhm])\s*", text)
    if not found:
        raise ValueError(f"{name} must be an age such as 30d, 12h or 5m, got {text!r}")
    return float(found[1]) * {"d": 86400, "h": 3600, "m": 60}[found[2]]
