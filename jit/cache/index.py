"""A shortcut for warm imports: all operators' keys, good for as long as no source file changed.

To read and digest the sources costs 0.13 ms an operator, to look at their sizes and times 0.01 ms.
File times are coarse: a file that was written within two seconds before the index could be written
again without a trace, so such an index is not made (the "racy git" problem).
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import CacheError
from ..machine import files
from ..machine.sources import listed, source_folders
from ..machine.toolchain import Toolchain


class Index:
    """The index of the checkout `root` for a toolchain; it lies in the last cache's store."""

    def __init__(self, caches: Sequence[Path], root: Path, toolchain: Toolchain):
        self._layers = [cache / "store" for cache in caches]
        self._root = str(root)
        self._toolchain = json.dumps(toolchain.identity)
        self._usable = not toolchain.header_folders  # whose headers may change unseen
        name = hashlib.sha256(f"{root} {self._toolchain}".encode()).hexdigest()[:16]
        self._file = self._layers[-1] / f".index-{name}.json"

    def keys(self) -> dict[str, str] | None:
        """Keys by operator; None where a source may have changed since, or an entry is gone."""
        record = files.read_record(self._file) if self._usable else None
        try:
            if record and record["seen"] == self._look(record["paths"])[0]:
                wanted = {f"{unit}-{key}" for unit, key in record["keys"].items()}
                there = {name for layer in self._layers for name in listed(layer)}
                return record["keys"] if wanted <= there else None
        except (OSError, KeyError):
            pass
        return None

    def remember(self, keys: dict[str, str], paths: list[str]) -> None:
        """Write the index, if these files are old enough to be told apart by their times."""
        try:
            seen, newest = self._look(paths)
        except OSError:
            return
        if self._usable and newest <= time.time() - 2:
            from .store import make_private

            with contextlib.suppress(CacheError):  # all may be in the folders that are only read
                make_private(self._layers[-1])
            files.write_record(self._file, {"seen": seen, "paths": paths, "keys": keys})

    def _look(self, paths: list[str]) -> tuple[str, float]:
        """Digest of what can be seen of the sources without reading them; time of the last change.

        The folders' own names count too: a new file may be another operator, or hide a header.
        """
        facts, newest = [self._toolchain], 0
        for folder in source_folders(self._root):
            facts += listed(folder)
        for path in paths:
            stat = os.stat(path if path[0] == "/" else f"{self._root}/{path}")
            times = stat.st_mtime_ns, stat.st_ctime_ns
            facts.append(f"{path} {stat.st_size} {times} {stat.st_ino}")
            newest = max(newest, *times)
        return hashlib.sha256("\n".join(facts).encode()).hexdigest(), newest / 1e9
