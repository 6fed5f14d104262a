"""What many processes share: files written in one step, locks and children that are fit to use."""

import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import ROOT

from loader.jit.machine import child, files, toolchain
from loader.jit.machine.forks import Lock, cached_property


def test_a_file_is_seen_whole_while_it_is_written(tmp_path):
    """A reader beside a writer sees the old content or the new; no draft stays."""
    path, texts = tmp_path / "record", ["a" * 300_000, "b" * 200_000]
    files.write(path, texts[0])
    ended = threading.Event()

    def write():
        for i in range(200):
            files.write(path, texts[i % 2])
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not ended.is_set():
        seen.add(path.read_text())
    writer.join()
    assert seen <= {*texts} and os.listdir(tmp_path) == ["record"]


def test_a_write_that_fails_leaves_the_old_content_and_no_draft(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        files.write(tmp_path / "folder", "text")
    assert os.listdir(tmp_path) == ["folder"]


def test_a_record_that_was_damaged_is_not_read(tmp_path):
    path = tmp_path / "record"
    files.write_record(path, {"a": [1, 2]})
    assert files.read_record(path) == {"a": [1, 2]}
    path.write_text(path.read_text().replace("2]", "3]"))
    assert files.read_record(path) is None
    files.write_record(tmp_path / "none" / "record", 1)  # where nothing can be written
    assert files.read_record(tmp_path / "none" / "record") is None


def returns_in_a_forked_child(act) -> bool:
    """True if a thread of a forked child gets to the end of `act` within 20 s."""
    pid = os.fork()
    if pid == 0:
        actor = threading.Thread(target=lambda: (act(), os._exit(7)), daemon=True)
        actor.start()
        actor.join(20)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_a_forked_child_takes_a_lock_that_a_thread_of_its_parent_holds():
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    gets_it = returns_in_a_forked_child(lock.__enter__)
    done.set()
    thread.join()
    assert gets_it
    with lock, lock:  # it is reentrant, and the parent's works on
        pass


def test_a_forked_child_works_out_a_property_that_a_thread_of_its_parent_is_at():
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        @cached_property
        def value(self):
            """What it is."""
            begun.set()
            go_on.wait(60)
            return object()

    slow = Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    begun.wait()
    gets_it = returns_in_a_forked_child(lambda: go_on.set() or Slow().value)
    go_on.set()
    thread.join()
    assert gets_it
    assert slow.value is slow.value and Slow.value.__doc__ == "What it is."


def test_no_fork_falls_into_the_start_of_a_program():
    """Its child would hold the pipe open by which its parent learns that the program has started."""
    code = f"""
import os, sys, threading, types
sys.modules["loader"] = types.ModuleType("loader")
sys.modules["loader"].__path__ = [{str(ROOT)!r}]
from loader.jit.machine import child
sys.setswitchinterval(1e-6)

def pipes():
    names = [f"/proc/self/fd/{{name}}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(name).startswith("pipe:") for name in names if os.path.islink(name))

def start():
    while not ended.is_set():
        child.start(["true"]).wait()

before, ended = pipes(), threading.Event()
threads = [threading.Thread(target=start) for _ in range(2)]
[thread.start() for thread in threads]
found = []
for _ in range(100):
    if (pid := os.fork()) == 0:
        os._exit(pipes() - before)
    found.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
ended.set()
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{[0] * 100}\n", done.stdout + done.stderr


def test_how_a_program_ends_is_known_where_children_are_ignored(tmp_path):
    """Python takes each for a success then; what a server ignores, all that it starts ignore."""
    code = f"""
import os, signal, sys, types
sys.modules["loader"] = types.ModuleType("loader")
sys.modules["loader"].__path__ = [{str(ROOT)!r}]
from loader.jit.machine import child
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
assert child.start(["true"]).wait() == 0
assert child.start(["sh", "-c", "exit 7"]).wait() == 7
assert child.start(["sh", "-c", "kill -11 $$"]).communicate() == (None, None)
ended = child.start(["sh", "-c", "kill -11 $$"])
assert ended.wait() == ended.wait() == -11
told = child.start(["sh", "-c", "cat; exit 3"], stdin=-1, stdout=-1, text=True)
assert told.communicate("words") == ("words", None) and told.returncode == 3
killed = child.start(["sleep", "60"], start_new_session=True)
os.killpg(killed.pid, signal.SIGKILL)
while killed.poll() is None:
    pass
assert killed.returncode == killed.wait() == -9
inner = "import signal; assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL"
assert child.start([sys.executable, "-c", inner]).wait() == 0
open({str(tmp_path / "no")!r}, "w").close()
os.chmod({str(tmp_path / "no")!r}, 0o755)
said = child.start([{str(tmp_path / "no")!r}], stderr=-1, text=True)
assert "no: [Errno 8] Exec format error" in said.communicate()[1] and said.returncode == 127
assert len(os.listdir("/proc/self/fd")) == 4, os.listdir("/proc/self/fd")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_program_starts_without_a_touch_of_the_filters_of_warnings(tmp_path, monkeypatch):
    """They are the process's, and builds start programs in threads of their own."""
    (tmp_path / "hello").write_text("#!/bin/sh\necho $0 $HELLO\n")
    (tmp_path / "hello").chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HELLO": "there"}
    with monkeypatch.context() as patched:
        patched.setattr("warnings.catch_warnings", None)
        hello = child.start(["hello"], env=env, stdout=subprocess.PIPE, text=True)
        assert child.start(["true"]).wait() == 0
    assert hello.communicate()[0] == f"{tmp_path / 'hello'} there\n"
    with pytest.raises(FileNotFoundError, match="no such program"):
        child.start([str(tmp_path / "no such program")])


def test_a_child_imports_what_this_process_does_whatever_lies_around(tmp_path):
    """The current folder and the environment do not come before `sys.path`."""
    for name in ("json.py", "importlib.py", "loader.py"):
        (tmp_path / name).write_text("raise SystemExit('the wrong one')")
    command = child.command("machine.sources.listed", str(ROOT / "include"), body=False)
    show = command[command.index("-c") + 1] + "\nprint(sys.path[1:], loader_body())"
    show = show.replace(
        "print", "loader_body = lambda: hasattr(sys.modules['loader'], 'build')\nprint"
    )
    command[command.index("-c") + 1] = show
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"{sys.path} False", done.stderr
    assert json.loads(command[-1])[0][0] == str(ROOT)


@pytest.mark.parametrize(
    "text, words",
    [
        (None, ["c++"]),
        ("ccache g++ -m64", ["ccache", "g++", "-m64"]),
        ("'a b/c++' -x", ["a b/c++", "-x"]),
    ],
)
def test_a_compiler_is_words_that_no_shell_sees(text, words, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    if text:
        monkeypatch.setenv("CXX", text)
    assert toolchain.command("CXX") == words


def test_a_compiler_whose_path_has_a_space_needs_no_quotes(monkeypatch, tmp_path):
    path = tmp_path / "my c++"
    path.touch()
    monkeypatch.setenv("CXX", str(path))
    assert toolchain.command("CXX") == [str(path)]
