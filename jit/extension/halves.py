"""A CUDA source as two, so that nvcc never sees torch's headers.

Whatever nvcc compiles it parses three times, and torch's headers cost it ten seconds and more. So
kernels go to nvcc and host functions to the C++ compiler. A launch `k<<<grid, block>>>(x)` becomes
what nvcc itself makes of it: the configuration is pushed and the kernel's stub called, which has
the kernel's name and lies in nvcc's half. Of a kernel template nvcc's half has the instances that
the host's object asks for.
"""

import re
from bisect import bisect
from dataclasses import dataclass

from ..errors import cxx
from .levels import CUDA_HEADERS, TORCH_NAMES, include_lines, standard_headers

_KERNEL = re.compile(r"\b__global__\b")
_DEVICE = re.compile(r"\b__(?:device|constant|managed|host|shared|grid_constant)__\b")
_TEMPLATE = re.compile(r"template\s*<")
_TYPE = re.compile(r"(?:struct|class|enum|union)\b")
_BOTH = re.compile(
    r"(?:struct|class|enum|union|template|(?:static |inline )*const(?:expr)?|inline)\b"
)
_SAFE_HEADER = re.compile(
    r"(?:torch|ATen|c10)/.*|cuda[\w.]*|[a-z_]+|c?math\.h|(?:std\w+|float|limits|string|assert)\.h"
    r"|mma\.h|cooperative_groups\.h"
)
_OF_TORCH = re.compile(r"(?:torch|ATen|c10)/")
_BEFORE_ITEM = re.compile(r"namespace\b|extern\b|asm\b|[\[;(]")
_GOES_ON = re.compile(r"(?:typedef|struct|class|enum|union)\b")
_CUDA_HEADERS = include_lines(CUDA_HEADERS)
_LAUNCHES = (
    _CUDA_HEADERS
    + 'extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);\n'
    "inline bool octet_configure(dim3 grid, dim3 block, size_t shared = 0,\n"
    "                            struct CUstream_st* stream = nullptr) {\n"
    "    return __cudaPushCallConfiguration(grid, block, shared, stream) == 0;\n"
    "}\n"
)
# Names of c10's types that instances of a kernel may have, with the header of each.
_C10_TYPES = {"Half": "Half", "BFloat16": "BFloat16", "complex": "complex"}
# So that the host's half finds the stubs of template kernels, and no other library does.
LINKED_STUBS = ["-static-global-template-stub=false", "-Xcompiler", "-fvisibility=hidden"]


@dataclass(frozen=True)
class Halves:
    """Return what the GPU runs, for nvcc, and the host's part, for the C++ compiler."""

    device: str
    host: str
    kernels: frozenset[str]
    templates: frozenset[str]  # those of the kernels that are templates

    def with_instances(self, symbols: list[str]) -> str | None:
        """Return the device's half with the instances that the host's object lacks.

        `symbols` are its undefined ones, demangled. None where one cannot be written as C++.
        """
        lines = []
        for symbol in symbols:
            name = re.match(r"void (\w+)<", symbol)
            if not name or name[1] not in self.templates:
                continue
            if re.search(r"\{|\(anonymous|\[|'", symbol):
                return None  # a lambda, or a type without a name
            lines.append(f"template __global__ {symbol};\n")
        asked = "".join(lines)
        headers = [
            f"#include <c10/util/{file}.h>\n"
            for name, file in _C10_TYPES.items()
            if f"c10::{name}" in asked
        ]
        if re.search(r"\b(?:at|torch)::|\bc10::(?!Half\b|BFloat16\b|complex\b)", asked):
            return None
        return "".join([*headers, self.device, '#line 1 "instances"\n', *lines])


def halves(text: str, name: str) -> Halves | None:
    """Split a CUDA source where that is safe; None where it is not.

    Only sources whose kernels are functions at the top level are split, or templates of such; what
    is not understood leaves the source whole.
    """
    code = cxx.blanked(text)
    if re.search(r"\boctet_configure\b", code):
        return None
    split = _Split(text, code, name)
    items = _items(text, code)
    if items is None or not all(split.takes(begin, end) for begin, end in items):
        return None
    if not split.kernels:
        return None
    return Halves(
        _CUDA_HEADERS + standard_headers(code, device=True) + "".join(split.device),
        _LAUNCHES + "".join(split.host),
        frozenset(split.kernels),
        frozenset(split.templates),
    )


class _Split:
    """A source that is being split, item by item."""

    def __init__(self, text: str, code: str, name: str):
        self._text, self._code, self._name = text, code, name
        self._lines = [0, *(found.end() for found in re.finditer("\n", text))]
        self.device: list[str] = []
        self.host: list[str] = []
        self.kernels: set[str] = set()
        self.templates: set[str] = set()
        self._device_names: set[str] = set()  # of what the host's half does not have

    def takes(self, begin: int, end: int) -> bool:
        """Put an item where it belongs; False where it is not understood."""
        item, bare = self._text[begin:end], self._code[begin:end]
        place = f'#line {bisect(self._lines, begin)} "{self._name}"\n'
        if bare.startswith("#"):
            return self._directive(place, item, bare)
        if _KERNEL.search(bare):
            return self._kernel(place, item, bare)
        if _DEVICE.search(bare):
            return self._device_item(place, item, bare)
        if "<<<" not in bare and (re.match(r"(?:using|typedef)\b", bare) or _BOTH.match(bare)):
            variable = re.search(r"\}[^{}]*\w[^{}]*$", bare) and not bare.startswith("typedef")
            if variable or re.match(r"template\s*<\s*>", bare):
                return False  # what is defined once, of which both halves would have one
            self.host.append(f"{place}{item}\n")
            if not TORCH_NAMES.search(bare):
                self.device.append(f"{place}{item}\n")
            return True
        return self._host_item(place, item, bare)

    def _directive(self, place: str, item: str, bare: str) -> bool:
        word = re.match(r"#\s*(\w*)", bare)[1]
        if word not in ("include", "define", "undef", "pragma"):
            return False
        header = re.match(r"#\s*include\s*<([^>]+)>", item)
        if word == "include" and not (header and _SAFE_HEADER.fullmatch(header[1])):
            return False
        self.host.append(f"{place}{item}\n")
        if not (header and _OF_TORCH.match(header[1])):
            self.device.append(f"{place}{item}\n")
        return True

    def _kernel(self, place: str, item: str, bare: str) -> bool:
        declared = _declaration(bare)
        if TORCH_NAMES.search(bare) or declared is None:
            return False
        self.kernels.add(declared[0])
        if _TEMPLATE.match(bare):
            self.templates.add(declared[0])
        self.device.append(f"{place}{item}\n")
        self.host.append(f"{place}{declared[1]}\n")
        return True

    def _device_item(self, place: str, item: str, bare: str) -> bool:
        if TORCH_NAMES.search(bare) or re.match(r"template\s*<\s*>", bare):
            return False
        self.device.append(f"{place}{item}\n")
        head = re.split(r"[{;=]", bare, maxsplit=1)[0]
        rest = bare[_behind_template(bare) :].lstrip()
        if "__host__" in bare or _TYPE.match(rest):
            if not _BOTH.match(bare) or re.search(r"\}\s*\w[^{}]*$", bare):
                return False
            self.host.append(f"{place}{item}\n")
        else:
            name = re.search(r"(\w+)\s*(?:\(|\[|$)", head[_behind_template(head) :].rstrip())
            self._device_names |= {name[1]} if name else set()
        return True

    def _host_item(self, place: str, item: str, bare: str) -> bool:
        """A function, or its declaration; one with what only nvcc's half has is not split off."""
        if not (bare.rstrip().endswith("}") or re.search(r"\)\s*;\s*$", bare)):
            return False
        start = _behind_template(bare)
        if not re.match(r"[\w:<>,&*\s\[\]]+\(", bare[start:]):
            return False
        if self._device_names & cxx.identifiers(bare):
            return False
        launched = _launches(item, bare, self.kernels)
        if launched is None:
            return False
        self.host.append(f"{place}{launched}\n")
        return True


def _behind_template(bare: str) -> int:
    """The place behind `template <...>` at the beginning, 0 where there is none."""
    opened = _TEMPLATE.match(bare)
    return cxx.closing(bare, opened.end(), "<", ">") if opened else 0


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
        elif (at := _item_end(code, begin)) < 0:
            return None
        found.append((begin, at))


def _item_end(code: str, begin: int) -> int:
    """Where a declaration or definition ends; -1 where that is not understood."""
    if _BEFORE_ITEM.match(code, begin):
        return -1
    goes_on, depth = _GOES_ON.match(code, begin), 0
    for at in range(begin, len(code)):
        depth += (code[at] in "({[") - (code[at] in ")}]")
        if depth < 0:
            return -1
        if depth == 0 and code[at] == ";":
            return at + 1
        if depth == 0 and code[at] == "}" and _ends(code, begin, at + 1, goes_on):
            return at + 1
    return -1


def _ends(code: str, begin: int, at: int, goes_on) -> bool:
    """True if a brace closed at the top level ends the item: not so in `struct S {};`."""
    if goes_on or re.match(r"\s*;", code[at : at + 80]):
        return False
    head = code[begin : code.index("{", begin)]
    return not re.search(r"=\s*$", head)


def _declaration(bare: str) -> tuple[str, str] | None:
    """A kernel's name and its declaration for the host; None for what has another linkage."""
    head = bare.partition("{")[0].rstrip().rstrip(";")
    if re.search(r"\b(?:static|inline|friend)\b", head):
        return None
    head = re.sub(r"\b__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)", " ", head)
    head = re.sub(r"\b__(?:global|grid_constant)__\b", " ", head)
    name = re.search(r"\bvoid\s+(\w+)\s*\(", head)
    return (name[1], " ".join(head.split()) + ";") if name else None


def _launches(item: str, bare: str, kernels: set[str]) -> str | None:
    """A host function with each `<<<` written out; None where one is no plain launch."""
    pieces, at = [], 0
    for found in re.finditer("<<<", bare):
        begin = _launched(bare, at, found.start())
        name = re.match(r"\w*", bare[begin:])[0]
        end = bare.find(">>>", found.end())
        if name not in kernels or end < 0 or "<<<" in bare[found.end() : end]:
            return None
        if bare[:begin].rstrip()[-1:] not in (";", "{", "}", ")"):
            return None  # not a statement of its own
        configuration, kernel = item[found.end() : end], item[begin : found.start()]
        pieces.append(f"{item[at:begin]}!octet_configure({configuration}) ? (void)0 : {kernel}")
        at = end + len(">>>")
    return "".join([*pieces, item[at:]])


def _launched(bare: str, least: int, end: int) -> int:
    """Where the kernel's name before `<<<` begins, with its template arguments behind it."""
    at = len(bare[:end].rstrip())
    if bare[at - 1 : at] == ">":
        depth = 0
        while at > least:
            at -= 1
            depth += (bare[at] == ">") - (bare[at] == "<")
            if depth == 0:
                break
        at = len(bare[:at].rstrip())
    while at > least and (bare[at - 1].isalnum() or bare[at - 1] == "_"):
        at -= 1
    return at
