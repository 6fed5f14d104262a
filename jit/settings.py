"""The environment variables that loader reads: one table, parsed strictly."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """One variable: its name, default, the values it may have (none: any path) and its meaning."""

    name: str
    default: str
    allowed: tuple[str, ...]
    meaning: str


SETTINGS = (
    Setting(
        "LOADER_BUILD", "eager", ("eager", "lazy", "never"), "when to compile what the cache lacks"
    ),
    Setting("LOADER_CACHE_DIR", "tmp_build", (), "folder of the build cache, beside `loader.py`"),
    Setting("LOADER_NATIVE", "1", ("0", "1"), "compile for this CPU (`-march=native`)"),
)


def value(name: str) -> str:
    """The value of a setting; ValueError where it is not one of those allowed."""
    setting = next(s for s in SETTINGS if s.name == name)
    text = os.environ.get(name) or setting.default
    if setting.allowed and text not in setting.allowed:
        raise ValueError(f"{name} must be one of {', '.join(setting.allowed)}, got {text!r}")
    return text


def cache_dir(root: Path) -> Path:
    """The folder of the build cache, absolute; it need not exist yet."""
    return Path(os.path.abspath(root / os.path.expanduser(value("LOADER_CACHE_DIR"))))
