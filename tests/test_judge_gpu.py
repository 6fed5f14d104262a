"""`loader.judge` on a GPU: kernels that are right, wrong, late, early, harmful, or cheat."""

import pytest
import verdicts
from gpu_candidates import KERNELS, REFERENCES, kernel
from honest_candidates import HONEST
from honest_candidates import REFERENCES as HONEST_REFERENCES
from hostile_candidates import REFERENCE, RIGHT, module

import loader

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def judged(tmp_path_factory, pytestconfig):
    """The verdicts of all kernels by name; endless ones come before others of their order."""

    def judge() -> dict:
        folder, found = tmp_path_factory.mktemp("kernels"), {}
        for kind, text in {"usual": REFERENCE, **REFERENCES}.items():
            (folder / kind).mkdir()
            reference = folder / kind / "reference.py"
            reference.write_text(text)
            for slow in (False, True):
                names = [n for n, k in KERNELS.items() if k.reference == kind and k.slow == slow]
                names += ["after_an_endless_one"] * (slow and kind == "usual")
                paths = [folder / kind / f"{name}.py" for name in names]
                for name, path in zip(names, paths, strict=True):
                    path.write_text(
                        KERNELS[name].code if name in KERNELS else KERNELS["kernel"].code
                    )
                limits = {"seconds": 3 if slow else 30, "jobs": 1 if slow else 6}
                options = {"device": "cuda", "sanitizer": False, **limits}
                if paths:
                    verdict = loader.judge(paths, reference, **options)
                    found |= dict(zip(names, verdict, strict=True))
        return {"verdicts": found}

    return verdicts.shared(tmp_path_factory, pytestconfig, "kernels", judge)["verdicts"]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gets_the_right_verdict(judged, name):
    due, verdict = KERNELS[name], judged[name]
    if not due.failed:
        assert verdict.accepted, verdict
        return
    assert not verdict.accepted, verdict
    assert {*verdict.failed} & {*due.failed}, verdict
    assert due.says in " ".join(verdict.check(check)["text"] for check in verdict.failed)


def test_what_comes_after_an_endless_kernel_is_judged(judged):
    assert judged["endless_kernel"].data["ended"] == "hung"
    assert judged["after_an_endless_one"].accepted


def test_a_kernel_is_timed_by_events_and_against_a_copy(judged):
    time = judged["kernel"].data["time"]
    assert 0 < time["candidate"]["fastest_ms"] <= time["candidate"]["median_ms"]
    assert time["resolved"] and time["speedup"] > 0 and time["clocks"]
    copied = judged["large_results"].data["time"]
    assert copied["bytes"] == 2 * 4 << 24
    assert 0.1 < copied["share_of_limit"] < 1.5


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    (folder / "ref.py").write_text(REFERENCE)
    (folder / "right.py").write_text(module(f"return {RIGHT}"))
    return folder


def test_it_is_confined_on_a_gpu_as_without(pair, judged):
    on_cpu = loader.judge(pair / "right.py", pair / "ref.py", device="cpu", timed=False)
    there = judged["kernel"].data["isolation"]
    for what, given in on_cpu.data["isolation"].items():
        assert not given or there[what] == given, what


def test_torch_compile_of_the_reference_is_timed_too(pair):
    words = {"device": "cuda", "compiled": True, "sanitizer": False}
    verdict = loader.judge(pair / "right.py", pair / "ref.py", **words)
    assert verdict.accepted, verdict
    assert verdict.data["time"]["compiled"]["median_ms"] > 0


def test_compute_sanitizer_finds_what_is_written_behind_a_result(pair):
    past = (
        "out = run(torch.empty_like(x), x, y)\n"
        "run(out[-1:], x[-1:], y[-1:], x.shape[1], x.shape[1] + 1)\nreturn out"
    )
    (pair / "past.py").write_text(kernel(past))
    words = {"device": "cuda", "timed": False}
    right = loader.judge(pair / "right.py", pair / "ref.py", **words)
    assert right.accepted, right
    if right.check("sanitizer")["outcome"] == "skipped":
        pytest.skip(right.check("sanitizer")["text"])
    verdict = loader.judge(pair / "past.py", pair / "ref.py", **words)
    assert verdict.failed == ["sanitizer"], verdict
    assert "Invalid __global__ write" in verdict.check("sanitizer")["text"]


def test_a_reference_that_asserts_on_the_gpu_is_asked_for_what_it_takes(tmp_path):
    kind, code = HONEST["chances_by_hand"]
    (tmp_path / "reference.py").write_text(HONEST_REFERENCES[kind])
    (tmp_path / "candidate.py").write_text(code)
    options = {"device": "cuda", "sanitizer": False, "timed": False}
    verdict = loader.judge(tmp_path / "candidate.py", tmp_path / "reference.py", **options)
    assert verdict.accepted, verdict
