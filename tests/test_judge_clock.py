"""What a candidate's events say is held against the judge's own clock, on GPUs that others use too."""

import random

import pytest

from loader.jit.judge.clock import Round, borne_out
from loader.jit.judge.verdict import BUSY, Ledger, Refused, Verdict

AROUND = 1.6  # milliseconds that stand around a call


def rounds(draw, number, calls, true, claimed, jitter):
    """Rounds of a candidate and the same without a call, each of them delayed at random."""

    def one(per_call, claims):
        waited = calls * (AROUND + per_call) + jitter * draw.expovariate(1)
        return Round(waited / 1e3, [], [claims] * calls, [0.01] * calls)

    return [(one(true, claimed), one(0, 0)) for _ in range(number)]


def outcomes(number, calls, true, claimed, jitter):
    """What comes of it 200 times: refused, by events, or by the judge's own clock."""
    draw, found = random.Random(f"{number} {calls} {true} {claimed} {jitter}"), []
    for _ in range(200):
        try:
            believed = borne_out(rounds(draw, number, calls, true, claimed, jitter))
            found.append("events" if believed else "own clock")
        except Refused:
            found.append("refused")
    return found


@pytest.mark.parametrize(("number", "calls", "true"), [(7, 12, 0.005), (7, 12, 5), (3, 1, 400)])
def test_an_honest_time_on_a_gpu_of_ones_own_is_believed(number, calls, true):
    assert {*outcomes(number, calls, true, true, 0.3)} == {"events"}


@pytest.mark.parametrize(
    ("true", "claimed"), [(1, 0.0004), (0.3, 0.005), (5, 1)], ids=["1 ms", "0.3 ms", "5 as 1"]
)
def test_a_lie_on_a_gpu_of_ones_own_is_refused(true, claimed):
    assert {*outcomes(7, 12, true, claimed, 0.3)} == {"refused"}


@pytest.mark.parametrize("jitter", [2, 10, 100, 1000])
@pytest.mark.parametrize(("number", "calls"), [(7, 12), (7, 4), (7, 1), (3, 1)])
def test_a_lie_is_never_believed_on_a_busy_gpu(number, calls, jitter):
    """Where calls are few too, since the reference's own first time was that of a busy GPU."""
    assert outcomes(number, calls, 1, 0.0004, jitter).count("events") == 0


@pytest.mark.parametrize("jitter", [2, 10, 100])
@pytest.mark.parametrize(("number", "calls"), [(7, 12), (7, 4), (3, 1)])
def test_an_honest_kernel_is_seldom_refused_on_a_busy_gpu(number, calls, jitter):
    """Less than a third of the time, and it is refused for good only if it is three times."""
    assert outcomes(number, calls, 0.005, 0.005, jitter).count("refused") < 200 / 3


def test_what_could_not_be_ruled_out_is_a_warning_that_says_what_to_do():
    ledger = Ledger(general=False)
    ledger.passed("streams", "runs")
    ledger.warned("streams", BUSY)
    verdict = Verdict(ledger.summary())
    assert verdict.accepted and verdict.check("runs")["outcome"] == "passed"
    assert verdict.check("streams") == {"name": "streams", "outcome": "warned", "text": BUSY}
    assert BUSY.endswith("judge it where nothing else uses the GPU")
    ledger.failed("streams", "late")
    ledger.warned("streams", BUSY)
    assert Verdict(ledger.summary()).check("streams")["text"] == "late"
