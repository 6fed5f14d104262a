"""What an extension's source needs, by its text: the narrowest headers that may serve.

torch/extension.h takes ten to twenty seconds to compile, and most extensions use a sliver of it. So
each source is tried with little first, and with more where names are missing; at last it is
compiled as torch.utils.cpp_extension compiles it. What it is tried with first is decided here.
"""

import os
import re
from bisect import bisect
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Headers of torch that are there for everything in them; what a source uses of it is worked out.
UMBRELLAS = ("torch/extension.h", "torch/torch.h", "torch/all.h", "torch/python.h")
UMBRELLAS += ("torch/types.h", "ATen/ATen.h")
# What the headers of single operators include, and a caller of operators does not need.
_HEAVY = ("ATen/Context.h", "ATen/DeviceGuard.h", "ATen/TensorUtils.h", "ATen/TracerMode.h")
_HEAVY += ("ATen/core/Reduction.h",)

# Beside what the binding includes. math.h and stdlib.h decide which `abs` an unqualified one is.
_STANDARD = "algorithm cmath cstring functional iostream map memory numeric sstream stdexcept "
_STANDARD += "unordered_map math.h stdlib.h"

# A macro that may be set by torch's headers: without them a condition could come out otherwise.
_TORCH_CONDITION = re.compile(
    r"^[ \t]*#[ \t]*(?:if|elif|ifdef|ifndef)\b.*?"
    r"(?:\b_*(?:TORCH|AT|C10|CAFFE|PYBIND|USE|CUDNN)|__has_include)",
    re.MULTILINE,
)
_PYTHON_BINDING = re.compile(
    r"\b(?:PYBIND11_\w+|pybind11|py|TORCH_LIBRARY\w*|TORCH_EXTENSION_NAME|THP\w+|Library)\b"
)
# What torch/types.h and pybind.h have not.
_REST_OF_TORCH = re.compile(
    r"\btorch::(?:nn|optim|data|serialize|jit|save|load|python|autograd|fft|linalg|special|nested"
    r"|sparse|enumtype)\b|\busing\s+namespace\s+torch::"
)
_TORCH = re.compile(
    r"\b(?:torch|at|c10)\s*::|\b(?:TORCH_(?!EXTENSION_NAME\b)|AT_|C10_)\w+|\bTensor\b"
)

_SKIPPED = re.compile(
    r'R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|//(?:[^\n]|(?<=\\)\n)*|/\*.*?\*/'
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'",
    re.DOTALL,
)


def code_of(text: str) -> str:
    """The text with comments and literals blanked, every other character at its place."""
    return _SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def included(text: str) -> list[str]:
    """Names of the headers that a text includes, those in quotes as `"name"`."""
    found = re.findall(r'^[ \t]*#[ \t]*include[ \t]*(?:<([^>\n]+)>|("[^"\n]+"))', text, re.M)
    return [bracketed or quoted for bracketed, quoted in found]


@dataclass(frozen=True)
class Level:
    """A way to compile a source.

    Attributes:
        name: plain, tensor, torch or full; the last is torch.utils.cpp_extension's own way.
        prelude: what stands before the source.
        hidden: headers that are left out, since the prelude has what is needed of them.
        own_binding: whether functions are bound by inline_binding.h, not by pybind11.
        shared: whether the prelude is the same for all, so that it is worth precompiling.
    """

    name: str
    prelude: str
    hidden: tuple[str, ...] = ()
    own_binding: bool = False
    shared: bool = False


# What torch/extension.h brings for a source that binds by hand and names nothing of torch.
_PYBIND = "".join(f"#include <{name}>\n" for name in _STANDARD.split())
_PYBIND += "#include <pybind11/pybind11.h>\n#include <pybind11/stl.h>\nnamespace py = pybind11;\n"

TORCH = Level(
    "torch",
    "#include <torch/types.h>\n#include <torch/csrc/Exceptions.h>\n"
    "#include <torch/csrc/utils/pybind.h>\n",
    UMBRELLAS[:4],
    shared=True,
)


def levels(
    text: str, functions: bool, implicit: bool, torch_include: Path, cuda: bool = False
) -> list[Level]:
    """The ways to compile a source, the narrowest first; the last one is certain.

    `functions` tells that bindings follow; `implicit` that torch's umbrella header stands before
    the source without being written there.
    """
    umbrella = "torch/types.h" if cuda else "torch/extension.h"
    full = Level("full", f"#include <{umbrella}>\n" if implicit else "")
    if cuda:
        full = Level("full", full.prelude + "#include <cuda.h>\n#include <cuda_runtime.h>\n")
        full = full if implicit else Level("full", "")
    code, headers = code_of(text), included(text)
    if not implicit and not any(name.strip('"') in UMBRELLAS for name in headers):
        return [full]  # it says itself what it needs
    others = [n for n in headers if n.strip('"') not in UMBRELLAS]
    of_torch = [name for name in others if re.match(r'"?(?:torch|ATen|c10|caffe2)/', name)]
    if _TORCH_CONDITION.search(text) or _REST_OF_TORCH.search(code):
        return [full]
    wide = [full] if cuda else [TORCH, full]
    if not (functions or cuda or of_torch or others) and not _TORCH.search(code):
        binds = re.search(r"\bPYBIND11_MODULE\b", code)
        return (
            [Level("pybind", _PYBIND, UMBRELLAS), *wide] if binds else [plain(False, cuda), *wide]
        )
    known = ("c10/", "ATen/cuda/", "ATen/Dispatch", "ATen/Parallel", "ATen/core/")
    if _PYTHON_BINDING.search(code) or any(not n.startswith(known) for n in of_torch):
        return wide
    if any(name.startswith('"') for name in others):
        return wide  # may need torch as well
    if not _TORCH.search(code) and not of_torch:
        return [plain(functions, cuda), *wide]
    if functions and not _layout_is_known(torch_include):
        return wide
    slim = not any(name.startswith("ATen/") for name in of_torch)
    return [tensor(code, functions, torch_include, cuda, slim), *wide]


def plain(functions: bool, cuda: bool) -> Level:
    """Without torch."""
    prelude = "".join(f"#include <{name}>\n" for name in _STANDARD.split())
    prelude += "#include <cuda.h>\n#include <cuda_runtime.h>\n" if cuda else ""
    prelude += '#include "inline_binding.h"\n' if not cuda else ""
    return Level("plain", prelude, UMBRELLAS, own_binding=functions)


def tensor(code: str, functions: bool, torch_include: Path, cuda: bool, slim: bool) -> Level:
    """Tensors, their methods and operators, and the functions of at:: and torch:: that are named.

    `slim` leaves out what the headers of operators include without need.
    """
    prelude = "#define AT_PER_OPERATOR_HEADERS\n"
    prelude += "".join(f"#include <{name}>\n" for name in _STANDARD.split())
    prelude += "#include <ATen/core/Tensor.h>\n#include <ATen/TensorOperators.h>\n"
    prelude += "#include <ATen/core/LegacyTypeDispatch.h>\n"
    called = sorted({*re.findall(r"(?<![.\w])(?<!->)([A-Za-z_]\w*)\s*\(", code)})
    operators = [w for w in called if (torch_include / "ATen" / "ops" / f"{w}.h").exists()]
    prelude += "".join(f"#include <ATen/ops/{name}.h>\n" for name in operators)
    if re.search(r"\bAT_DISPATCH_", code):
        prelude += "#include <ATen/Dispatch.h>\n"
    if re.search(r"\bparallel_for\b|\bparallel_reduce\b", code):
        prelude += "#include <ATen/Parallel.h>\n"
    prelude += "#include <cuda.h>\n#include <cuda_runtime.h>\n" if cuda else ""
    prelude += _torch_namespace(code, tuple(operators), torch_include)
    if not cuda:
        prelude += '#define OCTET_TENSORS\n#include "inline_binding.h"\n'
    hidden = (*UMBRELLAS, *_HEAVY) if slim else UMBRELLAS
    return Level("tensor", prelude, hidden, own_binding=functions)


def _torch_namespace(code: str, operators: tuple[str, ...], torch_include: Path) -> str:
    """What torch/types.h puts into the namespace torch, of it what is used."""
    api = torch_include / "torch" / "csrc" / "api" / "include" / "torch" / "types.h"
    constants = re.findall(r"^constexpr auto k\w+ = [\w:]+;$", _read(api), re.M)
    lines = ["namespace torch {", "using namespace at;", "using Dtype = at::ScalarType;"]
    lines += ["using std::nullopt;", "using std::optional;", *constants]
    factories = _factories(torch_include)
    used = [text for name in operators for text in factories.get(name, ())]
    if used:
        lines += [
            "namespace autograd {",
            "inline at::Tensor make_variable(at::Tensor data, bool requires_grad) {",
            "    return requires_grad ? at::Tensor(data.set_requires_grad(true)) : data;",
            "}",
            "}",
            *used,
        ]
    return "\n".join([*lines, "}  // namespace torch", ""])


@cache
def _factories(torch_include: Path) -> dict[str, list[str]]:
    """The functions of the namespace torch that make tensors, which heed `requires_grad`."""
    text = _read(torch_include / "torch/csrc/autograd/generated/variable_factories.h")
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^inline at::Tensor (\w+)\(.*?^\}$", text, re.M | re.S):
        body = match[0]
        if "make_variable" in body and "detail::" not in body and "symint" not in match[1]:
            found.setdefault(match[1], []).append(body)
    return found


@cache
def _layout_is_known(torch_include: Path) -> bool:
    """Whether torch declares what inline_binding.h takes for granted."""
    variable = _read(torch_include / "torch/csrc/autograd/python_variable.h")
    variable = re.sub(r"//[^\n]*", "", variable)
    exceptions = _read(torch_include / "torch/csrc/Exceptions.h")
    return bool(
        re.search(r"struct THPVariable \{\s*PyObject_HEAD\s*at::Tensor cdata;", variable)
        and re.search(r"PyObject\* THPVariable_Wrap\(const at::TensorBase& var\);", variable)
        and re.search(
            r"void translate_exception_to_python\(\s*const std::exception_ptr&", exceptions
        )
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Halves:
    """A CUDA source as two: what the GPU runs, for nvcc, and the host's, for the C++ compiler."""

    device: str
    host: str


_KERNEL = re.compile(r"\b__global__\b")
_DEVICE = re.compile(r"\b__(?:device|constant|managed|host|shared|grid_constant)__\b")
_BOTH = re.compile(
    r"(?:struct|class|enum|union|template|(?:static |inline )*const(?:expr)?|inline)\b"
)
_SAFE_HEADER = re.compile(
    r"(?:torch|ATen|c10)/.*|cuda[\w.]*|[a-z_]+|c?math\.h|std\w+\.h|mma\.h|cooperative_groups\.h"
)
PUSH = (
    'extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);\n'
    "inline bool octet_configure(dim3 grid, dim3 block, size_t shared = 0,\n"
    "                            struct CUstream_st* stream = nullptr) {\n"
    "    return __cudaPushCallConfiguration(grid, block, shared, stream) == 0;\n"
    "}\n"
)
LAUNCHES = "#include <cuda.h>\n#include <cuda_runtime.h>\n" + PUSH


def halves(text: str, name: str) -> Halves | None:
    """A CUDA source split where that is safe; None where it is not.

    Whatever nvcc compiles it parses three times, and torch's headers cost it ten seconds and more.
    A launch `k<<<grid, block>>>(x)` becomes what nvcc itself makes of it: the configuration is
    pushed and the kernel's stub called, which has the kernel's name and lies in nvcc's half. Only
    sources whose kernels are plain functions at the top level are split; what is not understood
    leaves the source whole.
    """
    code = code_of(text)
    device: list[str] = []
    host: list[str] = []
    kernels: set[str] = set()
    starts = [0, *(found.end() for found in re.finditer("\n", text))]

    def place(at: int) -> str:
        return f'#line {bisect(starts, at)} "{name}"\n'

    items = _items(text, code)
    if items is None:
        return None
    for begin, end in items:
        item, bare = text[begin:end], code[begin:end]
        mentions_torch = _TORCH.search(bare)
        shown = f"{place(begin)}{item}\n"
        if bare.startswith("#"):
            words = re.match(r"#\s*(\w+)", bare)
            if not words or words[1] not in ("include", "define", "undef", "pragma"):
                return None
            header = re.match(r"#\s*include\s*<([^>]+)>", item)
            if words[1] == "include" and not (header and _SAFE_HEADER.fullmatch(header[1])):
                return None
            host.append(shown)
            if not (header and re.match(r"torch/|ATen/|c10/", header[1])):
                device.append(shown)
        elif _KERNEL.search(bare):
            declared = _declaration(bare)
            if mentions_torch or declared is None:
                return None
            kernels.add(declared[0])
            device.append(shown)
            host.append(f"{place(begin)}{declared[1]}\n")
        elif _DEVICE.search(bare):
            if mentions_torch:
                return None
            device.append(shown)
            if _BOTH.match(bare):
                host.append(shown)
            elif "__host__" in bare:
                return None
        elif re.match(r"(?:using|typedef)\b", bare) or _BOTH.match(bare):
            if "<<<" in bare:
                return None
            host.append(shown)
            if not mentions_torch:
                device.append(shown)
        elif bare.rstrip().endswith("}") or re.search(r"\)\s*;\s*$", bare):
            if not re.match(r"[\w:<>,&*\s\[\]]+\(", bare):
                return None
            launched = _launches(item, bare, kernels)
            if launched is None:
                return None
            host.append(f"{place(begin)}{launched}\n")
        else:
            return None
    if not kernels:
        return None
    return Halves("".join(device), "".join(host))


def _items(text: str, code: str) -> list[tuple[int, int]] | None:
    """Where each directive, declaration and definition at the top level begins and ends."""
    found, at, size = [], 0, len(code)
    while True:
        while at < size and code[at].isspace():
            at += 1
        if at >= size:
            return found
        begin = at
        if code[at] == "#":
            while at < size and not (code[at] == "\n" and text[at - 1] != "\\"):
                at += 1
        else:
            if re.compile(r"namespace\b|extern\b|asm\b|[\[;(]").match(code, at):
                return None
            goes_on = re.compile(r"(?:typedef|struct|class|enum|union)\b").match(code, at)
            depth = 0
            while at < size:
                depth += (code[at] in "({[") - (code[at] in ")}]")
                at += 1
                if depth < 0:
                    return None
                if depth == 0 and (
                    code[at - 1] == ";" or (code[at - 1] == "}" and _ends(code, begin, at, goes_on))
                ):
                    break
            else:
                return None
        found.append((begin, at))


def _ends(code: str, begin: int, at: int, goes_on) -> bool:
    """Whether a brace closed at the top level ends the item: not so in `struct S {};`."""
    if goes_on or re.match(r"\s*;", code[at : at + 80]):
        return False
    head = code[begin : code.index("{", begin)]
    return not re.search(r"=\s*$", head)


def _declaration(bare: str) -> tuple[str, str] | None:
    """A kernel's name and its declaration for the host; None for a template and the like."""
    head = bare.partition("{")[0].rstrip().rstrip(";")
    if re.match(r"template\b", head) or re.search(r"\b(?:static|inline|friend)\b", head):
        return None
    head = re.sub(r"\b__launch_bounds__\s*\([^()]*\)", " ", head)
    head = re.sub(r"\b__(?:global|grid_constant|cluster_dims)__\b", " ", head)
    name = re.search(r"\bvoid\s+(\w+)\s*\(", head)
    return (name[1], " ".join(head.split()) + ";") if name else None


def _launches(item: str, bare: str, kernels: set[str]) -> str | None:
    """A host function with each `<<<` written out; None where one is no plain launch."""
    pieces, at = [], 0
    for found in re.finditer("<<<", bare):
        name = re.search(r"(\w+)\s*$", bare[at : found.start()])
        end = bare.find(">>>", found.end())
        if not name or name[1] not in kernels or end < 0 or "<<<" in bare[found.end() : end]:
            return None
        begin = at + name.start()
        before = bare[:begin].rstrip()[-1:]
        if before not in (";", "{", "}", ")"):
            return None  # not a statement of its own
        configuration = item[found.end() : end]
        pieces.append(f"{item[at:begin]}!octet_configure({configuration}) ? (void)0 : {name[1]}")
        at = end + len(">>>")
    return "".join([*pieces, item[at:]])


def spoken(functions: dict[str, str], name: str, level: Level, error_handling: bool) -> str:
    """The text that binds functions, to be put behind the source."""
    if level.own_binding:
        return _own_binding(functions, name)
    wrap = "torch::wrap_pybind_function({})" if error_handling else "{}"
    lines = [
        f"m.def({_literal(f)}, {wrap.format(f)}, {_literal(doc)});" for f, doc in functions.items()
    ]
    return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}", ""])


def _own_binding(functions: dict[str, str], name: str) -> str:
    lines, rows, ready = [], [], []
    for i, (function, doc) in enumerate(functions.items()):
        said = _literal(function)
        lines += [
            f"static PyObject* octet_call_{i}(PyObject*, PyObject* const* given, Py_ssize_t n) {{",
            f"    return octet::call({said}, &{function}, given, n);",
            "}",
            f"static std::string octet_doc_{i};",
        ]
        ready.append(
            f"    octet_doc_{i} = octet::signature({said}, &{function}) + "
            f'"\\n\\n" + {_literal(doc)} + "\\n";'
        )
        ready.append(f"    octet_methods[{i}].ml_doc = octet_doc_{i}.c_str();")
        rows.append(
            f"    {{{said}, (PyCFunction)(void (*)())octet_call_{i}, METH_FASTCALL, nullptr}},"
        )
    lines += [
        "static PyMethodDef octet_methods[] = {",
        *rows,
        "    {nullptr, nullptr, 0, nullptr}};",
        "static PyModuleDef octet_module = {",
        f"    PyModuleDef_HEAD_INIT, {_literal(name)}, nullptr, -1,",
        "    octet_methods, nullptr, nullptr, nullptr, nullptr};",
        f"PyMODINIT_FUNC PyInit_{name}() {{",
        *ready,
        "    return octet::module(&octet_module);",
        "}",
        "",
    ]
    return "\n".join(lines)


def _literal(text: str) -> str:
    """A C++ string literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("\r", "\\r").replace("??", "?\\?") + '"'


def torch_include() -> Path:
    """Where torch's headers are."""
    import torch

    return Path(os.path.dirname(torch.__file__)) / "include"
