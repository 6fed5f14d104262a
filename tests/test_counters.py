"""`bench counters`: what it makes of ncu's table, and what it says where there is none."""

import json
import os
import sys

import pytest
from conftest import ROOT, ended, start_program

sys.path.append(str(ROOT / "bench"))
import counters

HEAD = ["ID", "Kernel Name", counters.NS, counters.PERCENT["DRAM"], counters.PERCENT["warps"]]
ROWS = [
    ["", "", "ns", "%", "%"],
    ["0", "marks_a_call", "1,000", "1", "1"],
    ["1", "turn_kernel", "1000", "90.0", "50"],
    ["2", "forward_kernel", "3,000", "50.0", "90"],
    ["3", "marks_a_call", "1000", "1", "1"],
    ["4", "other_kernel", "2000", "10", "99"],
]
TEXT = "==PROF== Connected\n" + "\n".join(
    ",".join(f'"{cell}"' for cell in row) for row in [HEAD, *ROWS]
)
CALL = {"operator": "square", "direction": "forward", "key": [0, 1], "bytes": 1}


def test_kernels_are_told_apart_by_marks_and_weighted_by_their_time():
    one, two = counters.by_call([CALL, CALL | {"direction": "backward"}], counters.kernels(TEXT))
    assert one["busy"] == {"DRAM": 60.0, "warps": 80.0} and one["us"] == 4 and one["kernels"] == 2
    assert (one["kernel"], one["share"], one["binds"]) == ("forward_kernel", 0.75, "DRAM")
    assert two["binds"] == "latency"  # warps are no unit that could bind
    with pytest.raises(RuntimeError, match="2 marks of 1 calls"):
        counters.by_call([CALL], counters.kernels(TEXT))


def test_the_table_counts_what_binds():
    rows = counters.by_call([CALL, CALL], counters.kernels(TEXT))
    record = {"rows": rows, "seed": 3, "cases": 2, "device": "a GPU", "torch": "2"}
    record |= {"date": "today", "cuda": "13.0"}
    record["sources"] = {"square": counters.harness.source_key("square", "cuda")}
    text = counters.table(record)
    assert "`python -m loader bench counters square --seed 3 --cases 2`;" in text
    assert "changed since" not in text
    record["sources"] = {"square": "another"}
    assert "sources of square have changed since" in counters.table(record)
    assert "| `square` | forward | 35 | 90 | DRAM in 1 of 2, latency in 1 of 2 |" in text


def test_a_run_of_one_operator_keeps_the_others_of_one_like_it(tmp_path):
    path = tmp_path / "counters_cuda.json"
    first = {"date": "today", "seed": 3, "sources": {"square": "a", "add2": "b"}}
    rows = [{"operator": "square", "us": 1}, {"operator": "add2", "us": 2}]
    assert counters.beside(first, rows, path) == (first, rows)
    path.write_text(json.dumps(first | {"rows": rows}))
    again = {"date": "today", "seed": 3, "sources": {"square": "c"}}
    facts, both = counters.beside(again, [{"operator": "square", "us": 3}], path)
    assert facts["sources"] == {"add2": "b", "square": "c"}
    assert both == [{"operator": "add2", "us": 2}, {"operator": "square", "us": 3}]
    for other in ({"seed": 4}, {"largest": 1}):  # also what the run before did not say
        assert counters.beside(again | other, [], path) == (again | other, [])


def fake(tmp_path, said, status=0):
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


def test_counters_that_cannot_be_read_are_one_error_with_its_cure(tmp_path):
    options = type("Options", (), {"seed": 0, "cases": 1, "least": 1, "largest": 1})
    ncu = fake(tmp_path, "==ERROR== ERR_NVGPUCTRPERM - no permission", 1)
    with pytest.raises(RuntimeError, match=r"square: the GPU's counters cannot be read.*root"):
        counters.measure(ncu, "square", options, [counters.NS])
    with pytest.raises(RuntimeError, match="square: ncu ended with exit status 3:\nnonsense"):
        counters.measure(fake(tmp_path, "nonsense", 3), "square", options, [counters.NS])


def test_counters_that_a_gpu_lacks_are_not_asked_for(tmp_path):
    names = [counters.NS, counters.PERCENT["L2"]]
    listed = "\n".join(f"{name.partition('.')[0]}  Counter  %" for name in names)
    assert counters.metrics(fake(tmp_path, listed)) == names
    assert len(counters.metrics(fake(tmp_path, "in another form"))) == 1 + len(counters.PERCENT)


def test_without_ncu_or_a_gpu_it_is_one_line(tmp_path):
    words = ["-m", "loader", "bench", "counters", "square"]
    environment = {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = ended(start_program(words, ROOT, os.environ | environment))
    assert done.returncode == 1
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("counters: ")]
    assert "no ncu" in line or "no GPU to run it on" in line
