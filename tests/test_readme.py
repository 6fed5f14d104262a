"""What the documentation says is so."""

import re
import sys

import torch
from conftest import ROOT

from loader.jit.machine.settings import SETTINGS

sys.path.insert(0, str(ROOT / "bench"))
README = (ROOT / "README.md").read_text()


def test_the_examples_run():
    names = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, names)
    assert names["feats"].grad.abs().sum() > 0 and names["points"].grad.abs().sum() > 0
    torch.testing.assert_close(names["smooth"][4:-4], names["x"].unfold(0, 9, 1).mean(1))
    assert torch.equal(names["graded"], names["photo"])  # through a table that changes nothing
    assert names["values"].shape == (1, 16, 1, 1, 10000) and names["encoded"].shape == (1000, 32)
    expected = torch.nn.functional.grid_sample(names["image"], names["grid"], align_corners=False)
    torch.testing.assert_close(names["out"], expected)
    y = torch.ones(3)
    torch.testing.assert_close(names["module"].sin_add(y, y), 2 * y.sin())


def test_the_table_of_settings_is_the_code_s():
    for s in SETTINGS:
        values = ", ".join(f"`{value}`" for value in s.allowed) or s.values
        assert f"| `{s.name}` | {values} | `{s.default}` | {s.meaning} |" in README


def test_every_operator_is_in_the_table():
    for path in (ROOT / "ops").glob("*.cpp"):
        assert f"| `{path.stem}(" in README


def test_the_tables_come_from_the_result_files():
    import tables

    for page in tables.pages():
        text = page.read_text()
        assert tables.filled(text) == text, f"{page}: run `python -m loader bench tables`"
    assert all(
        f"makes this: {name} -->" in "".join(p.read_text() for p in tables.pages())
        for name in tables.TABLES
    )


def test_every_setting_is_read_in_one_place():
    for path in [ROOT / "loader.py", *(ROOT / "jit").rglob("*.py")]:
        if path.name != "settings.py":
            assert not re.search(r"environ[^\n]*LOADER_", path.read_text())
