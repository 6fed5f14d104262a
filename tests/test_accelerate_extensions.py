"""`loader.accelerate_extensions()`: torch's own functions, on loader's engine, with their results."""

import json
import os
import shlex
import sys
import threading
from types import FunctionType

import pytest
from conftest import Checkout, ended

import loader
from loader.jit.extension import objects
from loader.jit.machine import toolchain

MODULE = """
#include <Python.h>
%s
static PyObject* f(PyObject*, PyObject* x) { return PyLong_FromLong(FACTOR * twice(PyLong_AsLong(x))); }
static PyMethodDef methods[] = {{"f", f, METH_O, "doc of f"}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "m", "doc of m", -1, methods};
PyMODINIT_FUNC INIT() { return PyModule_Create(&definition); }
"""
ALONE = MODULE % "static int twice(int x) { return 2 * x; }"
REACHING = MODULE % '#include "twice.h"'
TWICE = '#include "twice.h"\nint twice(int x) { return BY * x; }\n'
# `INIT` is PyInit_ and the module's name.
CALLS = """
import contextlib, ctypes, io, json, os, subprocess, sys, torch, loader, torch.utils.cpp_extension
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.abspath("torchs")
from torch.utils.cpp_extension import load as files, load_inline   # before it begins

def facts(made, folder=None):
    found = {"type": type(made).__name__}
    if isinstance(made, str):
        found |= {"is there": os.path.isfile(made), "ends": os.path.splitext(made)[1]}
    else:
        spec = made.__spec__
        found |= {"names": [made.__name__, spec.name, made.__package__, spec.name in sys.modules]}
        found |= {"docs": [made.__doc__, made.f.__doc__], "has": [n for n in dir(made) if n[0] != "_"]}
        found |= {"result": made.f(5), "file": os.path.splitext(made.__file__)[1]}
    if folder:
        found["folder"] = [n for n in ("files.so", "program", "kept") if os.path.exists(f"{folder}/{n}")]
    return found

def raised(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return type(error).__name__, str(error)

def calls():
    flags = ["-DFACTOR=3", "-DINIT=PyInit_inline_m"]
    made = load_inline("inline_m", [MODULE], extra_cflags=flags, no_implicit_headers=True)
    yield facts(made)
    os.makedirs("kept", exist_ok=True)
    flags = ["-DFACTOR=1", "-DINIT=PyInit_files", "-DBY=4"]
    with contextlib.redirect_stdout(io.StringIO()):
        made = files(name="files", sources=["module.cpp", "twice.cpp"], extra_cflags=flags, verbose=True,
            extra_include_paths=["include"], build_directory="kept", keep_intermediates=False)
    yield facts(made, "kept")
    made = files("library", "library.cpp", is_python_module=False)
    yield facts(made) | {"five": ctypes.CDLL(made).five()}
    made = files("program", ["program.cpp"], is_python_module=False, is_standalone=True)
    yield facts(made) | {"five": subprocess.run([made]).returncode}
    made = files("no-identifier", "other.cpp", is_python_module=False)   # which loader leaves to torch
    yield facts(made) | {"six": ctypes.CDLL(made).six()}
    jit = torch.utils.cpp_extension._jit_compile   # as gsplat calls it
    made = jit("library", ["library.cpp"], None, None, None, None, None, "kept", False, None, None,
        is_python_module=False, is_standalone=False)
    yield facts(made) | {"five": ctypes.CDLL(made).five()}
    yield raised(files, "program", ["program.cpp"], is_standalone=True)
    yield raised(load_inline, "strings", "", functions=5)[0]
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """One checkout without operators and one cache, with ninja on PATH."""
    made = Checkout(tmp_path_factory.mktemp("accelerated"), only="none")
    environment = made.environment

    def with_ninja(**changes):
        env = environment(**changes)
        env["PATH"] += f":{os.path.dirname(sys.executable)}"
        return env

    made.environment = with_ninja
    (made.root / "include/twice.h").write_text("int twice(int);\n")
    for name, text in {
        "module": REACHING,
        "one": ALONE,
        "two": REACHING,
        "three": ALONE,
        "twice": TWICE,
        "library": 'extern "C" int five() { return 5; }\n',
        "other": 'extern "C" int six() { return 6; }\n',
        "program": "int main() { return 5; }\n",
    }.items():
        (made.root / f"{name}.cpp").write_text(text)
    (made.root / "sub").mkdir()
    return made


def printed(checkout, code, **changes):
    """What code prints, which must end well, and what it says beside."""
    done = checkout.run(code, **changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


def test_each_argument_gives_what_torch_gives(checkout):
    code = f"MODULE = {ALONE!r}\n{CALLS}"
    theirs, _ = printed(checkout, f"{code}\nprint(json.dumps([*calls()]))")
    code += "\nwith loader.accelerate_extensions():\n    print(json.dumps([*calls()]))"
    ours, said = printed(checkout, code)
    ours, theirs = (json.loads(out.splitlines()[-1]) for out in (ours, theirs))
    assert ours == theirs
    assert ours[0]["result"] == 30 and ours[1]["result"] == 20
    kept = ("inline.inline_m", "inline.files", "inline.library", "inline.program")
    assert sorted(name.partition("-")[0] for name in checkout.entries()) == sorted(kept)
    assert said.count("loader: load('no-identifier'): left to torch: ") == 1
    again, _ = printed(checkout, code, LOADER_BUILD="never")
    assert json.loads(again.splitlines()[-1]) == ours


def torch_as_it_is() -> list[dict]:
    from torch.utils import cpp_extension as there

    functions = {n: f for n, f in vars(there).items() if isinstance(f, FunctionType)}
    inside = {n: [f.__code__, f.__defaults__, f.__kwdefaults__] for n, f in functions.items()}
    owners = vars(there), vars(there.BuildExtension), dict(enumerate(sys.meta_path))
    held = {n: [*map(id, parts)] for n, parts in inside.items()}
    return [held, *({n: id(value) for n, value in owner.items()} for owner in owners)]


def test_torch_is_restored_exactly_whoever_closes_last():
    before = torch_as_it_is()
    outer, inner = loader.accelerate_extensions(), loader.accelerate_extensions()
    changed = torch_as_it_is()
    assert changed[1] == before[1] and changed[0] != before[0]  # the same objects, other code
    outer.close()
    outer.close()
    assert torch_as_it_is() == changed
    with outer, inner:
        assert torch_as_it_is() == changed
    assert torch_as_it_is() == before
    with pytest.raises(ZeroDivisionError), loader.accelerate_extensions():
        raise ZeroDivisionError
    assert torch_as_it_is() == before
    assert repr(inner) == "<loader.accelerate_extensions: closed>"


def test_any_number_of_threads_may_begin_and_end_it():
    before, barrier = torch_as_it_is(), threading.Barrier(8)

    def begin_and_end():
        barrier.wait()
        for _ in range(50):
            with loader.accelerate_extensions():
                assert torch_as_it_is()[0] != before[0]

    threads = [threading.Thread(target=begin_and_end) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert torch_as_it_is() == before


def test_signatures_and_sources_are_torchs(checkout):
    import inspect

    from torch.utils.cpp_extension import load_inline

    before = inspect.signature(load_inline), inspect.getsource(load_inline)
    with loader.accelerate_extensions():
        assert (inspect.signature(load_inline), inspect.getsource(load_inline)) == before


def test_nothing_is_imported_for_it(checkout):
    """What is imported while it holds is changed, and is torch's own after its end."""
    printed(checkout, """
        import sys, torch, loader
        name, before = "torch.utils.cpp_extension", [*sys.meta_path]
        assert name not in sys.modules
        with loader.accelerate_extensions():
            assert name not in sys.modules and "setuptools" not in sys.modules
        assert sys.meta_path == before
        with loader.accelerate_extensions():
            from torch.utils.cpp_extension import load
            assert sys.meta_path == before
            inside = load.__code__
        there = sys.modules[name]
        assert there.__loader__ is there.__spec__.loader and "jit" not in repr(there.__loader__)
        assert load.__code__ is not inside and "torch_extensions" in repr(load.__code__.co_consts)
        """.replace("\n        ", "\n"))  # fmt: skip


def test_a_fork_has_it_too(checkout):
    out, _ = printed(checkout, """
        import os, torch, loader
        from torch.utils.cpp_extension import load
        theirs = load.__code__
        inside = loader.accelerate_extensions()
        if os.fork() == 0:
            inherited = load.__code__ is not theirs
            inside.close()
            os._exit(inherited and load.__code__ is theirs)
        print(os.waitstatus_to_exitcode(os.wait()[1]), load.__code__ is not theirs)
        """.replace("\n        ", "\n"))  # fmt: skip
    assert out.split() == ["1", "True"]


def test_accelerate_torch_does_both():
    import torch

    loader.grid_sample  # noqa: B018 - registered for good, with a finder that waits for DTensor
    before = torch_as_it_is()
    with loader.accelerate_torch(extensions=True) as inside:
        assert inside.devices and torch_as_it_is()[0] != before[0]
        assert "dispatcher.h" in torch._C._dispatch_dump("aten::grid_sampler_2d")
    assert torch_as_it_is() == before
    with loader.accelerate_torch():
        assert torch_as_it_is()[:3] == before[:3]


def test_below_run_the_programs_own_loader_builds(checkout):
    """One change to torch, though there are two copies of what makes it."""
    out, _ = printed(checkout, """
        import sys, torch
        from torch.utils.cpp_extension import load_inline
        sys.path.insert(0, "jit/tools/children")
        import octet_run
        theirs = load_inline.__code__
        octet_run.begin()
        ours = load_inline.__code__
        import loader
        with loader.accelerate_extensions() as inside:
            assert load_inline.__code__ is ours is not theirs
        assert load_inline.__code__ is ours
        try:
            load_inline("never_built", "int f() { return 1; }", functions=["f"])
        except loader.BuildError as error:
            print(error)
        """.replace("\n        ", "\n"), LOADER_BUILD="never")  # fmt: skip
    assert out.startswith("never_built: there is no build")


SETUP = """
import sys, torch
if {ours}:
    import loader
    loader.accelerate_extensions()
import setuptools
from torch.utils.cpp_extension import BuildExtension, CppExtension
from setuptools import setup

def macros(name, **more):
    return [("INIT", "PyInit_" + name), *more.items()]

setup(
    name="package", packages=[], cmdclass={{"build_ext": BuildExtension.with_options(**{options})}},
    script_args=["-q", "build_ext", "--build-lib", {out!r}, "--build-temp", {out!r} + ".temp", {more}],
    ext_modules=[
        CppExtension("inner.one", ["one.cpp"], define_macros=macros("one", FACTOR="2"),
            extra_compile_args=["-O1"]),
        CppExtension("two", ["two.cpp", "twice.cpp", "sub/twice.cpp"], define_macros=macros("two"),
            include_dirs=[{here!r} + "/include"], extra_compile_args={{"cxx": ["-DBY=4", "-DFACTOR=1"]}},
            libraries=["m"], library_dirs=["/usr/lib"], language="c++"),
        CppExtension("three", ["three.cpp"], define_macros=macros("three", FACTOR="5"),
            py_limited_api=True),
    ],
)
"""


def tree(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def results(checkout, out: str) -> list[int]:
    """What the modules of a folder compute."""
    files = [path for path in tree(checkout.root / out) if path.endswith(".so")]
    code = f"import importlib.util as u, torch\nfor file in {files!r}:\n"
    code += "    spec = u.spec_from_file_location(file.split('/')[-1].split('.')[0], "
    code += f"'{out}/' + file)\n    module = u.module_from_spec(spec)\n    print(module.f(5))\n"
    return [*map(int, printed(checkout, code)[0].split())]


def setup(checkout, out, ours=True, more='"--force"', options=None, **changes):
    """Run a setup.py; what it says of objects in the cache."""
    here = str(checkout.root)
    code = SETUP.format(ours=ours, options=options or {}, out=out, more=more, here=here)
    return [
        line for line in printed(checkout, code, **changes)[1].splitlines() if "loader:" in line
    ]


def test_what_a_setup_builds_has_the_names_and_places_of_torchs(checkout):
    (checkout.root / "sub/twice.cpp").write_text("int unused() { return 0; }\n")
    for at, options in enumerate([{}, {"no_python_abi_suffix": True}]):
        setup(checkout, f"theirs{at}", False, options=options)
        said = setup(checkout, f"ours{at}", True, '"-j2"', options=options)
        found = sorted(re_counts(said))
        assert found == ([(0, 1), (0, 1), (0, 3)] if not at else [(1, 1), (1, 1), (3, 3)])
        libraries = tree(checkout.root / f"ours{at}")
        assert len(libraries) == 3 and libraries == tree(checkout.root / f"theirs{at}")
        made = [p for p in tree(checkout.root / f"ours{at}.temp") if p.endswith(".o")]
        there = tree(checkout.root / f"theirs{at}.temp")
        assert len(made) == 5 and made == [p for p in there if p.endswith(".o")]
        assert results(checkout, f"ours{at}") == results(checkout, f"theirs{at}") == [20, 50, 20]


def re_counts(said: list[str]) -> list[tuple[int, int]]:
    return [(int(words[2]), int(words[4])) for words in map(str.split, said)]


def test_an_edit_compiles_what_it_reaches(checkout):
    (checkout.root / "sub/twice.cpp").write_text("")
    setup(checkout, "edited")
    assert re_counts(setup(checkout, "edited")) == [(1, 1), (3, 3), (1, 1)]
    header = checkout.root / "include/twice.h"
    header.write_text("int twice(int);  // edited\n")
    assert re_counts(setup(checkout, "edited")) == [(1, 1), (1, 3), (1, 1)]
    library = checkout.root / "sub/twice.cpp"
    library.write_text("#define NAME <twice.h>\n#include NAME\n")
    for _ in range(2):  # which file that is, nobody knows before the compiler does
        assert re_counts(setup(checkout, "edited")) == [(1, 1), (2, 3), (1, 1)]
    library.write_text("int broken( { }\n")
    code = SETUP.format(ours=True, options={}, out="o", more='"-f"', here=str(checkout.root))
    done = checkout.run(code)
    assert done.returncode == 1
    assert f"BuildError: two: twice.cpp could not be built:\n{library}:1:16: error" in done.stderr
    library.write_text("")


def test_without_ninja_a_setup_builds_side_by_side(checkout, tmp_path):
    """And one that asks for no ninja is left to setuptools."""
    (tmp_path / "ninja").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "ninja").chmod(0o755)
    path = f"{tmp_path}:{checkout.environment()['PATH']}"
    (checkout.root / "sub/twice.cpp").write_text("")
    setup(checkout, "before")
    assert re_counts(setup(checkout, "without", PATH=path)) == [(1, 1), (3, 3), (1, 1)]
    assert setup(checkout, "distutils", options={"use_ninja": False}) == []
    assert results(checkout, "distutils") == results(checkout, "without")


def test_of_two_processes_one_compiles(checkout, counting):
    (checkout.root / "sub/twice.cpp").write_text("int twofold() { return 0; }\n")
    here, start = str(checkout.root), checkout.start
    counting(checkout)
    try:
        codes = [
            SETUP.format(ours=True, options={}, out=f"both{i}", more='"-f"', here=here)
            for i in "ab"
        ]
        both = [ended(process) for process in [checkout.start(code, SLOW=1) for code in codes]]
        assert [done.returncode for done in both] == [0, 0], both
        assert checkout.compiled() == 5  # another compiler, so all of them, once
    finally:
        checkout.start = start


ASKED = {
    "sources": ["/s/a.cpp"], "objects": ["/t/a.o"], "build_directory": "/t", "verbose": True,
    "cflags": ["-O2"], "post_cflags": ["-DTORCH_EXTENSION_NAME=m"], "cuda_cflags": None,
    "cuda_post_cflags": None, "cuda_dlink_post_cflags": None, "sycl_cflags": None,
    "sycl_post_cflags": None, "sycl_dlink_post_cflags": None, "with_cuda": False, "with_sycl": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"with_sycl": True}, "SYCL is not built by loader"),
        ({"cuda_dlink_post_cflags": ["-dlink"]}, "device linking (dlink) is not built by loader"),
        ({"cflags": ["@flags"]}, "@flags has the compiler read a file"),
        ({"post_cflags": ["-fprofile-use=x"]}, "-fprofile-use=x has the compiler read a file"),
        ({"cuda_cflags": ["--compiler-options=-Iy"]}, "--compiler-options=-Iy has the compiler"),
    ],
    ids=str,
)
def test_what_loader_would_not_do_quite_as_torch_is_left_to_it(
    changes, reason, monkeypatch, capsys
):
    from torch.utils import cpp_extension

    ran = []
    monkeypatch.setattr(cpp_extension, "_write_ninja_file", lambda **facts: None)
    monkeypatch.setattr(cpp_extension, "_run_ninja_build", lambda *asked, **_: ran.append(asked))
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", lambda: None)
    with loader.accelerate_extensions():
        cpp_extension._write_ninja_file_and_compile_objects(**ASKED | changes)
    assert len(ran) == 1
    assert f"loader: these objects: left to torch: {reason}" in capsys.readouterr().err


def test_paths_count_from_where_torchs_compilers_run(tmp_path):
    for name in ("headers", "forced.h", "headers/other.h"):
        path = tmp_path / name
        path.write_text("") if path.suffix else path.mkdir()
    source = tmp_path / "a.cpp"
    source.write_text("")
    flags = ["-Iheaders", "-isystem", "headers", "-include", "forced.h", "-include other.h"]
    asked = {"sources": [source], "build_directory": tmp_path, "cflags": [*flags, "-Igone"]}
    ((object_, command),) = objects.order(ASKED | asked).commands.items()
    there, forced = str(tmp_path / "headers"), str(tmp_path / "forced.h")
    expected = [
        f"-I{there}",
        "-isystem",
        there,
        "-include",
        forced,
        "-include",
        "other.h",
        "-Igone",
    ]
    assert command.words[1 : len(expected) + 1] == expected
    tools = toolchain.current.__wrapped__(tmp_path)
    inputs = objects.ObjectRecipe("m", command, tools, {}).inputs()
    assert {*inputs["files"]} == {str(source), forced, f"{there}/other.h"}
    assert (object_, "once" in inputs) == ("/t/a.o", False)


def test_commands_are_those_that_torch_writes_for_ninja(tmp_path, monkeypatch):
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "_run_ninja_build", lambda *asked, **_: None)
    monkeypatch.setattr(cpp_extension, "verify_ninja_availability", lambda: None)
    monkeypatch.setenv("PYTORCH_NVCC", sys.executable)
    sources = [str(tmp_path / "a b.cpp"), str(tmp_path / "k.cu")]
    asked = ASKED | {
        "sources": sources, "objects": [f"{source}.o" for source in sources], "with_cuda": True,
        "build_directory": str(tmp_path), "cflags": ["-Wall", "'-DNAME=\"x y\"'", " -c"],
        "cuda_cflags": ["-DA", "-c"], "cuda_post_cflags": ["--compiler-options", "''\"'\"'-fPIC'\"'\"''"],
    }  # fmt: skip
    cpp_extension._write_ninja_file_and_compile_objects(**asked)
    lines = (tmp_path / "build.ninja").read_text().splitlines()
    given = dict(line.split(" = ", 1) for line in lines if " = " in line and line[0] != " ")
    words = {name: shlex.split(text) for name, text in given.items()}
    expected = {
        f"{sources[0]}.o": ["cxx", "cflags", sources[0], "post_cflags"],
        f"{sources[1]}.o": ["nvcc", "cuda_cflags", sources[1], "cuda_post_cflags"],
    }
    for made, command in objects.order(asked).commands.items():
        tool, before, file, after = expected[made]
        assert command.source == file
        assert command.words == [*words[tool], *words[before], "-c", file, *words[after]]


def test_an_unknown_torch_is_left_alone():
    asked = {name: value for name, value in ASKED.items() if name != "cuda_cflags"}
    with pytest.raises(ValueError, match="this torch has other names for cuda_cflags"):
        objects.order(asked)


MENDED = """
import sys, torch, warnings, loader
from torch.utils import cpp_extension as there
for _ in range(2):
    with warnings.catch_warnings(record=True) as told, loader.accelerate_extensions():
        warnings.simplefilter("always")
        there._write_ninja_file_and_compile_objects(**{asked!r})
    print(*[w.message for w in told if w.category.__name__ == "MendWarning"])
"""


def test_an_old_source_of_a_setup_is_mended(checkout):
    import torch

    source, header = checkout.root / "old/old.cpp", checkout.root / "old/beside.h"
    source.parent.mkdir()
    header.write_text("#include <c10/util/Exception.h>\n")
    source.write_text('#include "beside.h"\nvoid f(int x) { AT_CHECK(x > 0, "not above 0"); }\n')
    include = f"-I{os.path.dirname(torch.__file__)}/include"
    asked = {"sources": [str(source)], "objects": ["old.o"], "build_directory": str(source.parent)}
    asked = ASKED | asked | {"cflags": ["-O0", include], "post_cflags": ["-std=c++20"]}
    first, second = printed(checkout, MENDED.format(asked=asked))[0].splitlines()[-2:]
    said = "objects: old.cpp is for an older torch or CUDA, and was mended: `AT_CHECK` -> "
    assert first.startswith(said) and "(old.cpp:2)" in first and second == first
    assert (source.parent / "old.o").stat().st_size and "AT_CHECK" in source.read_text()
    done = checkout.run(MENDED.format(asked=asked), LOADER_MENDS="off")
    assert done.returncode == 1 and f"{source}:2:17: error: " in done.stderr
