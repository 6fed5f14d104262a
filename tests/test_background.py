"""`import loader` returns at once and builds behind; what is used goes first, who ends early loses
nothing.
"""

import os
import signal
import time

import pytest
from conftest import Checkout

USE = "import torch, loader; assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3"
COPIES = ("cube", "fourth", "fifth")


@pytest.fixture
def several(tmp_path, counting):
    """A checkout of four small operators, with a compiler that can be made slow."""
    checkout = Checkout(tmp_path, only="square")
    for name in COPIES:
        for room in ("include", "kernels", "ops"):
            for file in (checkout.root / room).glob("square*"):
                text = file.read_text().replace("square", name).replace("Square", name.title())
                (file.parent / file.name.replace("square", name)).write_text(text)
    return counting(checkout)


def test_import_returns_at_once_and_says_what_is_built_where_and_why(several):
    code = """
import sys, time, torch
begun = time.perf_counter()
import loader
assert time.perf_counter() - begun < 0.9 * float(sys.argv[1] if len(sys.argv) > 1 else 2)
assert not any(result in str(loader.receipt()) for result in ("built", "failed"))
"""
    done = several.run(code, LOADER_BUILD=None, SLOW="2")
    assert done.returncode == 0, done.stderr
    said = done.stderr.splitlines()[0]
    assert said.startswith("loader: building 4 operators (cube, fifth, fourth, square) behind into")
    assert str(several.cache) in said and said.endswith("the first build of it in this cache")


def test_the_first_use_of_an_operator_waits_for_its_own_library_alone(several):
    """What is used goes to the front: of the others none is built by then."""
    code = f"""
import torch, loader
assert loader.fourth(torch.ones(3) * 3).tolist() == [9.0] * 3
there = {{name for name in {COPIES} + ("square",) if loader._session.store.has(name, loader._session.keys[name])}}
assert there == {{"fourth"}}, there
loader.build()
assert loader.cube(torch.ones(3) * 3).tolist() == [9.0] * 3
"""
    done = several.run(code, LOADER_BUILD=None, SLOW="0.7", MAX_JOBS="1")
    assert done.returncode == 0, done.stderr
    assert several.compiled() == 8 and len(several.entries()) == 4


def test_a_process_that_ends_early_keeps_what_it_compiled(several):
    """The next one goes on from there, and no compiler outlives the first."""
    begin = "import torch, loader, time; time.sleep(0.1)\nwhile True:\n    time.sleep(0.05)\n"
    begin += "    if len(list(loader._session.store.path.parent.glob('work/*/*.o'))) >= 3: break"
    done = several.run(begin, LOADER_BUILD=None, SLOW="0.3", MAX_JOBS="1")
    assert done.returncode == 0, done.stderr
    assert "this process ends while" in done.stderr.splitlines()[-1]
    before = several.compiled()
    again = several.run("import loader; loader.build()", LOADER_BUILD=None)
    assert again.returncode == 0, again.stderr
    assert len(several.entries()) == 4 and several.compiled() - before <= 6


def test_a_killed_process_leaves_a_cache_that_works(several):
    process = several.start("import loader, time; time.sleep(60)", LOADER_BUILD=None, SLOW="0.5")
    while several.compiled() < 3:
        time.sleep(0.02)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    done = several.run(USE)
    assert done.returncode == 0, done.stderr
    assert len(several.entries()) == 4


def test_an_error_behind_is_raised_where_the_operator_is_used(several):
    kernel = several.root / "kernels/cube_cpu.cpp"
    good = kernel.read_text()
    kernel.write_text(good + "int oops() { return undeclared; }\n")
    code = f"""
import pathlib, torch, loader
try:
    loader.cube
except loader.BuildError as error:
    assert "undeclared" in str(error) and error.unit == "cube"
else:
    raise SystemExit("no error")
assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
pathlib.Path("kernels/cube_cpu.cpp").write_text({good!r})
loader.build("cube")
assert loader.cube(torch.ones(3) * 3).tolist() == [9.0] * 3
"""
    done = several.run(code, LOADER_BUILD=None)
    assert done.returncode == 0, done.stderr


def test_a_fork_builds_for_itself(several):
    """The child has no thread that builds; it neither hangs nor ends its parent's compilers."""
    code = """
import os, torch, loader
pid = os.fork()
if pid == 0:
    ok = loader.cube(torch.ones(3) * 3).tolist() == [9.0] * 3
    os._exit(0 if ok else 1)
assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
loader.build()
"""
    done = several.run(code, LOADER_BUILD=None, SLOW="0.3", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert len(several.entries()) == 4


def test_an_interrupt_while_waiting_leaves_the_build_going(several):
    code = """
import _thread, threading, torch, loader
threading.Timer(0.5, _thread.interrupt_main).start()
try:
    loader.square
except KeyboardInterrupt:
    pass
assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
"""
    done = several.run(code, LOADER_BUILD=None, SLOW="1")
    assert done.returncode == 0, done.stderr
    assert several.compiled() <= 8


def test_a_batch_that_has_not_begun_as_the_process_ends_is_no_error():
    """An interpreter that ends begins no more threads: such a batch was met with none of its own."""
    from loader.jit.build.batch import Batch
    from loader.jit.build.progress import Silent

    assert Batch([], None, Silent()).abandon() == []
