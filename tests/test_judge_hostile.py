"""Candidates that cheat or do harm: each gets the right verdict, and the judge goes on."""

import subprocess

import pytest
from hostile_candidates import COPY, HOSTILE, REFERENCE

import loader

SLOW = {"endless_loop", "endless_import", "stops_itself"}  # these take as long as they may


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """All verdicts by name, the file that was to be spoilt, and a process that was to be killed."""
    folder = tmp_path_factory.mktemp("hostile")
    victim = folder / "victim"
    victim.write_text("theirs")
    other = subprocess.Popen(["sleep", "1000"])
    verdicts = {}
    try:
        for copy in (False, True):
            place = folder / ("copy" if copy else "usual")
            place.mkdir()
            reference = place / "ref.py"
            reference.write_text(COPY if copy else REFERENCE)
            for slow in (False, True):
                paths = {}
                for name, hostile in HOSTILE.items():
                    if hostile.copy == copy and (name in SLOW) == slow:
                        paths[name] = folder / f"{name}.py"
                        words = {"victim": str(victim), "reference": str(reference)}
                        text = hostile.code.replace("{{", "{").replace("}}", "}")
                        for word, value in words.items():
                            text = text.replace("{" + word + "!r}", repr(value))
                        paths[name].write_text(text.replace("{pid}", str(other.pid)))
                if paths:
                    found = loader.judge(
                        [*paths.values()],
                        reference,
                        jobs=2,
                        seconds=1.5 if slow else 20,
                        memory="1GiB",
                    )
                    verdicts |= dict(zip(paths, found, strict=True))
        yield verdicts, victim, other
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
