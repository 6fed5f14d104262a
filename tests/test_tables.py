"""The tables that README and docs have of benchmarks."""

import json
import shutil
import sys

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "bench"))
import tables


@pytest.mark.parametrize("table", [tables.summary, tables.kernels])
def test_a_table_says_that_its_sources_have_changed(table, monkeypatch):
    monkeypatch.setattr(tables.harness, "source_key", lambda *of: "of other sources")
    assert "Its sources have changed since" in table()


def test_a_table_of_the_present_sources_says_nothing(monkeypatch):
    record = json.loads((tables.RESULTS / "trilinear_interpolation_cuda.json").read_text())
    measured = record["sources"]["trilinear_interpolation"]
    monkeypatch.setattr(tables.harness, "source_key", lambda *of: measured)
    assert "changed" not in tables.summary()


def test_of_the_cpu_s_loops_a_gpu_s_results_know_nothing(monkeypatch, tmp_path):
    harness = tables.harness
    for room in ("ops", "kernels", "include"):
        shutil.copytree(ROOT / room, tmp_path / room)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    records = {
        kind: {"sources": {"square": harness.source_key("square", kind)}}
        for kind in ("cpu", "cuda")
    }
    records["cuda"]["cuda"] = "13.0"
    assert not any(map(harness.changed, records.values()))
    both = ["cpu", "cuda"]
    of_files = {"kernels/square_cpu.cpp": ["cpu"], "kernels/square.cu": ["cuda"]}
    for file, of in {**of_files, "include/square.h": both, "ops/square.cpp": both}.items():
        text = (tmp_path / file).read_text()
        (tmp_path / file).write_text("// words\n\n" + text + "/* more */\n")
        assert not any(map(harness.changed, records.values()))
        (tmp_path / file).write_text(text + "int edited;\n")
        assert [kind for kind, record in records.items() if harness.changed(record)] == of
        (tmp_path / file).write_text(text)


def test_a_new_operator_s_benchmark_has_its_table_by_name_alone(monkeypatch, tmp_path):
    """A mark on a page is enough; `kernels` then leaves its results to it."""
    (tmp_path / "cube_bench.py").write_text("")
    row = {"case": "tiny", "direction": "forward", "dtype": "float32", "bytes": 8000}
    us = {name: {"median": time} for name, time in (("loader", 2.0), ("eager", 5.0), ("copy", 1.0))}
    facts = {"device": "CPU", "torch": "2", "threads": 1, "date": "today", "sources": {"cube": "k"}}
    record = json.dumps({**facts, "rows": [{**row, "us": us}]})
    (tmp_path / "cube_bench_cpu.json").write_text(record)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- `python -m loader bench tables` makes this: cube_bench -->\n<!-- end -->\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables.harness, "source_key", lambda *of: "k")
    monkeypatch.setattr(tables, "pages", lambda: [page])
    assert "| forward | tiny | float32 | 2.0 us | 4 | 50 % | 2.50x |" in tables.filled(
        page.read_text()
    )
    assert "cube" not in tables.kernels()
    page.write_text("")
    assert "`cube` on CPU" in tables.kernels()
