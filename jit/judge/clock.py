"""The time of record: taken outside of the process that is timed.

A round sends fresh arguments for a number of calls, in memory that the process could not see before
the clock was started, and stops the clock when it says that all results lie in memory that this
process reads; it is halted by a signal before they are read, it can have no other process at work
(jail.py, seccomp.py), and every result is compared. So nothing that it does to clocks of its own
changes what is measured, and a result that is late is wrong. What the way there and back takes is
measured with a reference that is not called, and taken off of both sides.
"""

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import exhibits, tolerance
from .asked import Asked, Options
from .cases import Case, is_free, secret
from .exhibits import Layout, Mapped
from .verdict import Refused

_ROUNDS = 7
_LENGTH = 0.02  # seconds of a round that is long enough
_BYTES = 1 << 27  # of the arguments of one round
_MOST_CALLS = 200


class Contest(NamedTuple):
    """Two processes, and what the contest does for a race between them."""

    candidate: Asked
    reference: Asked
    drawn: Callable[[str, int], Case]
    check: Callable[[list[Tensor], list[Tensor], Case], None]


class Round(NamedTuple):
    """Seconds for a number of calls, and their results."""

    seconds: float
    results: list[Tensor]


def race(contest: Contest) -> dict[str, Any]:
    """Time candidate and reference in turns; their medians and spreads in milliseconds.

    Raises: what the calls do; Refused for a result that is wrong.
    """
    _lock(contest)
    case = contest.drawn("timed", 2)
    per_call = sum(x.numel() * x.element_size() for x in case.tensors)
    contest.reference.give(case)
    answer = contest.reference.ask("call", guarded=False, keep=True, seed=1)
    out = contest.reference.tensors(answer, "results")
    once = _once(contest.reference, [case], out, False).seconds
    once = min(once, _once(contest.reference, [case], out, False).seconds)
    bytes_of_all = per_call + sum(x.numel() * x.element_size() for x in out)
    count = int(max(1, min(_LENGTH / once, _MOST_CALLS, _BYTES / max(1, bytes_of_all))))
    taken: dict[str, list[float]] = {"reference": [], "candidate": [], "overhead": []}
    for number in range(_ROUNDS):
        sets = _fresh(contest, case, count)
        sides = (("reference", contest.reference), ("candidate", contest.candidate))
        results = {}
        for name, witness in sides if number % 2 else sides[::-1]:
            done = _once(witness, sets, out, False)
            taken[name].append(1e3 * done.seconds / count)
            results[name] = done.results
        for i, given in enumerate(sets):
            part = slice(i * len(out), (i + 1) * len(out))
            contest.check(results["candidate"][part], results["reference"][part], given)
        empty = _once(contest.reference, sets, out, True)
        taken["overhead"].append(1e3 * empty.seconds / count)
    return _summary(taken, count, bytes_of_all)


def _lock(contest: Contest) -> None:
    """From here on the candidate is one process that can start no other."""
    jail = contest.candidate.jail
    before = jail.filters()
    contest.candidate.ask("lock")
    after = jail.filters()
    for pid in jail.processes()[1:]:
        os.kill(pid, signal.SIGKILL)
    jail.in_force["no new processes while timed"] = 0 < before < after
    if 0 < after <= before:
        raise Refused("tampering", "it keeps the judge's code in its process from its work")


def _fresh(contest: Contest, case: Case, count: int) -> list[Case]:
    """Return arguments for `count` calls that were never used before."""
    first = contest.drawn("timed", 2)
    if Layout.of(first.tensors) != Layout.of(case.tensors):  # samples of many shapes
        first = _rolled(case)
    return [first, *(_rolled(first) for _ in range(count - 1))]


def _rolled(case: Case) -> Case:
    """Return a case with the numbers of each free tensor turned and scaled by chance."""

    def rolled(x: Tensor) -> Tensor:
        scale = 0.75 + 0.25 * (secret() % 1024) / 1024
        return (x.flatten().roll(secret() % x.numel()) * scale).reshape(x.shape)

    return case.named("timed", [rolled(x) if is_free(x) else x for x in case.tensors])


def _once(witness: Asked, sets: Sequence[Case], out: list[Tensor], empty: bool) -> Round:
    given = [x for case in sets for x in case.tensors]
    one, of_out = Layout.of(sets[0].tensors), Layout.of(out)
    layout = one.repeated(one.period, len(sets))
    results = of_out.repeated(of_out.period, len(sets))
    files = exhibits.make(layout.size), exhibits.make(results.size)
    try:
        Mapped(files[0], layout).fill(given)
        order = {"do": "batch", "layout": one.json(), "size": one.size, "out": of_out.json()}
        order |= {"out_size": of_out.size, "count": len(sets), "empty": empty}
        mapped = Mapped(files[1], results)
        begun = time.perf_counter()
        answer = witness.jail.ask(order, files)
        seconds = time.perf_counter() - begun
        witness.jail.signal(signal.SIGSTOP)
        found = mapped.copies()
        witness.jail.signal(signal.SIGCONT)
        witness.check(answer, "batch")
        return Round(seconds, found)
    finally:
        for file in files:
            os.close(file)


def _summary(taken: dict[str, list[float]], count: int, moved: int) -> dict[str, Any]:
    overhead = min(taken.pop("overhead"))
    summary: dict[str, Any] = {"calls": count, "rounds": _ROUNDS, "overhead_ms": overhead}
    medians = {}
    for name, samples in taken.items():
        net = [max(ms - overhead, 0.0) for ms in samples]
        medians[name] = statistics.median(net)
        summary[name] = {
            "median_ms": medians[name],
            "fastest_ms": min(net),
            "slowest_ms": max(net),
            "measured_ms": samples,
        }
    summary["resolved"] = min(medians.values()) > overhead / 4
    if not summary["resolved"]:
        medians = {name: statistics.median(samples) for name, samples in taken.items()}
    summary["speedup"] = medians["reference"] / medians["candidate"]
    summary["bytes"] = moved
    return summary


def allowance(dtype: torch.dtype, given: Sequence[Tensor], options: Options) -> float:
    """By what share of its size a timed result may differ from the reference's own."""
    if not dtype.is_floating_point:
        return 0.0
    terms = max([x.numel() for x in given] or [1]) ** 0.25
    unit = max(tolerance.unit(dtype), tolerance.PRECISIONS[options.precision])
    return 64 * unit * terms
