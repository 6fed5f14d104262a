"""Run examples/edit_and_rerun.ipynb and keep its outputs in it.

    python -m loader bench edit_notebook

The times shown are this machine's; its folders are left out, and when each cell ran.
"""

import argparse
import os
import tempfile
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "examples" / "edit_and_rerun.ipynb"


def executed(cache: str) -> nbformat.NotebookNode:
    """The notebook after a run on the CPU, with an empty cache."""
    notebook = nbformat.read(FILE, as_version=4)
    place = {"metadata": {"path": str(FILE.parent)}}
    environment = {**os.environ, "LOADER_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("TORCH_CUDA_ARCH_LIST", "LOADER_BUILD"):
        environment.pop(name, None)
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute(env=environment)
    return notebook


def portable(notebook: nbformat.NotebookNode, cache: str) -> str:
    """Its text without what is this machine's: folders, and when each cell ran."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    text = nbformat.writes(notebook) + "\n"
    return text.replace(cache, "cache").replace(str(ROOT), "octet")


def main(arguments: list[str] | None = None) -> None:
    """Run it and write it."""
    argparse.ArgumentParser(
        prog="python -m loader bench edit_notebook", description=__doc__.split("\n")[0]
    ).parse_args(arguments)
    with tempfile.TemporaryDirectory() as cache:
        FILE.write_text(portable(executed(cache), cache))
