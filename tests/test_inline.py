"""`loader.load` and `loader.load_inline`, for real: compilers run, modules are imported."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import Checkout

from loader.jit.extension import build as inline_build
from loader.jit.extension import text as inline_text

INCLUDE = inline_text.torch_include()

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
IMPORT = "import torch, loader, pathlib, time\n" + HELLO + SIN_ADD
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
        '#!/bin/sh\ncase " $* " in *" -c "*) echo "$*" >> '
        f'"{log}"; sleep "${{SLOW:-0}}";; esac\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    checkout.compiled = lambda: len(log.read_text().splitlines()) if log.exists() else 0
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
hello = loader.load_inline("hello_module", [HELLO], functions=["hello"], build_directory="a/b")
assert hello.hello() == "Hello World!" and hello.hello.__doc__ == "hello() -> str\\n\\nhello\\n"
assert pathlib.Path("a/b/hello_module.so").exists() and pathlib.Path("a/b/main.cpp").exists()
begun = time.perf_counter()
sines = loader.load_inline("inline_extension", [SIN_ADD], functions={"sin_add": 'adds "sines"'})
print(time.perf_counter() - begun)
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
    compiled = shared.compiled()
    assert compiled == 2
    warm = [float(passes(shared, code).stdout) for _ in range(3)]
    assert shared.compiled() == compiled
    assert min(warm) < 0.05, warm  # 4 ms on an idle machine


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
    ((torch.ones(2), None, 2, "me", 1), RuntimeError), ((torch.ones(2), None, "2", "me", False), TypeError),
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
exec("""
try:
    loader.load_inline('wrong', chr(10).join(['int f() ' + chr(123), 'retu' + 'rn }}']), functions=['f'])
except loader.BuildError as error:
    print(error)
""")
'''
    )
    env = shared.environment()
    done = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "wrong could not be built:"
    assert lines[1].startswith(f"{script}:7:15: error: expected primary-expression")
    assert lines[2] == "    7 |     return 3 +;" and lines[3].endswith("^")
    assert "functions: 'helo' is not in cpp_sources; did you mean 'hello'?" in lines
    assert "undefined symbol: f()" in lines
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


def test_headers_of_files_are_part_of_the_key(shared, tmp_path):
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    source = tmp_path / "value.cpp"
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
pathlib.Path({str(tmp_path / "value.h")!r}).write_text("#define VALUE 5\\n")
assert loader.load(**ask).value == 7
"""
    passes(shared, code)


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
    "flags, expected",
    [
        (("-O3 -g",), ["-O3", "-g"]),
        (("-I/a b/c",), ["-I/a b/c"]),
        (("-isystem /a",), ["-isystem", "/a"]),
        (("-DX='a b'", "-DY=$(rm)"), ["-DX=a b", "-DY=$(rm)"]),
        (("-gencode arch=compute_90,code=sm_90",), ["-gencode", "arch=compute_90,code=sm_90"]),
    ],
)
def test_flags_become_arguments_without_a_shell(flags, expected):
    assert inline_build.argv(flags) == expected


def test_architectures():
    of = inline_build.architecture_flags
    assert of("9.0", []) == ["-gencode=arch=compute_90,code=sm_90"]
    assert of("8.6+PTX;9.0a", [])[0] == "-gencode=arch=compute_86,code=compute_86"
    assert of("", []) == of("9.0", ["-arch=sm_80"]) == []
    with pytest.raises(ValueError, match="got 'nine'"):
        of("nine", [])


def names(text, **more):
    given = {"functions": True, "implicit": True, "torch_include": INCLUDE} | more
    return [level.name for level in inline_text.levels(text, **given)]


def test_headers_go_by_what_the_source_uses():
    assert names("std::string f() { return {}; }")[0] == "plain"
    assert names("// torch::Tensor\nint f();")[0] == "plain"
    assert names("torch::Tensor f();") == ["tensor", "torch", "full"]
    bound = "int f();\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}"
    assert names(bound, functions=False) == ["pybind", "torch", "full"]
    assert names("at::Tensor g(); " + bound, functions=False) == ["torch", "full"]
    assert names("torch::nn::Linear f();") == ["full"]
    assert names("#ifdef TORCH_VERSION_MAJOR\nint f();\n#endif") == ["full"]
    assert names("int f();", implicit=False) == ["full"]


def test_a_cuda_source_is_split_only_where_that_is_safe():
    split = inline_text.halves(SQUARE, "x.cu")
    assert "torch" not in split.device and "__global__" in split.device
    assert "__global__" not in split.host and "<<<" not in split.host
    assert "octet_configure(number_of_blocks, threads_per_block)" in split.host
    for unsafe in (
        SQUARE.replace("__global__ void", "template <class T> __global__ void"),
        SQUARE.replace("__global__ void", "static __global__ void"),
        "namespace n {" + SQUARE + "}",
        "int counter = 0;\n" + SQUARE,
        "#ifdef X\n#endif\n" + SQUARE,
        '#include "mine.h"\n' + SQUARE,
        SQUARE.replace("const float* matrix,", "torch::PackedTensorAccessor32<float, 2> matrix,"),
        SQUARE.replace("square_matrix_kernel<<<", "auto k = 1, square_matrix_kernel<<<"),
        SQUARE.replace("int row", "__shared__ at::Half row; int"),
    ):
        assert inline_text.halves(unsafe, "x.cu") is None, unsafe


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
