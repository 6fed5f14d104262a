"""`python -m loader new`: an operator that works before a line of it is changed."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, Checkout, ended, start_program

from loader.jit.machine import sources
from loader.jit.operators import new


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A whole checkout with tests."""
    checkout = Checkout(tmp_path_factory.mktemp("new"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", checkout.root / "tests", ignore=ignored)
    return checkout


@pytest.fixture
def create(place, monkeypatch):
    """`new.create` in the checkout, without a process."""
    for module in (new, sources):
        monkeypatch.setattr(module, "HOME", place.root)

    def run(name, folder=None, like="square", public=frozenset({"build"}), arguments=None):
        return new.create(name, folder, like, public, arguments)

    return run


def run_its_tests(place, *arguments, cwd):
    """All but those of torch.compile, and of each layout and dtype: they take 20 s an operator."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile and not match"]
    environment = place.environment(PYTHONPATH=place.root, LOADER_BUILD="lazy")
    return ended(start_program([*words, *arguments], cwd, environment))


def test_a_new_operator_passes_its_own_tests(place):
    done = place.command("new", "gauss_blur")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    files = ["include/X.h", "kernels/X.cu", "kernels/X_cpu.cpp", "ops/X.cpp", "ops/X.py"]
    for file in (*files, "tests/test_X.py"):
        file = file.replace("X", "gauss_blur")
        assert f"  {file} " in done.stdout + " " or f"  {file}\n" in done.stdout
        text = (place.root / file).read_text()
        assert "square" not in text.replace("x.square()", "") and "Square" not in text
    assert "python -m pytest tests/test_gauss_blur.py" in done.stdout
    ran = run_its_tests(place, "tests/test_gauss_blur.py", cwd=place.root)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr
    operators = [entry for entry in place.entries() if not entry.startswith("node.")]
    assert [entry.split("-")[0] for entry in operators] == ["gauss_blur"]


def test_any_number_of_arguments(place):
    """A kernel for all gradients, `output_mask`, tests: it passes them before it is changed."""
    done = place.command("new", "blend", "--args", "a", "b", "t")
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "it computes a * a + b * b + t * t" in done.stdout
    place.command("new", "halve", "--args", "number")
    ran = run_its_tests(place, "tests/test_blend.py", "tests/test_halve.py", cwd=place.root)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr
    header = place.root / "include/blend.h"
    text = header.read_text().replace("a * a + b * b + t * t;", "a + t * (b - a);")
    assert "{2 * grad_out * a, 2 * grad_out * b, 2 * grad_out * t}" in text
    header.write_text(
        text.replace(
            "{2 * grad_out * a, 2 * grad_out * b, 2 * grad_out * t}",
            "{grad_out * (1 - t), grad_out * t, grad_out * (b - a)}",
        )
    )
    side = place.root / "ops/blend.py"
    side.write_text(
        side.read_text()
        .replace("return a * a + b * b + t * t", "return torch.lerp(a, b, t)")
        .replace("from torch import Tensor", "import torch\nfrom torch import Tensor")
    )
    code = """
import loader, torch
a, b, t = (torch.rand(50, 70, dtype=torch.float64).requires_grad_() for _ in range(3))
torch.testing.assert_close(loader.blend(a, b, t), torch.lerp(a, b, t))
few = [x.detach()[:2, :3].requires_grad_() for x in (a, b, t)]
print(torch.autograd.gradcheck(loader.blend, few), torch.autograd.gradgradcheck(loader.blend, few))
"""
    done = place.run(code, LOADER_BUILD="lazy")
    assert done.stdout == "True True\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--args takes 1 to 15 names, got 0"),
        ([f"x{i}" for i in range(16)], "--args takes 1 to 15 names, got 16"),
        (["A"], "--args takes names in lower case, such as a b t; got 'A'"),
        (["a", "for"], "'for' is a word of a language"),
        (["int"], "'int' is a word of a language"),
        (["a", "b", "a"], "'a' has a meaning already"),
        (["grad_out"], "'grad_out' has a meaning already"),
        (["blend2"], "'blend2' has a meaning already"),
    ],
)
def test_arguments_that_will_not_do_are_refused(create, tmp_path, arguments, message):
    with pytest.raises(ValueError) as caught:
        create("blend2", tmp_path / "outside", arguments=arguments)
    assert message in str(caught.value) and not (tmp_path / "outside").exists()


def test_what_to_make_it_of_is_found_by_looking(create, tmp_path):
    """Any elementwise operator of one row of files; no list has their names."""
    for like in ("grid_sample", "none"):
        with pytest.raises(ValueError, match=rf"--like takes one of add2, .*square; got '{like}'"):
            create("blend2", tmp_path / "outside", like=like)


def test_outside_of_the_checkout_too(place, create, monkeypatch):
    """With the test's own Library, from any folder, and a path that no shell would like."""
    folder = place.root.parent / "it's mine"
    monkeypatch.chdir(place.root.parent)
    said = create("my_sum", folder, like="add2")
    assert "it computes a + b" in said and f"loader.Library({str(folder)!r}); mine.my_sum" in said
    ran = run_its_tests(place, folder / "tests", cwd="/")
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout + ran.stderr


def test_what_is_made_is_formatted(create, place, tmp_path):
    """`make check` has nothing to say, unless a long name makes lines too long."""
    create("apple", tmp_path)
    create("plum", tmp_path, like="add2")
    create("pear", tmp_path, arguments=["a", "b", "t"])
    sources = [*tmp_path.rglob("*.cpp"), *tmp_path.rglob("*.cu"), *tmp_path.rglob("*.h")]
    shutil.copy(ROOT / ".clang-format", tmp_path)
    for command in (
        ["clang-format", "--dry-run", "--Werror", *sources],
        [sys.executable, "-m", "ruff", "check", "--config", ROOT / "pyproject.toml", tmp_path],
        [sys.executable, "-m", "ruff", "format", "--check", "--config", ROOT / "pyproject.toml", tmp_path],
    ):  # fmt: skip
        program = shutil.which(command[0], path=f"{os.path.dirname(sys.executable)}:{os.defpath}")
        if not program:
            pytest.skip(f"no {command[0]}")
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, check=False, cwd=tmp_path
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Blur", "in lower case, such as gauss_blur; got 'Blur'"),
        ("9x", "got '9x'"),
        ("a b", "got 'a b'"),
        ("_a", "got '_a'"),
        ("a__b", "got 'a__b'"),
        ("é", "got 'é'"),
        ("", "got ''"),
        ("../x", "got '../x'"),
        ("lambda", "is a word of Python's own"),
        ("template", "is a word of C++'s own"),
        ("square", "taken by the operator square"),
        ("square_bw", "taken by the operator square"),
        ("square_cpu", "taken by the operator square"),
        ("build", "loader.build is something else already"),
        ("ops", "loader.ops is something else already"),
        ("half", "has a meaning in include/common.h"),
        ("launch", "has a meaning in include/"),
        ("std", "has a meaning in include/"),
        ("exp", "is a function of C's own"),
        ("read", "is a function of C's own"),
    ],
)
def test_a_name_that_will_not_do_is_refused(create, place, tmp_path, name, message):
    before = sorted(place.root.rglob("*"))
    for folder in (None, tmp_path / "outside"):
        with pytest.raises(ValueError) as caught:
            create(name, folder)
        assert message in str(caught.value)
    assert sorted(place.root.rglob("*")) == before and not (tmp_path / "outside").exists()


def test_nothing_is_written_where_a_file_exists_or_the_folder_cannot_be_written(create, tmp_path):
    file = tmp_path / "kernels/blur_cpu.cpp"
    file.parent.mkdir()
    file.write_text("mine")
    with pytest.raises(ValueError, match=r"there is already .*blur_cpu\.cpp; nothing was written"):
        create("blur", tmp_path)
    assert [*tmp_path.rglob("*.*")] == [file] and file.read_text() == "mine"
    (tmp_path / "ops").write_text("a file where a folder is wanted")
    with pytest.raises(ValueError, match=r"ops.* cannot be written: "):
        create("other", tmp_path)
    assert not [path for path in tmp_path.rglob("*other*")]


def test_an_installed_package_wants_a_folder(create, place, monkeypatch, tmp_path):
    """There HOME is `site-packages/loader`, whose loader.py is called `__init__.py`."""
    installed = tmp_path / "site-packages/loader"
    installed.mkdir(parents=True)
    monkeypatch.setattr(new, "HOME", installed)
    with pytest.raises(ValueError, match="name a folder with --in FOLDER"):
        create("blur")
