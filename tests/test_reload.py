"""Edits in a living process: what is live afterwards, what is refused, and that nothing is lost."""

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Checkout, ended, start_program
from living import FORWARD, NOTE, Living, note_which, square_and_add2

sys.path.insert(0, str(ROOT / "bench"))


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """One process for all tests of this file; each leaves the files as they were."""
    yield from square_and_add2(tmp_path_factory.mktemp("reload"))


@pytest.fixture
def living(process):
    """That process, the files restored afterwards."""
    yield process
    process.restore()


def test_whoever_holds_the_operator_runs_the_new_code(living):
    living(NOTE)
    living("g = torch.compile(f, backend='aot_eager', fullgraph=True); g(x)")
    living("op = torch.ops.octet.square.default; from loader.ops.square import square as h")
    living("class M(torch.nn.Module):\n    forward = staticmethod(f)\nm = M()")
    note_which(living, "new")
    assert (
        living("r = loader.reload(); print(r.ok, [e.outcome for e in r.edits])") == "True ['live']"
    )
    for call in (
        "f(x)",
        "g(x)",
        "op(x)",
        "h(x)",
        "m(x)",
        "f(x.clone().requires_grad_()).sum().backward()",
    ):
        found = living(
            f"c.setenv(b'OCTET_NOTE', b'none', 1); {call}; print(c.getenv(b'OCTET_NOTE'))"
        )
        assert found == "b'new'", call
    assert "Warning" not in living.stderr()


def test_an_edit_of_a_kernel_recompiles_that_file_alone(living):
    living.edit("kernels/square_cpu.cpp", FORWARD, FORWARD + "  // edited")
    files = living("print([*loader.reload().edits[0].rebuilt.compiled])")
    assert files == "['kernels/square_cpu.cpp']"


def test_an_edit_of_a_header_rebuilds_whoever_includes_it(living):
    living.edit("include/square.h", "return x * x;", "return x * x + 0;")
    assert living("print([e.unit for e in loader.reload().edits])") == "['square']"
    living.edit("include/elementwise_cpu.h", "#pragma once", "#pragma once  // edited")
    report = living("r = loader.reload(); print(r.ok, sorted(e.unit for e in r.edits))")
    assert report == "True ['add2', 'square']"


def test_what_does_not_compile_is_shown_and_the_last_build_goes_on(living):
    living.edit("kernels/square_cpu.cpp", FORWARD, "elementwise_cpu<Square>(*p, start, end);")
    shown = living("r = loader.reload(); print(r); print(r.ok, f(x).tolist())")
    assert "kernels/square_cpu.cpp:6:" in shown and "‘start’ was not declared" in shown
    assert shown.endswith("False [0.0, 1.0, 4.0, 9.0]")
    assert living("print(loader.reload())") == "nothing changed"  # and is not tried again


def test_wrong_results_are_refused_unless_forced_and_can_be_taken_back(living):
    living.edit("include/square.h", "return x * x;", "return x * x * x;")
    shown = living("print(loader.reload()); print(f(x).tolist())")
    assert "refused" in shown and "expected" in shown and "sample 0 on cpu" in shown
    assert shown.endswith("[0.0, 1.0, 4.0, 9.0]")
    shown = living("print(loader.reload(force=True)); print(f(x).tolist())")
    assert "in use, forced" in shown and shown.endswith("[0.0, 1.0, 8.0, 27.0]")
    shown = living("print(loader.revert('square')); print(f(x).tolist(), loader.reload())")
    assert shown.endswith("[0.0, 1.0, 4.0, 9.0] nothing changed")


@pytest.mark.parametrize(
    "code, says",
    [
        ("for (volatile int i = 0;; i = i + 1) {}", "did not end within 1 s"),
        (FORWARD + " static_cast<char*>(p->out[0])[-1] = 0;", "memory outside its tensors"),
        (FORWARD + " *static_cast<volatile int*>(nullptr) = 1;", "SIGSEGV"),
        (FORWARD + " __builtin_trap();", "SIGILL"),
    ],
)
def test_a_kernel_that_would_take_the_process_down_is_refused(living, code, says):
    living.edit("kernels/square_cpu.cpp", FORWARD, code)
    limit = 1 if "did not end" in says else 30  # of which a busy machine may take some
    shown = living(f"r = loader.reload(time_limit={limit}); print(r, f(x).tolist())")
    assert "refused" in shown and says in shown and shown.endswith("[0.0, 1.0, 4.0, 9.0]")


def test_an_edit_of_the_python_side_is_live_in_functions_that_others_hold(living):
    living("from loader.ops.square import square_reference as reference")
    living.edit("ops/square.py", "return x * x", "return x.pow(2)")
    living.edit(
        "ops/square.py",
        "def square(x: Tensor) -> Tensor:\n",
        "def square(x: Tensor, once=True) -> Tensor:\n",
    )
    assert living("r = loader.reload(); print(r.ok, r.edits[0].files)") == "True ['ops/square.py']"
    assert (
        living("print(f(x, once=True).tolist(), f is loader.square)") == "[0.0, 1.0, 4.0, 9.0] True"
    )
    assert living("import inspect; print('pow' in inspect.getsource(reference))") == "True"
    assert living("print('pow' in str(reference.__code__.co_names))") == "True"


def test_a_wrong_formula_or_a_broken_python_side_is_refused(living):
    living.edit("ops/add2.py", "(grad_out, grad_out)", "(2 * grad_out, grad_out)")
    shown = living("print(loader.reload())")
    assert "refused" in shown and "the gradient to argument 0 differs" in shown
    grad = (
        "y = x.clone().requires_grad_(); loader.add2(y, x).sum().backward(); print(y.grad.tolist())"
    )
    assert living(grad) == "[1.0, 1.0, 1.0, 1.0]"
    living.edit("ops/add2.py", "def add2_reference", "def def add2_reference")
    shown = living("print(loader.reload())")
    assert "SyntaxError" in shown and "refused" in shown
    assert living(grad) == "[1.0, 1.0, 1.0, 1.0]"


def test_other_arguments_of_an_operator_take_a_new_process(living):
    living.edit("ops/square.cpp", "(square, Square, x)", "(square, Square, y)")
    shown = living("print(loader.reload(), f(x).tolist())")
    assert "its arguments changed" in shown and shown.endswith("[0.0, 1.0, 4.0, 9.0]")


def test_other_arguments_are_noticed_too_where_the_schema_was_declared_at_the_import(living):
    warm = Living(living.checkout)
    warm("import torch, loader; from loader import square as f; x = torch.arange(4.); f(x)")
    assert warm("import os; print(' square ' in os.environ['OCTET_DECLARED'] + ' ')") == "True"
    living.edit("ops/square.cpp", "(square, Square, x)", "(square, Square, y)")
    shown = warm("print(loader.reload(), f(x).tolist())")
    warm.end()
    assert "its arguments changed" in shown and shown.endswith("[0.0, 1.0, 4.0, 9.0]")


def test_the_history_is_in_explain(living):
    living.edit("kernels/square_cpu.cpp", FORWARD, FORWARD + "  // again")
    living("loader.reload()")
    shown = living("print(loader.explain('square'))")
    assert "in this session" in shown and "kernels/square_cpu.cpp: in use" in shown


def test_a_new_process_finds_the_edit_in_the_store(living):
    living.edit("kernels/square_cpu.cpp", FORWARD, FORWARD + "  // kept")
    living("loader.reload()")
    code = "import loader; loader.square; print(loader.receipt().units['square']['result'])"
    first, second = living.checkout.run(code), living.checkout.run(code)
    # The first may have to wait: the edit is in use before the store has it.
    assert first.stdout.strip() in ("hit", "waited") and "loader: built" not in first.stderr
    assert second.stdout.strip() == "hit" and "built" not in second.stderr


def test_edits_in_a_notebook_are_taken_in_before_the_cell(living):
    living("from IPython.core.interactiveshell import InteractiveShell")
    living("shell = InteractiveShell.instance(); shell.user_ns.update(f=f, x=x, note=None)")
    living(NOTE + "\nshell.user_ns['note'] = note")
    assert "Error" not in living("print(shell.run_line_magic('load_ext', 'loader'))")
    note_which(living, "cell")
    shown = living("shell.run_cell('print(note())')")
    assert "square: kernels/square_cpu.cpp: in use" in shown and shown.endswith("cell")
    assert living("shell.run_cell('print(note())')") == "cell"
    living.edit("kernels/square_cpu.cpp", FORWARD, "oops;")
    shown = living("shell.run_cell('print(note())')")
    assert "oops" in shown and "does not build" in shown and shown.endswith("cell")
    kernel = "__global__ void add(int* x) { x[threadIdx.x] += STEP; }"
    living(f"shell.run_cell_magic('cuda', 'mod STEP=3', {kernel!r})")
    run = "t = torch.zeros(4, dtype=torch.int32); mod.get_function('add')(t, grid=1, block=4)"
    living("shell.user_ns['torch'] = torch")
    assert living(f"shell.run_cell({run + '; print(t.tolist())'!r})").endswith("[3, 3, 3, 3]")
    living("shell.run_line_magic('unload_ext', 'loader')")


def test_watch_takes_in_an_edit_while_a_script_runs(living):
    living(NOTE)
    living("w = loader.watch()")
    note_which(living, "watched")
    found = living(
        "import time; end = time.monotonic() + 30\n"
        "while note() != 'watched' and time.monotonic() < end: time.sleep(0.05)\n"
        "print(note()); w.stop()"
    )
    assert found == "watched"


def test_nothing_changed_is_seen_below_a_millisecond_for_20_operators(tmp_path):
    checkout = Checkout(tmp_path, only="square")
    for i in range(19):
        for room in ("ops", "kernels", "include"):
            for file in (checkout.root / room).glob("square*"):
                (file.parent / file.name.replace("square", f"other{i}")).write_text(
                    file.read_text()
                )
    done = checkout.run(
        "import loader, time\n"
        "from loader.jit.live.reload import reloader\n"
        "assert len(loader._session.units) == 20\n"
        "reloader.look()\n"
        "def once():\n"
        "    begun = time.perf_counter(); assert reloader.is_unchanged()\n"
        "    return time.perf_counter() - begun\n"
        "print(sorted(once() for _ in range(101))[50])",
        LOADER_BUILD="lazy",
    )
    assert float(done.stdout) < 1e-3, done.stderr


def test_random_edits(tmp_path):
    """The process survives all; the good ones are live, the others are not; memory stays."""
    import edits

    edits_main, compilers = Path(edits.__file__), f"{os.environ['OCTET_COMPILERS']}/bin:"
    words = ["-m", "loader", "bench", "edits", "--count", 12, "--results", tmp_path]
    changes = {"TMPDIR": str(tmp_path), "PATH": f"{compilers}{os.environ['PATH']}"}
    done = ended(start_program(words, ROOT, os.environ | changes), timeout=600)
    assert done.returncode == 0, f"{edits_main}: {done.stdout}{done.stderr}"
    (row,) = json.loads((tmp_path / "edits_cpu.json").read_text())["rows"]
    assert row["mistakes"] == [] and row["bytes_an_edit"] < 2 << 20


def test_an_edit_is_refused_where_it_cannot_be_tried(living):
    """The process that stands by is killed, and another started; what cannot start is told of."""
    living(
        "import os, signal; t = reloader.trials; os.kill(t._process.pid, signal.SIGKILL); t._process.wait()"
    )
    living.edit("kernels/square_cpu.cpp", FORWARD, FORWARD + "  // tried by another")
    assert living("print(loader.reload().ok)") == "True"
    living("import sys; t.stop(); kept = sys.executable; sys.executable = '/bin/false'")
    living.edit("kernels/square_cpu.cpp", FORWARD, FORWARD + "  // tried by nobody")
    shown = living("print(loader.reload()); sys.executable = kept; t.stop()")
    assert "refused" in shown and "the process that tries edits could not do so" in shown
