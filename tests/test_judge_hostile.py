"""Candidates that cheat or do harm: each gets the right verdict, and the judge goes on."""

import subprocess

import pytest
import verdicts
from hostile_candidates import HOSTILE, REFERENCE, RIGHT, SLOW, module, written

import loader


def check_that_they_are_confined(folder):
    """Let none of them loose on a machine whose kernel or container would not hold it."""
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "right.py").write_text(module(f"return {RIGHT}"))
    words = {"timed": False, "device": "cpu"}
    verdict = loader.judge(folder / "right.py", folder / "reference.py", **words)
    given = verdict.data["isolation"] | {"own user": True}  # whoever is root does without
    given["landlock"] = {"files", "tracing", "signals"} <= {*given["landlock"]}
    if missing := [what for what, there in given.items() if not there]:
        pytest.skip(f"this machine has no {', '.join(missing)} for the judge")


@pytest.fixture(scope="module")
def judged(tmp_path_factory, pytestconfig):
    """All verdicts, what is in the file that was to be spoilt, and of whom was to be killed."""

    def judge() -> dict:
        folder = tmp_path_factory.mktemp("hostile")
        check_that_they_are_confined(folder)
        other = subprocess.Popen(["sleep", "1000"])
        found = {}
        try:
            for copy in (False, True):
                for slow in (False, True):
                    names = [
                        n for n, h in HOSTILE.items() if h.copy == copy and (n in SLOW) == slow
                    ]
                    if names:
                        paths, reference = written(folder, names, other.pid)
                        limits = {"seconds": 1.5 if slow else 20, "memory": "1GiB", "jobs": 2}
                        judged = loader.judge(paths, reference, device="cpu", **limits)
                        found |= dict(zip(names, judged, strict=True))
            victim, ended = (folder / "victim").read_text(), other.poll()
        finally:
            other.kill()
            other.wait()
        return {"verdicts": found, "victim": victim, "ended": ended}

    return verdicts.shared(tmp_path_factory, pytestconfig, "hostile", judge)


@pytest.mark.parametrize("name", HOSTILE)
def test_it_gets_the_right_verdict(judged, name):
    hostile, verdict = HOSTILE[name], judged["verdicts"][name]
    if not hostile.failed:
        assert verdict.accepted, verdict
        return
    assert not verdict.accepted
    assert set(verdict.failed) & set(hostile.failed), verdict
    text = " ".join(verdict.check(check)["text"] for check in verdict.failed)
    assert hostile.says in text


def test_the_machine_is_as_it_was(judged):
    """And so is the judge: what came after each of them was judged as well."""
    assert judged["victim"] == "theirs"
    assert judged["ended"] is None
