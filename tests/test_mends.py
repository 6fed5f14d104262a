"""Sources for an older torch or CUDA: what compilers say of them, what is changed, what is told."""

import pytest

from loader.jit.extension.arguments import Extension, Source
from loader.jit.extension.mending import Mending, diff, summary
from loader.jit.extension.mends import MENDS
from loader.jit.machine import toolchain as tools

DISPATCH = "at_dispatch: error: "


def extension(tmp_path, text, name="a.cu", **changes) -> Extension:
    """An extension of one source."""
    facts = {
        "name": "old",
        "sources": (Source(name, text, name.endswith(".cu")),),
        "functions": None,
        "cflags": (),
        "cuda_cflags": (),
        "ldflags": (),
        "include_paths": (),
        "with_cuda": True,
        "is_python_module": True,
        "is_standalone": False,
    }
    return Extension(**facts | changes)


def mended(tmp_path, text, said, **changes) -> tuple[str, Mending]:
    """The text that the compiler gets after it said this; the mending."""
    toolchain = tools.current.__wrapped__(tmp_path)._replace(architectures="6.0;9.0")
    mending = Mending(extension(tmp_path, text, **changes), toolchain, tmp_path)
    (tmp_path / "a.cu").write_text(text)
    mending.take(said)
    return mending.extension.sources[0].text, mending


def absent(name, line=1):
    """What nvcc says of a name that is not there."""
    return f'a.cu({line}): error: identifier "{name}" is undefined\n'


NO_CONVERSION = (
    'a.cu(1): error: no suitable conversion function from "const at::DeprecatedTypeProperties" to '
    '"c10::ScalarType" exists\n'
)
NO_MEMBER = "a.cu:1:9: error: ‘class at::DeprecatedTypeProperties’ has no member named ‘{}’\n"

# What nvcc 13 and g++ 12 said of each with torch 2.11 or 2.15: the line, that, the line mended.
TEXTS = {
    "`AT_DISPATCH_...(x.type(), ...)`": (
        'AT_DISPATCH_FLOATING_TYPES(f(x).type(), "x.type(),", ([&] { y.type(); }));',
        NO_CONVERSION,
        'AT_DISPATCH_FLOATING_TYPES(f(x).scalar_type(), "x.type(),", ([&] { y.type(); }));',
    ),
    "`x.type()` for a dtype": (
        "at::ScalarType t = x.type(); // x.type()",
        "a.cu:1:51: error: cannot convert ‘at::DeprecatedTypeProperties’ to ‘c10::ScalarType’ in "
        "initialization\n",
        "at::ScalarType t = x.scalar_type(); // x.type()",
    ),
    "`x.type().tensor(...)`, `x.type().zeros(...)`": (
        "auto y = x.type().tensor({n, f(3)}), z = at::CUDA(at::kFloat).zeros({2});",
        NO_MEMBER.format("tensor"),
        "auto y = torch::empty({n, f(3)}, x.options()), "
        "z = torch::zeros({2}, torch::dtype(at::kFloat).device(torch::kCUDA));",
    ),
    "`x.type().dtype()`": (
        "auto t = x.type().dtype();",
        NO_MEMBER.format("dtype"),
        "auto t = x.scalar_type();",
    ),
    "`x.is_variable()`": (
        "if (!x.is_variable()) fail();",
        "a.cu:1:167: error: ‘class at::Tensor’ has no member named ‘is_variable’\n",
        "if (!true) fail();",
    ),
    "`AT_CHECK`": (
        'AT_CHECK(ok, "AT_CHECK failed");',
        absent("AT_CHECK"),
        'TORCH_CHECK(ok, "AT_CHECK failed");',
    ),
    "`PYBIND11_MODULE` without its header": (
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}",
        "a.cu:1:16: error: expected constructor, destructor, or type conversion before ‘(’ token\n",
        '#include <torch/extension.h>\n#line 1 "a.cu"\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}',
    ),
    "`c10::make_unique`": (
        "auto p = c10::guts::make_unique<int>(3);",
        "a.cu:1:57: error: ‘make_unique’ is not a member of ‘c10::guts’; did you mean "
        "‘std::make_unique’?\n",
        "auto p = std::make_unique<int>(3);",
    ),
    "`torch::jit::RegisterOperators`": (
        'auto op = torch::jit::RegisterOperators("a::c", &f);',
        "a.cu:1:129: error: ‘RegisterOperators’ is not a member of ‘torch::jit’; did you mean "
        "‘registerOperator’?\n",
        'auto op = torch::RegisterOperators("a::c", &f);',
    ),
    "`extern THCState *state;`": ("extern THCState *state;", absent("THCState"), ""),
    "`THCState_getCurrentStream(state)`": (
        "cudaStream_t s = THCState_getCurrentStream(state);",
        absent("THCState_getCurrentStream"),
        '#include <ATen/cuda/CUDAContext.h>\n#line 1 "a.cu"\n'
        "cudaStream_t s = at::cuda::getCurrentCUDAStream().stream();",
    ),
    "`THCudaCheck`": (
        "THCudaCheck(cudaGetLastError());",
        absent("THCudaCheck"),
        '#include <c10/cuda/CUDAException.h>\n#line 1 "a.cu"\nC10_CUDA_CHECK(cudaGetLastError());',
    ),
    "`THCCeilDiv`": (
        "int b = THCCeilDiv(n, 2);",
        absent("THCCeilDiv"),
        '#include <ATen/ceil_div.h>\n#line 1 "a.cu"\nint b = at::ceil_div(n, 2);',
    ),
    "`at::cuda::ATenCeilDiv`": (
        "int b = at::cuda::ATenCeilDiv(n, m);",
        'a.cu(1): error: namespace "at::cuda" has no member "ATenCeilDiv"\n',
        '#include <ATen/ceil_div.h>\n#line 1 "a.cu"\nint b = at::ceil_div(n, m);',
    ),
    "`THCudaMalloc(state, n)`": (
        "void* p = THCudaMalloc(state, 12);",
        absent("THCudaMalloc"),
        '#include <c10/cuda/CUDACachingAllocator.h>\n#line 1 "a.cu"\n'
        "void* p = c10::cuda::CUDACachingAllocator::raw_alloc( 12);",
    ),
    "`THCudaFree(state, p)`": (
        "THCudaFree(state, p);",
        absent("THCudaFree"),
        '#include <c10/cuda/CUDACachingAllocator.h>\n#line 1 "a.cu"\n'
        "c10::cuda::CUDACachingAllocator::raw_delete( p);",
    ),
    "`at::globalContext().getCurrentCUDAStream()`": (
        "auto s = at::globalContext().getCurrentCUDAStream();",
        'a.cu(1): error: class "at::Context" has no member "getCurrentCUDAStream"\n',
        '#include <ATen/cuda/CUDAContext.h>\n#line 1 "a.cu"\n'
        "auto s = at::cuda::getCurrentCUDAStream();",
    ),
    "`at::cuda::CUDAGuard`, `OptionalCUDAGuard` without their header": (
        "at::cuda::CUDAGuard g(0);",
        'a.cu(1): error: namespace "at::cuda" has no member "CUDAGuard"\n',
        '#include <c10/cuda/CUDAGuard.h>\n#line 1 "a.cu"\nc10::cuda::CUDAGuard g(0);',
    ),
    "`CUDACachingAllocator` without its header": (
        "c10::cuda::CUDACachingAllocator::emptyCache();",
        'a.cu(1): error: name followed by "::" must be a class or namespace name\n',
        '#include <c10/cuda/CUDACachingAllocator.h>\n#line 1 "a.cu"\n'
        "c10::cuda::CUDACachingAllocator::emptyCache();",
    ),
    "`cudaThreadSynchronize`": (
        "cudaThreadSynchronize();",
        absent("cudaThreadSynchronize"),
        "cudaDeviceSynchronize();",
    ),
    "`cudaThreadExit`": ("cudaThreadExit();", absent("cudaThreadExit"), "cudaDeviceReset();"),
} | {
    f"`{name}(...)`": (f"v += {name}(v, 1);", absent(name), f"v += {name}_sync(0xffffffff, v, 1);")
    for name in ("__shfl", "__shfl_up", "__shfl_down", "__shfl_xor", "__any", "__all", "__ballot")
}
HEADERS = {m.what: m.shim for m in MENDS if m.shim}
FLAGS = {  # flags before, what is said, flags after
    "`-std=c++14`, `-std=c++11`": (
        ("-O2 -std=c++14", "-std", "c++11"),
        "t.h:65:22: error: ‘is_enum_v’ is not a member of ‘std’; did you mean ‘is_enum’?\n",
        ("-O2",),
    ),
    "`-gencode` and `-arch` of GPUs that this nvcc does not know": (
        ("-gencode=arch=compute_60,code=sm_60", "-gencode", "arch=compute_90,code=sm_90"),
        "nvcc fatal   : Unsupported gpu architecture 'compute_60'\n",
        ("-gencode", "arch=compute_90,code=sm_90"),
    ),
    "warnings as errors (`-Werror`)": (
        ("-Wall", "-Werror"),
        "a.cu:1:57: error: ‘int f()’ is deprecated: old [-Werror=deprecated-declarations]\n",
        ("-Wall", "-Werror", "-Wno-error=deprecated-declarations"),
    ),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_line_is_mended(tmp_path, what):
    """Where the compiler says that it is wrong, and not without this row of the table."""
    line, said, now = TEXTS[what]
    text, mending = mended(tmp_path, line, said)
    assert text == now
    assert {row["mend"] for row in mending.rows()} == {what}
    assert mended(tmp_path, line, absent("other"))[0] == line


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_is_another_one(tmp_path, what):
    """In the source; where a header of the user's includes it, one of the old name stands in."""
    old, new = HEADERS[what]
    line = f"#include <{old}> // <{old}>"
    said = f"{{}}:1:10: fatal error: {old}: No such file or directory\n"
    text, mending = mended(tmp_path, line, said.format("a.cu"))
    assert text == f"#include <{new}> // <{old}>"
    assert [row["mend"] for row in mending.rows()] == [what]
    text, mending = mended(tmp_path, "int x;", said.format("/own/utils.h"))
    assert text == "int x;"
    assert mending.extension.cflags == (f"-I{tmp_path}/mended",)
    assert (tmp_path / "mended" / old).read_text() == f"#include <{new}>\n"


@pytest.mark.parametrize("what", FLAGS)
def test_flags_are_mended(tmp_path, what):
    before, said, after = FLAGS[what]
    _, mending = mended(tmp_path, "int x;", said, cuda_cflags=before)
    assert mending.extension.cuda_cflags == after
    assert mending.extension.cflags == ()
    assert {row["mend"] for row in mending.rows()} == {what}


def test_every_row_has_its_test():
    assert {m.what for m in MENDS} == TEXTS.keys() | HEADERS.keys() | FLAGS.keys()


def test_an_architecture_of_the_environments_list_goes_too(tmp_path):
    _, mending = mended(tmp_path, "int x;", "nvcc fatal   : Unsupported gpu architecture 'sm_60'\n")
    assert mending.toolchain.architectures == "9.0"
    assert mending.rows()[0]["after"] == "TORCH_CUDA_ARCH_LIST=9.0"


def test_warnings_of_the_compiler_that_nvcc_calls(tmp_path):
    said = "a.cu:1:5: error: ‘f’ is deprecated [-Werror=deprecated-declarations]\n"
    _, mending = mended(tmp_path, "f();", said, cuda_cflags=("-Xcompiler", "-Wall,-Werror"))
    assert mending.extension.cuda_cflags[-2:] == (
        "-Xcompiler",
        "-Wno-error=deprecated-declarations",
    )


TEXT = """#define CHECK_CUDA(x) AT_CHECK(x.is_cuda(), \\
    "AT_CHECK" #x)
#define CHECK_INPUT(x) CHECK_CUDA(x)
// AT_CHECK(1)
int AT_CHECK_count;
void f(at::Tensor x) {
    CHECK_INPUT(x);
    AT_DISPATCH_ALL_TYPES(
        x.type(), "f.type(),", [&] {
            const char* s = R"(x.type(),)";
        });
    AT_CHECK(true);
}
"""


def test_only_what_the_compiler_names_is_changed(tmp_path):
    """The macros that its line uses, the arguments that its macro has; no string, no comment."""
    text, mending = mended(tmp_path, TEXT, absent("AT_CHECK", 7))
    assert text == TEXT.replace("(x) AT_CHECK(x", "(x) TORCH_CHECK(x")
    (row,) = mending.rows()
    assert (row["file"], row["line"]) == ("a.cu", 1)
    assert diff([row]).splitlines() == [
        "@@ a.cu:1",
        "-#define CHECK_CUDA(x) AT_CHECK(x.is_cuda(), \\",
        "+#define CHECK_CUDA(x) TORCH_CHECK(x.is_cuda(), \\",
    ]
    assert summary([row]) == "`AT_CHECK` -> `TORCH_CHECK` (a.cu:1)"
    text, _ = mended(tmp_path, TEXT, NO_CONVERSION.replace("(1)", "(8)"))
    assert text == TEXT.replace('x.type(), "f', 'x.scalar_type(), "f')


def test_places_in_headers_of_torchs_lead_to_the_users_line(tmp_path):
    """As g++ tells them: the error in a header, the line of the source in a note."""
    said = (
        "/t/Dispatch.h:36:63: error: cannot convert ‘const at::DeprecatedTypeProperties’ to "
        "‘c10::ScalarType’\n"
        "a.cu:8:5: note: in expansion of macro ‘AT_DISPATCH_ALL_TYPES’\n"
    )
    text, _ = mended(tmp_path, TEXT, said)
    assert text == TEXT.replace('x.type(), "f', 'x.scalar_type(), "f')


def test_a_macro_in_the_users_header_is_given_its_new_name(tmp_path):
    """As the header is the user's, and no copy of it is made."""
    said = "/own/utils.h:3:23: error: ‘AT_CHECK’ was not declared in this scope\n"
    text, mending = mended(tmp_path, "CHECK(x);", said)
    assert text == "CHECK(x);"
    assert mending.extension.cflags == ("-DAT_CHECK=TORCH_CHECK",)


def test_no_line_is_lost(tmp_path):
    """Where what is replaced goes over several, so that places stay true."""
    text, mending = mended(tmp_path, "extern\n  THCState\n *state;\nint y;", absent("THCState", 1))
    assert text == "\n\n\nint y;"
    assert {row["line"] for row in mending.rows()} == {1, 2, 3}


def test_ptxas_names_no_line(tmp_path):
    """So every use is changed of what no GPU of this nvcc has."""
    said = (
        "ptxas a.ptx, line 65; error   : Instruction 'vote' without '.sync' is not supported on "
        ".target sm_70 and higher from PTX ISA version 6.4\n"
    )
    text, _ = mended(tmp_path, "a = __any(b);\n// __any(b)\nc = __any_sync(m, __all(d));", said)
    assert text == (
        "a = __any_sync(0xffffffff, b);\n// __any(b)\nc = __any_sync(m, __all_sync(0xffffffff, d));"
    )


def test_off_means_off(tmp_path, monkeypatch):
    monkeypatch.setenv("LOADER_MENDS", "off")
    assert mended(tmp_path, "AT_CHECK(x);", absent("AT_CHECK"))[0] == "AT_CHECK(x);"


def test_whatever_is_said_nothing_is_raised(tmp_path):
    """Of places that are not there, nor any text."""
    for said in (absent("AT_CHECK", 99), absent("AT_CHECK", 0), "AT_CHECK", "", "a.cu(1): error: "):
        text, mending = mended(tmp_path, "int x;", said)
        assert text == "int x;" and not mending.rows()
