"""A round of calls that are timed: arguments that nobody saw before, and results that are there.

On the CPU the clock runs from before the arguments are sent until all results lie in memory that
the judge reads. What goes to a GPU and comes back takes longer than most calls, and never the same
time: there the clock runs from when the process hears how the arguments of each call are made of
numbers that lie there already, each tensor rolled and scaled by chance, until it has said a
fingerprint of each result, by a seed that it did not know before. Results are fetched after that,
those of calls drawn by chance where all would be too much, and are to have the fingerprints.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import exhibits
from .asked import Asked
from .cases import Case, is_free, secret
from .exhibits import Layout, Mapped
from .verdict import Refused

COMPARED = 1 << 27  # bytes of arguments and results of the calls that are compared


class Round(NamedTuple):
    """Seconds for a number of calls, and their results."""

    seconds: float
    results: list[Tensor]
    claimed: list[float]  # milliseconds of each call by CUDA's events, which are not believed alone
    late: list[float]  # and how much longer it took until all streams were done


class Calls(NamedTuple):
    """What a round calls with: fresh arguments, and how each call's are made of them."""

    case: Case
    turns: list[list[list[Any]]]  # of each call, for each tensor: places it is rolled by, scale

    @classmethod
    def of(cls, case: Case, count: int) -> "Calls":
        """Draw how the arguments of each call are made."""
        free = [is_free(x) for x in case.tensors]

        def turn(x: Tensor) -> list[Any]:
            return [secret() % x.numel(), 0.75 + 0.25 * (secret() % 1024) / 1024]

        def turns() -> list[list[Any]]:
            return [turn(x) if f else [] for x, f in zip(case.tensors, free, strict=True)]

        return cls(case, [turns() for _ in range(count)])

    def arguments(self) -> list[Tensor]:
        """Return the arguments of all calls, one after the other."""
        return [
            exhibits.turned(x, *how)
            for turn in self.turns
            for x, how in zip(self.case.tensors, turn, strict=True)
        ]


def once(asked: Asked, calls: Calls, out: list[Tensor]) -> Round:
    """Have one process do all calls."""
    return together([(asked, False)], calls, calls, out)[0][0]


def together(
    who: Sequence[tuple[Asked, bool]], calls: Calls, seeming: Calls, out: list[Tensor]
) -> tuple[list[Round], int]:
    """Have each do all calls, one after the other, while no other judge has the GPU.

    `who`: processes, and whether they only seem to call, which they do with the arguments of
    `seeming`. All is laid out before that, and looked at after it. Return their rounds, and of how
    many calls these have results.
    """
    with contextlib.ExitStack() as stack:
        kind = _OnGpu if who[0][0].turn else _OnCpu
        batches = [kind(asked, seeming if no else calls, out, no) for asked, no in who]
        for batch in batches:
            stack.callback(batch.close)
            batch.lay_out()
        with who[0][0].alone():
            for batch in batches:
                batch.run()
        which = [*range(len(calls.turns))]
        if who[0][0].turn:
            few = max(1, COMPARED // max(1, sum(x.nbytes for x in (*calls.case.tensors, *out))))
            while len(which) > few:
                which.pop(secret() % len(which))
        return [batch.read(which) for batch in batches], len(which)


class _Batch:
    """Calls of one process."""

    def __init__(self, asked: Asked, calls: Calls, out: list[Tensor], empty: bool):
        self._asked, self._calls, self._empty = asked, calls, empty
        self._layout = Layout.of(out)
        self._seconds, self._answer, self._files = 0.0, dict[str, Any](), list[int]()

    def lay_out(self) -> None:
        """Have there what it needs, before the clock runs."""
        raise NotImplementedError

    def close(self) -> None:
        """Give up its memory, also where laying it out has failed."""
        for file in self._files:
            os.close(file)

    def _file(self, layout: Layout) -> Mapped:
        self._files.append(exhibits.make(layout.size))
        return Mapped(self._files[-1], layout)

    def _clocked(self, order: dict[str, Any], files: Sequence[int]) -> None:
        """Have the order done, and halt the process."""
        jail = self._asked.jail
        jail.signal(signal.SIGCONT)
        begun = time.perf_counter()
        self._answer = jail.ask(order, files)
        self._seconds = time.perf_counter() - begun
        jail.signal(signal.SIGSTOP)

    def run(self) -> None:
        """Have it done by the clock."""
        raise NotImplementedError

    def read(self, which: Sequence[int]) -> Round:
        """Return what came of these calls, and let the process go on."""
        raise NotImplementedError


class _OnCpu(_Batch):
    """In memory that the process sees once the clock runs."""

    _found: list[Tensor] | None = None

    def lay_out(self) -> None:
        count, one = len(self._calls.turns), Layout.of(self._calls.case.tensors)
        self._file(one.repeated(one.period, count)).fill(self._calls.arguments())
        self._mapped = self._file(self._layout.repeated(self._layout.period, count))
        layouts = {"layout": one.json(), "out": self._layout.json()}
        sizes = {"size": one.size, "out_size": self._layout.size, "count": count}
        self._order = {"do": "batch", "empty": self._empty, **layouts, **sizes}

    def run(self) -> None:
        self._clocked(self._order, self._files)
        if self._asked.role == "candidate":
            self._found = self._mapped.copies()

    def read(self, which: Sequence[int]) -> Round:
        found = self._mapped.copies() if self._found is None else self._found
        self._asked.jail.signal(signal.SIGCONT)
        self._asked.check(self._answer, "batch")
        return Round(self._seconds, found, [], [])


class _OnGpu(_Batch):
    """With arguments made on the GPU, and results that stay there while the clock runs."""

    def lay_out(self) -> None:
        one = Layout.of(self._calls.case.tensors)
        self._file(one).fill(self._calls.case.tensors)
        self._asked.ask("hold", self._files, layout=one.json(), size=one.size)
        self._seed = secret() << 31 | secret()

    def run(self) -> None:
        order = {"do": "timed", "turns": self._calls.turns, "empty": self._empty}
        self._clocked(order | {"seed": self._seed}, [])

    def read(self, which: Sequence[int]) -> Round:
        self._asked.jail.signal(signal.SIGCONT)
        self._asked.check(self._answer, "timed")
        claimed, idle = self._answer["claimed_ms"], self._answer["idle_ms"]
        if not all(0 <= ms < 1e9 for ms in (*claimed, *idle)) or len(claimed) != len(idle):
            raise Refused("results", "its process says of no time what a clock could")
        late = [b - a for a, b in zip(claimed, idle, strict=True)]
        found = [] if self._empty else self._fetched(which)
        return Round(self._seconds, found, claimed, late)

    def _fetched(self, which: Sequence[int]) -> list[Tensor]:
        """Return the results of these calls. Raises: Refused where they are others than before."""
        mapped = self._file(self._layout.repeated(self._layout.period, len(which)))
        words = {"out": self._layout.json(), "out_size": self._layout.size}
        self._asked.ask("fetch", self._files[-1:], which=[*which], **words)
        found, prints = mapped.copies(), self._answer["prints"]
        if len(prints) == len(self._calls.turns):
            said = [number for call in which for number in prints[call]]
            if said == [exhibits.fingerprint(x, self._seed).item() for x in found]:
                return found
        raise Refused("timed_values", "its results are others than when the clock stopped")
