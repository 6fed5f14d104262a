"""The notebooks run from beginning to end, and what is kept in them is what they show."""

import os
import re
import sys
import time

import nbformat
import pytest
import torch
from conftest import ROOT, start_python
from jupyter_client.provisioning import local_provisioner

import loader

sys.path.insert(0, str(ROOT / "bench"))
import notebooks

NAMES = [file.stem for file in notebooks.FILES]
# What is run here in the place of text in a cell: the same on less, as it is to cost little.
SMALLER = {
    "first_steps": {"(fullgraph=True)": '(fullgraph=True, backend="aot_eager")'},
    "edit_and_rerun": {'str(folder / "tests"))': 'str(folder / "tests"), "-k", "matches")'},
    "from_pycuda": {"data.camera()": "data.camera()[::4, ::4]"},
    "hash_grid_field": {
        "PICTURES, SIDE, STEPS = 20, 64, 400": "PICTURES, SIDE, STEPS = 12, 32, 150",
        "rays=512, samples=40": "rays=256, samples=24",
    },
    "medical_resampling": {
        "LEVELS = {6.0: (50, 1.0), 3.0: (20, 0.1)}": "LEVELS = {6.0: (40, 1.0), 3.0: (1, 0.1)}"
    },
    "from_cpp_extension": {"N, FEATURES = 65536, 64": "N, FEATURES = 1024, 64"},
}
# In outputs: text that must be there, or a figure with the limits of a small run and of a kept one.
SAYS = {
    "first_steps": [
        "trilinear_interpolation  ",
        "True\nTrue",
        (r"step 60: +([\d.]+) degrees", (18, 22), (19, 21)),
        "feats must be (N, 8, F), got (100000, 7, 16)",
        "A build would work.",
    ],
    "edit_and_rerun": [
        "made tone_curve from square",
        "refused, the code before it stays in use",
        "tensor([0.0625, 0.2500, 0.5625])",
        "in use (",
        "tensor([0.1562, 0.5000, 0.8438])",
        (r"(\d+) passed", (1, 999), (60, 999)),
        "does not build, the code before it stays in use",
        "SIGSEGV",
        "in this session",
        "gone back to the code before",
    ],
    "from_pycuda": [
        "source_module for the CPU",
        (r"disc +largest difference (\S+)", (0, 1e-5), (0, 1e-5)),
        (r"operator and kernel: (\S+) apart", (0, 1e-5), (0, 1e-5)),
        "same result: True",
        (r"off by ([\d.]+) % of its largest", (0, 5), (0, 5)),
        "flaot",
    ],
    "from_cpp_extension": [
        "trilinear could not be built",
        (r"from the tutorial's: (\S+)", (0, 1e-5), (0, 1e-5)),
        "first derivatives:  True\nsecond derivatives: True",
    ],
    "hash_grid_field": [
        (r"steps in [\d.]+ s: [\d.]+ dB -> ([\d.]+) dB", (16, 99), (27, 99)),
    ],
    "medical_resampling": [
        "axes RAS",
        "axes LAS",
        (r"in float64: (\S+) at most", (0, 1e-12), (0, 1e-12)),
        (r"in float32: (\S+) at most", (0, 1e-4), (0, 1e-4)),
        (r"from nibabel: +(\S+) at most", (0, 1e-4), (0, 1e-4)),
        (r"misplaced by [\d.]+ mm on average, ([\d.]+) mm at most", (0, 3), (0, 0.5)),
    ],
}
# The nvcc of requirements.txt is of CUDA 13; with a torch for CUDA 12 there is a warning about it.
OTHERWISE = {"A build would work.": "A build would work: 1 warning"}
NUMBER = r"[-+]?\d[\d.,:]*(e[-+]?\d+)?"


def read(name: str):
    return nbformat.read(ROOT / f"examples/{name}.ipynb", as_version=4)


def text(output) -> str:
    """What an output says, or that it is a picture."""
    if output.output_type == "stream":
        return output.text
    pictures = [kind for kind in output.data if kind.startswith("image/")]
    return "<picture>" if pictures else output.data["text/plain"]


def texts(notebook, varies: bool) -> list[str]:
    """What cells say, with or without those that another machine may well answer in other words."""
    cells = notebooks.code_cells(notebook)
    cells = [c for c in cells if varies or "varies" not in c.metadata.get("tags", ())]
    return ["".join(text(o) for o in c.outputs if o.get("name") != "stderr") for c in cells]


def formed(said: str) -> str:
    """Without figures, units of time, the spaces that depend on them, and what compiled first."""
    said = re.sub(r"(?m)^compiled: .*", "compiled", said)
    return re.sub(r"\s+", " ", re.sub(rf"{NUMBER}( (us|ms|s)\b)?", "#", said))


def check(name: str, notebook, kept: bool) -> None:
    """Look for what must be there, and at the figures."""
    said = "\n".join(texts(notebook, varies=True))
    for wanted in SAYS[name]:
        if isinstance(wanted, str):
            other_cuda = torch.version.cuda and torch.version.cuda != "13.0"
            otherwise = not kept and (other_cuda or torch.cuda.is_available())  # hidden from it
            wanted = OTHERWISE.get(wanted, wanted) if otherwise else wanted
            assert wanted in said, wanted
        else:
            pattern, *limits = wanted
            low, high = limits[kept]
            assert low <= float(re.search(pattern, said)[1]) <= high, pattern
    assert "<picture>" in said


def forked(command: list[str], env: dict, cwd: str, **others):
    """A kernel that is forked from a Python which has imported torch, as a new one's process."""
    assert command[1:3] == ["-m", "ipykernel_launcher"], command
    process = start_python(
        "import runpy, sys, warnings\n"
        "warnings.filterwarnings('default', category=UserWarning)  # as in a new Python\n"
        f"sys.argv[:] = {command[2:]}; sys.path[0] = {str(cwd)!r}\n"
        "runpy.run_module('ipykernel_launcher', run_name='__main__', alter_sys=True)  # torch",
        cwd,
        env,
        start_new_session=True,
    )
    process.stdin = None
    while os.getpgid(process.pid) != process.pid:  # signals go to its group, once it has one
        time.sleep(0.001)
    return process


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_says_what_is_kept(name, tmp_path, monkeypatch):
    """On less, so that figures differ; all other text of theirs is the same."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", forked)
    loader.build()
    cache = str(tmp_path / "cache")
    both = os.pathsep.join([*map(str, loader._session.caches), cache])
    file = ROOT / f"examples/{name}.ipynb"
    fresh = notebooks.executed(file, both, SMALLER.get(name))
    fresh = nbformat.reads(notebooks.portable(fresh, cache), as_version=4)
    check(name, fresh, kept=False)
    kept = read(name)
    for a, b in zip(texts(fresh, varies=False), texts(kept, varies=False), strict=True):
        assert formed(a) == formed(b)


@pytest.mark.parametrize("name", NAMES)
def test_its_outputs_are_kept_and_name_no_machine(name):
    """`make notebooks` makes them anew."""
    notebook = read(name)
    check(name, notebook, kept=True)
    assert notebook.metadata["octet"]["code"] == notebooks.digest(notebook), "run `make notebooks`"
    assert {*notebook.metadata} == {"kernelspec", "language_info", "octet"}
    assert notebook.metadata["kernelspec"]["name"] == "python3"
    cells = notebooks.code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        assert {*cell.metadata} <= {"tags"}
        assert all(output.output_type != "error" for output in cell.outputs)
        for output in cell.outputs:
            said = str({k: v for k, v in output.items() if k != "data"})
            said += str({k: v for k, v in output.get("data", {}).items() if "image" not in k})
            assert not re.search(r"(?<![\w.~])/(home|root|tmp|Users|var|mnt|work)/", said)
    assert (ROOT / f"examples/{name}.ipynb").stat().st_size < 400_000


def test_every_notebook_and_example_has_its_line():
    """In examples/README.md, by name; and here what it says."""
    listed = {
        *re.findall(r"^- \[([\w./]+)\]\(\1\): ", (ROOT / "examples/README.md").read_text(), re.M)
    }
    files = {p.name for kind in ("*.ipynb", "*.py") for p in (ROOT / "examples").glob(kind)}
    folders = {p.parent.name for p in (ROOT / "examples").glob("*/CMakeLists.txt")}
    assert listed == files - {"common.py"} | folders
    assert {*SAYS} == {*NAMES}
