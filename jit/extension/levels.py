"""The narrowest headers that may serve an extension's source, by its text.

torch/extension.h takes ten to twenty seconds to compile, and most extensions use a sliver of it. So
each source is tried with little first, and with more where names are missing; at last it is
compiled as torch.utils.cpp_extension compiles it.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..errors import cxx
from .arguments import Extension

# Headers of torch that are there for everything in them; what a source uses of it is worked out.
_WHOLE = ("torch/extension.h", "torch/torch.h", "torch/all.h", "torch/python.h")
UMBRELLAS = (*_WHOLE, "torch/types.h", "ATen/ATen.h")
CUDA_HEADERS = ("cuda.h", "cuda_runtime.h")
# What the headers of single operators include, and a caller of operators does not need.
_HEAVY = ("Context.h", "DeviceGuard.h", "TensorUtils.h", "TracerMode.h", "core/Reduction.h")

# math.h and stdlib.h decide which `abs` an unqualified one is.
_C_HEADERS = ("math.h", "stdlib.h", "string.h")
# What torch's headers bring for a source that names `std`, ...
_STANDARD = "algorithm cmath functional iostream map memory numeric sstream stdexcept unordered_map"
# ... and where one of these words is named.
_WORDS = r"""
array:array atomic:atomic\w* bitset:bitset cassert:assert chrono:chrono complex:complex
cctype:is(?:alnum|alpha|digit|lower|space|upper)|tolower|toupper cfloat:(?:FLT|DBL|LDBL)_\w+
climits:(?:U?(?:CHAR|SHRT|INT|LONG|LLONG)|SCHAR)_(?:MAX|MIN|BIT)
condition_variable:condition_variable\w*
cstdint:u?int(?:8|16|32|64)_t|U?INT(?:8|16|32|64)_(?:MAX|MIN)|u?intptr_t
cstdio:printf|fprintf|snprintf|puts|fopen|stderr|stdout ctime:time_t|clock|clock_t
deque:deque fstream:[io]?fstream future:future|async|promise initializer_list:initializer_list
iomanip:set(?:w|precision|fill) limits:numeric_limits list:list
iterator:back_inserter|istream_iterator|ostream_iterator|distance|advance
mutex:mutex|lock_guard|unique_lock|scoped_lock|call_once|once_flag optional:optional|nullopt
queue:queue|priority_queue
random:mt19937\w*|random_device|\w+_distribution|default_random_engine
set:(?:multi)?set stack:stack string:string|to_string string_view:string_view
thread:thread|this_thread tuple:tuple|tie type_traits:is_\w+_v|enable_if_t|conditional_t|decay_t
unordered_set:unordered_set utility:pair|move|swap|forward variant:variant|visit vector:vector
"""
_NAMED = dict(entry.split(":", 1) for entry in _WORDS.split())
# Of ATen what is included where a source names it.
_OF_ATEN = {
    "ATen/Dispatch.h": r"AT_DISPATCH_\w+",
    "ATen/Parallel.h": "parallel_for|parallel_reduce",
    "ATen/TensorIndexing.h": "Slice|indexing",
    "ATen/core/Formatting.h": "cout|cerr|ostringstream|stringstream",
}

# A macro that may be set by torch's headers: without them a condition could come out otherwise.
_TORCH_CONDITION = re.compile(r"\b_*(?:TORCH|AT|C10|CAFFE|PYBIND|USE|CUDNN)|__has_include")
# What the text that we add names.
_OURS = re.compile(r"\b(?:octet_binding|octet_configure|OCTET_TENSORS)\b")
_PYTHON_BINDING = re.compile(
    r"\b(?:PYBIND11_\w+|pybind11|py|TORCH_LIBRARY\w*|TORCH_EXTENSION_NAME|THP\w+|Library)\b"
)
# Of these the names that pybind11 has, with torch's own conversions of tensors.
_PYBIND = re.compile(r"\b(?:PYBIND11_\w+|pybind11|py|TORCH_EXTENSION_NAME)\b")
_PYBIND_OF_TORCH = ("torch/csrc/Exceptions.h", "torch/csrc/utils/pybind.h", "pybind11/stl.h")
# What torch/types.h and pybind.h have not.
_REST_OF_TORCH = re.compile(
    r"\btorch::(?:nn|optim|data|serialize|jit|save|load|python|autograd|fft|linalg|special|nested"
    r"|sparse|enumtype)\b|\busing\s+namespace\s+torch::"
)
TORCH_NAMES = re.compile(
    r"\b(?:torch|at|c10)\s*::|\b(?:TORCH_(?!EXTENSION_NAME\b)|AT_|C10_)\w+|\bTensor\b"
)


def include_lines(names: Iterable[str]) -> str:
    """Return the lines that include these headers."""
    return "".join(f"#include <{name}>\n" for name in names)


def standard_headers(code: str, device: bool = False) -> str:
    """Return the lines that include what torch's headers bring of the standard library.

    The kernels' half of a CUDA source (`device`) gets no more than it names.
    """
    always = [] if device else [*_C_HEADERS]
    if not device and re.search(r"\bstd\b", code):
        always += _STANDARD.split()
    return include_lines([*always, *_named(_NAMED, code)])


def _named(headers: dict[str, str], code: str) -> list[str]:
    return [name for name, words in headers.items() if re.search(rf"\b(?:{words})\b", code)]


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
    """A way to compile a source."""

    # plain, pybind, tensor, bound, torch or full; the last is torch.utils.cpp_extension's own
    name: str
    prelude: str  # what stands before the source
    hidden: tuple[str, ...] = ()  # headers left out, since the prelude has what is needed of them
    own_binding: bool = False  # functions are bound by inline_binding.h, not by pybind11
    shared: bool = False  # the prelude is the same for all, so that it is worth precompiling

    @property
    def is_torchs_own(self) -> bool:
        """True for the last way, whose prelude stands in the text itself, as torch writes it."""
        return self.name == "full"


TORCH = Level(
    "torch",
    "#include <torch/types.h>\n#include <torch/csrc/Exceptions.h>\n"
    "#include <torch/csrc/utils/pybind.h>\n",
    _WHOLE,
    shared=True,
)


def levels(text: str, functions: bool, implicit: bool, cuda: bool = False) -> list[Level]:
    """Return the ways to compile a source, the narrowest first; the last one is torch's own.

    `functions` tells that bindings follow; `implicit` that torch's umbrella header stands before
    the source without being written there.
    """
    gpu = include_lines(CUDA_HEADERS) if cuda else ""
    umbrella = ["torch/types.h", *CUDA_HEADERS] if cuda else ["torch/extension.h"]
    full = Level("full", include_lines(umbrella) if implicit else "")
    code, headers = cxx.blanked(text), cxx.includes(text)
    if not implicit and not any(header.name in UMBRELLAS for header in headers):
        return [full]  # it says itself what it needs
    others = [header for header in headers if header.name not in UMBRELLAS]
    of_torch = [h.name for h in others if re.match(r"(?:torch|ATen|c10|caffe2)/", h.name)]
    if any(map(_TORCH_CONDITION.search, conditions(text))) or _REST_OF_TORCH.search(code):
        return [full]
    wide = [full] if cuda else [TORCH, full]
    names_torch = TORCH_NAMES.search(code) or of_torch
    standard = standard_headers(code)
    own = gpu or '#include "inline_binding.h"\n'
    plain = Level("plain", standard + own, UMBRELLAS, own_binding=functions)
    if not (functions or cuda or others or names_torch):
        if re.search(r"\bPYBIND11_MODULE\b", code):  # binds by hand, and names nothing of torch
            bound = include_lines(["pybind11/pybind11.h", "pybind11/stl.h"])
            plain = Level("pybind", f"{standard}{bound}namespace py = pybind11;\n", UMBRELLAS)
        return [plain, *wide]
    known = ("c10/", "ATen/cuda/", "ATen/Dispatch", "ATen/Parallel", "ATen/core/")
    others = [header for header in others if not header.name.startswith("pybind11/")]
    by_hand = not cuda and _PYBIND.search(code) is not None
    if _PYTHON_BINDING.search(_PYBIND.sub("", code)):
        return wide
    if any(not name.startswith(known) for name in of_torch):
        return wide
    if (
        any(header.quoted for header in others)
        or _OURS.search(code)
        or (by_hand and not names_torch)
    ):
        return wide  # may need torch as well
    if not names_torch:
        return [plain, *wide]
    if functions and not _layout_is_known():
        return wide
    prelude = _tensors(code, standard + gpu)
    if by_hand:
        prelude += include_lines(_PYBIND_OF_TORCH)
    else:
        prelude += "" if cuda else f"#define OCTET_TENSORS\n{own}"
    slim = not any(name.startswith("ATen/") for name in of_torch)
    hidden = (*UMBRELLAS, *(f"ATen/{name}" for name in _HEAVY)) if slim else UMBRELLAS
    if by_hand:
        return [Level("bound", prelude, hidden), *wide]
    return [Level("tensor", prelude, hidden, own_binding=functions), *wide]


def binding(functions: dict[str, str], extension: Extension, level: Level) -> str:
    """Return the text behind a source that binds functions as the extension's module.

    It declares nothing but the module's own entry, so that no function's name can clash with it.
    """
    if level.own_binding:
        entries = "".join(
            f"octet_binding::entry<{i}, &{f}>({cxx.literal(f)}, {cxx.literal(doc)}),\n"
            for i, (f, doc) in enumerate(functions.items())
        )
        name, free = extension.name, str(extension.gil_not_used).lower()
        return (
            f"PyMODINIT_FUNC PyInit_{name}() {{\n"
            f"return octet_binding::module<{free}>("
            f"{cxx.literal(name)}, {{\n{entries}    {{}}}});\n}}\n"
        )
    wrap = "torch::wrap_pybind_function({})" if extension.error_handling else "{}"
    lines = [
        f"m.def({cxx.literal(f)}, {wrap.format(f)}, {cxx.literal(doc)});"
        for f, doc in functions.items()
    ]
    free = ", pybind11::mod_gil_not_used()" if extension.gil_not_used else ""
    return "\n".join([f"PYBIND11_MODULE(TORCH_EXTENSION_NAME, m{free}) {{", *lines, "}", ""])


def _tensors(code: str, before: str) -> str:
    """Return what brings tensors, their methods, and the functions of at:: that are named."""
    called = {*re.findall(r"(?<![.\w])(?<!->)([A-Za-z_]\w*)\s*\(", code)}
    operators = [w for w in sorted(called) if (torch_include() / f"ATen/ops/{w}.h").exists()]
    headers = ["ATen/core/Tensor.h", "ATen/TensorOperators.h", "ATen/core/LegacyTypeDispatch.h"]
    headers += [f"ATen/ops/{name}.h" for name in operators] + _named(_OF_ATEN, code)
    define = "#define AT_PER_OPERATOR_HEADERS\n"
    return define + before + include_lines(headers) + _torch_namespace(operators)


def _torch_namespace(operators: list[str]) -> str:
    """Return what torch/types.h puts into the namespace torch, of it what is used."""
    types = read_header("torch/csrc/api/include/torch/types.h")
    constants = re.findall(r"^constexpr auto k\w+ = [\w:]+;$", types, re.M)
    used = [text for name in operators for text in _factories().get(name, ())]
    return "\n".join(
        [
            "namespace torch {\nusing namespace at;\nusing Dtype = at::ScalarType;",
            "using std::nullopt;\nusing std::optional;",
            *constants,
            "namespace autograd {",
            "inline at::Tensor make_variable(at::Tensor data, bool requires_grad) {",
            "    return requires_grad ? at::Tensor(data.set_requires_grad(true)) : data;",
            "}\n}",
            *used,
            "}  // namespace torch\n",
        ]
    )


@cache
def _factories() -> dict[str, list[str]]:
    """Return the functions of the namespace torch that make tensors and heed `requires_grad`."""
    text = read_header("torch/csrc/autograd/generated/variable_factories.h")
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^inline at::Tensor (\w+)\(.*?^\}$", text, re.M | re.S):
        body = match[0]
        if "make_variable" in body and "detail::" not in body and "symint" not in match[1]:
            found.setdefault(match[1], []).append(body)
    return found


@cache
def _layout_is_known() -> bool:
    """True if torch declares what inline_binding.h takes for granted."""
    declared = {
        "autograd/python_variable.h": [
            r"struct THPVariable \{\s*PyObject_HEAD\s*at::Tensor cdata;",
            r"PyObject\* THPVariable_Wrap\(const at::TensorBase& var\);",
        ],
        "Exceptions.h": [r"void translate_exception_to_python\(\s*const std::exception_ptr&"],
    }
    return all(
        re.search(pattern, re.sub(r"//[^\n]*", "", read_header(f"torch/csrc/{header}")))
        for header, patterns in declared.items()
        for pattern in patterns
    )


def read_header(header: str) -> str:
    """Return the text of a header of torch's; "" where torch has it not."""
    try:
        return (torch_include() / header).read_text(errors="replace")
    except OSError:
        return ""


def torch_include() -> Path:
    """Return the folder of torch's headers."""
    import torch

    return Path(os.path.dirname(torch.__file__)) / "include"
