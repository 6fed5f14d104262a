"""What the documentation says is so: every block of code runs, every table is the code's."""

import re
import subprocess
import sys
import warnings
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT

from loader.jit.machine.settings import SETTINGS

sys.path += [str(ROOT / "bench"), str(ROOT / "docs")]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "notebooks"]

# Comments before a block say why it is not run here: "run by" a test, "from" a file, whose text it
# is, or "not run", and why. Whoever adds one of these says so here.
NOT_RUN = {
    "opens a prompt": 1,
    "makes a clone": 1,
    "compiles everything, as tests/test_build.py and tests/test_install.py do": 3,
    "needs a container engine and a network": 2,
    "needs conda's rattler-build": 1,
    "names a compiler that this machine need not have": 1,
    "needs several processes; tests/test_sharded.py and examples/distributed.py do so": 1,
}
# Diagrams are `text`; `api` and `toctree` are the site's own, which tests/test_docs.py builds.
NO_CODE = {"text", "{api}", "{toctree}"}


class Block(NamedTuple):
    """A fenced block: where it begins, its language, its text, and the comment before it."""

    place: str
    language: str
    code: str
    remark: str


def blocks(path) -> list[Block]:
    text, found = path.read_text(), []
    whole = re.search(r"^<!-- every block of this page is (run by \S+) -->$", text, re.M)
    fence = r"(?:<!-- ([^\n]*) -->\n)?^( *)(`{3,})([^\n`]*)\n(.*?)^\2\3$"
    for match in re.finditer(fence.replace("(?:<!--", "(?:^ *<!--"), text, re.M | re.S):
        remark, indent, _, language, code = match.groups()
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        line = text.count("\n", 0, match.start(5)) + 1
        place = f"{path.relative_to(ROOT)}:{line}"
        found.append(
            Block(place, language.split(" ")[0], code, remark or (whole[1] if whole else ""))
        )
    return found


def is_run(block: Block) -> bool:
    return block.language not in NO_CODE and not block.remark.startswith(("run by", "from", "not "))


ALL = {path: blocks(path) for path in PAGES}
RUN = {path: found for path in PAGES if (found := [b for b in ALL[path] if is_run(b)])}


@pytest.fixture
def shell(monkeypatch):
    """IPython's, without its history and its exit."""
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setattr(InteractiveShell, "_instance", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = InteractiveShell(history_load_length=0)
    made.history_manager.enabled = False
    yield made
    made.run_line_magic("unload_ext", "loader")
    made.history_manager.end_session()


@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_runs(path, request, tmp_path, monkeypatch):
    """One block after the other, as a reader would, in one namespace."""
    names, kinds = {}, {block.language for block in RUN[path]}
    assert kinds <= {"python", "ipython", "sh"}, path
    if "ipython" in kinds:
        shell = request.getfixturevalue("shell")
        names = shell.user_ns
    monkeypatch.chdir(tmp_path)
    for block in RUN[path]:
        if block.language == "python":
            exec(compile(block.code, block.place, "exec"), names)
        elif block.language == "ipython":
            shell.run_cell(block.code).raise_error()
        else:
            subprocess.run(["/bin/bash", "-euc", block.code], check=True)
    CHECKS.get(str(path.relative_to(ROOT)), lambda names: None)(names)


def has_both_gradients(names):
    assert names["feats"].grad.abs().sum() > 0 and names["points"].grad.abs().sum() > 0


def has_sampled(names):
    has_both_gradients(names)
    expected = names["loader"].grid_sample_reference(names["volume"], names["grid"])
    torch.testing.assert_close(names["values"], expected)


def has_changed_nothing(names):
    assert torch.equal(names["graded"], names["photo"])  # through a table that changes nothing


def has_encoded(names):
    assert names["encoded"].shape == (1000, 32) and names["encoded"].abs().sum() > 0


def has_sampled_as_torch(names):
    image, grid = names["image"], names["grid"]
    expected = torch.nn.functional.grid_sample(image, grid, align_corners=False)
    torch.testing.assert_close(names["out"], expected)


def has_blurred(names):
    x = names["x"]
    torch.testing.assert_close(names["smooth"][4:-4], x.unfold(0, 9, 1).mean(1))
    assert torch.equal(names["y"], 2 * x)


def has_added_sines(names):
    y = torch.ones(3)
    torch.testing.assert_close(names["module"].sin_add(y, y), 2 * y.sin())


# What the code of a page has computed.
CHECKS = {
    "README.md": has_both_gradients,
    "docs/quickstart.md": has_sampled,
    "docs/inline.md": has_added_sines,
    "docs/migrate.md": has_sampled_as_torch,
    "docs/source_module.md": has_blurred,
    "docs/operators/apply_lut3d.md": has_changed_nothing,
    "docs/operators/grid_sample.md": has_sampled_as_torch,
    "docs/operators/hash_grid_encoding.md": has_encoded,
    "docs/operators/trilinear_interpolation.md": has_both_gradients,
}


def test_what_is_not_run_here_is_listed():
    remarks = Counter(b.remark for found in ALL.values() for b in found)
    skipped = {why: count for why, count in remarks.items() if why.startswith("not run: ")}
    assert skipped == {f"not run: {why}": count for why, count in NOT_RUN.items()}
    for found in ALL.values():
        for block in found:
            assert block.language or block.remark, f"{block.place}: which language?"
            if block.remark.startswith("run by "):
                assert (ROOT / block.remark.removeprefix("run by ")).exists()
            if block.remark.startswith("from "):
                file = ROOT / block.remark.removeprefix("from ")
                assert block.code.strip() in file.read_text(), block.place


def test_the_table_of_settings_is_the_code_s():
    text = (ROOT / "docs" / "settings.md").read_text()
    for s in SETTINGS:
        values = ", ".join(f"`{value}`" for value in s.allowed) or s.values
        assert f"| `{s.name}` | {values} | `{s.default}` | {s.meaning} |" in text


def test_every_operator_is_in_the_table_and_has_a_page():
    for path in (ROOT / "ops").glob("*.cpp"):
        assert f"| `{path.stem}(" in README
        page = (ROOT / "docs" / "operators" / f"{path.stem}.md").read_text()
        assert f"\n```{{api}} ops/{path.stem}.py {path.stem}\n" in page
        assert f"](../pictures/{path.stem}.png)" in page
        for heading in ("Formula", "Cost", "Limits", "Reference"):
            assert f"\n## {heading}" in page


def test_the_tables_come_from_the_result_files():
    import tables

    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, f"{page}: run `python -m loader bench tables`"
    assert all(
        f"makes this: {name} -->" in "".join(p.read_text() for p in tables.pages())
        for name in tables.TABLES
    )


def test_the_plots_come_from_the_result_files():
    import plots

    for plot, names in plots.PLOTS.items():
        file = plots.FOLDER / f"{plot.__name__}.png"
        assert plots.made_from(file) == plots.digest(names), "run `python -m loader bench plots`"


def test_the_tables_that_the_code_makes_are_current():
    import made

    for page in made.pages():
        text = page.read_text()
        assert made.filled(text) == text, f"{page}: run `make docs`"


def test_every_setting_is_read_in_one_place():
    for path in [ROOT / "loader.py", *(ROOT / "jit").rglob("*.py")]:
        if path.name != "settings.py":
            assert not re.search(r"environ[^\n]*LOADER_", path.read_text())
