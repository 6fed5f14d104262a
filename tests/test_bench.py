"""The benchmarks' own tools: going on after an end, comparing results, the guard of CI."""

import argparse
import importlib
import itertools
import json
import os
import random
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
from conftest import ROOT

sys.path.append(str(ROOT / "bench"))  # after tests/, which has an interpolation.py too
import compare
import everything
import extensions
import guard
import sweep

import harness
from loader.jit.tools import cli


@pytest.fixture
def options(tmp_path):
    return argparse.Namespace(device="cpu", repeats=3, quick=False, results=tmp_path, begun=0.0)


def rows_of(name, calls):
    calls.append(name)
    yield {"case": name, "us": {"loader": {"median": 2.0}, "eager": {"median": 4.0}}}


@pytest.mark.cuda
def test_times_of_a_machine_at_other_work_are_taken_again():
    """All of one round of turns, after the calls that warm up."""
    turns = 5
    number = itertools.count()

    def run():
        if 3 <= next(number) < 3 + turns:
            torch.cuda._sleep(40_000_000)  # some 20 ms

    assert harness.Timer("cuda", turns, seconds=1)({"ours": run})["ours"]["median"] < 5000


@pytest.mark.parametrize("operator", [name for name in sweep.OPERATORS if name != "grid_sample"])
def test_peers_compute_the_same(operator):
    """In drawn cases; grid_sample's are held against PyTorch's as they are made."""
    space = importlib.import_module(f"spaces.{operator}")
    for k in range(20):
        case = {**space.draw(random.Random(f"peers {k}"), 200_000), "key": [0, k]}
        make = {"device": torch.device("cpu"), "generator": torch.Generator().manual_seed(k)}
        runs = space.tasks(case, make)["forward"].runs
        ours = runs.pop("loader")()
        for name, peer in runs.items():
            theirs = peer().view(ours.shape)
            most = 1.0  # of whole numbers; else of the largest: places have a rounding of their own
            if ours.is_floating_point():
                most = max(4 * torch.finfo(ours.dtype).eps, 2e-4) * float(theirs.abs().max())
            off = (ours.double() - theirs.double()).abs()
            assert (off <= most).double().mean() > 0.98, (name, case)


def test_a_run_that_was_ended_goes_on_after_its_last_case(options, capsys, tmp_path):
    calls = []

    def ended():
        raise KeyboardInterrupt

    cases = {name: (lambda name=name: rows_of(name, calls)) for name in ("a", "b", "c")}
    with pytest.raises(KeyboardInterrupt):
        harness.each("some", "square", options, cases | {"b": ended})
    assert calls == ["a"] and "ended: 1 of 3 cases are kept" in capsys.readouterr().out
    rows = harness.each("some", "square", options, cases)
    assert calls == ["a", "b", "c"] and [row["case"] for row in rows] == ["a", "b", "c"]
    said = capsys.readouterr().out
    assert "1 of 3 cases are kept from a run before" in said and "-- 3 of 3: c, about" in said
    harness.finish("some", "square", rows, options)
    assert [file.name for file in tmp_path.iterdir()] == ["some_cpu.json"]
    harness.each("some", "square", options, cases)
    assert calls == ["a", "b", "c"] * 2  # what has come to its end is measured anew


def test_cases_of_other_circumstances_are_measured_again(options, monkeypatch):
    calls = []
    cases = {"a": lambda: rows_of("a", calls)}
    harness.each("some", "square", options, cases)
    options.repeats = 4
    harness.each("some", "square", options, cases)
    monkeypatch.setattr(harness, "source_key", lambda *of: "of other sources")
    harness.each("some", "square", options, cases)
    assert calls == ["a"] * 3


def test_what_is_left_out_is_told_why(options, monkeypatch):
    options.again = False
    monkeypatch.setattr(everything.torch.cuda, "is_available", lambda: False)
    made = everything.Benchmark
    assert everything.why_not(made("x", "x", (), ("GPU",)), options) == "needs a GPU"
    missing = made("x", "x", (), ("no_such_package",))
    assert everything.why_not(missing, options) == "needs the package no_such_package"
    assert everything.why_not(made("x", "some"), options) == ""
    harness.finish("some", "square", [], options)
    assert everything.why_not(made("x", "some"), options).startswith("measured on 2")
    monkeypatch.setattr(harness, "source_key", lambda *of: "of other sources")
    assert everything.why_not(made("x", "some"), options) == ""


@pytest.mark.parametrize(
    ("words", "module", "given"),
    [
        (["--all", "--quick", "--results", "here"], everything, ["--quick", "--results", "here"]),
        (["--all"], everything, []),
        (["--compare", "old", "new"], compare, ["old", "new"]),
        (["guard", "--results", "here"], guard, ["--results", "here"]),
    ],
)
def test_the_command_hands_on_what_follows(words, module, given, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "main", lambda arguments: seen.append(arguments))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("LOADER_BUILD", "lazy")  # which the command sets
    assert cli.main(["bench", *words]) == 0 and seen == [given]


def test_the_command_takes_one_thing(capsys, monkeypatch):
    monkeypatch.setenv("LOADER_BUILD", "lazy")
    assert cli.main(["bench"]) == 1 and cli.main(["bench", "guard", "--all"]) == 1
    assert "one of a benchmark's name, --all and --compare OLD NEW" in capsys.readouterr().err


def test_every_benchmark_is_among_all():
    names = {path.stem for path in (ROOT / "bench").glob("*.py")}
    tools = {
        "harness",
        "children",
        "processes",
        "everything",
        "compare",
        "tables",
        "plots",
        "guard",
    }
    tools |= {"edit_notebook", "notebooks"}  # which keep outputs in notebooks
    assert {benchmark.name for benchmark in everything.ALL} == names - tools


def test_how_long_it_will_take_goes_by_what_it_took():
    assert everything.left(["a", "b"], {}) == "how long is not known yet"
    assert everything.left(["a", "b", "c"], {"a": 50, "b": 30}) == "about 2 min left"


def record(device="CPU", **us):
    times = {name: {"median": time} for name, time in us.items()}
    row = {"operator": "cube", "direction": "forward", "N": 8, "bytes": 64, "us": times}
    return {"device": device, "rows": [row]}


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        (record(loader=2.0, eager=4.0), record(loader=2.0, eager=4.0), 1.0),
        (record(loader=2.0, eager=4.0), record(loader=4.0, eager=8.0), 1.0),  # a slower day
        (record(loader=2.0, eager=4.0), record("another", loader=3.0, eager=4.0), 1.5),
        (record(loader=2.0), record(loader=3.0), 1.5),
    ],
)
def test_a_change_is_one_beside_the_peers(old, new, change):
    ((found, _, _),) = compare.changes(old, new)
    assert found == pytest.approx(change)


def test_times_of_two_devices_are_not_compared():
    assert compare.changes(record(loader=2.0), record("another", loader=3.0)) == []


def test_a_comparison_names_what_got_slower(tmp_path, capsys):
    for folder, time in (("old", 2.0), ("new", 3.0)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "cube_cpu.json"
        file.write_text(json.dumps(record(loader=time, eager=4.0, copy=1.0)))
    (tmp_path / "old" / "gone_cpu.json").write_text("{}")
    assert compare.main([tmp_path / "old", tmp_path / "new"]) == 1
    said = capsys.readouterr().out
    assert "cube_cpu.json: 1 cases, 1.50x the time" in said
    assert "1.50x  N 8, forward, loader  (beside copy, eager)" in said
    assert "gone_cpu.json: not compared" in said
    assert compare.main([tmp_path / "new", tmp_path / "old"]) == 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_all_forms_of_results_can_be_compared(device):
    for file in (ROOT / "bench" / "results").glob(f"*_{device}.json"):
        kept = json.loads(file.read_text())
        ours = any(row.get("who", "loader") == "loader" for row in kept["rows"])
        if ours and {"us", "median", "seconds"} & kept["rows"][0].keys():
            changes = compare.changes(kept, kept)
            assert changes and all(change == pytest.approx(1) for change, _, _ in changes), file


@pytest.mark.parametrize(
    ("ratios", "bound", "fails"),
    [
        ([1.2], 1.3, False),
        ([1.4, 1.2], 1.3, False),
        ([1.4, 1.4, 1.2], 1.3, False),
        ([1.4, 1.5, 1.3], 1.3, True),
        ([1.9], 2.0, False),
        ([2.1, 2.0, 2.5], 2.0, True),
    ],
)
def test_the_guard_fails_where_three_measurements_in_a_row_are_worse(
    ratios, bound, fails, monkeypatch
):
    monkeypatch.setattr(guard, "CASES", {"cube": None})
    turns = iter(ratios)
    failed = guard.check({"cube": (1.0, bound)}, lambda case: next(turns))
    assert failed == ([f"cube: {bound}x the kept ratio or more"] if fails else [])
    assert next(turns, None) is None


def test_the_guard_goes_by_this_processor_or_by_twice_the_slowest(capsys):
    of = [("A", "cube", 1.0), ("B", "cube", 2.0), ("B", "root", 3.0)]
    kept = [{"device": device, "case": case, "ratio": ratio} for device, case, ratio in of]
    assert guard.baseline(kept, "B") == {"cube": (2.0, 1.3), "root": (3.0, 1.3)}
    assert capsys.readouterr().out == ""
    assert guard.baseline(kept, "A") == {"cube": (1.0, 1.3), "root": (3.0, 2.0)}
    assert "none of ['root'] of A" in capsys.readouterr().out
    assert guard.baseline(kept, "C") == {"cube": (2.0, 2.0), "root": (3.0, 2.0)}
    assert "no ratios are kept of C" in capsys.readouterr().out


@pytest.mark.parametrize("case", guard.CASES)
def test_a_pair_of_the_guard_computes_the_same_and_is_measured(case):
    ours, peer = guard.CASES[case]()
    if "call" not in case:
        for mine, theirs in zip(flat(ours()), flat(peer()), strict=True):
            difference = (mine.flatten() - theirs.flatten()[: mine.numel()]).abs().max()
            assert difference < 1e-3 or case == "apply_lut3d"
    assert guard.measured(case, turns=2) > 0
    assert case in {row["case"] for row in json.loads(guard.FILE.read_text())["rows"]}


def flat(found):
    return found if isinstance(found, tuple) else (found,)


def test_a_sweep_keeps_what_it_found_of_random_cases(tmp_path, capsys):
    """The same seed draws the same cases, and a case alone is the same as among all."""
    given = ["square", "--device", "cpu", "--cases", "3", "--largest", "200000", "--repeats", "1"]
    asked = [*given, "--seed", "7", "--results", str(tmp_path)]
    sweep.main(asked)
    record = json.loads((tmp_path / "sweep_square_cpu.json").read_text())
    assert [row["key"] for row in record["rows"]] == [[7, k] for k in range(3) for _ in "fb"]
    for row in record["rows"]:
        assert row["limit"] in ("bytes", "flops")
        assert row["limit_us"] >= row["us"]["copy"]["median"] and row["bytes"] <= 400_000
    said = capsys.readouterr().out
    assert "backward, eager / ours: geometric mean" in said and "--seed 7 --only" in said
    sweep.main([*asked, "--only", "1"])
    assert record["rows"][2]["case"] in capsys.readouterr().out
    assert "| forward | of the limit |" in sweep.table(record)


@pytest.mark.parametrize("operator", sweep.OPERATORS)
def test_every_case_of_a_sweep_can_be_drawn(operator):
    """From small to large, with what a case is told by."""
    space = importlib.import_module(f"spaces.{operator}")
    cases = [space.draw(random.Random(f"0 {k}"), sweep.LARGEST["cuda"]) for k in range(300)]
    assert {case["dtype"] for case in cases} >= {"float32", "float64", "float16", "bfloat16"}
    assert cases == [json.loads(json.dumps(case)) for case in cases]


@pytest.mark.parametrize("wrong", [None, "out", "input", "grid"])
def test_a_sweep_of_grid_sample_sees_what_is_wrong(wrong, monkeypatch):
    """Of a warp with a plane of points on pixels, whose slopes in float64 are of the other side."""
    space = importlib.import_module("spaces.grid_sample")
    check = space.check

    def scaled(x, factor):  # itself, with a gradient so much larger
        return x.detach() + (x - x.detach()) * factor

    def spoilt(case, function, *rest):
        def ours(x, grid):
            x = scaled(x, 1.01) if wrong == "input" else x
            out = function(x, scaled(grid, 1.3) if wrong == "grid" else grid)
            return out * 1.01 if wrong == "out" else out

        check(case, ours, *rest)

    monkeypatch.setattr(space, "check", spoilt)
    case = space.draw(random.Random("711 161"), sweep.LARGEST["cuda"])
    make = {"device": "cpu", "generator": torch.Generator().manual_seed(0)}
    seen = pytest.raises(AssertionError, match=f"{wrong} is off") if wrong else nullcontext()
    with seen:
        space.tasks(case, make)


def test_extensions_takes_calls_down_and_builds_nothing(tmp_path):
    (tmp_path / "kernel.py").write_text(
        "from torch.utils.cpp_extension import load_inline\n"
        "m = load_inline('m', 'int f();', '__global__ void k() {}', functions=['f'], verbose=True)\n"
        "m.f(1)\nraise RuntimeError('what came before it counts')\n"
    )
    (tmp_path / "other.py").write_text("raise SystemExit\n")
    facts, (found,) = extensions.collected(tmp_path)
    assert (facts["files"], facts["calls"]) == (1, 1) and found["where"] == "kernel.py 0"
    call = found["call"]
    assert call["functions"] == ["f"] and "verbose" not in call and extensions.is_split(call)
    assert extensions.key_of(call) == extensions.key_of(call | {"name": "n"})
    assert extensions.key_of(call) != extensions.key_of(call | {"functions": ["g"]})


def test_extensions_compares_what_both_built():
    rows = [
        {"where": where, "who": who, "verdict": verdict, "cpu": cpu, "seconds": cpu}
        for where, who, verdict, cpu in (
            ("a", "loader", "built", 1.0), ("a", "torch", "built", 10.0),
            ("b", "loader", "built", 3.0), ("b", "torch", "built", 30.0),
            ("c", "loader", "built", 9.0), ("c", "torch", "refused", 9.0),
            ("d", "loader", "refused", 9.0),
        )
    ]  # fmt: skip
    facts = extensions.shares(rows)
    assert facts["built"] == 3 and facts["other verdicts"] == ["c"]
    assert facts["loader cpu"]["median"] == 2 and facts["torch seconds"]["median"] == 20


def test_extensions_are_built_side_by_side_and_go_on(tmp_path, monkeypatch):
    """Each in a process with a core of its own; what a run's end cuts off is built by the next."""
    options = argparse.Namespace(files=3, theirs=1, jobs=1, limit=60, stop=60)
    options.jobs = min(2, len(os.sched_getaffinity(0)))
    drawn = [{"where": f"{k}", "call": {"name": f"m{k}", "cpp_sources": f"{k}"}} for k in range(4)]
    cases = extensions.cases_of(drawn, options)
    assert [(each["where"], who) for each, who in cases.values()] == [
        ("0", "loader"), ("0", "torch"), ("1", "loader"), ("2", "loader")
    ]  # fmt: skip

    def built(ours, call):
        if call["name"] == "m1" and pause.exists():
            signal.pause()
        cores = len(os.sched_getaffinity(0))
        return {"verdict": "built", "cpu": cores, "seconds": int(os.environ["MAX_JOBS"])}

    monkeypatch.setattr(extensions, "built", built)
    (pause := tmp_path / "pause").touch()
    going = extensions.run(cases, tmp_path, options)
    assert {name for name, _ in itertools.islice(going, 2)} == {*[*cases][:2]}
    going.close()  # with the third at work
    pause.unlink()
    left = {name: cases[name] for name in [*cases][2:]}
    rows = [row for _, (row,) in extensions.run(left, tmp_path, options)]
    assert sorted((row["where"], row["cpu"], row["seconds"]) for row in rows) == [
        ("1", 1, 1),
        ("2", 1, 1),
    ]
    options.stop = 0
    assert not [*extensions.run(left, tmp_path, options)]
    options.stop, options.limit = 60, 0.1
    pause.touch()
    third = dict(itertools.islice(left.items(), 1))
    assert [row for _, (row,) in extensions.run(third, tmp_path, options)] == [
        {"where": "1", "who": "loader", "jobs": options.jobs, "verdict": "it was ended"}
    ]
