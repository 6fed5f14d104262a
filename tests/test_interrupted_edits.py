"""The edit loop under a careless hand: Ctrl-C, files that are gone, headers of many operators."""

import pytest
from living import FORWARD, NOTE, Living, checkout_of, note_which, square_and_add2

SLOWLY = "import os; os.environ['SLOW'] = '2'"  # seconds of a compiler that takes no core
SINGLE = "include/square.h"
SHARED = "include/elementwise_cpu.h"
KERNEL = "kernels/square_cpu.cpp"
INTERRUPT = """
import os, signal, threading
def interrupted(delay):
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start(); loader.reload(); timer.join()
    except KeyboardInterrupt as error:
        return str(error)
"""


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """A compiler that sleeps for SLOW seconds before each source."""
    program = tmp_path_factory.mktemp("slow") / "c++"
    program.write_text(
        '#!/bin/sh\nfor a; do case "$a" in *.cpp) sleep "${SLOW:-0}";; esac; done\nexec c++ "$@"\n'
    )
    program.chmod(0o755)
    return program


@pytest.fixture(scope="module")
def process(tmp_path_factory, slow):
    """One process for all tests of this file; each leaves the files as they were."""
    yield from square_and_add2(tmp_path_factory.mktemp("interrupted"), CXX=slow)


@pytest.fixture
def living(process):
    """That process, the files restored afterwards."""
    yield process
    process("import os; os.environ.pop('SLOW', None)")
    process.restore()


@pytest.fixture
def fresh(tmp_path, slow):
    """A process that uses square, not add2, and does not stand by for edits."""
    living = Living(checkout_of(tmp_path, "square", "add2", CXX=slow))
    living("import torch, loader; from loader import square as f; x = torch.arange(4.); f(x)")
    yield living
    living.end()


@pytest.mark.parametrize("delay", [0.0, 0.15, 0.3, 0.6])
def test_an_interrupted_edit_is_taken_in_by_the_next_reload(living, delay):
    living(NOTE + INTERRUPT)
    note_which(living, f"after {delay}")
    living(SLOWLY)
    shown = living(f"print(interrupted({delay}), note())")
    assert f"square: {KERNEL}: interrupted, the edit is still to come" in shown or not delay
    assert shown.endswith("none")  # the old code is in use, which notes nothing
    assert living("print(loader.reload().ok, note())") == f"True after {delay}"
    assert living("print(loader.reload())") == "nothing changed"


def test_an_interrupt_while_code_is_put_in_place_leaves_the_old_or_the_new(living):
    living(NOTE + INTERRUPT)
    living("from loader.jit.live.swap import Swap; import time; commit = Swap.commit")
    living(
        "def slow(self):\n"
        "    os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2); commit(self); time.sleep(0.2)\n"
        "Swap.commit = slow"
    )
    note_which(living, "whole")
    living.edit("ops/square.py", "return x * x", "return x.pow(2)")
    shown = living(
        "try:\n    loader.reload()\nexcept KeyboardInterrupt as error:\n    print(error)\n"
        "finally:\n    Swap.commit = commit"
    )
    assert "in use" in shown
    used = "print(note(), 'pow' in str(loader.square_reference.__code__.co_names))"
    assert living(used) == "whole True"
    assert living("print(loader.reload())") == "nothing changed"


def test_an_interrupt_before_a_cell_ends_the_cell(living):
    living(NOTE + INTERRUPT)
    living("from IPython.core.interactiveshell import InteractiveShell")
    living("shell = InteractiveShell.instance(); shell.user_ns.update(f=f, x=x, note=note)")
    living("shell.run_line_magic('load_ext', 'loader')")
    note_which(living, "next cell")
    living(SLOWLY)
    shown = living(
        "timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)); timer.start()\n"
        "shell.run_cell('print(\"ran\", 6 * 7)'); timer.join()"
    )
    assert "still to come" in shown and "ran 42" not in shown
    assert living("shell.run_cell('print(note())')").endswith("next cell")
    living("shell.run_line_magic('unload_ext', 'loader')")


def test_the_extension_can_be_loaded_again(living):
    """`%reload_ext` runs loader.py once more; there is one watcher still, and it knows all."""
    living(NOTE)
    living("from IPython.core.interactiveshell import InteractiveShell")
    living("shell = InteractiveShell.instance(); shell.user_ns.update(f=f, x=x, note=note)")
    living("shell.run_line_magic('load_ext', 'loader'); op = torch.ops.octet.square.default")
    note_which(living, "first")
    assert living("shell.run_cell('print(note())')").endswith("first")
    living("shell.run_line_magic('reload_ext', 'loader')")
    sessions = "from loader.jit.operators.session import SESSIONS; print(len(SESSIONS))"
    assert living(sessions) == "1"
    assert living("print(op is torch.ops.octet.square.default)") == "True"
    living.edit(KERNEL, '"first"', '"second"')
    shown = living("shell.run_cell('print(note())')")
    assert shown.count("in use") == 1 and shown.endswith("second")
    assert living("print(loader.reload())") == "nothing changed"
    assert "in use" in living("print(loader.explain('square'))")
    living("shell.run_line_magic('unload_ext', 'loader')")


def test_a_forked_process_can_reload_while_its_parent_does(living):
    note_which(living, "parent")
    living(SLOWLY)
    shown = living(
        "import os, signal, threading, time\n"
        "thread = threading.Thread(target=loader.reload); thread.start(); time.sleep(0.3)\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    signal.alarm(20); loader.reload('add2'); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])); thread.join()"
    )
    assert shown == "7"


@pytest.mark.parametrize(
    "path, says",
    [
        (KERNEL, "does not build"),
        (SINGLE, "does not build"),
        ("ops/square.cpp", "the code before stays in use in this process"),
        ("ops/square.py", "the code before stays in use in this process"),
    ],
)
def test_a_file_that_is_gone_is_named(living, path, says):
    file, moved = living.checkout.root / path, living.checkout.root / f"{path[:-4]}_moved.cpp"
    living.edit(path, "a", "a")  # kept, to be restored
    file.rename(moved) if path == KERNEL else file.unlink()
    shown = living("r = loader.reload(); print(r); print(r.ok, f(x).tolist())")
    moved.unlink(missing_ok=True)
    assert f"{path} (gone)" in shown and says in shown and f"{path}: deleted or renamed" in shown
    assert "force=True" not in shown and shown.endswith("False [0.0, 1.0, 4.0, 9.0]")
    assert path != KERNEL or "no operator has kernels/square_cpu_moved.cpp" in shown
    assert living("print(loader.reload())") == "nothing changed"


def test_a_header_that_is_gone_and_included_no_more_is_told_of_once(living):
    header = living.checkout.root / "include" / "extra.h"
    header.write_text("// more\n")
    living.edit(KERNEL, '#include "square.h"', '#include "extra.h"\n#include "square.h"')
    assert living("print(loader.reload().ok)") == "True"
    header.unlink()
    living.edit(KERNEL, '#include "extra.h"\n', "// without it\n")
    shown = living("print(loader.reload())")
    assert f"square: {KERNEL}, include/extra.h (gone): in use" in shown
    assert living("print(loader.reload())") == "nothing changed"


def test_sources_put_back_are_said_to_be_those_in_use(living):
    living.edit(KERNEL, FORWARD, "oops;")
    living("loader.reload()")
    living.edit(KERNEL, "oops;", FORWARD)
    shown = living("print(loader.reload())")
    assert shown == "square: the sources are again those of the code in use"


def test_cuda_that_is_not_compiled_is_said_to_be_left_out(living):
    living.edit("kernels/square.cu", "#include", "oops\n#include")
    shown = living("r = loader.reload(); print(r, r.ok)")
    assert "square: kernels/square.cu: not taken in" in shown and shown.endswith("False")
    assert "CUDA is not compiled here" in shown
    living.edit("kernels/square.cu", "oops", "oops again")
    living.edit(KERNEL, FORWARD, FORWARD + "  // beside it")
    shown = living("r = loader.reload(); print(r, r.ok)")
    assert f"square: {KERNEL}: in use" in shown and "kernels/square.cu: CUDA is not" in shown


@pytest.mark.parametrize(
    "path, old, new",
    [
        (KERNEL, FORWARD, FORWARD + " void missing(); missing();"),
        ("ops/square.py", "def square_ref", "def def square_ref"),
        ("ops/square.py", "import Tensor\n", "import Tensor, no_such_thing\n"),
        (KERNEL, FORWARD, "oops;"),
    ],
)
def test_force_is_not_offered_where_it_cannot_help(living, path, old, new):
    living.edit(path, old, new)
    shown = living("r = loader.reload(); print(r, r.ok, f(x).tolist())")
    assert "force" not in shown and shown.endswith("False [0.0, 1.0, 4.0, 9.0]")
    shown = living("r = loader.reload(force=True); print(r, r.ok, f(x).tolist())")
    assert "does not build" in shown and shown.endswith("False [0.0, 1.0, 4.0, 9.0]")


def test_an_error_in_a_cuda_cell_is_shown_without_a_page_of_traceback(living):
    living("from IPython.core.interactiveshell import InteractiveShell")
    living("shell = InteractiveShell.instance(); shell.run_line_magic('load_ext', 'loader')")
    cell = "%%cuda mod\n__global__ void add(int* x) { x[threadIdx.x] += oops; }"
    shown = living(f"shell.run_cell({cell!r})")
    assert "oops" in shown and "BuildError" in shown and "magic(" not in shown
    assert len(shown.splitlines()) < 12, shown
    living("shell.run_line_magic('unload_ext', 'loader')")


def test_the_first_edit_of_a_kernel_can_be_taken_back_and_is_said_to_be_still_there(fresh):
    fresh(NOTE)
    note_which(fresh, "first")
    assert fresh("print(loader.reload().ok, note())") == "True first"
    shown = fresh("print(loader.revert('square')); print(note())")
    assert f"{KERNEL} still holds the edit" in shown and shown.endswith("none")
    assert fresh("print(loader.reload())") == "nothing changed"
    assert fresh("print(loader.reload('square', force=True).ok, note())") == "True first"


def test_operators_in_use_come_before_others_that_a_header_concerns(fresh):
    fresh(SLOWLY)
    fresh.edit(SHARED, "#pragma once", "#pragma once\n\nstatic const int edited = 1;")
    shown = fresh("r = loader.reload(); print([e.unit for e in r.edits], r.behind, r.ok)")
    assert shown == "['square'] ['add2'] False"
    assert "add2: built behind" in fresh("print(loader.reload())")
    assert fresh("r = loader.reload('add2'); print([e.outcome for e in r.edits])") == "['live']"
    assert fresh("print(loader.reload())") == "nothing changed"
    assert fresh("print(loader.add2(x, x).tolist())") == "[0.0, 2.0, 4.0, 6.0]"


def test_what_is_built_behind_is_there_for_the_next_process(fresh):
    fresh(SLOWLY)
    fresh.edit(SHARED, "#pragma once", "#pragma once\n\nstatic const int edited = 1;")
    assert fresh("print(loader.reload().behind)") == "['add2']"
    fresh.end()
    done = fresh.checkout.run(
        "import loader; loader.add2, loader.square; r = loader.receipt().units\n"
        "print(r['add2']['result'], r['square']['result'])"
    )
    assert done.stdout.strip() == "hit hit", done.stderr
