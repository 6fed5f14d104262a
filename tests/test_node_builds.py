"""When the quick way into operators is built, and what becomes of it: jit/operators/node.py."""

import shutil
import stat

import pytest
from living import NOTE, Living, note_which

# Calls square often enough, and waits until the node is there; says what it is then.
CALL = """
import time
import torch
import loader
from loader.jit.operators.node import NODE, UNIT
x = torch.ones(3, requires_grad=True)
def called(times):
    for _ in range(times):
        out = loader.square(x)
    assert out.tolist() == [1, 1, 1]
    return "quick" if out.grad_fn.name() == "squareBackward" else "slow"
"""
FIRST = CALL + "print(called(1))"
OFTEN = (
    CALL
    + """
import contextlib, os
with contextlib.suppress(PermissionError):
    os.nice(-10)  # its compiler is as nice as those of tests beside this one then
print(called(299), NODE.begun)
called(1)
end = time.time() + 200
while not NODE.module and time.time() < end:
    time.sleep(0.05)
print(called(1))
"""
)


def said(done):
    """The words that a process printed, which had nothing to say on stderr."""
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout.split()


def node_of(checkout):
    (entry,) = [e for e in checkout.entries() if e.startswith("node.")]
    return checkout.cache / "store" / entry / "library.so"


def test_it_is_built_behind_once_operators_were_called_often(built):
    """Later processes have it at once, without a compiler; where damaged it is made anew."""
    assert said(built.run(OFTEN)) == ["slow", "False", "quick"]
    alone = {"LOADER_BUILD": "never"}
    assert said(built.run(FIRST, **alone)) == ["quick"]
    assert said(built.run(FIRST, **alone, CXX="no-such-compiler")) == ["quick"]
    library = node_of(built)
    library.chmod(stat.S_IRUSR | stat.S_IWUSR)
    library.write_bytes(library.read_bytes()[:-1])
    assert said(built.run(FIRST, **alone)) == ["slow"]
    shutil.rmtree(built.cache / "work")
    assert said(built.run(OFTEN)) == ["slow", "False", "quick"]
    assert said(built.run(FIRST, **alone)) == ["quick"]


@pytest.mark.parametrize("how", [{"LOADER_BUILD": "never"}, {"CXX": "no-such-compiler"}], ids=str)
def test_it_is_not_built_where_that_is_forbidden_or_impossible(built, how):
    code = CALL + "print(called(400)); time.sleep(1); print(called(1), NODE.module)"
    assert said(built.run(code, **how)) == ["slow", "slow", "None"]
    assert len(built.entries()) == 1


def test_a_failure_is_noted_and_not_tried_again(built, tmp_path):
    """It is no error: Python serves, without a word."""
    compiled, wrapper = tmp_path / "compiled", tmp_path / "failing-c++"
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *node.cpp*) '
        f'echo once >> "{compiled}"; echo "no such thing" >&2; exit 1;; esac\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    code = CALL + (
        "called(300)\n"
        "end = time.time() + 60\n"
        "work = loader._session.store.path.parent / 'work'\n"
        "while not [*work.glob('node.*.failed.json')] and time.time() < end: time.sleep(0.05)\n"
        "time.sleep(1)\n"
        "print(called(1), NODE.module)"
    )
    assert built.run("import loader; loader.build()", CXX=wrapper).returncode == 0
    for _ in range(2):
        assert said(built.run(code, CXX=wrapper)) == ["slow", "None"]
    assert compiled.read_text().split() == ["once"]


def test_a_process_that_ends_while_it_is_built_says_nothing(built, tmp_path):
    wrapper, lingers = tmp_path / "lingering-c++", tmp_path / "lingers"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *node.cpp*) echo > "{lingers}"; sleep 60;; esac\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    assert built.run("import loader; loader.build()", CXX=wrapper).returncode == 0
    before = built.entries()
    code = CALL + (
        "import os\n"
        "called(300)\n"
        "end = time.time() + 200\n"
        f"while not os.path.exists('{lingers}') and time.time() < end: time.sleep(0.01)\n"
    )
    assert said(built.run(code, CXX=wrapper)) == []
    assert lingers.exists()
    assert built.entries() == before and not any("node" in entry for entry in before)


def test_an_edited_kernel_is_what_it_calls(built):
    living = Living(built)
    try:
        living("import torch, loader; from loader import square as f; x = torch.ones(3)")
        living("from loader.jit.operators.node import NODE; f(x); print(NODE.build())")
        living(NOTE)
        call = "y = f(x.requires_grad_()); print(y.grad_fn.name(), note())"
        assert living(call) == "squareBackward none"
        note_which(living, "new")
        assert living("print(loader.reload().ok)") == "True"
        assert living(call) == "squareBackward new"
        assert living("y.sum().backward(); print(x.grad.tolist())") == "[2.0, 2.0, 2.0]"
        assert living("print(loader.revert('square').ok)") == "True"
        assert living(call) == "squareBackward none"
    finally:
        living.end()
