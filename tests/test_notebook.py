"""The notebook runs from beginning to end, and shows what its text says."""

import json
import os

import nbclient
import nbformat
from conftest import ROOT

SAYS = [
    "made tone_curve from square",
    "refused, the code before it stays in use",
    "tensor([0.0625, 0.2500, 0.5625])",
    "in use (",
    "tensor([0.1562, 0.5000, 0.8438])",
    "does not build, the code before it stays in use",
    "SIGSEGV",
    "in this session",
    "gone back to the code before",
]


def test_the_notebook_runs_and_shows_what_it_says(tmp_path, monkeypatch):
    monkeypatch.setenv("LOADER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    notebook = nbformat.read(ROOT / "examples/edit_and_rerun.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # they would name a machine
    client = nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "examples")}}
    )
    client.execute(env=dict(os.environ))
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells])
    for text in SAYS:
        assert text in shown, text
    assert "image/png" in shown
