"""The doctor as a whole, and what it finds of Python and its packages."""

import html
import json
import os
import subprocess
import sys
import sysconfig
import time

import doctor
import pytest
from doctor import (
    ALONE,
    CHECKS,
    ask_torch,
    look,
)

from loader.jit.tools import doctor as d
from loader.jit.tools.doctor import context as c
from loader.jit.tools.doctor import examine, report

# Fixtures.
context = doctor.context
plain_environment = doctor.plain_environment
tool = doctor.tool


def run_main(*arguments: str, caches: tuple, **changes):
    code = f"code = cli.main({['doctor', *arguments]!r})\n"
    code += "assert 'torch' not in sys.modules\nsys.exit(code)"
    changes["LOADER_CACHE_DIR"] = os.pathsep.join(map(str, caches))
    env = {**os.environ, **{name: str(value) for name, value in changes.items()}}
    command = [sys.executable, "-c", ALONE + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_a_machine_that_builds(tmp_path):
    """Every check says something, nothing is left behind, nobody is named."""
    cache = tmp_path / "not" / "yet"
    done = run_main("--json", caches=(cache,), HOME=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, done.stderr, report["ok"]) == (0, "", True), done.stdout
    assert [finding["subject"] for finding in report["findings"]] == [*CHECKS]
    assert {"python", "platform", "torch", "cuda"} <= {*report["versions"]}
    assert not [*tmp_path.iterdir()]
    assert str(tmp_path) not in done.stdout and "~/not/yet" in done.stdout
    assert not [f for f in report["findings"] if "Error" in f["found"]]


def test_a_torch_that_does_not_import(tmp_path):
    """The rest is checked all the same, and what needs torch says so."""
    (tmp_path / "torch").mkdir()
    missing = "libcudart.so.13: cannot open shared object file: No such file or directory"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise ImportError({missing!r})")
    done = run_main(caches=(tmp_path / "cache",), PYTHONPATH=tmp_path, COLUMNS=200)
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and done.stderr == ""
    assert f"ERROR torch does not import: ImportError: {missing}" in " ".join(done.stdout.split())
    (unchecked,) = (line for line in lines if line.startswith("warning  nvcc  "))
    assert unchecked.endswith("not checked: torch does not import")
    assert "a trial library compiles" in done.stdout
    assert lines[-1].startswith("A build would not work: 1 error")


def test_a_torch_that_crashes(tmp_path, monkeypatch):
    facts = ask_torch(tmp_path, monkeypatch, "torch", "import os; os.kill(os.getpid(), 11)")
    assert facts == {"torch_error": "error: killed by SIGSEGV"}


def test_an_interrupted_doctor_starts_no_more_commands(tmp_path):
    """A check that had its compiler ended must not try a next one, which may take its time."""
    begun = tmp_path / "begun"
    c.end_all()
    try:
        assert c.run(["touch", str(begun)]) == (False, "error: the doctor was interrupted")
        assert not begun.exists()
    finally:
        c.begin()
    assert c.run(["touch", str(begun)]) == (True, "") and begun.exists()


def test_the_table_is_as_wide_as_the_terminal_and_leaves_commands_whole(monkeypatch):
    command = "$ pip install " + " ".join(f"'package-{i}==13.0.*'" for i in range(9))
    findings = [
        d.Finding("torch", "ok", "2.11"),
        d.Finding("C++ compiler", "error", "words " * 40, f"{'cure ' * 30}\n{command}"),
    ]
    whole = d.Report(findings, {})
    monkeypatch.setenv("COLUMNS", "70")
    lines = str(whole).splitlines()
    assert repr(whole) == str(whole)  # at a prompt
    assert lines[0] == "ok       torch         2.11"
    assert lines[1].startswith("ERROR    C++ compiler  words words")
    assert [line.strip() for line in lines if len(line) > 70] == [command]
    assert (
        lines[2].startswith(" " * 23 + "words") and lines[-1] == "A build would not work: 1 error."
    )
    page = d.Report([d.Finding("a", "warning", "<b>", "$ x > y")], {})._repr_html_()
    assert html.escape("<b>") in page and "x &gt; y" in page and "A build would work: 1 war" in page


def test_a_bug_report_names_no_user(monkeypatch):
    monkeypatch.setattr(
        report.pwd, "getpwuid", lambda _: type("", (), {"pw_dir": "/home/ann", "pw_name": "ann"})
    )
    found = "/home/ann/x /scratch/ann/y /home/anna/z annotated"
    (finding,) = json.loads(d.Report([d.Finding("disk", "ok", found)], {}).json())["findings"]
    assert finding["found"] == "~/x /scratch/USER/y /home/anna/z annotated"


def test_a_check_that_fails_itself_is_a_warning():
    def check(context):
        raise KeyError("oops")

    finding = examine.guarded("disk", check, None)
    assert finding == d.Finding("disk", "warning", "not checked: KeyError: 'oops'")


def test_a_tool_that_hangs_is_ended_with_what_it_started(tool, monkeypatch, context):
    monkeypatch.setattr(c, "TIMEOUT", 0.3)
    monkeypatch.setenv("CXX", tool("slow-c++", "sleep 60 & sleep 60"))
    started = time.monotonic()
    state, found, _ = look("C++ compiler", context)
    assert (state, time.monotonic() - started < 5) == ("error", True)
    assert "does not end within 0.3 s" in found


def test_headers_missing(monkeypatch, context, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    state, found, cure = look("Python.h", context)
    assert state == "warning" and f"{tmp_path}/Python.h is missing" in found
    assert f"python{sysconfig.get_python_version()}-dev" in cure


def test_torch_too_old(context):
    state, found, cure = look("torch", context, torch="2.9.1+cu128", cuda="12.8")
    assert state == "error" and "2.10 or newer is needed" in found and "'torch>=2.10'" in cure
    assert look("torch", context)[1] == "2.11.0+cu130 (git 70d99e99), CUDA 13.0"


def test_numpy_that_torch_cannot_use(tmp_path, monkeypatch, context):
    """A package with the names of NumPy but without its C interface, as a broken upgrade leaves."""
    code = "__version__ = '1.21.0'\nclass ndarray: pass\ndef zeros(n): return ndarray()\n"
    code += "def __getattr__(name):\n    if name[:2] == '__': raise AttributeError(name)\n    return type(name, (), {})\n"
    facts = ask_torch(tmp_path, monkeypatch, "numpy", code)
    state, found, cure = look("NumPy", context, **facts)
    assert (state, found) == (
        "warning",
        "torch cannot use NumPy 1.21.0: RuntimeError: Numpy is not available",
    )
    assert "--force-reinstall numpy" in cure


def test_numpy_that_torch_does_not_import_with(tmp_path, monkeypatch, context):
    facts = ask_torch(tmp_path, monkeypatch, "numpy", "__version__ = '1.21.0'")
    state, found, cure = look("torch", context, **facts)
    assert state == "error" and "module 'numpy' has no attribute" in found
    assert cure == "$ pip install --force-reinstall numpy"


def test_no_numpy_is_no_fault(context):
    error = "ModuleNotFoundError: No module named 'numpy'"
    assert look("NumPy", context, numpy="", numpy_error=error)[0] == "ok"


@pytest.mark.parametrize(
    "code, state, says",
    [
        (
            "raise ModuleNotFoundError(\"No module named 'setuptools'\")",
            "error",
            "No module named 'setuptools'",
        ),
        ("__version__ = '39.0'", "error", "39.0; torch.utils.cpp_extension does not import"),
    ],
    ids=["missing", "too old to import"],
)
def test_setuptools(code, state, says, tmp_path, monkeypatch, context):
    facts = ask_torch(tmp_path, monkeypatch, "setuptools", code)
    got, found, cure = look("setuptools", context, **{"setuptools": "", **facts})
    assert (got, says in found) == (state, True), found
    assert "'setuptools>=70'" in cure


def test_setuptools_old_but_working(context):
    state, found, cure = look("setuptools", context, setuptools="65.5.0")
    assert (state, found) == ("warning", "65.5.0; 70 or newer is expected") and ">=70" in cure
