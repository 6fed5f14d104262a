"""Errors of a build as plain data, and as the lines of JSON that programs read."""

import json
import os
import pickle
from pathlib import Path

import pytest
from conftest import ROOT, ended, start_program

import loader
from loader.jit.errors import BuildError, CacheError, joined
from loader.jit.errors.diagnose import find_problems
from loader.jit.errors.problem import KINDS, error_of
from loader.jit.machine import settings, told

BAD = """#include <Python.h>
int twice(int x) {
    return 2 * missing;
}
"""
FIELDS = {"error", "unit", "kind", "message", "log", "messages", "tried", "mends"}
OF_A_MESSAGE = {"kind", "message", "file", "line", "column", "source", "advice", "cause"}


@pytest.fixture
def failed():
    """The error of a string that does not compile."""
    with pytest.raises(BuildError) as caught:
        loader.load_inline("twice_bad", BAD, functions=["twice"])
    return caught.value


def test_a_failed_extension_as_plain_data(failed):
    """Each message has its place in this file, the source line, and what was tried before."""
    told = failed.as_dict()
    assert told.keys() == FIELDS
    assert (told["error"], told["unit"], told["kind"]) == (
        "BuildError",
        "twice_bad",
        "compile_error",
    )
    (message,) = told["messages"]
    assert message.keys() == OF_A_MESSAGE
    assert message["message"].startswith("‘missing’ was not declared")
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "missing;" in text)
    assert (message["file"], message["line"]) == (__file__, line)
    assert message["source"].strip() == "return 2 * missing;"
    assert message["column"] == message["source"].index("missing") + 1
    assert [tried["source"] for tried in told["tried"]] == ["cpp_sources.cpp"] * len(told["tried"])
    assert told["tried"]
    assert not any(tried["ok"] for tried in told["tried"])
    assert json.loads(json.dumps(told)) == told


def test_it_goes_through_another_process_whole(failed):
    """So that who waits for another process's build, or gets it pickled, can tell the same."""
    told = failed.as_dict()
    assert error_of(json.loads(json.dumps(told)), "twice_bad").as_dict() == told
    assert pickle.loads(pickle.dumps(failed)).as_dict() == told


@pytest.mark.parametrize(
    "output, kind, where",
    [
        ('a.cu(3): error: expected a ";"\n', "compile_error", ("a.cu", 3)),
        ("a.o: undefined reference to `f(int)'\n", "link_error", (None, None)),
        ("cc1plus: fatal error: x: No space left on device\n", "machine", (None, None)),
        ("unheard of\n", "other", (None, None)),
    ],
)
def test_kinds(tmp_path, output, kind, where):
    """The kind of what compilers, linkers and the system say."""
    (problem,), total = find_problems(output, tmp_path)
    assert (problem.kind, total) == (kind, 1)
    assert (problem.file, problem.line) == where
    assert kind in KINDS


def test_the_users_line_of_an_error_in_a_header(tmp_path):
    """The error's own place, and as its cause the line that led there."""
    output = (
        "lib.h: In instantiation of ‘int f(T) [with T = int]’:\n"
        "a.cpp:2:14:   required from here\n"
        "lib.h:9:5: error: request for member ‘y’ in ‘x’\n"
    )
    (tmp_path / "a.cpp").write_text('#include "lib.h"\nint a =     f(1);\n')
    (problem,), _ = find_problems(output, tmp_path)
    assert (problem.file, problem.line, problem.column) == ("lib.h", 9, 5)
    assert problem.cause == {
        "file": "a.cpp",
        "line": 2,
        "column": 14,
        "source": "int a =     f(1);",
    }


def test_other_errors_have_one_message_of_their_kind():
    """Where no compiler ran, the whole text is the message."""
    for error, kind in ((CacheError("no folder"), "cache"), (BuildError("no"), "other")):
        (message,) = error.as_dict()["messages"]
        assert message.keys() == OF_A_MESSAGE
        assert (message["kind"], message["message"]) == (kind, str(error))


def test_what_is_refused_says_so(monkeypatch):
    monkeypatch.setenv("LOADER_BUILD", "never")
    with pytest.raises(BuildError) as caught:
        loader.load_inline("never_built", BAD, functions=["twice"])
    assert caught.value.as_dict()["kind"] == "refused"


def test_a_printed_error_is_one_line_of_json(monkeypatch, capsys):
    """Of any exception; text without the setting, and where the setting is wrong."""
    error = BuildError("two\nlines", "unit", kind="machine")
    for value, line in (("text", "loader: two\nlines\n"), ("xml", "loader: two\nlines\n")):
        monkeypatch.setenv("LOADER_ERRORS", value)
        told.tell(error)
        assert capsys.readouterr().err == line
    with pytest.raises(ValueError, match="LOADER_ERRORS must be one of text, json, got 'xml'"):
        settings.value("LOADER_ERRORS")
    monkeypatch.setenv("LOADER_ERRORS", "json")
    told.tell_each([error, BuildError("two\nlines"), BuildError("else")])
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert {first["message"], second["message"]} == {"two\nlines", "else"}
    told.tell(ValueError("--arch takes ..."))
    printed = json.loads(capsys.readouterr().err)
    assert (printed["error"], printed["message"]) == ("ValueError", "--arch takes ...")


SCRIPT = """
import sys, threading, loader
def fail(*given):
    raise loader.BuildError("no", "unit", kind="refused")
if sys.argv[1:] != ["other"]:
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    fail()
raise ValueError("other")
"""


def test_an_error_that_ends_a_program_is_one_line_too(checkout):
    """Of the program and of its threads; other errors keep their traceback."""
    done = checkout.run(SCRIPT, LOADER_ERRORS="json", LOADER_BUILD="lazy")
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [(e["error"], e["kind"], e["at"]["line"]) for e in lines] == [
        ("BuildError", "refused", 4)
    ] * 2
    assert "Traceback" not in done.stderr
    other = checkout.run(
        SCRIPT.replace("sys.argv[1:]", "['other']"), LOADER_ERRORS="json", LOADER_BUILD="lazy"
    )
    assert "ValueError: other" in other.stderr
    assert "Traceback" in other.stderr


def test_errors_of_a_program_below_run_are_lines_too(tmp_path):
    """Where torch's own function is called, and `loader` is nowhere imported."""
    script = tmp_path / "script.py"
    script.write_text(
        "from torch.utils.cpp_extension import load_inline\n"
        'load_inline("run_bad", "#include <Python.h>\\nint f() { return missing; }",\n'
        '            functions=["f"], no_implicit_headers=True)\n'
    )
    env = {**os.environ, "LOADER_ERRORS": "json", "LOADER_CACHE_DIR": str(tmp_path / "cache")}
    done = ended(start_program(["-m", "loader", "run", script], ROOT, env))
    assert done.returncode == 1
    (error,) = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert error["at"] == {"file": str(script), "line": 2}
    assert error["messages"][0]["source"].strip() == "int f() { return missing; }"


def test_one_of_several_failed_operators_says_its_kind():
    no_compiler, no_disk = (
        BuildError("a", "a", kind="missing_compiler"),
        BuildError("b", "b", "log"),
    )
    assert joined([no_compiler]) is no_compiler
    both = joined([no_compiler, no_disk])
    assert (both.unit, both.kind, str(both)) == ("a", "missing_compiler", "a\n\nb")
