"""The site of docs/: built strictly, all links lead somewhere, answers are near."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "docs"))
import check_site
import site_extension

# kB of a page with all that it loads: of long tables, of pictures that notebooks hold, of others.
MOST = {"performance": 700, "notebooks": 600, "viewer": 600}
MOST_OF_OTHERS = 300


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-E", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    places = ["-d", folder / "doctrees", ROOT / "docs", folder / "html"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    return check_site.read(site)


def test_every_link_leads_somewhere_and_nothing_comes_from_elsewhere(pages):
    assert len(pages) > 25
    assert check_site.broken(pages) == []


def test_no_page_is_heavy(pages):
    for name, size in check_site.weights(pages).items():
        own = "notebooks" if "/notebooks/" in name else Path(name).stem
        assert size < MOST.get(own, MOST_OF_OTHERS), name


def test_ten_questions_are_answered_within_three_clicks(pages, site):
    assert len(check_site.QUESTIONS) == 10
    assert check_site.unanswered(pages, site) == []


def test_what_leads_nowhere_is_found(tmp_path):
    (tmp_path / "index.html").write_text(
        '<article><a href="gone.html">a</a><a href="#here">b</a><a id="there" href="#there">c</a>'
        '<script src="https://cdn.example/x.js"></script></article>'
    )
    pages = check_site.read(tmp_path)
    found = [line.partition(": ")[2] for line in check_site.broken(pages)]
    assert found == [
        "gone.html is not there",
        "#here has no such anchor",
        "loads https://cdn.example/x.js",
    ]
    assert len(check_site.unanswered(pages, tmp_path)) == 10


def test_a_docstring_is_markdown_with_its_sections():
    text = """Raise x to the power n, x**n.

    Args:
        x: any shape; a * b
            and more.
    Returns: `x**n`,
    of x's shape.
    Raises: ValueError for n < 0.

    And a last word.
    """
    assert site_extension.markdown(text).splitlines() == [
        *(r"Raise x to the power n, x\*\*n.", "", "", "**Args**", "", r"- `x`: any shape; a \* b"),
        *("  and more.", "", "**Returns**: `x**n`,", "of x's shape."),
        *("", "**Raises**: ValueError for n < 0.", "", "And a last word."),
    ]


def test_the_reference_has_signatures_without_a_build():
    text = site_extension.entry("nn.py", "LUT3D", ["from_table"])
    assert "{py:class} loader.nn.LUT3D(size=33, interpolation='trilinear', device=None" in text
    assert "{py:method} loader.nn.LUT3D.from_table(" in text
    with pytest.raises(ValueError, match=r"ops/square.py has no function or class cube"):
        site_extension.entry("ops/square.py", "cube", [])
