"""Run the notebooks of examples/ and keep their outputs in them, pictures too.

    python -m loader bench notebooks [NAME ...]

They run on the CPU. The times shown are this machine's; its folders are left out, and when each
cell ran. A digest of the code goes into a notebook's metadata, so that a test can tell outputs that
are kept from those of cells that were changed since.
"""

import argparse
import hashlib
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "examples").glob("*.ipynb"))
FIRST = "first_steps"  # builds the operators, which the others then find
# torch says this where it finds nvcc and no GPU, with the path of its file.
NOT_OURS = re.compile(r".*No CUDA runtime is found.*\n")


def executed(file: Path, cache: str, smaller: dict[str, str] | None = None):
    """The notebook after a run from its first cell to its last.

    Args:
        file: the notebook.
        cache: where builds go, as LOADER_CACHE_DIR says it.
        smaller: text of its cells, and what stands there instead in this run.
    """
    notebook = nbformat.read(file, as_version=4)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    for old, new in (smaller or {}).items():
        found = [cell for cell in code_cells(notebook) if old in cell.source]
        if len(found) != 1:
            raise ValueError(f"{file.name}: {old!r} must be in one cell, is in {len(found)}")
        found[0].source = found[0].source.replace(old, new)
    environment = {**os.environ, "LOADER_CACHE_DIR": cache, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("TORCH_CUDA_ARCH_LIST", "LOADER_BUILD", "MPLBACKEND"):
        environment.pop(name, None)
    place = {"metadata": {"path": str(file.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=place, coalesce_streams=True)
    client.execute(env=environment)
    return notebook


def code_cells(notebook) -> list:
    """The cells that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook) -> str:
    """Of the code that outputs belong to."""
    code = "\0".join(cell.source for cell in code_cells(notebook))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def portable(notebook, cache: str) -> str:
    """Its text without what is this machine's: folders, and when each cell ran."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                output.text = NOT_OURS.sub("", output.text)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("text", "...")]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "octet": {"code": digest(notebook)},
    }
    text = nbformat.writes(notebook) + "\n"
    for folder, name in (
        (f"{cache}/work", "cache"),
        (cache, "cache"),
        (str(ROOT), "octet"),
        (f"{Path.home()}/", "~/"),
    ):
        text = text.replace(folder, name)
    return text


def main(arguments: list[str] | None = None) -> None:
    """Run them and write them, each as soon as it has run."""
    parser = argparse.ArgumentParser(
        prog="python -m loader bench notebooks", description=__doc__.split("\n")[0]
    )
    names = [file.stem for file in FILES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; else all")
    wanted = parser.parse_args(arguments).names
    if unknown := {*wanted} - {*names}:
        parser.error(f"there is no notebook {', '.join(unknown)}; there are {', '.join(names)}")
    with tempfile.TemporaryDirectory() as cache:
        for file in sorted(FILES, key=lambda file: file.stem != FIRST):
            if not wanted or file.stem in wanted:
                print(f"{file.stem} ...", end=" ", file=sys.stderr, flush=True)
                begun = time.perf_counter()
                text = portable(executed(file, cache), cache)
                file.write_text(text)
                size = f"{len(text) / 1000:.0f} kB"
                print(f"{time.perf_counter() - begun:.0f} s, {size}", file=sys.stderr)
