"""Care of the cache: what is in it, and making room without taking anything away that is in use."""

import contextlib
import fcntl
import os
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors.table import Table, bytes_text, duration
from .store import LIBRARY, MANIFEST, Store, remove

_LEFTOVER = 3600  # seconds after which what a killed process left is certainly nobody's
_LEFT = "store/.staging-*", "store/.damaged-*", "*/.probe-*", "*/.draft-*"


@dataclass(frozen=True)
class Item:
    """An entry of the store, or a work folder; times in seconds since 1970."""

    path: Path
    kind: str  # "library" or "work"
    unit: str
    key: str
    size: int
    made: float
    used: float
    why: str


def _item(path: Path, kind: str, made: float, used: float, why: str) -> Item:
    unit, _, key = path.name.rpartition("-")
    size = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            size += file.lstat().st_blocks * 512
    return Item(path, kind, unit, key, size, made, used, why)


def items(store: Store) -> list[Item]:
    """All libraries of all layers, and the work folders of the writable one."""
    found, recorded = [], dict(store.entries())
    for entry in (path for layer in store.layers for path in sorted(layer.glob("[!.]*-*"))):
        with contextlib.suppress(OSError):  # removed meanwhile
            made = used = entry.lstat().st_mtime
            with contextlib.suppress(FileNotFoundError):
                used = (entry / MANIFEST).stat().st_mtime
            why = "; ".join(recorded[entry].get("why", ())) if entry in recorded else "damaged"
            found.append(_item(entry, "library", made, used, why))
    for folder in filter(Path.is_dir, sorted(store.path.parent.glob("work/[!.]*-*"))):
        stat, why = folder.stat(), "objects, for the next edit"
        found.append(_item(folder, "work", stat.st_ctime, stat.st_mtime, why))
    return found


def listing(store: Store) -> Table:
    """Return the table that `python -m loader cache` prints."""
    all_items, now = items(store), time.time()
    total = bytes_text(sum(item.size for item in all_items))
    folders = os.pathsep.join(str(layer.parent) for layer in store.layers)
    columns = ("operator", "kind", "key", "size", "age", "last use", "in use", "why")
    table = Table(f"{folders}: {total}", columns, ("size", "age", "last use"))
    for item in sorted(all_items, key=lambda item: -item.used):
        age, unused = duration(now - item.made), duration(now - item.used)
        with _alone(item) as alone:
            in_use = "" if alone else "yes"
        texts = (item.key[:12], bytes_text(item.size), age, unused, in_use, item.why)
        table.rows.append((item.unit, item.kind, *texts))
    return table


def prune(
    store: Store,
    most: int | None = None,
    age: float | None = None,
    keep: Container[str] = (),
) -> tuple[int, int, int]:
    """Remove what was not used for longest, until the cache takes no more than `most` bytes, and
    what was not used for `age` seconds. How many items that were, their bytes, and how many that
    ought to have gone are in use and stay.

    `keep` has the keys of libraries that somebody is about to use. Work folders, which only make
    the next edit quicker to build, go before libraries.
    """
    tidy(store)
    ours = [item for item in items(store) if store.path.parent in item.path.parents]
    total, now = sum(item.size for item in ours), time.time()
    removed = freed = kept = 0
    for item in sorted(ours, key=lambda item: (item.kind == "library", item.used)):
        too_old = age is not None and now - item.used > age
        too_much = most is not None and total > most
        if item.key in keep or not (too_old or too_much):
            continue
        with _alone(item) as alone:
            if alone:
                store.discard(item.path)
                removed, freed, total = removed + 1, freed + item.size, total - item.size
            else:
                kept += 1
    return removed, freed, kept


def tidy(store: Store) -> None:
    """Remove what killed processes left behind."""
    for path in (path for pattern in _LEFT for path in store.path.parent.glob(pattern)):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFTOVER:
                remove(path)


@contextlib.contextmanager
def _alone(item: Item) -> Iterator[bool]:
    """Give True if nobody uses an item; nobody can begin to while this is held."""
    library = item.kind == "library"
    path = item.path / LIBRARY if library else f"{item.path}.lock"
    flags = os.O_RDONLY if library else os.O_RDWR | os.O_CREAT
    with contextlib.ExitStack() as closing:
        try:
            descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            closing.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except FileNotFoundError:
            alone = True
        except OSError:
            alone = False  # locked; or nobody can tell, where locks do not work
        yield alone
