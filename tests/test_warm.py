"""The warm Python that the tests fork from: a child of it is as a new process is."""

import os
import signal
import subprocess

import pytest
import warm
from conftest import ended, put_bytecode, start_python

CODES = {  # run as they are in a child, without an import in the new process, which is quicker
    "output": "import sys, os; print(sys.argv, sys.path, os.getcwd(), __name__, *dir())\n"
    "print(os.environ['MARK'], sys.flags, sys.stdout, sys.dont_write_bytecode, file=sys.stderr)",
    "exception": "def f():\n    1 / 0\nf()",
    "syntax": "no python",
    "status": "import sys; sys.exit(3)",
    "words": "import sys; sys.exit('oops')",
    "kill": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "raise KeyboardInterrupt",
    "end": "import atexit, threading, time\natexit.register(print, 'at the end')\n"
    "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    "warning": "import warnings; warnings.warn('one that is an error')",
}


def test_a_child_is_as_a_new_process(tmp_path):
    environment = {**os.environ, "MARK": "an environment of its own"}
    for name, code in CODES.items():
        new = start_python(code, tmp_path, environment, fresh=True)
        child = start_python(code + "\n# torch", tmp_path, environment)
        assert isinstance(new, subprocess.Popen) and isinstance(child, warm.WarmProcess)
        new, child = ended(new), ended(child)
        assert (new.returncode, new.stdout) == (child.returncode, child.stdout), name
        assert new.stderr.splitlines()[-1:] == child.stderr.splitlines()[-1:], name
        assert "warm.py" not in child.stderr


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONHASHSEED", "OMP_PROC_BIND"])
def test_what_a_program_reads_at_its_start_takes_a_new_process(tmp_path, name):
    process = start_python("import sys; 'torch'", tmp_path, {**os.environ, name: ""})
    assert isinstance(process, subprocess.Popen)
    assert ended(process).returncode == 0


def test_a_child_can_be_waited_for_and_killed(tmp_path):
    code = "import torch, time; print('ready', flush=True); time.sleep(60)"
    process = start_python(code, tmp_path, dict(os.environ), start_new_session=True)
    assert process.stdout.readline() == "ready\n" and process.poll() is None
    assert os.getsid(process.pid) == process.pid
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(timeout=20) == -signal.SIGTERM == process.poll()
    assert process.communicate() == ("", "")


def test_the_number_of_threads_is_taken_over(tmp_path):
    code = "import torch; print(torch.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    process = start_python(code, tmp_path, environment)
    assert isinstance(process, warm.WarmProcess) and ended(process).stdout == "3\n"


def test_places_of_modules_and_what_warns_are_taken_over(tmp_path):
    code = "import sys, warnings; print(sys.path, sys.warnoptions, warnings.filters[:3])  # torch"
    places, options = f"{tmp_path}/one:{tmp_path}/two", "ignore::FutureWarning,always:words"
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONWARNINGS": options}
    new = start_python(code, tmp_path, environment, fresh=True)
    child = start_python(code, tmp_path, environment)
    assert isinstance(new, subprocess.Popen) and isinstance(child, warm.WarmProcess)
    new, child = ended(new).stdout, ended(child).stdout
    assert new == child and f"'{tmp_path}/two'" in new and "FutureWarning" in new


def test_a_late_worker_finds_what_another_has_compiled(tmp_path):
    (tmp_path / "bytecode").mkdir()
    (tmp_path / "bytecode/of_another").touch()
    put_bytecode(tmp_path / "bytecode")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bytecode", "of_another"]
