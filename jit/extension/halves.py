"""A CUDA source as two, so that nvcc, which parses all three times, never sees torch's headers.

Kernels go to nvcc and host functions to the C++ compiler. A launch `k<<<grid, block>>>(x)` becomes
what nvcc itself makes of it: the configuration is pushed and the kernel's stub called, which has
the kernel's name and lies in nvcc's half. Of a kernel template that half has the instances that the
host's object asks for.
"""

import re
from dataclasses import dataclass

from ..errors import cxx
from .levels import CUDA_HEADERS, TORCH_NAMES, include_lines, standard_headers

_KERNEL = re.compile(r"\b__global__\b")
_DEVICE = re.compile(r"\b__(?:device|constant|managed|host|shared|grid_constant)__\b")
_TEMPLATE = re.compile(r"template\s*<")
_SPECIALISED = re.compile(r"template\s*<\s*>")
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
_SOLID = re.compile(r"\S")
_LINE = re.compile(r"(?:\\\r?\n|[^\n])*")
_LAUNCH = re.compile(r"(\w+)\s*(?:<(?:[^<>;{}]|<[^<>;{}]*>)*>)?\s*<<<")
_CUDA_HEADERS = include_lines(CUDA_HEADERS)
_LAUNCHES = (
    _CUDA_HEADERS
    + 'extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);\n'
    "inline bool octet_configure(dim3 grid, dim3 block, size_t shared = 0,\n"
    "                            struct CUstream_st* stream = nullptr) {\n"
    "    return __cudaPushCallConfiguration(grid, block, shared, stream) == 0;\n"
    "}\n"
)
# c10's types that instances of a kernel may have; each has a header of its name.
_C10_TYPES = ("Half", "BFloat16", "complex")
# So that the host's half finds the stubs of template kernels, and no other library does.
LINKED_STUBS = ["-static-global-template-stub=false", "-Xcompiler", "-fvisibility=hidden"]


@dataclass(frozen=True)
class Halves:
    """What the GPU runs, for nvcc, and the host's part, for the C++ compiler."""

    device: str
    host: str
    templates: frozenset[str]  # the kernels that are templates

    def with_instances(self, symbols: list[str]) -> str | None:
        """Return the device's half with the instances that the host's object lacks.

        `symbols` are its undefined ones, demangled. None where one cannot be written as C++.
        """
        found = ((re.match(r"void (\w+)<", symbol), symbol) for symbol in symbols)
        lacking = [symbol for name, symbol in found if name and name[1] in self.templates]
        asked = "".join(f"template __global__ {symbol};\n" for symbol in lacking)
        # A lambda, a type without a name, or one of a header of torch's.
        types = "|".join(_C10_TYPES)
        if re.search(rf"\{{|\(anonymous|\[|'|\b(?:at|torch)::|\bc10::(?!(?:{types})\b)", asked):
            return None
        headers = [f"c10/util/{name}.h" for name in _C10_TYPES if f"c10::{name}" in asked]
        return f'{include_lines(headers)}{self.device}#line 1 "instances"\n{asked}'


def halves(text: str, name: str) -> Halves | None:
    """Split a CUDA source where that is safe; None where it is not.

    Only sources whose kernels are functions at the top level are split, or templates of such; what
    is not understood leaves the source whole.
    """
    code = cxx.blanked(text)
    items = _items(text, code)
    if items is None or re.search(r"\boctet_configure\b", code):
        return None
    split, texts = _Split(), ("", "")
    for begin, end in items:
        parts = split.parts(text[begin:end], code[begin:end])
        if parts is None:
            return None
        line = f'#line {1 + text.count(chr(10), 0, begin)} "{name}"\n'
        device, host = (f"{line}{part}\n" if part else "" for part in parts)
        texts = texts[0] + device, texts[1] + host
    if not split.kernels:
        return None
    return Halves(
        _CUDA_HEADERS + standard_headers(code, device=True) + texts[0],
        _LAUNCHES + texts[1],
        frozenset(split.templates),
    )


class _Split:
    """The items of a source parted one by one; each as (nvcc's text, the host's), "" for none.

    None stands for what is not understood.
    """

    def __init__(self) -> None:
        self.kernels: set[str] = set()
        self.templates: set[str] = set()
        self._device_names: set[str] = set()  # of what the host's half does not have

    def parts(self, item: str, bare: str) -> tuple[str, str] | None:
        """Part any item; `bare` is its code without comments and strings."""
        if bare.startswith("#"):
            return _directive(item)
        if _KERNEL.search(bare):
            declared = _declaration(bare)
            if TORCH_NAMES.search(bare) or declared is None:
                return None
            self.kernels.add(declared[0])
            if _TEMPLATE.match(bare):
                self.templates.add(declared[0])
            return item, declared[1]
        if _DEVICE.search(bare):
            return self._device_item(item, bare)
        if "<<<" not in bare and (re.match(r"(?:using|typedef)\b", bare) or _BOTH.match(bare)):
            variable = re.search(r"\}[^{}]*\w[^{}]*$", bare) and not bare.startswith("typedef")
            if variable or _SPECIALISED.match(bare):
                return None  # what is defined once, of which both halves would have one
            return "" if TORCH_NAMES.search(bare) else item, item
        return self._host_item(item, bare)

    def _device_item(self, item: str, bare: str) -> tuple[str, str] | None:
        if TORCH_NAMES.search(bare) or _SPECIALISED.match(bare):
            return None
        if "__host__" in bare or _TYPE.match(bare[_behind_template(bare) :].lstrip()):
            once = not _BOTH.match(bare) or re.search(r"\}\s*\w[^{}]*$", bare)
            return None if once else (item, item)
        head = re.split(r"[{;=]", bare, maxsplit=1)[0]
        name = re.search(r"(\w+)\s*(?:\(|\[|$)", head[_behind_template(head) :].rstrip())
        self._device_names |= {name[1]} if name else set()
        return item, ""

    def _host_item(self, item: str, bare: str) -> tuple[str, str] | None:
        """A function, or its declaration; one with what only nvcc's half has is not split off."""
        if not re.search(r"(?:\}|\)\s*;)\s*$", bare):
            return None
        if not re.match(r"[\w:<>,&*\s\[\]]+\(", bare[_behind_template(bare) :]):
            return None
        if self._device_names & cxx.identifiers(bare):
            return None
        launched = _launches(item, bare, self.kernels)
        return None if launched is None else ("", launched)


def _directive(item: str) -> tuple[str, str] | None:
    safe = [h for h in cxx.includes(item) if not h.quoted and _SAFE_HEADER.fullmatch(h.name)]
    words = {directive.name for directive in cxx.directives(item)}
    if not words <= {"include", "define", "undef", "pragma"} or ("include" in words and not safe):
        return None
    return "" if any(_OF_TORCH.match(header.name) for header in safe) else item, item


def _behind_template(bare: str) -> int:
    """The place behind `template <...>` at the beginning, 0 where there is none."""
    opened = _TEMPLATE.match(bare)
    return cxx.closing(bare, opened.end(), "<", ">") if opened else 0


def _items(text: str, code: str) -> list[tuple[int, int]] | None:
    """Where each directive, declaration and definition at the top level begins and ends."""
    found, at = [], 0
    while starts := _SOLID.search(code, at):
        begin = starts.start()
        lines = _LINE.finditer(text, begin)
        at = next(lines).end() if code[begin] == "#" else _item_end(code, begin)
        if at < 0:
            return None
        found.append((begin, at))
    return found


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
        if depth == 0 and code[at] == "}" and not goes_on:  # as it does in `struct S {};`
            head = code[begin : code.index("{", begin)].rstrip()
            if not head.endswith("=") and not re.match(r"\s*;", code[at + 1 : at + 81]):
                return at + 1
    return -1


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
    pieces, at, launches = [], 0, [*_LAUNCH.finditer(bare)]
    if len(launches) != bare.count("<<<"):
        return None
    for found in launches:
        begin, end = found.start(), bare.find(">>>", found.end())
        if found[1] not in kernels or end < 0 or "<<<" in bare[found.end() : end]:
            return None
        if bare[:begin].rstrip()[-1:] not in (";", "{", "}", ")"):
            return None  # not a statement of its own
        configuration, kernel = item[found.end() : end], item[begin : found.end() - len("<<<")]
        pieces.append(f"{item[at:begin]}!octet_configure({configuration}) ? (void)0 : {kernel}")
        at = end + len(">>>")
    return "".join([*pieces, item[at:]])
