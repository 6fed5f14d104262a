"""The needs of an extension's source, by its text: the narrowest headers that may serve.

torch/extension.h takes ten to twenty seconds to compile, and most extensions use a sliver of it. So
each source is tried with little first, and with more where names are missing; at last it is
compiled as torch.utils.cpp_extension compiles it. What it is tried with first is decided here.
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import cxx

# Headers of torch that are there for everything in them; what a source uses of it is worked out.
UMBRELLAS = ("torch/extension.h", "torch/torch.h", "torch/all.h", "torch/python.h")
UMBRELLAS += ("torch/types.h", "ATen/ATen.h")
# What the headers of single operators include, and a caller of operators does not need.
_HEAVY = ("ATen/Context.h", "ATen/DeviceGuard.h", "ATen/TensorUtils.h", "ATen/TracerMode.h")
_HEAVY += ("ATen/core/Reduction.h",)

# Beside what the binding includes. math.h and stdlib.h decide which `abs` an unqualified one is.
_STANDARD = "algorithm cmath cstring functional iostream map memory numeric sstream stdexcept "
_STANDARD += "unordered_map math.h stdlib.h"
# What torch's headers bring beside these, where a source names it.
_NAMED = {
    "array": "array",
    "atomic": "atomic\\w*",
    "bitset": "bitset",
    "cassert": "assert",
    "cctype": "is(?:alnum|alpha|digit|lower|space|upper)|tolower|toupper",
    "cfloat": "(?:FLT|DBL|LDBL)_\\w+",
    "chrono": "chrono",
    "climits": "(?:U?(?:CHAR|SHRT|INT|LONG|LLONG)|SCHAR)_(?:MAX|MIN|BIT)",
    "complex": "complex",
    "condition_variable": "condition_variable\\w*",
    "cstdint": "u?int(?:8|16|32|64)_t|U?INT(?:8|16|32|64)_(?:MAX|MIN)|u?intptr_t",
    "cstdio": "printf|fprintf|snprintf|puts|fopen|stderr|stdout",
    "ctime": "time_t|clock|clock_t",
    "deque": "deque",
    "fstream": "[io]?fstream",
    "future": "future|async|promise",
    "initializer_list": "initializer_list",
    "iomanip": "set(?:w|precision|fill)",
    "iterator": "back_inserter|istream_iterator|ostream_iterator|distance|advance",
    "limits": "numeric_limits",
    "list": "list",
    "mutex": "mutex|lock_guard|unique_lock|scoped_lock|call_once|once_flag",
    "optional": "optional|nullopt",
    "queue": "queue|priority_queue",
    "random": "mt19937\\w*|random_device|\\w+_distribution|default_random_engine",
    "set": "(?:multi)?set",
    "stack": "stack",
    "string": "string|to_string",
    "string_view": "string_view",
    "thread": "thread|this_thread",
    "tuple": "tuple|tie",
    "type_traits": "is_\\w+_v|enable_if_t|conditional_t|decay_t",
    "unordered_set": "unordered_set",
    "utility": "pair|move|swap|forward",
    "variant": "variant|visit",
    "vector": "vector",
}

# A macro that may be set by torch's headers: without them a condition could come out otherwise.
_TORCH_CONDITION = re.compile(r"\b_*(?:TORCH|AT|C10|CAFFE|PYBIND|USE|CUDNN)|__has_include")
# What the text that we add names.
_OURS = re.compile(r"\b(?:octet_binding|octet_configure|OCTET_TENSORS)\b")
_PYTHON_BINDING = re.compile(
    r"\b(?:PYBIND11_\w+|pybind11|py|TORCH_LIBRARY\w*|TORCH_EXTENSION_NAME|THP\w+|Library)\b"
)
# What torch/types.h and pybind.h have not.
_REST_OF_TORCH = re.compile(
    r"\btorch::(?:nn|optim|data|serialize|jit|save|load|python|autograd|fft|linalg|special|nested"
    r"|sparse|enumtype)\b|\busing\s+namespace\s+torch::"
)
TORCH_NAMES = re.compile(
    r"\b(?:torch|at|c10)\s*::|\b(?:TORCH_(?!EXTENSION_NAME\b)|AT_|C10_)\w+|\bTensor\b"
)


def standard_headers(code: str, also: tuple[str, ...] = tuple(_STANDARD.split())) -> str:
    """Return the lines that include what torch's headers bring of the standard library."""
    named = [name for name, words in _NAMED.items() if re.search(rf"\b(?:{words})\b", code)]
    return "".join(f"#include <{name}>\n" for name in [*also, *named])


def conditions(text: str) -> set[str]:
    """Return the names that conditions of the preprocessor ask for."""
    return {
        name
        for directive in cxx.directives(text)
        if directive.name in ("if", "elif", "ifdef", "ifndef")
        for name in cxx.identifiers(cxx.blanked(directive.rest)) - {"defined"}
    }


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

    @property
    def is_torchs_own(self) -> bool:
        """True for the last way, whose prelude stands in the text itself, as torch writes it."""
        return self.name == "full"


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
    """Return the ways to compile a source, the narrowest first; the last one is torch's own.

    `functions` tells that bindings follow; `implicit` that torch's umbrella header stands before
    the source without being written there.
    """
    full = _full(implicit, cuda)
    code, headers = cxx.blanked(text), cxx.includes(text)
    if not implicit and not any(header.name in UMBRELLAS for header in headers):
        return [full]  # it says itself what it needs
    others = [header for header in headers if header.name not in UMBRELLAS]
    of_torch = [h.name for h in others if re.match(r"(?:torch|ATen|c10|caffe2)/", h.name)]
    if any(map(_TORCH_CONDITION.search, conditions(text))) or _REST_OF_TORCH.search(code):
        return [full]
    wide = [full] if cuda else [TORCH, full]
    names_torch = TORCH_NAMES.search(code) or of_torch
    if not (functions or cuda or others or names_torch):
        binds = re.search(r"\bPYBIND11_MODULE\b", code)
        return [_pybind(code) if binds else plain(code, False, cuda), *wide]
    known = ("c10/", "ATen/cuda/", "ATen/Dispatch", "ATen/Parallel", "ATen/core/")
    if _PYTHON_BINDING.search(code) or any(not name.startswith(known) for name in of_torch):
        return wide
    if any(header.quoted for header in others) or _OURS.search(code):
        return wide  # may need torch as well
    if not names_torch:
        return [plain(code, functions, cuda), *wide]
    if functions and not _layout_is_known(torch_include):
        return wide
    slim = not any(name.startswith("ATen/") for name in of_torch)
    return [tensor(code, functions, torch_include, cuda, slim), *wide]


def _full(implicit: bool, cuda: bool) -> Level:
    """Return torch.utils.cpp_extension's own way: the headers it puts before a string, if any."""
    if not implicit:
        return Level("full", "")
    headers = ["torch/types.h", "cuda.h", "cuda_runtime.h"] if cuda else ["torch/extension.h"]
    return Level("full", "".join(f"#include <{name}>\n" for name in headers))


def _pybind(code: str) -> Level:
    """Return the way of a source that binds by hand and names nothing of torch."""
    prelude = standard_headers(code)
    prelude += "#include <pybind11/pybind11.h>\n#include <pybind11/stl.h>\n"
    return Level("pybind", prelude + "namespace py = pybind11;\n", UMBRELLAS)


def plain(code: str, functions: bool, cuda: bool) -> Level:
    """Return the way without torch."""
    prelude = standard_headers(code)
    prelude += "#include <cuda.h>\n#include <cuda_runtime.h>\n" if cuda else ""
    prelude += '#include "inline_binding.h"\n' if not cuda else ""
    return Level("plain", prelude, UMBRELLAS, own_binding=functions)


def tensor(code: str, functions: bool, torch_include: Path, cuda: bool, slim: bool) -> Level:
    """Return the way with tensors, their methods, and the functions of at:: that are named.

    `slim` leaves out what the headers of operators include without need.
    """
    prelude = "#define AT_PER_OPERATOR_HEADERS\n" + standard_headers(code)
    prelude += "#include <ATen/core/Tensor.h>\n#include <ATen/TensorOperators.h>\n"
    prelude += "#include <ATen/core/LegacyTypeDispatch.h>\n"
    called = sorted({*re.findall(r"(?<![.\w])(?<!->)([A-Za-z_]\w*)\s*\(", code)})
    operators = [w for w in called if (torch_include / "ATen" / "ops" / f"{w}.h").exists()]
    prelude += "".join(f"#include <ATen/ops/{name}.h>\n" for name in operators)
    if re.search(r"\bAT_DISPATCH_", code):
        prelude += "#include <ATen/Dispatch.h>\n"
    if re.search(r"\bparallel_for\b|\bparallel_reduce\b", code):
        prelude += "#include <ATen/Parallel.h>\n"
    if re.search(r"\bSlice\b|\bindexing::", code):
        prelude += "#include <ATen/TensorIndexing.h>\n"
    if re.search(r"\b(?:cout|cerr|ostringstream|stringstream)\b", code):
        prelude += "#include <ATen/core/Formatting.h>\n"
    prelude += "#include <cuda.h>\n#include <cuda_runtime.h>\n" if cuda else ""
    prelude += _torch_namespace(code, tuple(operators), torch_include)
    if not cuda:
        prelude += '#define OCTET_TENSORS\n#include "inline_binding.h"\n'
    hidden = (*UMBRELLAS, *_HEAVY) if slim else UMBRELLAS
    return Level("tensor", prelude, hidden, own_binding=functions)


def _torch_namespace(code: str, operators: tuple[str, ...], torch_include: Path) -> str:
    """Return what torch/types.h puts into the namespace torch, of it what is used."""
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
    """Return the functions of the namespace torch that make tensors and heed `requires_grad`."""
    text = _read(torch_include / "torch/csrc/autograd/generated/variable_factories.h")
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^inline at::Tensor (\w+)\(.*?^\}$", text, re.M | re.S):
        body = match[0]
        if "make_variable" in body and "detail::" not in body and "symint" not in match[1]:
            found.setdefault(match[1], []).append(body)
    return found


@cache
def _layout_is_known(torch_include: Path) -> bool:
    """True if torch declares what inline_binding.h takes for granted."""
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


def torch_include() -> Path:
    """Return the folder of torch's headers."""
    import torch

    return Path(os.path.dirname(torch.__file__)) / "include"
