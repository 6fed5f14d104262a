"""`python -m loader run`: the program is what Python makes of it, but for who builds extensions."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

CHILDREN = str(ROOT / "jit/tools/children")
TELL = """
import json, os, sys
print(json.dumps([sys.argv, __name__, globals().get("__file__"), __package__, sys.flags.dev_mode,
    sys.warnoptions, sys.stdin.read(), sys.path, dict(os.environ), sys.executable]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """One cache for all that is built here."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def start(tmp_path, cache):
    """A function that runs Python in `tmp_path` with words, and returns how that ended."""

    def run(*words, stdin="given", **changes):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "LOADER_CACHE_DIR": str(cache)}
        env |= {"PATH": f"{os.environ['OCTET_COMPILERS']}/bin:{env['PATH']}"}
        env = {k: v for k, v in (env | changes).items() if v is not None}
        return subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=env, input=stdin,
            capture_output=True, text=True, check=False, timeout=300,
        )  # fmt: skip

    return run


def both(start, flags, *words):
    """The end of a program as Python runs it, and as `run` does."""
    return start(*flags, *words), start(*flags, "-m", "loader", "run", *words)


@pytest.mark.parametrize(
    "words",
    [("tell.py", "a", "--b", "-m", "-h"), ("-m", "package.inner", "-x"), ("-m", "package"), ("folder",)],
    ids=lambda words: words[-1],
)  # fmt: skip
def test_a_program_sees_what_python_gives_it(words, start, tmp_path):
    for file in ("tell.py", "package/inner.py", "package/__main__.py", "folder/__main__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(TELL)
    (tmp_path / "package/__init__.py").write_text("")
    plain, ours = both(start, ["-X", "dev", "-W", "ignore"], *words)
    assert (plain.returncode, plain.stderr) == (ours.returncode, ours.stderr) == (0, "")
    plain, ours = json.loads(plain.stdout), json.loads(ours.stdout)
    ours[7].remove(CHILDREN)
    assert ours[8].pop("PYTHONPATH") == f"{CHILDREN}:{plain[8].pop('PYTHONPATH')}"
    assert ours == plain


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("def f():\n    return 1 / 0\nf()", 1),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('a reason')", 1),
        ("this is no Python", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -2),
        ("import os, sys; os.write(2, b'end'); os._exit(3)", 3),
    ],
)
def test_a_program_ends_as_it_does_under_python(code, status, start, tmp_path):
    (tmp_path / "ends.py").write_text(code)
    plain, ours = both(start, [], "ends.py")
    assert ours.returncode == plain.returncode == status
    assert (ours.stdout, ours.stderr) == (plain.stdout, plain.stderr)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "run: expected a script, -m and a module, or a command, got nothing"),
        (["gone.py"], "run: there is no script and no command 'gone.py'"),
        (["a/gone"], "run: there is no script and no command 'a/gone'"),
        (["."], "run: . is a folder without __main__.py; name a script in it"),
        (["-m", "gone"], "run: there is no module 'gone'"),
        (["-m", "json.gone"], "run: there is no module 'json.gone'"),
        (["-m"], "run: expected a script, -m and a module, or a command, got '-m'"),
        (["-u", "a.py"], "run: expected a script, -m and a module, or a command, got '-u'"),
    ],
    ids=str,
)
def test_what_cannot_be_run_is_one_message(words, said, start):
    done = start("-m", "loader", "run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"loader: {said}") and done.stderr.count("\n") == 1


def test_options_that_hide_the_environment_are_refused(start, tmp_path):
    (tmp_path / "a.py").write_text("")
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]; import runpy; sys.argv[1:] = ['run', 'a.py']"
    )
    code += f"; runpy.run_path({str(ROOT / 'loader.py')!r}, run_name='__main__')"
    done = start("-E", "-c", code)
    assert done.returncode == 2 and "-E and -I hide PYTHONPATH" in done.stderr


def test_a_command_is_that_of_this_python(start):
    own, tell = os.path.basename(sys.executable), "import sys; print(sys.prefix)"
    done = start("-m", "loader", "run", own, "-c", tell, PATH="/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, f"{sys.prefix}\n")
    done = start("-m", "loader", "run", "sh", "-c", "echo $PYTHONPATH; exit 5")
    assert (done.returncode, done.stdout) == (5, f"{CHILDREN}:{ROOT}\n")


PROGRAM = """
import multiprocessing, os, subprocess, sys
import loader                                    # the program's own module
from loader import NUMBER

def build(_=0):
    import torch.utils.cpp_extension as extensions
    source = "int add(int a, int b) { return a + b; }"
    module = extensions.load_inline("run_add", source, functions=["add"])
    kept = os.path.realpath(os.environ["LOADER_CACHE_DIR"])
    return module.__name__, module.add(NUMBER, 3), module.__file__.startswith(kept)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*pool.map(build, [0])[0], flush=True)
    code = "import sys; sys.path[0] = 'project'; import program; print(*program.build())"
    subprocess.run([sys.executable, "-c", code], check=True)
    print(*build(), hasattr(loader, "load_inline"), "octet_run" in sys.modules)
"""


BROKEN = """import torch.utils.cpp_extension as extensions
extensions.load("broken", __file__.replace(".py", ".cpp"), is_python_module=False)
"""


def test_processes_that_it_starts_build_by_loader_too(start, tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project/program.py").write_text(PROGRAM)
    (tmp_path / "project/loader.py").write_text("NUMBER = 4\n")
    done = start("-m", "loader", "run", "project/program.py")
    assert done.returncode == 0, done.stderr
    built = "run_add 7 True"
    assert done.stdout.splitlines() == [built, built, f"{built} False True"]
    assert "building" not in done.stderr  # none of loader's operators
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "broken.cpp").write_text("int f() { return 1 }\n")
    done = start("-m", "loader", "run", "broken.py", LOADER_ERRORS="json")
    (told,) = (json.loads(line) for line in done.stderr.splitlines() if line[:9] == '{"error":')
    assert (done.returncode, told["messages"][0]["kind"]) == (1, "compile_error")
    assert told["at"] == {"file": str(tmp_path / "broken.py"), "line": 2}


SETUP = """
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

setup(
    name="small", version="0.1", packages=["small"], cmdclass={"build_ext": BuildExtension},
    ext_modules=[CppExtension("small._C", ["src/module.cpp", "src/twice.cpp"], extra_compile_args=["-O1"])],
)
"""
MODULE = """
#include <Python.h>
#include "twice.h"
static PyObject* f(PyObject*, PyObject* x) { return PyLong_FromLong(twice(PyLong_AsLong(x))); }
static PyMethodDef methods[] = {{"f", f, METH_O, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "", -1, methods};
PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&definition); }
"""


def test_a_package_is_installed_from_the_objects_of_before(start, tmp_path, cache):
    """As pip has its own setup.py, in processes of its own."""
    files = {"setup.py": SETUP, "small/__init__.py": "", "src/module.cpp": MODULE}
    files |= {"src/twice.h": "int twice(int);\n"}
    files |= {"src/twice.cpp": '#include "twice.h"\nint twice(int x) { return 2 * x; }\n'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    pip = ["-m", "pip", "install", "-v", "--no-build-isolation", "--no-deps", "--no-index"]
    pip += ["--disable-pip-version-check"]
    built = start("-m", "loader", "run", "setup.py", "-q", "build_ext", "--inplace")
    assert built.returncode == 0, built.stderr
    assert f"loader: _C: 0 of 2 objects were in {cache}" in built.stderr
    (module,) = tmp_path.glob("small/_C.cpython-*.so")
    done = start("-m", "loader", "run", *pip, "--target", "site", ".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"loader: _C: 2 of 2 objects were in {cache}" in done.stderr
    installed = tmp_path / "site/small" / module.name
    use = "import sys; sys.path[:0] = ['site']; import small._C as c; print(c.f(21), c.__file__)"
    assert start("-c", use).stdout.split() == ["42", str(installed)]
    assert not [name for name in os.listdir(tmp_path / "site") if "octet" in name]
