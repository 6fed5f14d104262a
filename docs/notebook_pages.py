"""The notebooks of examples/ as pages of the site, with the outputs and pictures that they hold.

Written into docs/notebooks/, which is not kept, whenever the site is built.
"""

import base64
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
PICTURES = {"image/png": "png", "image/jpeg": "jpg"}


def write(_=None) -> None:
    """Write a page for each notebook, and its pictures beside it."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        (FOLDER / f"{path.stem}.md").write_text(page(path))


def page(path: Path) -> str:
    """Return a notebook as Markdown."""
    parts, pictures = [], 0
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_moved(text))
        elif text.strip():
            parts.append(_fenced("ipython3" if re.search(r"^[%!]", text, re.M) else "python", text))
        for output in cell.get("outputs", ()):
            kind = next((kind for kind in PICTURES if kind in output.get("data", {})), None)
            if kind:
                pictures += 1
                name = f"{path.stem}_{pictures}.{PICTURES[kind]}"
                picture = "".join(output["data"][kind])
                (FOLDER / name).write_bytes(base64.b64decode(picture))
                parts.append(f"![Output of the cell above]({name})")
            elif said := _said(output):
                parts.append(_fenced("text", said))
    title, _, rest = "\n\n".join(parts).partition("\n")
    where = f"[The notebook itself](../../examples/{path.name}), to run it."
    return f"{title}\n\n{where}\n{rest}\n"


def _moved(text: str) -> str:
    """Links as they are from the page's folder."""
    return re.sub(r"\]\((?!https?:|#|attachment:)([^)]+)\)", r"](../../examples/\1)", text)


def _said(output: dict) -> str:
    """What an output is as text, without colours."""
    text = output.get("text") or output.get("data", {}).get("text/plain") or output.get("traceback")
    found = "".join(text or "") if output["output_type"] != "error" else "\n".join(text or "")
    return re.sub(r"\x1b\[[0-9;]*m", "", found).strip("\n")


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`{3,}", text)), 3)
    return f"{fence}{language}\n{text}\n{fence}"
