"""The receipt of an import: what was done for each operator, and how long each part took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..errors.table import Table

STAGES = ("hash", "lookup", "wait", "compile", "link", "verify", "dlopen")


class Receipt:
    """The work of this process so far.

    Attributes:
        units: by operator, `result` and milliseconds by stage of `STAGES`. The result is `hit`
            (it was in the cache), `built`, `waited` (another process built it meanwhile), `failed`,
            `missing` (not built yet), or `foreign` (a library that somebody else loaded has it).
        total: milliseconds that `what`, an import or a library, took with what it built.
        index: milliseconds to see that nothing had changed since the last import, where that was
            so: then the sources are not even hashed.
    """

    def __init__(self, what: str = "import loader"):
        self.what, self.total = what, 0.0
        self.units: dict[str, dict] = {}
        self.index: float | None = None

    @contextmanager
    def time(self, unit: str, stage: str) -> Iterator[None]:
        """Count the time inside to a stage."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.add(unit, stage, time.perf_counter() - begun)

    def add(self, unit: str, stage: str, seconds: float) -> None:
        """Count `seconds` to a stage."""
        row = self.units.setdefault(unit, {"result": "missing"})
        row[stage] = row.get(stage, 0.0) + seconds * 1e3

    def result(self, unit: str, result: str) -> None:
        """Say how it ended."""
        self.units.setdefault(unit, {})["result"] = result

    def _table(self) -> "Table":
        from ..errors.table import Table  # a warm import does without

        title = f"{self.what}: {self.total:.1f} ms"
        if self.index is not None:
            title += f", of which {self.index:.1f} ms to see that nothing had changed"
        table = Table(title, ("operator", "result", *STAGES, "ms"), (*STAGES, "ms"))
        for unit, row in self.units.items():
            times = [row.get(stage) for stage in STAGES]
            texts = ["" if t is None else f"{t:.1f}" for t in (*times, sum(filter(None, times)))]
            table.rows.append((unit, row["result"], *texts))
        return table

    def __repr__(self) -> str:
        """Return the text that a terminal shows."""
        return str(self._table())

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows."""
        return self._table()._repr_html_()
