"""Many processes, threads and versions on one cache; kills at any moment; locks that fail."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, Checkout, ended, start_program, start_python

from loader.jit.build.progress import Progress

USE = "import torch, loader; assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3"

# Waits with torch imported until all are there.
RACE = """
import os, pathlib, time, torch
gate = pathlib.Path(os.environ["GATE"])
(gate / str(os.getpid())).touch()
while not (gate / "go").exists():
    time.sleep(0.02)
import loader
assert loader.add2(torch.ones(3), torch.ones(3)).tolist() == [2.0] * 3
assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
"""


def test_32_processes_compile_each_unit_once(tmp_path, counting):
    """How much longer the last of them takes than one alone: `python -m loader bench crowd`."""
    count, gate = 32, tmp_path / "gate"
    gate.mkdir()
    checkout = counting(Checkout(tmp_path, only=("square", "add2")))
    once = {"PYTHONDONTWRITEBYTECODE": None, "OMP_NUM_THREADS": "1", "GATE": gate}
    processes = [checkout.start(RACE, **once) for _ in range(count)]
    while len(os.listdir(gate)) < count:
        time.sleep(0.05)
        assert all(process.poll() is None for process in processes)
    (gate / "go").touch()
    for process in processes:
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
    sources = [*checkout.root.glob("ops/*.cpp"), *checkout.root.glob("kernels/*.cpp")]
    assert checkout.compiled() == len(sources) == 4


def descendants(pid: int) -> list[tuple[int, str]]:
    """Number and name of all processes below one."""
    found = []
    with contextlib.suppress(OSError):
        children = [*Path(f"/proc/{pid}/task").glob("*/children")]
        for child in map(int, " ".join(x.read_text() for x in children).split()):
            with contextlib.suppress(OSError):
                found.append((child, Path(f"/proc/{child}/comm").read_text().strip()))
            found += descendants(child)
    return found


TINY = """
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
static volatile char padding[1 << 18] = {1};
"""
USE_TINY = """
import ctypes, torch, loader
loader._session.load("square")
(path,) = {line.split()[-1] for line in open("/proc/self/maps") if "library.so" in line}
assert ctypes.CDLL(path).answer() == 42
"""


def test_50_kills_at_random_moments_leave_a_cache_that_works(tmp_path, counting):
    """Of the importer, its process group, or a compiler; in any mode of building; then all is well.

    The unit is of two tiny sources without torch's headers, so that the moments fall everywhere.
    """
    victims = ("importer", "group", "cc1plus", "c++")

    def round_(number: int) -> str:
        dice = random.Random(number)
        checkout = counting(Checkout(tmp_path / str(number), only="square"))
        victim = victims[number % len(victims)]
        slower = "#include <string>\n" if victim == "cc1plus" else ""
        (checkout.root / "ops/square.cpp").write_text(slower + TINY)
        (checkout.root / "kernels/square_cpu.cpp").write_text("int another() { return 1; }\n")
        slow = {"SLOW": "0.4", "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}  # c++ itself
        slow["LOADER_BUILD"] = dice.choice(("eager", "background", "lazy"))
        process = checkout.start(USE_TINY, start_new_session=True, **slow)
        if victim in ("c++", "cc1plus"):
            while not any(name == victim for _, name in descendants(process.pid)):
                assert process.poll() is None
                time.sleep(0.01)
            time.sleep(dice.uniform(0, 0.3 if victim == "c++" else 0.05))
        else:
            time.sleep(dice.uniform(0, 3))
        if victim == "group":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        targets = [pid for pid, name in descendants(process.pid) if name == victim]
        targets = [process.pid] if victim == "importer" else targets
        for pid in dice.sample(targets, min(1, len(targets))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        if process.returncode not in (0, -signal.SIGKILL):
            assert "BuildError" in err, err
        again = checkout.run(USE_TINY)
        assert again.returncode == 0, (number, victim, again.stderr)
        assert len(checkout.entries()) == 1
        return f"{victim} {process.returncode}"

    with ThreadPoolExecutor(3) as pool:
        results = Counter(pool.map(round_, range(50)))
    print(dict(results))
    assert results.total() == 50


def test_who_waits_is_told_for_whom_and_gets_the_error_of_a_build_that_failed(checkout, counting):
    checkout = counting(checkout)
    kernel = checkout.root / "kernels/square_cpu.cpp"
    kernel.write_text("int oops() { return undeclared; }\n")
    first = checkout.start(USE, SLOW="2")
    while checkout.compiled() < 2:
        time.sleep(0.02)
        assert first.poll() is None
    second = checkout.run(USE, SLOW="2")
    _, err = first.communicate(timeout=60)
    assert checkout.compiled() == 2, "it was compiled again"
    for text in (err, second.stderr):
        assert "square_cpu.cpp:1:" in text and "undeclared" in text
    said = re.search(
        r"loader: waiting for process (\d+) \((\d+) s\), which is building square", second.stderr
    )
    assert said and int(said[1]) == first.pid
    kernel.write_text((ROOT / "kernels/square_cpu.cpp").read_text())
    assert checkout.run(USE).returncode == 0


def test_a_waiting_process_takes_over_from_one_that_was_killed(checkout, counting):
    checkout = counting(checkout)
    first = checkout.start(USE, SLOW="30")
    while checkout.compiled() < 2:
        time.sleep(0.02)
    second = checkout.start(USE, SLOW="0")
    line = second.stderr.readline()
    assert "waiting for process" in line
    for pid in [first.pid] + [pid for pid, _ in descendants(first.pid)]:
        os.kill(pid, signal.SIGKILL)
    first.communicate(timeout=60)
    _, err = second.communicate(timeout=60)
    assert second.returncode == 0 and "built 1 of 1" in err


def test_an_interrupt_ends_all_that_the_build_started(checkout, counting):
    checkout = counting(checkout)
    # Where the tests run in the background a shell may have told them to ignore it.
    attentive = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    process = checkout.start(attentive + USE, SLOW="30")
    while checkout.compiled() < 2:
        time.sleep(0.02)
    below = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert err.rstrip().endswith("KeyboardInterrupt")  # and no word of what was built
    end = time.monotonic() + 5
    while left := [(pid, name) for pid, name in below if Path(f"/proc/{pid}/cwd").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.05)
    assert checkout.run(USE).returncode == 0


def shim(tmp_path: Path, code: str) -> Path:
    """A library for LD_PRELOAD."""
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(f"#define _GNU_SOURCE\n#include <errno.h>\n#include <dlfcn.h>\n{code}")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("int flock(int f, int o) { errno = ENOLCK; return -1; }", "No locks available"),
        ("int flock(int f, int o) { return 0; }", "two were granted at once"),
    ],
    ids=["refused", "lies"],
)
def test_a_folder_where_locks_do_not_work_is_refused(checkout, tmp_path, code, why):
    done = checkout.run(USE, LD_PRELOAD=shim(tmp_path, code))
    last = done.stderr.splitlines()[-1]
    assert f"file locks do not work in {checkout.cache}/work ({why})" in last
    assert "set LOADER_CACHE_DIR to a folder on a local disk" in last
    assert not checkout.entries()


@pytest.mark.usefixtures("built")
def test_locks_are_not_needed_to_use_a_full_cache(checkout, tmp_path):
    assert checkout.run(USE).returncode == 0
    refused = shim(tmp_path, "int flock(int f, int o) { errno = ENOLCK; return -1; }")
    done = checkout.run(USE, LD_PRELOAD=refused)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("size", ["32k", "180k", "240k"])
def test_a_full_disk_gets_one_clear_error_and_leaves_no_half_entry(checkout, size):
    """On a disk of this size, mounted for this test alone."""
    checkout.cache.mkdir()
    mounted = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    script = f'''mount -t tmpfs -o size={size} none "{checkout.cache}" && "{sys.executable}" -c "$0"
ls -A "{checkout.cache}/store"; umount "{checkout.cache}"'''
    done = subprocess.run(
        [*mounted, "sh", "-c", script, USE],
        cwd=checkout.root,
        env=checkout.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stdout, done.stderr
    assert done.stderr.count("No space left on device") >= 1
    assert "LOADER_CACHE_DIR" in done.stderr and "errors.CacheError: " in done.stderr


def test_a_process_that_could_not_build_keeps_no_lock(checkout):
    """It lives on, as a notebook does, and another one mends the cause and builds."""
    code = """
import torch, loader
from loader.jit.cache import lock
def full(self, **facts):
    raise OSError(28, "No space left on device")
lock.FileLock.note = full
try:
    loader.build()
except loader.BuildError as error:
    print(error, flush=True)
input()
"""
    theirs, ours = os.pipe()
    env = checkout.environment(LOADER_BUILD="lazy")
    process = start_python(code, checkout.root, env, stdin=theirs)
    os.close(theirs)
    assert "cannot be written: No space left on device" in process.stdout.readline()
    other = checkout.run(USE)
    assert other.returncode == 0 and "waiting" not in other.stderr
    os.write(ours, b"\n")
    os.close(ours)
    process.communicate()


@pytest.mark.usefixtures("built")
def test_a_cache_that_cannot_be_written_is_read_and_else_named(checkout):
    """A mount for reading only, as in an image."""
    assert checkout.run(USE).returncode == 0
    script = f'''mount --bind -o ro "{checkout.cache}" "{checkout.cache}" &&
mount -o remount,bind,ro "{checkout.cache}" && "{sys.executable}" -c "$0"'''
    mounted = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]

    def run():
        return subprocess.run(
            [*mounted, "sh", "-c", script, USE],
            cwd=checkout.root,
            env=checkout.environment(),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    warm = run()
    assert (warm.returncode, warm.stderr) == (0, "")
    header = checkout.root / "include/square.h"
    header.write_text(header.read_text() + "// edited\n")
    cold = run()
    assert cold.returncode != 0 and "cannot be written: Read-only file system" in cold.stderr
    assert "set LOADER_CACHE_DIR" in cold.stderr


def test_import_in_threads_and_use_in_others(checkout):
    code = """
import threading, torch
failures = []
def use():
    try:
        import loader
        assert loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
        loader.receipt(), loader.explain()
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=use) for _ in range(8)]
[thread.start() for thread in threads], [thread.join() for thread in threads]
assert not failures, failures
"""
    done = checkout.run(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("loader: built 1 of 1") == 1


WORKERS = """
import sys, warnings, torch, loader
from torch.utils.data import DataLoader, Dataset

class Squares(Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return loader.square(torch.full((3,), float(i)))

def child(queue):
    queue.put(loader.square(torch.full((3,), 5.0)).tolist())

if __name__ == "__main__":
    method, when = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "This DataLoader will create 2 worker processes")  # of one core
    if when == "used":
        loader.square(torch.ones(3))
    batches = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context=method)
    assert torch.cat([*batches]).sum() == 3 * sum(i * i for i in range(12))
    context = torch.multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    assert queue.get() == [25.0] * 3
    process.join()
    assert process.exitcode == 0
"""


@pytest.mark.parametrize("when", ["used", "imported"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers_and_multiprocessing(checkout, method, when):
    """Children may be the first to use an operator, and to build it."""
    script = checkout.root / "workers.py"
    script.write_text(WORKERS)
    env = checkout.environment(LOADER_BUILD="lazy", OMP_NUM_THREADS="1")
    done = ended(start_program([script, method, when], checkout.root, env))
    assert done.returncode == 0, done.stderr
    assert len(checkout.entries()) == 1


def test_a_fork_while_another_thread_builds(checkout, counting):
    """The child neither waits for its parent's thread nor keeps the build's lock."""
    code = """
import os, threading, time, torch, loader
thread = threading.Thread(target=lambda: loader.square)
thread.start()
time.sleep(1.5)
pid = os.fork()
if pid == 0:
    import loader
    ok = loader.square(torch.ones(3) * 3).tolist() == [9.0] * 3
    os._exit(0 if ok else 1)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    checkout = counting(checkout)
    done = checkout.run(code, LOADER_BUILD="lazy", SLOW="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert checkout.compiled() == 2


def import_slowly(path, seconds):
    """Have a module take so long to import."""
    text, count = re.subn(
        r"\n(?=import |from )", f"\nimport time; time.sleep({seconds})\n", path.read_text(), count=1
    )
    assert count == 1
    path.write_text(text)


@pytest.mark.parametrize(
    ("module", "use"),
    [("jit.cache.store", "square"), ("ops.square", "square"), ("nn", "nn.Convolve2d")],
)
def test_a_fork_while_another_thread_imports(built, module, use):
    """The child would find the module locked by a thread that it has not."""
    import_slowly(built.root / f"{module.replace('.', '/')}.py", 1)
    code = f"""
import os, sys, threading, time, torch, loader
thread = threading.Thread(target=lambda: loader.{use})
thread.start()
while "loader.{module}" not in sys.modules:
    time.sleep(0.01)
assert thread.is_alive()
if (pid := os.fork()) == 0:
    os._exit(7 if loader.{use} else 1)
thread.join()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    done = ended(built.start(code, LOADER_BUILD="lazy"), timeout=60)
    assert done.returncode == 0, done.stderr


def test_forks_wait_once_for_an_import_that_does_not_end(built):
    import_slowly(built.root / "ops/square.py", 99)
    code = """
import os, sys, threading, time, torch, loader
threading.Thread(target=lambda: loader.square, daemon=True).start()
while "loader.ops.square" not in sys.modules:
    time.sleep(0.01)
for least, most in ((9, 15), (0, 3)):
    start = time.monotonic()
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert least < time.monotonic() - start < most, time.monotonic() - start
os._exit(7)
"""
    done = ended(built.start(code, LOADER_BUILD="lazy"), timeout=60)
    assert done.returncode == 7, done.stderr


def test_two_checkouts_share_a_cache(tmp_path):
    """Equal sources share an entry; others get one of their own; neither sees the other's edits."""
    one = Checkout(tmp_path / "one", only="square")
    two = Checkout(tmp_path / "two", only="square")
    two.cache = one.cache
    assert one.run(USE).returncode == 0
    shared = two.run(USE)
    assert (shared.returncode, shared.stderr, len(one.entries())) == (0, "", 1)
    header = two.root / "include/square.h"
    header.write_text(header.read_text().replace("return x * x", "return x * x + 1"))
    racing = [one.start(USE), two.start(USE.replace("9.0", "10.0"))]
    for process in racing:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert len(one.entries()) == 2


def test_a_build_that_was_ended_says_what_was_built_if_anything(tmp_path, capfd):
    def end(results: list[str], stopped: bool, hushed: bool = False) -> str:
        report = Progress({"a": 1, "b": 1}, tmp_path)
        report.show({"unit": "a", "state": "compiling"})
        if hushed:
            report.hush()
            report.show({"unit": "b", "state": "waiting", "holder": {}})
        report.end([SimpleNamespace(result=r, stopped=stopped) for r in results], 1.0, (0, 0))
        return capfd.readouterr().err

    assert "built 0 of 2 (a, b) in 1.0 s" in end(["failed", "failed"], stopped=False)
    assert end(["failed", "failed"], stopped=True) == ""
    assert "built 1 of 2 (a, b) in 1.0 s" in end(["built", "failed"], stopped=True)
    assert end(["built", "failed"], stopped=True, hushed=True) == ""
