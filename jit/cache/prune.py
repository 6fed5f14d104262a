"""Care of the cache: what is in it, and making room without taking anything away that is in use."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors.table import Table, bytes_text, duration
from .store import LIBRARY, MANIFEST, Store

_LEFTOVER = 3600  # seconds after which what a killed process left is certainly nobody's


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


def items(store: Store) -> list[Item]:
    """All libraries of all layers, and the work folders of the writable one."""
    found, recorded = [], dict(store.entries())
    for entry in (path for layer in store.layers for path in sorted(layer.glob("[!.]*-*"))):
        unit, _, key = entry.name.rpartition("-")
        with contextlib.suppress(OSError):  # removed meanwhile
            made = used = entry.lstat().st_mtime
            with contextlib.suppress(FileNotFoundError):
                used = (entry / MANIFEST).stat().st_mtime
            why = "; ".join(recorded[entry].get("why", ())) if entry in recorded else "damaged"
            found.append(Item(entry, "library", unit, key, _size(entry), made, used, why))
    work = store.path.parent / "work"
    for folder in sorted(work.glob("*-*")) if work.is_dir() else ():
        if folder.is_dir() and not folder.name.startswith("abandoned-"):
            unit, _, key = folder.name.rpartition("-")
            stat = folder.stat()
            size, why = _size(folder), "objects, for the next edit"
            found.append(Item(folder, "work", unit, key, size, stat.st_ctime, stat.st_mtime, why))
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
        in_use = "yes" if _in_use(item) else ""
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
        if not too_old and (most is None or total <= most):
            continue
        if item.key in keep:
            continue
        if _remove(store, item):
            removed, freed, total = removed + 1, freed + item.size, total - item.size
        else:
            kept += 1
    return removed, freed, kept


def tidy(store: Store) -> None:
    """Remove what killed processes left behind."""
    cache = store.path.parent
    left = [*store.path.glob(".staging-*"), *store.path.glob(".damaged-*")]
    left += [*cache.glob("work/abandoned-*"), *cache.glob("*/.probe-*"), *cache.glob("*/.draft-*")]
    for path in left:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _LEFTOVER:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total


@contextlib.contextmanager
def _alone(item: Item) -> Iterator[bool]:
    """Give True if nobody uses an item; nobody can begin to while this is held."""
    path = item.path / LIBRARY if item.kind == "library" else Path(f"{item.path}.lock")
    flags = os.O_RDONLY if item.kind == "library" else os.O_RDWR | os.O_CREAT
    descriptor = None
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        alone = True
    except FileNotFoundError:
        alone = True
    except OSError:
        alone = False  # locked; or nobody can tell, where locks do not work
    try:
        yield alone
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _in_use(item: Item) -> bool:
    with _alone(item) as alone:
        return not alone


def _remove(store: Store, item: Item) -> bool:
    with _alone(item) as alone:
        if alone:
            store.discard(item.path)
        return alone
