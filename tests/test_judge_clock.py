"""What a candidate's events say is held against the judge's own clock, on GPUs that others use too."""

import random
from types import SimpleNamespace

import pytest
import torch

from loader.jit.judge import clock, exhibits
from loader.jit.judge.asked import Asked, Crowded, Misused, Turn
from loader.jit.judge.cases import Case
from loader.jit.judge.clock import Round, believed, borne_out, in_time
from loader.jit.judge.rounds import Calls
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
    """In less than one try of 50, and it is refused for good only if it is twice."""
    assert outcomes(number, calls, 0.005, 0.005, jitter).count("refused") < 200 / 50


def test_a_few_calls_that_claim_too_much_do_not_make_up_for_many_that_claim_too_little():
    claims = [0.0004] * 7 + [2.4] * 5  # of 1 ms each
    pairs = rounds(random.Random(1), 7, 12, 1, 0, 0.3)
    with pytest.raises(Refused, match="the events lie"):
        borne_out([(done._replace(claimed=claims), empty) for done, empty in pairs])


def test_a_host_that_is_away_for_a_round_or_two_hides_no_lie_and_refuses_no_honest_kernel():
    def away(true, claimed):
        draw, found = random.Random(1), []
        for _ in range(200):
            pairs = rounds(draw, 7, 12, true, claimed, 0.3)
            for i in draw.sample(range(7), 2):
                slow, side = draw.uniform(0.005, 0.06), draw.random() < 0.5
                done, empty = pairs[i]
                if side:
                    pairs[i] = done._replace(seconds=done.seconds + slow), empty
                else:
                    pairs[i] = done, empty._replace(seconds=empty.seconds + slow)
            try:
                found.append("events" if borne_out(pairs) else "own clock")
            except Refused:
                found.append("refused")
        return {*found}

    assert away(1, 0.0004) == {"refused"}
    assert away(0.005, 0.005) == {"events"}


def lateness(late, preempted, share, whole):
    """What comes of it 50 times, where a share of calls, or of rounds, finds the host away."""

    def one(draw, late):
        away = draw.random() < whole
        times = [0.01 + late + preempted * (away or draw.random() < share) for _ in range(12)]
        return Round(0.02, [], [0.05] * 12, times)

    found = []
    for number in range(50):
        draw = random.Random(number)
        try:
            seen = in_time([(one(draw, late), one(draw, 0)) for _ in range(7)])
            found.append("in time" if seen else "not seen")
        except Refused as refusal:
            assert refusal.check == "streams"
            found.append("refused")
    return found


@pytest.mark.parametrize(("preempted", "share"), [(0, 0), (5, 0.1), (1, 0.1)])
def test_work_after_a_calls_own_events_is_refused_on_a_host_that_is_sometimes_away(
    preempted, share
):
    assert {*lateness(0, preempted, share, 0)} == {"in time"}
    assert {*lateness(0.9, preempted, share, 0)} == {"refused"}


@pytest.mark.parametrize(
    ("preempted", "share", "whole"), [(3, 0, 0.3), (20, 0.2, 0.3), (1, 0.3, 0)]
)
def test_late_work_is_never_believed_where_the_host_is_often_away(preempted, share, whole):
    assert "in time" not in lateness(0.9, preempted, share, whole)
    assert lateness(0, preempted, share, whole).count("refused") < 50 / 5


def tried(*kinds):
    """Seven rounds of 12 calls for each: of an honest time, a lie, or beside others at work."""

    def rounds(waited, claims, noise):
        each = [Round(0.02 + waited + noise * i, [], [claims] * 12, [0.01] * 12) for i in range(7)]
        without = [0.02 + noise * (6 - i) for i in range(7)]
        return {
            "candidate": each,
            "overhead": [x._replace(seconds=s) for x, s in zip(each, without, strict=True)],
        }

    made = {"honest": (0.001, 0.08, 0), "lie": (0.012, 0.0004, 0), "noise": (0.001, 0.08, 0.01)}
    return iter([rounds(*made[kind]) for kind in kinds])


def test_a_refusal_is_to_hold_each_time():
    assert believed(tried("honest"), 12)[0]
    assert believed(tried("lie", "noise", "honest"), 12)[0]
    for kinds in (("noise", "noise", "lie"), ("lie", "noise", "noise"), ("noise",) * 5):
        assert not believed(tried(*kinds), 12)[0]
    for kinds in (("lie", "lie"), ("noise", "lie", "noise", "noise", "lie")):
        with pytest.raises(Refused, match="the events lie"):
            believed(tried(*kinds), 12)
    with pytest.raises(Refused, match="of 11 calls 12 times"):
        believed(tried("honest"), 11)


def test_on_a_cpu_each_side_comes_from_calls_of_nothing_to_its_own(monkeypatch):
    """What it sees in those is no argument of its calls, and what counts are the reference's."""
    reference, candidate = (SimpleNamespace(name=name, turn=None) for name in ("r", "c"))
    contest = SimpleNamespace(
        reference=reference, drawn=lambda *_: Case("timed", None, [torch.rand(64)])
    )
    orders, seconds = [], iter(range(100))

    def together(who, calls, seeming, out):
        orders.append([(asked.name, seems) for asked, seems in who])
        used = [x.sort().values for x in calls.arguments()]
        assert not any(torch.equal(x.sort().values, y) for x in seeming.arguments() for y in used)
        return [Round(next(seconds), [], [], []) for _ in who], 0

    monkeypatch.setattr(clock, "together", together)
    sides = {"reference": reference, "candidate": candidate}
    found = clock.take_turns(contest, contest.drawn(), 3, sides, [])
    one, other = [("r", True), ("r", False)], [("c", True), ("c", False)]
    assert orders == [other + one, one + other] * 3 + [other + one]
    taken = {name: [int(each.seconds) for each in rounds] for name, rounds in found.items()}
    assert taken == {
        "overhead": [2, 4, 10, 12, 18, 20, 26],
        "reference": [3, 5, 11, 13, 19, 21, 27],
        "candidate": [1, 7, 9, 15, 17, 23, 25],
    }


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float32, torch.complex64, torch.bool, torch.uint8, torch.int64]
)
@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 3), (64, 33)])
def test_a_fingerprint_is_that_of_all_bits_and_of_the_seed(dtype, shape):
    x = torch.randint(0, 2, shape).to(dtype)
    number = exhibits.fingerprint(x, 5).item()
    assert exhibits.fingerprint(x.clone(), 5).item() == number
    assert exhibits.fingerprint(x.t().contiguous().t() if x.dim() == 2 else x, 5).item() == number
    if x.numel():
        assert exhibits.fingerprint(x, 6).item() != number
        other = x.clone()
        other.view(-1)[-1] = not other.view(-1)[-1]
        assert exhibits.fingerprint(other, 5).item() != number


def test_arguments_of_each_call_are_others_in_the_same_layout():
    matrix = torch.rand(16, 8).t()
    spread = torch.rand(8, 32)[:, ::2]
    fixed = torch.arange(64)
    calls = Calls.of(Case("timed", None, [matrix, spread, fixed]), 3)
    given = calls.arguments()
    assert len(given) == 9 and [x.stride() for x in given] == 3 * [(1, 8), (32, 2), (1,)]
    for one, other in ((0, 3), (1, 4), (0, 6), (3, 6)):
        assert not torch.equal(given[one], given[other])
    for x, begin in zip(given, 3 * [matrix, spread, fixed], strict=True):
        assert x.data_ptr() != begin.data_ptr() and x.dtype == begin.dtype
        assert 0.74 < x.double().abs().max() / begin.double().abs().max() <= 1
    assert torch.equal(given[2], fixed)


@pytest.mark.parametrize("copies", [None, 0, 1, 5])
def test_what_lies_beside_a_slice_is_none_of_its_arguments(copies):
    memory = torch.full((8, 32), torch.nan)
    memory[:, ::2] = torch.rand(8, 16)
    part = memory[:, ::2] if copies is None else memory[:, ::2].expand(copies, 8, 16)
    for places in (1, 37, 127):
        made = exhibits.turned(part, places, 0.5)
        expected = memory[:, ::2].flatten().roll(places).view(8, 16) * 0.5
        assert made.stride() == part.stride() and torch.equal(made, expected.expand(part.shape))
    assert memory.isnan().sum() == 128


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


@pytest.mark.parametrize(("role", "alone"), [("candidate", Refused), ("reference", Misused)])
def test_who_gets_no_memory_beside_others_is_to_be_judged_again_alone(tmp_path, role, alone):
    answer = {"error": "CUDA out of memory", "kind": "memory", "files": []}
    beside = Turn(str(tmp_path / "turn"), 6)
    with pytest.raises(Crowded):
        Asked(None, role, beside).check(answer, "call")
    with pytest.raises(Crowded):  # that of torch.compile has no turn
        Asked(None, role, crowded=True).check(answer, "call")
    with pytest.raises(alone, match="out of memory"):
        Asked(None, role, Turn(str(tmp_path / "turn"), 1)).check(answer, "call")
    assert beside.share("candidate") * 6 <= 0.5 and beside.share("reference") == 1
