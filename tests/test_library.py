"""loader.Library: operators of a folder outside the checkout."""

import pytest
from conftest import ROOT, Checkout


def write_operator(folder, name, formula="x * x"):
    """square's row of files under another name, without its test and its CUDA part."""
    for file in ("ops/X.cpp", "ops/X.py", "kernels/X_cpu.cpp", "include/X.h"):
        text = (ROOT / file.replace("X", "square")).read_text()
        target = folder / file.replace("X", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace("square", name).replace("Square", name.capitalize())
        target.write_text(text.replace("return x * x", f"return {formula}"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout with a folder `mine` beside it that has an operator `cube`; both are built."""
    folder = tmp_path_factory.mktemp("it's a place")  # no name for a shell
    checkout = Checkout(folder, only="square")
    write_operator(folder / "mine", "cube", "x * x * x")
    header = folder / "mine/include/cube.h"
    header.write_text(header.read_text().replace("2 * grad_out * x", "3 * grad_out * x * x"))
    done = checkout.run("import loader; loader.Library('../mine')")
    assert done.returncode == 0, done.stderr
    assert [line.split(" in ")[0] for line in done.stderr.splitlines()] == [
        "loader: built 1 of 1 (square)",
        "loader: built 1 of 1 (cube)",
    ]
    for root in (checkout.root, folder / "mine"):
        assert str(root / "ops") in (root / "compile_commands.json").read_text()
    return checkout


def test_its_operators_are_like_loader_s_own(place):
    """All forms of them, under torch.ops too, from the cache, and after a change of folder."""
    code = """
import copy, os, pickle, torch, loader
mine = loader.Library("../mine")
os.chdir("/")
run = torch.compile(lambda x: mine.cube(x) + 1, backend="eager", fullgraph=True)
assert run(torch.ones(2)).tolist() == [2.0, 2.0]
x = torch.tensor([2.0, -3.0], dtype=torch.float64, requires_grad=True)
assert torch.ops.octet.cube(x).tolist() == mine.cube_reference(x).tolist() == [8.0, -27.0]
assert mine.cube_fw(x).tolist() == [8.0, -27.0] and not mine.cube_fw(x).requires_grad
assert torch.autograd.gradcheck(mine.cube, x)
assert mine.cube_bw(torch.ones_like(x), x).tolist() == [12.0, 27.0]
assert loader.square(x).tolist() == [4.0, 9.0]
assert {"cube", "cube_bw", "build"} <= {*dir(mine)} and not hasattr(loader, "cube")
root = str(mine._session.root)
assert loader.Library(root + "/ops/..") is mine
assert copy.deepcopy(mine) is mine and pickle.loads(pickle.dumps(mine)) is mine
assert mine.receipt().units["cube"]["result"] == "hit" and root in str(mine.receipt())
((name, state, why),) = mine.explain().rows
assert (name, why) == ("cube", "the first build of it in this cache")
mine.build("cube")
try:
    mine.cueb
except AttributeError as error:
    assert str(error) == f"{mine!r} has no attribute 'cueb'; did you mean 'cube'?"
"""
    done = place.run(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry.split("-")[0] for entry in place.entries()] == ["cube", "square"]


def test_the_second_creation_only_looks_whether_something_changed(place):
    """Hashing nothing; an edit of one of loader's own headers counts as one."""
    code = """
import loader
mine = loader.Library("../mine")
print(mine.receipt().index is not None, *mine._session.find([*mine._session.units]))
"""
    place.run(code)
    commands = place.root.parent / "mine/compile_commands.json"
    commands.unlink()
    assert place.run(code).stdout.split() == ["True"] and not commands.exists()
    header = place.root / "include/elementwise_cpu.h"
    text = header.read_text()
    header.write_text(text + "// edited\n")
    try:
        assert place.run(code, LOADER_BUILD="lazy").stdout.split() == ["False", "cube"]
    finally:
        header.write_text(text)


def test_what_cannot_be_loaded_gets_one_clear_error(place):
    folder = place.root.parent
    (folder / "empty").mkdir()
    for name, operator in (
        ("taken", "square"),
        ("again", "cube"),
        ("bare", "fourth"),
        ("odd", "build"),
        ("sound", "fifth"),
    ):
        write_operator(folder / name, operator)
    (folder / "bare/ops/fourth.py").unlink()
    code = """
import loader
loader.Library("../mine")
for path in ("../nowhere", "../empty", "../taken", "../again", "../bare", "../odd", 7, "."):
    try:
        loader.Library(path)
    except (ValueError, TypeError, FileNotFoundError) as error:
        print(type(error).__name__, error)
sound = loader.Library("../sound", cache="../other")
try:
    loader.Library("../sound", cache="../third")
except ValueError as error:
    print(error)
try:
    sound.fifth
except loader.BuildError as error:
    print(error)
"""
    done = place.run(code, LOADER_BUILD="never")
    assert done.returncode == 0, done.stderr
    messages = done.stdout.splitlines()
    expected = [
        (f"FileNotFoundError Library: there is no folder {folder}/nowhere", ""),
        (f"FileNotFoundError Library: {folder}/empty has no folder ops/", "new NAME --in"),
        (
            f"ValueError {folder}/taken: there is an operator 'square' in {place.root}/ops already",
            "give this one another name",
        ),
        (
            f"ValueError {folder}/again: there is an operator 'cube' in {folder}/mine/ops already",
            "give this one another name",
        ),
        (f"ValueError Library: {folder}/bare/ops/fourth.cpp has no fourth.py", "ops/square.py"),
        (f"ValueError Library: {folder}/odd/ops/build.cpp: an operator's name", "got 'build'"),
        ("TypeError Library: path must be the path of a folder, got int", ""),
        (f"ValueError Library: {place.root} is loader's own folder", "operators are loader.X"),
        (f"Library: {folder}/sound is loaded already, with the cache {folder}/other", "third"),
        ("fifth: there is no build of these sources", "LOADER_BUILD=never forbids"),
    ]
    assert len(messages) == len(expected), messages
    for message, (begin, cure) in zip(messages, expected, strict=True):
        assert message.startswith(begin) and cure in message


def test_libraries_do_not_mix_and_a_bad_operator_takes_down_only_itself(place):
    """Modules of one name in two folders are two; each folder has a cache of its own here."""
    folder = place.root.parent
    for name, value in (("first", 1), ("second", 2)):
        write_operator(folder / name, f"{name}_op", f"x + {value}")
        (folder / name / "ops/shared.py").write_text(f"VALUE = {value}\n")
        side = folder / name / f"ops/{name}_op.py"
        side.write_text(side.read_text() + f"\nfrom .shared import VALUE as {name}_op_value\n")
    kernel = folder / "second/kernels/second_op_cpu.cpp"
    good = kernel.read_text()
    kernel.write_text(good + "int oops() { return undeclared; }\n")
    code = f"""
import pathlib, torch, loader
first, second = loader.Library("../first", cache="../own"), loader.Library("../second")
assert first.first_op(torch.zeros(2)).tolist() == [1, 1] and first.first_op_value == 1
try:
    second.second_op
except loader.BuildError as error:
    print(error)
pathlib.Path("../second/kernels/second_op_cpu.cpp").write_text({good!r})
second.build()
assert second.second_op(torch.zeros(2)).tolist() == [2, 2] and second.second_op_value == 2
"""
    done = place.run(code)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "second_op could not be built:"
    assert lines[1].startswith(f"{kernel}:") and "undeclared" in lines[1]
    assert {p.name.split("-")[0] for p in (folder / "own/store").glob("[!.]*")} == {"first_op"}
