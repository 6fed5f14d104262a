"""The compiler that tests share: another object wherever another one would be made."""

import os
import subprocess

import pytest
from compiler import install

KERNEL = """#ifndef NUMBER
#define NUMBER 1
#endif
int answer() { return NUMBER; }
"""


@pytest.fixture
def compile_(tmp_path):
    """A function that compiles KERNEL, a header's edit before it; the object, and if it was new."""
    # One of its own, beside the test's folder: in that of all tests others put objects too.
    folder = str(install(tmp_path.parent / f"compilers-{tmp_path.name}"))
    environment = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"}

    def run(*words, text=KERNEL, header="", name="a.cpp", **changes):
        (tmp_path / "a.h").write_text(header)
        (tmp_path / name).write_text('#include "a.h"\n' + text)
        before = {*os.listdir(folder)}
        made = tmp_path / "a.o"
        made.unlink(missing_ok=True)
        command = ["c++", *words, "-c", tmp_path / name, "-o", made]
        env = environment | changes
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        kept = [file for file in {*os.listdir(folder)} - before if file.endswith(".o")]
        return made.read_bytes() if made.exists() else done.stdout, len(kept)

    return run


def test_what_changes_an_object_makes_another(compile_):
    first, new = compile_()
    assert new == 1 and compile_() == (first, 0)
    assert compile_(text=KERNEL + "// a comment\n", header="/* another */\n") == (first, 0)
    for changed in (
        compile_("-DNUMBER=2"),
        compile_(header="#define NUMBER 3\n"),
        compile_(text=KERNEL.replace("NUMBER 1", "NUMBER 4")),
    ):
        assert changed[0] != first and changed[1] == 1
    assert compile_("-O1", header="#define NUMBER 3\n")[1] == 1


def test_little_is_optimised_where_nobody_asks_for_more(compile_):
    loop = "int sum(int* x) { int y = 0; for (int i = 0; i < 64; ++i) y += x[i]; return y; }\n"
    little, new = compile_("-O1", text=loop)
    assert new == 1 and compile_("-O3", text=loop) == (little, 0)
    much, new = compile_("-O3", text=loop, OCTET_OPTIMIZE="1")
    assert new == 1 and much != little


def test_what_a_compiler_says_is_said_each_time(compile_, tmp_path):
    for _ in range(2):
        said, new = compile_(text="int oops() { return undeclared; }\n")
        assert "undeclared" in said and f"{tmp_path}/a.cpp:2" in said and not new
        assert compile_("-Wall", text="static int unused;\n")[1] == 0


def test_the_headers_reached_are_listed_each_time(compile_, tmp_path):
    for new in (1, 0):
        (tmp_path / "a.d").unlink(missing_ok=True)
        assert compile_("-MD", "-MF", tmp_path / "a.d", "-DLISTED")[1] == new
        assert "a.h" in (tmp_path / "a.d").read_text()


def test_a_header_is_noticed_however_it_comes_to_be_another(compile_, tmp_path):
    """Of equal size and date, as it was once, and in a folder that is looked into before."""
    texts = [f"#define NUMBER {n}\n" for n in (5, 6, 5, 6)]
    objects = []
    for text in texts:
        objects.append(compile_("-DNOTICED", header=text)[0])
        os.utime(tmp_path / "a.h", (1e9, 1e9))
    assert objects[:2] == objects[2:] and objects[0] != objects[1]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    (tmp_path / "second/b.h").write_text("#define NUMBER 7\n")
    folders = "-I", tmp_path / "first", "-I", tmp_path / "second"
    before = compile_(*folders, text='#include "b.h"\n' + KERNEL)
    (tmp_path / "first/b.h").write_text("#define NUMBER 8\n")
    assert compile_(*folders, text='#include "b.h"\n' + KERNEL)[0] != before[0]
