"""What a judgement says: as a table for people, and as plain data with names that stay.

docs/judge.md describes each name.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..errors.table import Table, bytes_text
from ..machine.timing import milliseconds

FORMAT = 1  # of the JSON; a change that breaks a reader makes it another
CHECKS = {
    "loads": "its code loads, builds and makes a model",
    "runs": "it neither crashes, hangs, ends the process, raises nor uses more than allowed",
    "results": "number, shapes, dtypes and kind of its results are the reference's",
    "values": "each element is within rounding of the reference in float64",
    "written": "no element of a result is left unwritten",
    "bounds": "nothing beside its tensors is touched",
    "inputs_unchanged": "it leaves its arguments as the reference does",
    "aliasing": "results have memory of their own, also after later calls",
    "caching": "new values at the same addresses give new results",
    "tampering": "functions that judges rely on are not replaced",
    "streams": "what it launches is done, or ordered on the current stream, when it returns",
    "sanitizer": "compute-sanitizer finds nothing",
    "timed_values": "results are right in the calls that are timed",
    "determinism": "the same arguments give the same bits",
    "other_shapes": "other lengths of the first dimension work",
    "other_dtypes": "other floating dtypes work",
}
BUSY = (
    "others keep the GPU busy, so that CUDA's events cannot be held against the judge's clock, by "
    "which times are; judge it where nothing else uses the GPU"
)
INFORMATIVE = {"determinism", "other_shapes", "other_dtypes"}  # they refuse nobody unless asked to


class Refused(Exception):
    """A check failed, and nothing more can be found out."""

    def __init__(self, check: str, text: str, **data: dict):
        super().__init__(text)
        self.check, self.data = check, data  # for the JSON: `build`, `worst`


class Ledger:
    """The outcome of each check, as they come."""

    def __init__(self, general: bool):
        self._general = general
        self._checks: dict[str, tuple[str, str]] = {}

    def failed(self, check: str, text: str) -> None:
        """Enter what a check found; the first word on it stays."""
        outcome = "warned" if check in INFORMATIVE and not self._general else "failed"
        if self._checks.get(check, ("", ""))[0] != "failed":
            self._checks[check] = outcome, text

    def warned(self, check: str, text: str) -> None:
        """Enter why a check, although it found nothing, could not rule out all that it is for."""
        if self._checks.get(check, ("", ""))[0] != "failed":
            self._checks[check] = "warned", text

    def passed(self, *checks: str) -> None:
        """Enter that these found nothing, unless they have."""
        for check in checks:
            self._checks.setdefault(check, ("passed", ""))

    def skipped(self, check: str, text: str) -> None:
        """Enter why a check was not made."""
        self._checks.setdefault(check, ("skipped", text))

    def summary(self) -> dict:
        """Return it as plain data."""
        checks = []
        for name, meaning in CHECKS.items():
            outcome, text = self._checks.get(name, ("skipped", ""))
            checks.append({"name": name, "outcome": outcome, "text": text or meaning})
        failed = [c["name"] for c in checks if c["outcome"] == "failed"]
        verdict = "refused" if failed else "accepted"
        return {"format": FORMAT, "verdict": verdict, "failed": failed, "checks": checks}


class Verdict:
    """What was found out about one candidate; prints as a table."""

    def __init__(self, data: dict):
        self.data = data

    @property
    def accepted(self) -> bool:
        """True if no check failed."""
        return bool(self.data["verdict"] == "accepted")

    @property
    def failed(self) -> list[str]:
        """Names of the checks that failed."""
        return [*self.data["failed"]]

    def check(self, name: str) -> dict:
        """Return what a check said: `outcome` and `text`."""
        return next(c for c in self.data["checks"] if c["name"] == name)

    def json(self) -> str:
        """Return all of it as JSON."""
        return json.dumps(self.data, indent=1)

    def _table(self) -> Table:
        table = Table(self._headline(), ("check", "outcome", ""))
        for check in self.data["checks"]:
            table.rows.append((check["name"], check["outcome"], check["text"].splitlines()[-1]))
        return table

    def _headline(self) -> str:
        data = self.data
        parts = [f"{data['candidate']}: {data['verdict']}"]
        if data["failed"]:
            parts.append(f"({', '.join(data['failed'])})")
        if time := data.get("time"):
            doubt = "" if time["resolved"] else " (not sure)"
            parts.append(
                f"{milliseconds(time['candidate']['median_ms'])}, reference "
                f"{milliseconds(time['reference']['median_ms'])}: {time['speedup']:.2f}x{doubt}"
            )
        parts.append(f"judged in {data['seconds']:.1f} s, {bytes_text(data['peak_memory'])}")
        return " ".join(parts)

    def _details(self) -> str:
        failed = [c for c in self.data["checks"] if c["outcome"] == "failed"]
        said = [f"{c['name']}: {c['text']}" for c in failed if "\n" in c["text"]]
        if worst := self.data.get("worst"):
            said.append(_worst(worst))
        force = self.data["isolation"]
        said.append("in force: " + ", ".join(_words(force)))
        return "\n".join(said)

    def __repr__(self) -> str:
        """Return what a terminal shows."""
        return f"{self._table()}\n{self._details()}"

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return self._table()._repr_html_()


class Verdicts(Sequence[Verdict]):
    """Those of many candidates, with how many a minute there were."""

    def __init__(self, found: list[Verdict], seconds: float, jobs: int):
        self._found, self.seconds, self.jobs = found, seconds, jobs

    def __getitem__(self, index: Any) -> Any:
        """Return one, or a list of some."""
        return self._found[index]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._found)

    def __iter__(self) -> Iterator[Verdict]:
        """Yield them in the order of the candidates."""
        return iter(self._found)

    @property
    def per_minute(self) -> float:
        """How many were judged in a minute."""
        return 60 * len(self._found) / max(self.seconds, 1e-9)

    def json(self) -> str:
        """Return all of it as JSON."""
        throughput = {
            "candidates": len(self._found),
            "seconds": self.seconds,
            "jobs": self.jobs,
            "per_minute": self.per_minute,
        }
        data = [v.data for v in self._found]
        whole = {"format": FORMAT, "candidates": data, "throughput": throughput}
        return json.dumps(whole, indent=1)

    def _table(self) -> Table:
        table = Table(
            f"{len(self._found)} candidates in {self.seconds:.1f} s with {self.jobs} at once, "
            f"{self.per_minute:.0f} a minute",
            ("candidate", "verdict", "because", "time", "speedup", "judged in"),
            ("time", "speedup", "judged in"),
        )
        for v in self._found:
            time = v.data.get("time")
            table.rows.append(
                (
                    v.data["candidate"],
                    v.data["verdict"],
                    ", ".join(v.failed),
                    milliseconds(time["candidate"]["median_ms"]) if time else "",
                    f"{time['speedup']:.2f}x" if time else "",
                    f"{v.data['seconds']:.1f} s",
                )
            )
        return table

    def __repr__(self) -> str:
        """Return what a terminal shows."""
        return repr(self._table())

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return self._table()._repr_html_()


def _words(force: dict) -> list[str]:
    words = []
    for name, value in force.items():
        if isinstance(value, list):
            words += [f"{name} ({', '.join(value)})"] if value else [f"no {name}"]
        elif isinstance(value, bool):
            words.append(name if value else f"no {name}")
    return words


def _worst(worst: dict) -> str:
    beside = worst["neighbourhood"]
    lines = [
        f"worst element: result {worst['result']} at {tuple(worst['index'])}, {worst['case']}: got "
        f"{worst['got']}, expected {worst['expected']}, allowed {worst['allowed']:.2g}"
    ]
    for what in ("got", "expected"):
        rows = beside[what] if isinstance(beside[what], list) else [beside[what]]
        rows = rows if rows and isinstance(rows[0], list) else [rows]
        lines.append(f"  {what} from {tuple(beside['first'])}:")
        for row in rows:
            cells = (f"{x:>12.5g}" if isinstance(x, int | float) else f"{x:>12}" for x in row)
            lines.append("  " + "".join(cells))
    return "\n".join(lines)
