"""Candidates that cheat or do harm: each gets the right verdict, and the judge goes on."""

import subprocess

import pytest
from hostile_candidates import HOSTILE, REFERENCE, RIGHT, SLOW, module, written

import loader


def check_that_they_are_confined(folder):
    """Let none of them loose on a machine whose kernel or container would not hold it."""
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "right.py").write_text(module(f"return {RIGHT}"))
    verdict = loader.judge(folder / "right.py", folder / "reference.py", timed=False)
    given = verdict.data["isolation"] | {"own user": True}  # whoever is root does without
    given["landlock"] = {"files", "tracing", "signals"} <= {*given["landlock"]}
    if missing := [what for what, there in given.items() if not there]:
        pytest.skip(f"this machine has no {', '.join(missing)} for the judge")


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """All verdicts by name, the file that was to be spoilt, and a process that was to be killed."""
    folder = tmp_path_factory.mktemp("hostile")
    check_that_they_are_confined(folder)
    other = subprocess.Popen(["sleep", "1000"])
    verdicts = {}
    try:
        for copy in (False, True):
            for slow in (False, True):
                names = [n for n, h in HOSTILE.items() if h.copy == copy and (n in SLOW) == slow]
                if names:
                    paths, reference = written(folder, names, other.pid)
                    limits = {"seconds": 1.5 if slow else 20, "memory": "1GiB"}
                    found = loader.judge(paths, reference, jobs=2, **limits)
                    verdicts |= dict(zip(names, found, strict=True))
        yield verdicts, folder / "victim", other
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("name", HOSTILE)
def test_it_gets_the_right_verdict(judged, name):
    hostile, verdict = HOSTILE[name], judged[0][name]
    if not hostile.failed:
        assert verdict.accepted, verdict
        return
    assert not verdict.accepted
    assert set(verdict.failed) & set(hostile.failed), verdict
    text = " ".join(verdict.check(check)["text"] for check in verdict.failed)
    assert hostile.says in text


def test_the_machine_is_as_it_was(judged):
    """And so is the judge: what came after each of them was judged as well."""
    _, victim, other = judged
    assert victim.read_text() == "theirs"
    assert other.poll() is None
