"""`loader.judge` and `python -m loader judge`: forms, reports, bad input."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import verdicts
from conftest import ROOT, ended, start_program
from honest_candidates import HONEST, INLINE, REFERENCES
from hostile_candidates import REFERENCE, RIGHT, module

import loader
from loader.jit.judge import tolerance
from loader.jit.tools.cli import main

FUNCTIONS = """
import torch


def theirs(x, y):
    return torch.sin(x) + y


def mine(x, y):
    return y + x.sin()


def wrong(x, y):
    out = torch.sin(x) + y
    out[3, 4] += 0.5
    return out


def arguments():
    return [torch.rand(8, 8), torch.rand(8, 8)]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    (folder / "ref.py").write_text(REFERENCE)
    (folder / "right.py").write_text(module(f"return {RIGHT}"))
    (folder / "wrong.py").write_text(module(f"out = {RIGHT}\nout[3, 4] += 0.5\nreturn out"))
    (folder / "functions.py").write_text(FUNCTIONS)
    return folder


@pytest.fixture(scope="module")
def honest(tmp_path_factory, pytestconfig):
    """The verdicts of all honest candidates, by name."""

    def judge() -> dict:
        folder, found = tmp_path_factory.mktemp("honest"), {}
        for kind, text in REFERENCES.items():
            (folder / kind).mkdir()
            (folder / kind / "reference.py").write_text(text)
            paths = {}
            for name, (reference, code) in HONEST.items():
                if reference == kind:
                    paths[name] = folder / kind / f"{name}.py"
                    paths[name].write_text(code)
            words = {"device": "cpu", "jobs": 2, "timed": False}
            judged = loader.judge([*paths.values()], folder / kind / "reference.py", **words)
            found |= dict(zip(paths, judged, strict=True))
        return {"verdicts": found}

    return verdicts.shared(tmp_path_factory, pytestconfig, "honest", judge)["verdicts"]


@pytest.mark.parametrize("name", HONEST)
def test_no_honest_candidate_is_refused(honest, name):
    assert honest[name].accepted, honest[name]


def test_an_extension_that_it_builds(files):
    (files / "inline.py").write_text(INLINE)
    verdict = loader.judge(files / "inline.py", files / "ref.py", timed=False, device="cpu")
    assert verdict.accepted, verdict


def test_an_extension_that_does_not_compile(files):
    (files / "broken.py").write_text(INLINE.replace("y.sum(-1, true)", "y.summ(-1, true)"))
    verdict = loader.judge(files / "broken.py", files / "ref.py", timed=False, device="cpu")
    assert verdict.failed == ["loads"]
    assert "summ" in verdict.check("loads")["text"]
    assert verdict.data["build"]["messages"][0]["line"]


def test_two_functions(files):
    path = files / "functions.py"
    words = {"inputs": "arguments", "timed": False, "device": "cpu"}
    assert loader.judge(f"{path}:mine", f"{path}:theirs", **words).accepted
    verdict = loader.judge(f"{path}:wrong", f"{path}:theirs", **words)
    assert verdict.failed == ["values"]
    worst = verdict.data["worst"]
    assert worst["index"] == [3, 4]
    assert worst["got"] - worst["expected"] == pytest.approx(0.5, abs=1e-3)
    assert len(worst["neighbourhood"]["got"]) == 5
    assert "worst element: result 0 at (3, 4)" in str(verdict)


def test_arguments_that_are_given(files):
    path = files / "functions.py"
    given = [[torch.rand(5, 6), torch.rand(5, 6)], (torch.rand(8, 9), torch.rand(8, 9))]
    words = {"inputs": given, "timed": False, "device": "cpu"}
    assert loader.judge(f"{path}:mine", f"{path}:theirs", **words).accepted
    assert loader.judge(f"{path}:wrong", f"{path}:theirs", **words).failed == ["values"]


LOSES_ITS_GPU = """
lost = False


class Model(torch.nn.Module):
    def forward(self, x, y):
        global lost
        lost = lost or bool((x < 0).any())
        if lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return torch.relu(x) * y.sum(-1, keepdim=True)
"""


def test_a_reference_whose_gpu_some_numbers_end_is_asked_anew_without_them(files):
    """As binary_cross_entropy's for what is no chance: no call after it comes through."""
    reference = files / "loses.py"
    reference.write_text(REFERENCE.partition("class Model")[0] + LOSES_ITS_GPU)
    with reference.open("a") as file:
        file.write("\n\ndef get_inputs" + REFERENCE.partition("def get_inputs")[2])
    (files / "right.py").write_text(module(f"return {RIGHT}"))
    words = {"timed": False, "device": "cpu"}
    verdict = loader.judge(files / "right.py", reference, **words)
    assert verdict.accepted, verdict
    reference.write_text(reference.read_text().replace("lost = False", "lost = True"))
    with pytest.raises(ValueError, match=r"(?s)the reference raises: .*CUDA error"):
        loader.judge(files / "right.py", reference, **words)


def test_of_many_elements_beside_a_kink_some_may_move_that_moved_in_no_run():
    """Below 0 relu moves nothing, however far rounding moves what it is given."""

    def allowed(count: int) -> float:
        x = torch.cat([torch.ones(count // 2), -torch.ones(count // 2)])
        return float(tolerance.bounds(torch.relu, [x]).pairs[0][1][-1])

    assert allowed(8_000_000) == pytest.approx(2 * allowed(1_000_000), rel=0.01)
    assert 0 < allowed(1_000_000) == pytest.approx(allowed(10_000), rel=0.1)


def test_an_operator_has_its_own_reference():
    assert loader.judge(loader.square, timed=False, device="cpu").accepted
    assert loader.judge("add2", timed=False, device="cpu").accepted


@pytest.mark.parametrize("status", [0, 86])
def test_an_accepted_candidate_is_called_once_more_under_compute_sanitizer(files, status):
    """Under a stand-in, which starts what it is given and says that it found something."""
    program = files / "compute-sanitizer"
    program.write_text(
        f"#!/bin/sh\nwhile [ $1 != {sys.executable} ]; do shift; done\n"
        f'"$@" && echo "========= Invalid read of size 4" && exit {status}\n'
    )
    program.chmod(0o755)
    words = {"timed": False, "sanitizer": program, "device": "cpu"}
    verdict = loader.judge(files / "right.py", files / "ref.py", **words)
    assert verdict.accepted == (status == 0), verdict
    assert verdict.check("sanitizer")["outcome"] == ("failed" if status else "passed")
    assert not status or "Invalid read" in verdict.check("sanitizer")["text"]


def below(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                found += [int(child), *below(int(child))]
    return found


def test_nothing_goes_on_when_the_judge_is_killed(files):
    (files / "endless.py").write_text(module("while True: pass"))
    words = ["-m", "loader", "judge", files / "endless.py"]
    words += ["--reference", files / "ref.py", "--device", "cpu"]
    process = start_program(words, ROOT, {**os.environ})
    deadline = time.monotonic() + 120
    while len(there := below(process.pid)) < 7:  # court, referee, and three for each of two
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while any(os.path.exists(f"/proc/{pid}") for pid in there):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ended(process)


def run(*words: object) -> subprocess.CompletedProcess:
    return ended(start_program(["-m", "loader", "judge", *words], ROOT, {**os.environ}))


def test_a_command_judges_a_folder_and_writes_json(files, tmp_path):
    folder, out = tmp_path / "candidates", tmp_path / "out.json"
    folder.mkdir()
    for name in ("right", "wrong"):
        (folder / f"{name}.py").write_text((files / f"{name}.py").read_text())
    words = ["--device", "cpu", "--json", out, "--jobs", 2]
    done = run(folder, "--reference", files / "ref.py", *words)
    assert done.returncode == 1, done.stderr
    assert "2 candidates" in done.stdout and "values" in done.stdout
    data = json.loads(out.read_text())
    right, wrong = data["candidates"]
    assert (right["verdict"], right["failed"]) == ("accepted", [])
    assert (wrong["verdict"], wrong["failed"]) == ("refused", ["values"])
    assert data["throughput"]["candidates"] == 2
    assert right["time"]["candidate"]["median_ms"] >= 0
    assert right["time"]["speedup"] > 0
    assert len(right["time"]["candidate"]["measured_ms"]) == right["time"]["rounds"]
    page = (ROOT / "docs/judge.md").read_text()
    for check in right["checks"]:
        assert f"| `{check['name']}` |" in page
    for field in right:
        assert f"`{field}`" in page


@pytest.mark.parametrize(
    ("candidate", "words", "says"),
    [
        ("no_such.py", {}, "no such file: .*no_such.py"),
        ("ref.py", {}, "has no class `ModelNew`"),
        ("right.py", {"reference": "raises.py"}, "the reference raises: .*broken on purpose"),
        ("right.py", {"reference": "does_not_load.py"}, "cannot be loaded: .*SyntaxError"),
        ("right.py", {"reference": "no_tensors.py"}, "hold no tensor"),
        ("right.py", {"reference": "odd_inputs.py"}, "an argument is neither a tensor"),
        ("right.py", {"inputs": "nothing"}, "has no function 'nothing'"),
        ("right.py", {"inputs": [[1, 2]]}, "must hold a tensor"),
        ("right.py", {"inputs": 3}, "inputs must be"),
        ("right.py", {"jobs": 0}, "jobs must be 1 or more"),
        ("right.py", {"seconds": 0}, "seconds must be above 0"),
        ("right.py", {"precision": "int4"}, "precision must be one of own, "),
        (len, {}, "cannot be taken to another process"),
        (3, {}, "a file, a function or an operator is due"),
        ("functions.py:other", {"reference": "functions.py:theirs"}, "has no function 'other'"),
    ],
)
def test_bad_input_gets_one_clear_error(files, candidate, words, says):
    made = "torch.rand(24, 40), torch.rand(24, 40)"
    (files / "raises.py").write_text(
        REFERENCE.replace(
            "return torch.relu", "assert 0, 'broken on purpose'\n        return torch.relu"
        )
    )
    (files / "does_not_load.py").write_text("def )")
    (files / "no_tensors.py").write_text(REFERENCE.replace(made, "1, 2"))
    (files / "odd_inputs.py").write_text(REFERENCE.replace(made, "object()"))
    if isinstance(candidate, str):
        candidate = str(files / candidate)
    words = {"reference": "ref.py", **words}
    words["reference"] = str(files / words["reference"])
    with pytest.raises((ValueError, TypeError, OSError), match=f"(?s)^judge: .*{says}") as raised:
        loader.judge(candidate, device="cpu", **words)
    assert "\n\n" not in str(raised.value)


def test_the_command_says_what_is_wrong_with_status_2(files, tmp_path, capsys):
    words = ["judge", str(files / "ref.py"), "--reference", str(files / "ref.py")]
    words += ["--device", "cpu", "--json"]
    assert main([*words, str(tmp_path / "no/out.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("loader: judge: ") and "no/out.json" in said
    assert len(said.splitlines()) == 1
    assert main([*words, str(tmp_path / "out.json")]) == 2
    assert "ModelNew" in capsys.readouterr().err
