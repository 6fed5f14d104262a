"""`loader.load` and `loader.load_inline`, for real: compilers run, modules are imported."""

import dataclasses
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import Captured, Checkout, ended, start_program

from loader.jit.build.workshop import Ran, Workshop, in_threads
from loader.jit.errors import cxx
from loader.jit.extension import flags, levels, retry
from loader.jit.extension.arguments import Extension, Source
from loader.jit.extension.compilers import Compilers, Task
from loader.jit.extension.names import Names, names_of
from loader.jit.extension.precompiled import Precompiled

HELLO = 'HELLO = """\nstd::string hello() {\n  return "Hello World!";\n}\n"""\n'
SIN_ADD = 'SIN_ADD = """at::Tensor sin_add(at::Tensor x, at::Tensor y) {\n  return x.sin() + y.sin();\n}"""\n'
SQUARE = """
__global__ void square_matrix_kernel(const float* matrix, float* result, int width, int height) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < height && col < width) {
        int idx = row * width + col;
        result[idx] = matrix[idx] * matrix[idx];
    }
}

torch::Tensor square_matrix(torch::Tensor matrix) {
    const auto height = matrix.size(0);
    const auto width = matrix.size(1);
    auto result = torch::empty_like(matrix);
    dim3 threads_per_block(16, 16);
    dim3 number_of_blocks((width + threads_per_block.x - 1) / threads_per_block.x,
                          (height + threads_per_block.y - 1) / threads_per_block.y);
    square_matrix_kernel<<<number_of_blocks, threads_per_block>>>(
        matrix.data_ptr<float>(), result.data_ptr<float>(), width, height);
    return result;
}
"""
IMPORT = "import torch, loader, pathlib\n" + HELLO + SIN_ADD
USE = (
    IMPORT
    + "assert loader.load_inline('m', HELLO, functions=['hello']).hello() == 'Hello World!'\n"
)
DECLARED = "torch::Tensor square_matrix(torch::Tensor matrix);"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One checkout without operators and one cache, for all tests that do not spoil it."""
    checkout = Checkout(tmp_path_factory.mktemp("inline"), only="none")
    log, wrapper = checkout.root.parent / "ran", checkout.root.parent / "noting-c++"
    wrapper.write_text(
        '#!/bin/sh\ncase " $* " in *" /dev/null"*) ;; *" -o "*) echo " $* " >> '
        f'"{log}";; esac\ncase " $* " in *" -c "*) sleep "${{SLOW:-0}}";; esac\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)

    def ran():
        return log.read_text().splitlines() if log.exists() else []

    checkout.started = lambda: len(ran())  # compilers and linkers
    checkout.compiled = lambda: sum(" -c " in line for line in ran())
    start = checkout.start
    checkout.start = lambda code, **changes: start(code, **{"CXX": wrapper, **changes})
    return checkout


def passes(checkout, code, **changes):
    done = checkout.run(code, **changes)
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def test_classic_snippets_run_and_are_warm_the_second_time(shared):
    """hello and sin_add: neither needs torch/extension.h, and each compiles once."""
    code = (
        IMPORT
        + """
MARKED = "\ufeff" + HELLO  # as some editors begin a file
hello = loader.load_inline("hello_module", [MARKED], functions=["hello"], build_directory="a/b")
assert hello.hello() == "Hello World!" and hello.hello.__doc__ == "hello() -> str\\n\\nhello\\n"
assert pathlib.Path("a/b/hello_module.so").exists() and pathlib.Path("a/b/main.cpp").exists()
sines = loader.load_inline("inline_extension", [SIN_ADD], functions={"sin_add": 'adds "sines"'})
x = torch.rand(3, requires_grad=True)
out = sines.sin_add(x, x)
torch.testing.assert_close(out, x.sin() * 2)
out.sum().backward()
assert x.grad is not None and 'adds "sines"' in sines.sin_add.__doc__
try:
    sines.sin_add(x, 3)
except TypeError as error:
    assert "incompatible function arguments" in str(error) and "arg1: torch.Tensor" in str(error)
else:
    raise AssertionError
try:
    sines.sin_add(torch.ones(2), torch.ones(3))
except RuntimeError as error:
    assert str(error).startswith("The size of tensor a (2) must match")
"""
    )
    passes(shared, code)
    assert (shared.compiled(), shared.started()) == (2, 4)  # two compilers, two linkers
    passes(shared, code)
    assert (shared.compiled(), shared.started()) == (2, 4)
    assert levels_of(shared, "hello_module") == ["plain"]
    assert levels_of(shared, "inline_extension") == ["tensor"]


def test_functions_may_be_said_to_need_no_gil(shared):
    """Which a Python without one believes of a module; torch has the argument from 2.15 on."""
    code = """
m = loader.load_inline("free", HELLO, functions=["hello"], gil_not_used=True)
assert m.hello() == "Hello World!"
"""
    passes(shared, IMPORT + code)
    extension = Extension(
        "free", (), {}, (), (), (), (), with_cuda=False, is_python_module=True,
        is_standalone=False, gil_not_used=True,
    )  # fmt: skip
    own = levels.Level("plain", "", own_binding=True)
    for way, said in ((levels.TORCH, ", pybind11::mod_gil_not_used()"), (own, "<true>")):
        assert said in levels.binding({"f": "f"}, extension, way)
        kept = dataclasses.replace(extension, gil_not_used=False)
        assert said not in levels.binding({"f": "f"}, kept, way)


def test_conversions_are_those_of_pybind11(shared):
    code = (
        IMPORT
        + '''
import warnings
m = loader.load_inline("conversions", """
std::vector<torch::Tensor> many(const torch::Tensor& x, std::optional<torch::Tensor> w, double a,
                                const std::string& s, bool flag) {
    TORCH_WARN("careful ", s);
    if (flag) throw std::out_of_range("oor");
    return {x * a, w.has_value() ? *w : torch::zeros({2}, torch::kFloat64)};
}
std::tuple<torch::Tensor, int64_t> pair(torch::Tensor x, std::vector<int64_t> n) {
    return {torch::ones(n, x.options().requires_grad(true)), (int64_t)n.size()};
}
""", functions=["many", "pair"])
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    x, y = m.many(torch.ones(2), None, 2, "me", False)
assert x.tolist() == [2, 2] and y.dtype == torch.float64
assert len(seen) == 1 and str(seen[0].message).startswith("careful me")
ones, n = m.pair(torch.ones(1), (2, 3))
assert ones.shape == (2, 3) and ones.requires_grad and n == 2
for arguments, expected in [
    ((torch.ones(2), None, 2, "me", 1), (RuntimeError, IndexError)), ((torch.ones(2), None, "2", "me", False), TypeError),
    ((None, None, 2, "me", False), TypeError), ((torch.ones(2), 1, 2, "me", False), TypeError)]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            m.many(*arguments)
    except expected:
        continue
    raise AssertionError(arguments)
'''
    )
    passes(shared, code)


def test_an_edit_gives_the_new_code_and_the_old_module_works_on(shared):
    code = (
        IMPORT
        + """
old = loader.load_inline("edited", HELLO, functions=["hello"])
new = loader.load_inline("edited", HELLO.replace("World", "Moon"), functions=["hello"])
assert (old.hello(), new.hello()) == ("Hello World!", "Hello Moon!")
assert old.__name__ == new.__name__ == "edited"
assert loader.load_inline("edited", HELLO, functions=["hello"]) is old
"""
    )
    passes(shared, code)


def test_modules_that_pybind11_binds_can_be_edited_too(shared):
    """It keeps modules by name and would give back the old one."""
    code = '''
import loader
text = """
int add(int a, int b) { return a + b; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("add", &add, py::arg("a"), py::arg("b")); }
"""
old = loader.load_inline("bound", text)
new = loader.load_inline("bound", text.replace("a + b", "a - b"))
assert (old.add(a=1, b=2), new.add(1, 2)) == (3, -1) and new.__name__ == "bound"
'''
    passes(shared, code)


def test_errors_are_shown_at_the_line_of_the_callers_file(shared, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f'''import sys
sys.path.insert(0, {str(shared.root)!r})
import loader
try:
    loader.load_inline("wrong", """
std::string hello() {{
    return 3 +;
}}
""", functions=["hello"])
except loader.BuildError as error:
    print(error)
try:
    loader.load_inline("wrong", "std::string hello();", functions=["helo"])
except loader.BuildError as error:
    print(error)
try:
    loader.load_inline("wrong", "int f();", functions=["f"])
except loader.BuildError as error:
    print(error)
try:
    loader.load_inline("wrong", "int f();")
except loader.BuildError as error:
    print(error)
try:
    two = "int f(int x) {{ return x; }} int f(double x) {{ return 2; }}"
    loader.load_inline("wrong", "int g() {{ return 1; }}" + two, functions=["g", "f"])
except loader.BuildError as error:
    print(error)
exec("""
try:
    loader.load_inline('wrong', chr(10).join(['int f() ' + chr(123), 'retu' + 'rn }}']), functions=['f'])
except loader.BuildError as error:
    print(error)
""")
'''
    )
    done = ended(start_program([script], tmp_path, shared.environment()))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "wrong could not be built:"
    assert lines[1].startswith(f"{script}:7:15: error: expected primary-expression")
    assert lines[2] == "    7 |     return 3 +;" and lines[3].endswith("^")
    assert "functions: 'helo' is not in cpp_sources; did you mean 'hello'?" in lines
    assert "undefined symbol: f()" in lines
    several = "functions: 'f' is a template or has overloads, of which its name chooses none: "
    assert any(line.startswith(several) for line in lines)
    assert any(line.startswith("Name the functions to bind in `functions`") for line in lines)
    assert any(line.startswith("cpp_sources:2:8: error: expected") for line in lines)


def test_a_cell_of_a_notebook_is_named_in_errors(shared):
    pytest.importorskip("IPython")
    code = '''
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_cell("import loader")
shell.run_cell("""text = \'\'\'
int f() {
    return;;
    oops!
}
\'\'\'
try:
    loader.load_inline("cell", text, functions=["f"])
except loader.BuildError as error:
    print(error)
""", store_history=True)
'''
    done = passes(shared, code, HOME=shared.root, IPYTHONDIR=shared.root / "ipython")
    assert "In[1]:" in done.stdout and "cpp_sources" not in done.stdout.splitlines()[1], done.stdout


def test_processes_that_ask_at_once_compile_once(shared):
    before = shared.compiled()
    code = USE.replace("'m'", "'together'")
    running = [shared.start(code, SLOW="0.5") for _ in range(4)]
    for process in running:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert shared.compiled() == before + 1


def test_a_kill_in_the_middle_leaves_a_cache_that_works(shared):
    before = shared.compiled()
    code = USE.replace("'m'", "'killed'")
    process = shared.start(code, SLOW="30", start_new_session=True)
    while shared.compiled() == before:
        time.sleep(0.02)
        assert process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    passes(shared, code)


def test_a_damaged_library_is_built_again(shared):
    code = USE.replace("'m'", "'damaged'")
    passes(shared, code)
    (library,) = (shared.cache / "store").glob("inline.damaged-*/library.so")
    content = library.read_bytes()
    library.write_bytes(content[: len(content) // 2])
    passes(shared, code)
    now = library.read_bytes()  # whole again; nvcc's own names in it may differ
    recorded = json.loads((library.parent / "manifest.json").read_text())["sha256"]
    assert len(now) == len(content) and hashlib.sha256(now).hexdigest() == recorded


def test_headers_of_files_are_part_of_the_key(tmp_path):
    folder = tmp_path / f"\"{os.fsdecode(bytes([255]))}\\n\n'"  # no UTF-8, and to be quoted for C++
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 1\n")
    source = folder / "value.cpp"
    source.write_text(
        '#include <Python.h>\n#include "value.h"\n'
        "static PyModuleDef def = {PyModuleDef_HEAD_INIT, NAME, 0, -1, 0, 0, 0, 0, 0};\n"
        "PyMODINIT_FUNC PyInit_value() { PyObject* m = PyModule_Create(&def);\n"
        'PyModule_AddIntConstant(m, "value", VALUE + MORE); return m; }\n'
    )
    code = f"""
import loader, pathlib
ask = dict(name="value", sources={str(source)!r}, extra_cflags=["-DNAME='\\"a b; $(exit)\\"' -DMORE=2"])
assert loader.load(**ask).value == 3
pathlib.Path({str(folder / "value.h")!r}).write_text("#define VALUE 5\\n")
assert loader.load(**ask).value == 7
pathlib.Path(ask["sources"]).open("a").write("int broken = no_such_thing;")
try:
    assert not loader.load(**ask)
except loader.BuildError as error:
    assert "value.cpp:6:14: error: " in str(error) and "no_such_thing" in str(error), error
    assert "no_such_thing" in open(error.log, errors="replace").read()
"""
    passes(Checkout(tmp_path, only="none"), code)


@pytest.mark.parametrize(
    "call, message",
    [
        ("loader.load_inline('a-b', 'x')", "ValueError: load_inline: name must be a Python identifier"),
        ("loader.load_inline('a', 7)", "TypeError: load_inline: cpp_sources must be a str or a list"),
        ("loader.load_inline('a', [b'x'])", "TypeError: load_inline: cpp_sources must be C++ as str, got bytes"),
        ("loader.load_inline('a', 'x\\0')", "ValueError: load_inline: cpp_sources has a NUL"),
        ("loader.load_inline('a', 'x', functions=7)", "ValueError: load_inline: functions must be a list"),
        ("loader.load_inline('a', 'x', functions=['f g'])", "ValueError: load_inline: functions must hold names"),
        ("loader.load_inline('a', 'x', extra_cflags='-O3')", "must be a list of str, got str; write ['-O3']"),
        ("loader.load_inline('a', 'x', sycl_sources='x')", "NotImplementedError: load_inline: SYCL"),
        ("loader.load('a', 'missing.cpp')", "load: the source cannot be read: No such file"),
        ("loader.load('a', [])", "ValueError: load: sources must name at least one file"),
        ("loader.load('a', ['loader.py'], is_standalone=True)", "is_python_module and is_standalone exclude"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_clear_error(monkeypatch, tmp_path, call, message):
    import loader

    monkeypatch.chdir(os.path.dirname(loader.__file__))
    with pytest.raises((TypeError, ValueError, OSError, NotImplementedError)) as caught:
        eval(call, {"loader": loader})
    assert message in f"{type(caught.value).__name__}: {caught.value}"


def test_arguments_are_those_of_torch():
    import inspect

    import torch.utils.cpp_extension as theirs

    import loader

    for name in ("load", "load_inline"):
        ours = inspect.signature(getattr(loader, name)).parameters
        for parameter in inspect.signature(getattr(theirs, name)).parameters.values():
            assert ours[parameter.name].default == parameter.default
            assert ours[parameter.name].kind == parameter.kind


@pytest.mark.parametrize(
    "given, expected",
    [
        (("-O3 -g",), ["-O3", "-g"]),
        (("-I/a b/c",), ["-I/a b/c"]),
        (("-isystem /a",), ["-isystem", "/a"]),
        (("-DX='a b'", "-DY=$(rm)"), ["-DX=a b", "-DY=$(rm)"]),
        (("-gencode arch=compute_90,code=sm_90",), ["-gencode", "arch=compute_90,code=sm_90"]),
    ],
)
def test_flags_become_arguments_without_a_shell(given, expected):
    assert flags.argv(given) == expected


def names(text, **more):
    given = {"functions": True, "implicit": True} | more
    return [level.name for level in levels.levels(text, **given)]


def test_headers_go_by_what_the_source_uses():
    assert names("std::string f() { return {}; }")[0] == "plain"
    assert names("// torch::Tensor\nint f();")[0] == "plain"
    assert names("torch::Tensor f();") == ["tensor", "torch", "full"]
    bound = "int f();\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}"
    assert names(bound, functions=False) == ["pybind", "torch", "full"]
    assert names("at::Tensor g(); " + bound, functions=False) == ["bound", "torch", "full"]
    assert names("at::Tensor g(); TORCH_LIBRARY(a, m) {}", functions=False) == ["torch", "full"]
    assert names("torch::nn::Linear f();") == ["full"]
    assert names("#ifdef TORCH_VERSION_MAJOR\nint f();\n#endif") == ["full"]
    assert names("int f();", implicit=False) == ["full"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_square_matrix_compiles_without_a_gpu_and_without_a_warning(shared):
    code = f"""
import torch, loader
m = loader.load_inline("square_matrix_extension", {DECLARED!r}, {SQUARE!r},
                       functions=["square_matrix"], with_cuda=True, extra_cuda_cflags=["-O2"])
assert m.square_matrix.__doc__.startswith("square_matrix(arg0: torch.Tensor) -> torch.Tensor")
try:
    m.square_matrix(torch.ones(3))
except IndexError as error:
    assert "Dimension out of range" in str(error)
"""
    for architectures in (None, "9.0"):
        done = passes(shared, code, TORCH_CUDA_ARCH_LIST=architectures)
        assert done.stderr == ""
    libraries = (shared.cache / "store").glob("inline.square_matrix_extension-*/library.so")
    assert any(b"sm_90" in library.read_bytes() for library in libraries)


@pytest.mark.cuda
def test_square_matrix_on_the_gpu(shared):
    code = f"""
import torch, loader
ask = lambda text: loader.load_inline("square_on_gpu", {DECLARED!r}, text, functions=["square_matrix"])
x = torch.randn(37, 53, device="cuda")
old = ask({SQUARE!r})
torch.testing.assert_close(old.square_matrix(x), x * x, rtol=0, atol=0)
new = ask({SQUARE!r}.replace("* matrix[idx];", "* matrix[idx] + 1;"))
torch.testing.assert_close(new.square_matrix(x), x * x + 1)
torch.testing.assert_close(old.square_matrix(x), x * x, rtol=0, atol=0)
"""
    passes(shared, code, CUDA_VISIBLE_DEVICES=None)


@pytest.mark.cuda
def test_template_kernels_on_the_gpu(shared):
    code = '''
import torch, loader
m = loader.load_inline("templated", "torch::Tensor sq(torch::Tensor x);", """
#include <ATen/cuda/CUDAContext.h>
template <typename T> __global__ void k(const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i];
}
torch::Tensor sq(torch::Tensor x) {
    auto y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "sq", [&] {
        k<scalar_t><<<1, 256, 0, at::cuda::getCurrentCUDAStream()>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
    });
    return y;
}
""", functions=["sq"])
for dtype in (torch.float32, torch.float64):
    x = torch.randn(100, device="cuda", dtype=dtype)
    torch.testing.assert_close(m.sq(x), x * x)
'''
    passes(shared, code, CUDA_VISIBLE_DEVICES=None)


TEMPLATE = """
#include <ATen/cuda/CUDAContext.h>
template <typename T>
__global__ void k(const T* x, T* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i];
}
torch::Tensor sq(torch::Tensor x) {
    auto y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES_AND_HALF(x.scalar_type(), "sq", [&] {
        k<scalar_t><<<1, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
    });
    return y;
}
"""
NO_MENDING = {
    "a method": ("at::Tensor f(at::Tensor x) { return x.sinn(); }", "no member named"),
    "a function": ("at::Tensor f(at::Tensor x) { return torch::zeross({2}); }", "zeross"),
    "a variable": ("at::Tensor f(at::Tensor x) { return y; }", "'y' was not declared"),
    "an argument": ('at::Tensor f(at::Tensor x) { return x.sum("a"); }', "no matching function"),
    "its own function": ("int g(int); int f(int x) { return g(x, \"a\"); }", "too many arguments"),
    "syntax": ("at::Tensor f(at::Tensor x) { TORCH_CHECK(x.dim()); return x }", "expected ';'"),
    "a definition": ("int f(int x) { return x; } int f(int x) { return x; }", "redefinition"),
}  # fmt: skip


def test_what_no_larger_header_mends_is_told_after_the_first_try(shared):
    """One run of a compiler each; without `functions` none, and text alone tells."""
    code = f"""
import loader, pathlib
for name, (text, words) in {NO_MENDING!r}.items():
    try:
        loader.load_inline("no_mending", text, functions=["f"])
    except loader.BuildError as error:
        said = str(error).replace("\\u2018", "'").replace("\\u2019", "'")
        assert words in said, (name, said)
    else:
        raise AssertionError(name)
try:
    loader.load_inline("no_module", "at::Tensor f(at::Tensor x) {{ return x.sin(); }}")
except loader.BuildError as error:
    assert "Name the functions to bind in `functions`" in str(error)
"""
    before = shared.compiled()
    passes(shared, code)
    assert shared.compiled() - before == len(NO_MENDING)


CLASHES = [
    "n",
    "given",
    "call",
    "module",
    "self",
    "args",
    "name",
    "count",
    "octet",
    "entry",
    "kept",
    "methods",
    "definition",
    "doc",
]


def test_functions_may_have_any_name(shared):
    """None of the words in the text that binds them stands in a function's way."""
    text = "\n".join(f"int {name}(int a) {{ return a + {i}; }}" for i, name in enumerate(CLASHES))
    code = f"""
import loader
m = loader.load_inline("clashes", {text!r}, functions={CLASHES!r})
for i, name in enumerate({CLASHES!r}):
    assert getattr(m, name)(1) == 1 + i, name
other = loader.load_inline("clashes_too", "int n(int a) {{ return a + 100; }}", functions=["n"])
assert (m.n(1), other.n(1)) == (1, 101)
"""
    before = shared.compiled()
    passes(shared, code)
    assert shared.compiled() - before == 2


TRANSITIVE = """
torch::Tensor f(torch::Tensor x) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    std::optional<double> least = std::numeric_limits<double>::lowest();
    assert(!sizes.empty());
    char text[8]; memcpy(text, "abc", 4); uint8_t byte = UINT8_MAX;
    printf("%s", std::string(text, 0).c_str());
    c10::ScalarType type = x.scalar_type();
    std::mt19937 random(0); std::set<int> seen{INT_MAX}; std::chrono::seconds second(1);
    std::unordered_set<std::string> words{std::to_string(random())};
    return torch::full(sizes, M_PI, torch::dtype(type)) + *least * 0 + byte * 0.0;
}
"""


def test_what_torchs_headers_bring_needs_no_include(shared):
    code = f"""
import torch, loader
for name, before in (("transitive", ""), ("transitive_too", "#include <torch/extension.h>\\n")):
    m = loader.load_inline(name, before + {TRANSITIVE!r}, functions=["f"])
    torch.testing.assert_close(m.f(torch.ones(2)), torch.full((2,), torch.pi))
"""
    before = shared.compiled()
    passes(shared, code)
    assert shared.compiled() - before == 2


LIMITS = """
#include <torch/extension.h>
#include <c10/cuda/CUDAException.h>
__global__ void k(const float* x, float* y, int n) {
    float least = FLT_MAX;
    for (int i = 0; i < n; ++i) { assert(i < INT_MAX); least = fminf(least, x[i]); }
    if (least == 0) printf("%u", (uint8_t)UINT8_MAX);
    y[0] = least * float(M_PI);
}
torch::Tensor f(torch::Tensor x) {
    auto y = torch::empty({1}, x.options());
    k<<<1, 1>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return y;
}
"""


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_limits_in_a_kernel_need_no_include(shared):
    """torch's headers bring <cfloat> by way of thrust, which nvcc alone sees."""
    code = f"""
import loader
loader.load_inline("limits", "torch::Tensor f(torch::Tensor x);", {LIMITS!r}, functions=["f"])
"""
    passes(shared, code, TORCH_CUDA_ARCH_LIST="9.0")
    assert levels_of(shared, "limits") == ["tensor", "kernels", "host tensor"]


FILES = {
    "ext.h": """#pragma once
#include <torch/extension.h>
#define CHECK_INPUT(x) TORCH_CHECK(x.is_cuda(), #x " must be on the GPU")
torch::Tensor scaled(torch::Tensor feats, torch::Tensor taps);
""",
    "bound.cpp": """#include "ext.h"
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("scaled", &scaled); }
""",
    "kernels.cu": """#include "ext.h"
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <cublas_v2.h>
__constant__ float taps[16];
namespace {
template <typename scalar_t>
__global__ void scaled_kernel(
    const torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> feats,
    torch::PackedTensorAccessor32<scalar_t, 2, torch::RestrictPtrTraits> out) {
    const int n = blockIdx.x * blockDim.x + threadIdx.x, f = blockIdx.y * blockDim.y + threadIdx.y;
    if (n < feats.size(0) && f < feats.size(1)) out[n][f] = feats[n][f] * scalar_t(taps[f % 16]);
}
}
torch::Tensor scaled(torch::Tensor feats, torch::Tensor values) {
    CHECK_INPUT(feats);
    auto out = torch::zeros_like(feats);
    cudaMemcpyToSymbol(taps, values.data_ptr<float>(), sizeof(taps), 0, cudaMemcpyDeviceToDevice);
    (void)cublasHandle_t(at::cuda::getCurrentCUDABlasHandle());
    const dim3 threads(16, 16), blocks((feats.size(0) + 15) / 16, (feats.size(1) + 15) / 16);
    AT_DISPATCH_FLOATING_TYPES_AND_HALF(feats.scalar_type(), "scaled", ([&] {
        scaled_kernel<scalar_t><<<blocks, threads, 0, at::cuda::getCurrentCUDAStream()>>>(
            feats.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>(),
            out.packed_accessor32<scalar_t, 2, torch::RestrictPtrTraits>());
    }));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return out;
}
""",
}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_an_extension_of_files_is_built_without_torchs_umbrella_headers(shared, tmp_path):
    """As its users write them: nvcc sees kernels alone, and pybind11 is bound by hand."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(f"\ufeff{text}")  # which some editors begin a file by
    code = f"""
import loader, torch
m = loader.load("files", [{str(tmp_path / "bound.cpp")!r}, {str(tmp_path / "kernels.cu")!r}])
try:
    m.scaled(torch.ones(2, 2), torch.ones(16))
except RuntimeError as error:
    assert "feats must be on the GPU" in str(error)
"""
    passes(shared, code, TORCH_CUDA_ARCH_LIST="9.0")
    assert levels_of(shared, "files") == ["bound", "kernels", "host tensor"]
    (library,) = (shared.cache / "store").glob("inline.files-*/library.so")
    names = subprocess.run(["nm", "-C", library], capture_output=True, text=True, check=True).stdout
    for type in ("float", "double", "c10::Half"):
        assert f"scaled_kernel<{type}>(" in names
    assert not re.search(r" U .*scaled_kernel", names)


def levels_of(checkout, name):
    (manifest,) = (checkout.cache / "store").glob(f"inline.{name}-*/manifest.json")
    return json.loads(manifest.read_text())["levels"]


def test_damaged_objects_and_headers_of_the_work_folder_are_made_again(shared):
    """All of them, and the library in the store, which is built anew from sound ones alone."""
    code = (
        "import loader, torch\n"
        f"m = loader.load_inline('spoilt', {SIN_ADD.split('=', 1)[1].strip()!r}.strip('\"'), functions=['sin_add'])\n"
        "torch.testing.assert_close(m.sin_add(torch.ones(2), torch.zeros(2)), torch.ones(2).sin())\n"
    )
    passes(shared, code)
    (library,) = (shared.cache / "store").glob("inline.spoilt-*/library.so")
    compiled = shared.compiled()
    (folder,) = (path for path in (shared.cache / "work").glob("inline.spoilt-*") if path.is_dir())
    spoilt = [path for path in folder.rglob("*") if path.is_file()] + [library]
    assert {path.suffix for path in spoilt} >= {".o", ".h", ".cpp", ".so"}
    for path in spoilt:
        stat, content = path.stat(), path.read_bytes()
        middle = len(content) // 2
        path.chmod(0o600)
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    passes(shared, code)
    assert shared.compiled() == compiled + 1
    recorded = json.loads((library.parent / "manifest.json").read_text())
    assert hashlib.sha256(library.read_bytes()).hexdigest() == recorded["sha256"]
    for path in folder.glob("*.o"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert path.stem.endswith(f"-{digest[:32]}")


WIDE = Names(frozenset({"TORCH_CHECK", "FLT_MAX"}), frozenset({"zeros", "Slice", "vector"}))


@pytest.mark.parametrize(
    "said, mendable",
    [
        ("a.cpp:1:2: error: ‘class at::Tensor’ has no member named ‘sinn’; did you mean ‘sin’?", False),
        ("a.cpp:1:2: error: no member named 'sinn' in 'at::Tensor'", False),
        ('a.cu(3): error: class "at::Tensor" has no member "sinn"', False),
        ("a.cpp:1:2: error: ‘zeross’ is not a member of ‘torch’", False),
        ("a.cpp:1:2: error: ‘zeros’ is not a member of ‘torch’; did you mean ‘at::zeros’?", True),
        ('a.cu(3): error: identifier "FLT_MAX" is undefined', True),
        ('a.cu(3): error #20: identifier "FLT_MIX" is undefined', False),
        ('a.cu(3): error: namespace "torch" has no member "zeross"', False),
        ("a.cpp:1:2: error: use of undeclared identifier 'Slice'", True),
        ("a.cpp:1:2: error: expected ‘;’ before ‘}’ token", False),
        ("a.cpp:1:2: error: no matching function for call to ‘at::Tensor::sum(const char [2])’", False),
        ("a.cpp:1:2: error: no matching function for call to ‘at::Tensor::index(int)’", True),
        ("a.cpp:1:2: error: no matching function for call to ‘g(int)’", False),
        ("a.cpp:1:2: error: no matching function for call to ‘vector(int)’", True),
        ("a.cpp:1:2: error: no match for ‘operator<<’ (operand types are ‘int’ and ‘at::Tensor’)", True),
        ("a.cpp:1:2: error: invalid use of incomplete type ‘struct S’", True),
        ("/usr/include/x.h:1:2: error: expected ‘;’ before ‘}’ token", True),
        ("a.cpp:1:2: error: redefinition of ‘int f()’\na.cpp:1:1: note: ‘int f()’ previously defined here", False),
        ("a.cpp:1:2: error: redefinition of ‘int f()’\nb.h:1:1: note: ‘int f()’ previously defined here", True),
        ("a.cpp:1:2: error: static assertion failed: octet_binding::Convert lacks this type", True),
        ("cc1plus: out of memory", True),
        ("ptxas fatal   : Unresolved extern function 'f'", False),
    ],
)  # fmt: skip
def test_errors_that_larger_headers_may_mend(said, mendable):
    words = {"f", "x", "TORCH_CHECK"}
    found = retry.may_need_more(
        said, ("a.cpp", "a.cu"), words, lambda: WIDE, lambda: {"TORCH_CHECK"}
    )
    assert found is mendable


def test_syntax_that_a_macro_of_torchs_may_change_is_tried_with_more_headers():
    said = "a.cpp:1:2: error: expected initializer before ‘f’"
    assert retry.may_need_more(said, ("a.cpp",), {"TORCH_CHECK"}, lambda: WIDE, set)


def test_names_are_those_that_namespaces_declare():
    text = """
#define LIMIT 3
#define GONE 1
#undef GONE
namespace a { inline int f(int parameter) { int local = 0; return local; } enum E { first, second };
template <typename Argument> struct S { int member; }; enum class Scoped { inside };
constexpr int value = other; extern "C" { void g(); typedef void (*handler)(int); } }
"""
    found = names_of(text)
    assert found.macros == {"LIMIT"}
    assert {
        "a",
        "f",
        "E",
        "first",
        "second",
        "S",
        "value",
        "g",
        "handler",
        "Scoped",
    } <= found.declared
    hidden = {"parameter", "local", "member", "Argument", "inside", "other", "GONE"}
    assert not hidden & (found.declared | found.macros)
    assert "f" in found and not cxx.KEYWORDS & found.declared


def test_a_damaged_precompiled_header_is_not_trusted(tmp_path):
    (tmp_path / "work").mkdir()
    with Workshop(tmp_path / "work" / "unit") as shop:
        (shop.folder / "x.cpp").write_text("Known known;\n")
        work = shop.folder.parent
        header = Precompiled(work, ["c++", "-std=c++17"], ["c++"], "struct Known {};\n")

        ran = []

        def compile(use):
            ran.append(shop.run(["c++", "-std=c++17", *use, "-fsyntax-only", "x.cpp"])[:2])
            return None, ran[-1][1]

        assert header.used(compile) is None and not ran  # it is not waited for
        header.make()
        assert header.used(compile) == (None, "") and ran == [(0, "")]
        (made,) = (tmp_path / "work").glob("inline.headers-*/torch.h.gch")
        stat, content = made.stat(), bytearray(made.read_bytes())
        content[len(content) // 2] ^= 1
        made.write_bytes(content)
        os.utime(made, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert header.used(compile) is None and not made.exists()
        header.make()
        assert header.used(compile) == (None, "") and ran[-1] == (0, "")


@pytest.mark.parametrize("standalone", [False, True])
def test_the_callers_own_flags_reach_the_linker(tmp_path, standalone):
    """Also where torch's libraries are left out, since nothing needs them."""
    import loader
    from loader.jit.machine import toolchain

    own = ("-Wl,-rpath,/a", "-L/b/torch/lib", "-lc10")
    extension = Extension(
        "m", (Source("a.cpp", "", False),), None, (), (), own, (),
        with_cuda=False, is_python_module=not standalone, is_standalone=standalone,
    )  # fmt: skip
    shop = Captured(tmp_path / "work" / "m")
    shop.folder.mkdir(parents=True)
    tools = toolchain.current.__wrapped__(loader._session.caches[-1])
    compilers = Compilers(extension, tools, shop)
    for with_torch in (False, True):
        compilers.link([shop.folder / "a.o"], with_torch)
        at = shop.linked.index(own[0])
        assert shop.linked[at : at + 3] == [*own] and "a.o" in shop.linked
        assert ("-shared" in shop.linked) is not standalone
        assert ("-ltorch_cpu" in shop.linked) is with_torch


def test_names_of_torchs_headers_are_read_once_for_all_gpus_and_both_halves(tmp_path, monkeypatch):
    import loader
    from loader.jit.machine import toolchain

    tools = toolchain.current.__wrapped__(loader._session.caches[-1])
    monkeypatch.setenv("PYTORCH_NVCC", "nvcc")
    ran = []

    class Shop(Captured):
        def run(self, command, note=True):
            ran.append([word for word in command if "gencode" in word or "arch=" in word])
            time.sleep(0.1)  # in which the other half asks
            return Ran(0, "#define KNOWN 1\nnamespace at { class Tensor; }\n", 0.0)

    for gpus in (
        ["-gencode=arch=compute_80,code=sm_80"],
        ["-gencode", "arch=compute_90,code=sm_90"],
    ):
        source = Source("a.cu", "", True)
        extension = Extension(
            "m", (source,), None, (), tuple(gpus), (), (),
            with_cuda=True, is_python_module=True, is_standalone=False,
        )  # fmt: skip
        shop = Shop(tmp_path / "work" / "m")
        shop.folder.mkdir(parents=True, exist_ok=True)
        compilers = Compilers(extension, tools, shop)
        task = Task(source, True, gpus, "", beside="")
        found = in_threads(compilers.wide, [task, task])
        assert all("KNOWN" in names and "Tensor" in names for names in found)
    assert ran == [[]]


def test_conditions_that_torchs_headers_do_not_change_leave_the_quick_way(shared):
    text = "#ifndef M_PI\n#define M_PI 3\n#endif\n#if __cplusplus < 1\n#error old\n#endif\n"
    text = f"#define MINE 1\n{text}#ifndef MINE\n#error mine\n#endif\n"
    code = f"""
import loader, math
m = loader.load_inline("asks", {text!r} + "double f() {{ return M_PI; }}", functions=["f"])
assert m.f() == math.pi
"""
    passes(shared, code)
    assert levels_of(shared, "asks") == ["plain"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_a_typo_in_the_host_functions_of_a_cuda_source_is_told_after_the_first_try(shared):
    """The C++ compiler sees each source once: nvcc would see nothing else."""
    text = TEMPLATE.replace("empty_like", "empty_likee")
    code = f"""
import loader
try:
    loader.load_inline("host", "torch::Tensor sq(torch::Tensor x);", {text!r}, functions=["sq"])
except loader.BuildError as error:
    assert "empty_likee" in str(error)
"""
    before = shared.compiled()
    passes(shared, code, TORCH_CUDA_ARCH_LIST="9.0")
    assert shared.compiled() - before == 2


def test_what_flags_and_macros_name_counts_as_sources_do(shared, tmp_path):
    code = f"""
import os, pathlib, subprocess, loader
here = pathlib.Path({str(tmp_path)!r})
def archive(number):
    (here / "g.cpp").write_text(f"int g() {{{{ return {{number}}; }}}}")
    subprocess.run(["c++", "-fPIC", "-c", here / "g.cpp", "-o", here / "g.o"], check=True)
    (here / "libg.a").unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", here / "libg.a", here / "g.o"], check=True)
(here / "in").mkdir()
change = {{
    "archive": archive,
    "response": lambda n: (here / "words").write_text(f"-DIN_WORDS={{n}}"),
    "forced": lambda n: (here / "c.h").write_text(f"#define FORCED {{n}}"),
    "found": lambda n: (here / "in/d.h").write_text(f"#define FOUND {{n}}"),
    "by a macro": lambda n: (here / "in/e.h").write_text(f"#define BY_MACRO {{n}}"),
    "bytes": lambda n: (here / "bytes").write_text(str(n)),
}}
SOURCE = '''
#include <d.h>
#define ITS_NAME "e.h"
#include ITS_NAME
asm(".section .rodata\\\\nbytes: .incbin \\\\"''' + str(here / "bytes") + '''\\\\"\\\\n.previous");
extern "C" __attribute__((visibility("hidden"))) const char bytes[];
int g();
int f() {{ return ((((g() * 10 + IN_WORDS) * 10 + FORCED) * 10 + FOUND) * 10 + BY_MACRO) * 10 + bytes[0] - '0'; }}
'''
def now():
    cflags = [f"@{{here}}/words", "-include", f"{{here}}/c.h", f"-I{{here}}/in"]
    return loader.load_inline(
        "flags", SOURCE, functions=["f"], extra_cflags=cflags, extra_ldflags=[f"-L{{here}}", "-lg"]
    ).f()
for make in change.values():
    make(1)
expected = [1] * 6
assert now() == 111111
for i, make in enumerate(change.values()):
    make(2)
    expected[i] = 2
    assert now() == int("".join(map(str, expected))), (i, now())
"""
    passes(shared, code)
