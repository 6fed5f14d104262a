"""The time of record: taken outside of the process that is timed.

A round is a number of calls with fresh arguments (rounds.py). The process is halted by a signal
when the clock stops, it can have no other process at work (jail.py, seccomp.py), and results are
compared. So nothing that it does to clocks of its own changes what is measured, and a result that
is late is wrong. What stands around calls is measured with a reference that is not called, and
taken off of both sides.
"""

import itertools
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import compare, tolerance
from .asked import Asked, Options
from .cases import Case
from .exhibits import Layout
from .rounds import COMPARED, Calls, Round, once, together
from .verdict import Refused

_ROUNDS, _FEWEST = 7, 3
_TRIES, _REFUSALS = 5, 2  # of rounds on a GPU, and how many are to be refused for a refusal
_LONGEST = 4.0  # seconds after which there are no more rounds than the fewest
_LENGTH = 0.02  # seconds of a round that is long enough
_ON_GPU = 1 << 30  # bytes of arguments and results of one round there
_SEVERAL, _SPENT = 12, 0.2  # calls of a round on a GPU, where they take up to so many seconds
_MOST_CALLS = 200
_COPIED = 1 << 26  # bytes of the copy that says what memory can do
_COPIED_THERE = 1 << 28  # the same on a GPU
_BORNE_OUT, _SLACK_MS = 0.5, 3.0  # what events say is to be so much of what the judge has waited
_ERRORS = 2.6  # two standard errors of a median of seven, of the fifth deviation from it
_SEEN_MS = 0.25  # of a call: where that would not be seen, events are not believed
_LATE_MS = 0.1  # after a call's own events, that other streams may need


class Contest(NamedTuple):
    """Two processes, and what the contest does for a race between them."""

    candidate: Asked
    reference: Asked
    compiled: Asked | None  # the reference, by torch.compile
    drawn: Callable[[str, int], Case]
    options: Options
    allowed: Sequence[float]  # by what results of such arguments could differ, in the mean


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
    sides = {"reference": contest.reference, "candidate": contest.candidate}
    if contest.compiled:
        sides["compiled"] = contest.compiled
        contest.compiled.give(case)
        once(contest.compiled, Calls.of(case, 1), out)
    least = min(once(contest.reference, Calls.of(case, 1), out).seconds for _ in range(2))
    bytes_of_all = per_call + sum(x.numel() * x.element_size() for x in out)
    on_gpu, turn = contest.options.device == "cuda", contest.reference.turn
    room = min(_ON_GPU, turn.room()) if turn else COMPARED
    calls = _LENGTH / least
    if on_gpu:  # whose host may have been away in these; of few calls less would be seen
        calls = max(calls, min(_SEVERAL, _SPENT / least))
    count = int(max(1, min(calls, _MOST_CALLS, room / max(1, bytes_of_all))))
    clocks = _clocks(contest.options.device)
    tries = iter(lambda: take_turns(contest, case, count, sides, out), None)
    by_events, rounds = believed(tries, count) if on_gpu else (False, next(tries))
    summary = _summary(rounds, count, by_events, contest.options.device)
    summary["clocks"] = [*clocks, *_clocks(contest.options.device)]
    return summary | _limit(summary, bytes_of_all, contest)


def take_turns(
    contest: Contest, case: Case, count: int, sides: dict[str, Asked], out: list[Tensor]
) -> dict[str, list[Round]]:
    """Have the sides take turns; return the rounds of each, and those without a call as "overhead".

    The reference's alone tell that. On a CPU each side has them before its calls, with arguments of
    no other use: who was halted until then is slower at first.
    Raises: Refused for a result of the candidate that is wrong.
    """
    rounds: dict[str, list[Round]] = {name: [] for name in (*sides, "overhead")}
    begun = time.perf_counter()
    for number in range(_ROUNDS):
        if number >= _FEWEST and time.perf_counter() - begun > _LONGEST:
            break
        fresh = contest.drawn("timed", 2)
        if Layout.of(fresh.tensors) != Layout.of(case.tensors):  # samples of many shapes
            fresh = case.named("timed", Calls.of(case, 1).arguments())
        order = [*sides] if number % 2 else [*reversed(sides)]
        calls = seeming = Calls.of(fresh, count)
        who = [("reference", True), *((name, False) for name in order)]
        if not contest.reference.turn:
            seeming = Calls.of(case.named("timed", Calls.of(case, 1).arguments()), count)
            who = [(name, seems) for name in order for seems in (True, False)]
        done, compared = together([(sides[x], seems) for x, seems in who], calls, seeming, out)
        found = dict(zip(who, done, strict=True))
        for name, those in rounds.items():
            each = found[("reference", True) if name == "overhead" else (name, False)]
            those.append(each._replace(results=[]))
        got, plain = found["candidate", False].results, found["reference", False].results
        for i in range(compared):
            part = slice(i * len(out), (i + 1) * len(out))
            _check(contest, got[part], plain[part], fresh)
    return rounds


def believed(
    tries: Iterator[dict[str, list[Round]]], count: int
) -> tuple[bool, dict[str, list[Round]]]:
    """Return whether times are those that CUDA's events say, and the rounds that tell.

    Others may have had the GPU, or the host: what is refused or not seen is tried again. Raises:
    Refused where two are.
    """
    refusals = 0
    for rounds in itertools.islice(tries, _TRIES):
        for name in rounds.keys() - {"overhead"}:
            if wrong := [len(x.claimed) for x in rounds[name] if len(x.claimed) != count]:
                raise Refused("results", f"its process says of {count} calls {wrong[0]} times")
        pairs = [*zip(rounds["candidate"], rounds["overhead"], strict=True)]
        try:
            if all([in_time(pairs), borne_out(pairs)]):  # each looks, whatever the other sees
                return True, rounds
        except Refused:
            refusals += 1
            if refusals == _REFUSALS:
                raise
    return False, rounds


def in_time(rounds: Sequence[tuple[Round, Round]]) -> bool:
    """Look whether streams are at work after a call's own events. Raises: Refused where most are.

    `rounds`: the candidate's, and the same without a call. The host stands between the two events,
    which may take its time: so do calls of nothing. Return False where these take so long in more
    than a quarter of the rounds that work of others would not be seen.
    """
    claimed = statistics.median([ms for done, _ in rounds for ms in done.claimed])
    nothing = sorted(statistics.median(empty.late) for _, empty in rounds)
    usual, noise = nothing[0], nothing[-1 - len(nothing) // 4] - nothing[0]
    late = statistics.median([statistics.median(done.late) for done, _ in rounds]) - usual
    if late > max(_LATE_MS, claimed / 4) + noise:
        raise Refused(
            "streams",
            f"a call takes the current stream {claimed:.3g} ms by CUDA's events, and the GPU is at "
            f"work for {late:.3g} ms more: on streams that nobody waits for",
        )
    return noise < max(_SEEN_MS, claimed / 4)


def borne_out(rounds: Sequence[tuple[Round, Round]]) -> bool:
    """Hold what events say against the judge's own clock. Raises: Refused.

    `rounds`: the candidate's, and the same without a call. By medians: a host that is mostly there
    is away for a round or two. Return False where the waits, beside others at work, differ so much
    that a lie by more than the claim would not be seen.
    """
    waits = [1e3 * (done.seconds - empty.seconds) for done, empty in rounds]
    usual = statistics.median(waits)
    outside = len(rounds) * usual
    each = [len(done.claimed) * statistics.median(done.claimed) for done, _ in rounds]
    claimed = len(rounds) * statistics.median(each)  # by what is reported: a sum could hide it
    spread = sorted(abs(wait - usual) for wait in waits)[-1 - 3 * len(waits) // 10]
    noise = _ERRORS * spread * len(rounds) ** 0.5
    if claimed < _BORNE_OUT * outside - _SLACK_MS - noise:
        raise Refused(
            "streams",
            f"events say {claimed:.3g} ms for all calls, and they kept the judge waiting for "
            f"{outside:.3g} ms: their work is not on the current stream, or the events lie",
        )
    calls = sum(len(done.claimed) for done, _ in rounds)
    return _SLACK_MS + noise < claimed + _SEEN_MS * calls


def _limit(summary: dict[str, Any], moved: int, contest: Contest) -> dict[str, Any]:
    """Say what share of the bandwidth of a copy the candidate's arguments and results come to."""
    if contest.options.device == "cuda":  # the referee wakes no GPU: copied where the reference is
        with contest.reference.alone():
            milliseconds = contest.reference.ask("copying", size=_COPIED_THERE)["ms"]
        limit = moved * milliseconds / (2 * _COPIED_THERE)
    else:
        x = torch.ones(_COPIED, dtype=torch.uint8)
        y = torch.empty_like(x)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            y.copy_(x)
            seconds.append(time.perf_counter() - begun)
        limit = 1e3 * moved * min(seconds) / (2 * _COPIED)
    median = summary["candidate"]["median_ms"]
    return {"bytes": moved, "limit_ms": limit, "share_of_limit": limit / median if median else None}


def _clocks(device: str) -> list[str]:
    """Return the GPU's clocks and what slows it down, as nvidia-smi tells."""
    if device != "cuda":
        return []
    words = "clocks.sm,clocks.max.sm,clocks_throttle_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={words}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines()[:1]


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


def _summary(
    rounds: dict[str, list[Round]], count: int, by_events: bool, device: str
) -> dict[str, Any]:
    def per_call(each: Round) -> float:
        return statistics.median(each.claimed) if by_events else 1e3 * each.seconds / count

    taken = {name: [per_call(each) for each in found] for name, found in rounds.items()}
    without = taken.pop("overhead")
    overhead = 0.0 if by_events else min(without)  # events have none
    summary: dict[str, Any] = {
        "calls": count,
        "rounds": len(taken["candidate"]),
        "overhead_ms": overhead,
    }
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
    summary["resolved"] = by_events or (device == "cpu" and min(medians.values()) > overhead / 2)
    if not summary["resolved"]:
        medians = {name: statistics.median(samples) for name, samples in taken.items()}
    for name in medians.keys() - {"candidate"}:
        key = "speedup" if name == "reference" else f"speedup_over_{name}"
        summary[key] = medians[name] / max(medians["candidate"], 1e-9)
    return summary


def _check(contest: Contest, got: list[Tensor], plain: list[Tensor], case: Case) -> None:
    """Compare results of calls that were timed with the reference's. Raises: Refused."""
    for number, (x, y) in enumerate(zip(got, plain, strict=True)):
        size = y.double().abs().nan_to_num(0, 0, 0)
        scale = size.mean() if y.numel() else torch.tensor(0.0)
        near = (size + 4 * scale) * _allowance(y.dtype, case.tensors, contest.options)
        near = near.clamp_min(contest.allowed[number])  # of what cancels little else is left
        if wrong := compare.differs(x, y, near):
            raise Refused(
                "timed_values",
                f"while it was timed it gave {wrong['got']} at {tuple(wrong['index'])} where "
                f"{wrong['expected']} was due, and {wrong['wrong']} such elements",
                worst={"case": case.name, "result": number, **wrong},
            )


def _allowance(dtype: torch.dtype, given: Sequence[Tensor], options: Options) -> float:
    """By what share of its size a timed result may differ from the reference's own."""
    if not dtype.is_floating_point:
        return 0.0
    terms = max([x.numel() for x in given] or [1]) ** 0.25
    unit = max(tolerance.unit(dtype), tolerance.PRECISIONS[options.precision])
    return 64 * unit * terms
