"""What torch and CUDA have removed, and what stands there now: the table of mends.

A row has what a compiler says and the change that answers it. A change of the text is made in the
line that the compiler names, or in a macro of the source's that the line uses, and never in strings
or comments; that it was right is for the compiler to say, which runs again behind it.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..errors import cxx

_ABSENT = (
    r"not declared|not been declared|undeclared|does not name a|not a member|is undefined"
    r"|no (?:actual )?member|unknown type name|no template named|not a class or namespace"
    r"|must be a class or namespace"
)


class Edit(NamedTuple):
    """A piece of a text and what takes its place."""

    begin: int
    end: int
    text: str


class Place:
    """What a compiler names of a source: the line, and the source's own macros that it uses.

    Where it names none, as ptxas, all of the source.
    """

    def __init__(self, text: str, line: int | None):
        self.text, self.code = text, cxx.blanked(text)
        self._directives = cxx.blanked(text, strings=False)
        starts = [0, *(match.end() for match in re.finditer("\n", text)), len(text) + 1]
        self._spans = [(0, len(text))] if line is None else []
        if line and 0 < line < len(starts):
            self._spans = [(starts[line - 1], starts[line] - 1)]
        macros = re.finditer(r"(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)(?:\\\r?\n|[^\n])*", self.code)
        defined = {match[1]: match.span() for match in macros}
        for begin, end in self._spans:  # grows
            for name in cxx.identifiers(self.code[begin:end]):
                if defined.get(name, self._spans[0]) not in self._spans:
                    self._spans.append(defined[name])

    def find(self, pattern: str, includes: bool = False) -> Iterator[re.Match]:
        """Yield where a pattern begins in this place's code; of `includes` with their "names"."""
        code = self._directives if includes else self.code
        for begin, end in self._spans:
            yield from (m for m in re.finditer(pattern, code) if begin <= m.start() < end)


Change = Callable[[Place], Iterator[Edit]]


class Mend(NamedTuple):
    """A row: `said` is searched in a compiler's message, `what` and `now` are for people."""

    what: str
    now: str
    said: str
    change: Change | None = None
    include: str = ""  # a header that the change needs
    flags: Callable[[list[str], str], list[str]] | None = None  # of the caller's, in place of text
    define: str = ""  # a macro that does the same for headers of the caller's
    everywhere: bool = False  # also where the message has no place: the name is nowhere allowed
    shim: tuple[str, str] | None = None  # a header's name, and the one that it is to include


def absent(*names: str) -> str:
    """Return the pattern of a message which says that a name is not there."""
    return (
        rf"(?=.*(?:{_ABSENT})).*[‘'\"](?:class |struct )?(?:[\w:]+::)?(?:{'|'.join(names)})[’'\"]"
    )


def swap(pattern: str, becomes: str, includes: bool = False) -> Change:
    """Return the change of what a pattern finds, \\1 in `becomes` being its first group's text."""

    def change(place: Place) -> Iterator[Edit]:
        for match in place.find(pattern, includes):

            def group(number: re.Match, match: re.Match = match) -> str:
                return place.text[slice(*match.span(int(number[1])))]

            yield Edit(*match.span(), re.sub(r"\\(\d)", group, becomes))

    return change


def several(*changes: Change) -> Change:
    """Return changes as one."""

    def change(place: Place) -> Iterator[Edit]:
        for each in changes:
            yield from each(place)

    return change


def _dispatched(place: Place) -> Iterator[Edit]:
    """`x.type()` as an argument of AT_DISPATCH_..., before its name, which is a string."""
    for macro in place.find(r"\bAT_DISPATCH_\w+\s*\("):
        end = cxx.closing(place.code, macro.end(), "(", ")")
        name = place.text.find('"', macro.end(), end)
        arguments = place.code[macro.end() : name if name >= 0 else end]
        for found in re.finditer(r"(?:\.|->)\s*(type\s*\(\s*\))\s*(?=,)", arguments):
            begin, stop = (macro.end() + at for at in found.span(1))
            yield Edit(begin, stop, "scalar_type()")


def _without(*patterns: str) -> Callable[[list[str], str], list[str]]:
    """Return what leaves out those flags of the caller's that a pattern matches as a whole.

    WHAT in a pattern is what the compiler's message names.
    """

    def flags(given: list[str], what: str) -> list[str]:
        found, words = [], iter(given)
        for word in words:
            pair = [next(words, "")] if word in _WITH_VALUE else []
            whole = "=".join([word, *pair])
            if not any(re.fullmatch(p.replace("WHAT", what), whole) for p in patterns):
                found += [word, *pair]
        return found

    return flags


_WITH_VALUE = ("-gencode", "--generate-code", "-arch", "-code", "-std", "--gpu-architecture")


def _no_errors(given: list[str], what: str) -> list[str]:
    """Have warnings of a kind only warn, where flags make them errors."""
    more: list[str] = []
    for before, word in zip(["", *given], given, strict=False):
        handed_on = "-Xcompiler" in (before, word.partition("=")[0])
        if any(part in ("-Werror", f"-Werror={what}") for part in re.split(",|Xcompiler=", word)):
            more += [*(["-Xcompiler"] if handed_on else []), f"-Wno-error={what}"]
    return [*given, *more] if f"-Wno-error={what}" not in given else given


_TYPE = r"(?:\.|->)\s*type\s*\(\s*\)"
_STATE = r"\(\s*[\w.:>()-]*?\s*\)"  # an argument that nobody needs any more
_CONTEXT = r"at::globalContext\s*\(\s*\)\s*\.\s*"
_THC = "ATen/cuda/CUDAContext.h"
_ALLOCATOR = "c10/cuda/CUDACachingAllocator.h"
_FACTORY = r"(?:torch|at)::(CPU|CUDA)\s*\(\s*((?:at|torch)::k\w+)\s*\)\s*\.\s*"
_MADE = r"(zeros|ones|rand|randn|empty)\s*\(((?:[^()]|\([^()]*\))*)\)"
_MADE_TENSOR = r"tensor\s*\(((?:[^()]|\([^()]*\))*)\)"
_OPTIONS = r"torch::dtype(\2).device(torch::k\1)"


def _renamed(old: str, new: str, include: str = "", pattern: str = "") -> Mend:
    """The row of a name that is another one today."""
    last = old.rpartition("::")[2]
    change = swap(pattern or rf"(?<![\w:.>]){old}\b", new)
    define = "" if "::" in old else f"-D{old}={new}"
    return Mend(f"`{old}`", f"`{new}`", absent(last), change, include, define=define)


def _header(old: str, new: str) -> Mend:
    """The row of a header that is another one today."""
    name = re.escape(old)
    said = rf"{name}(?:: No such|[\"'] file not)|cannot.*\"{name}\""
    line = rf"#[ \t]*include[ \t]*[<\"]{name}[>\"]"
    change = swap(line, f"#include <{new}>", includes=True)
    return Mend(f"`{old}`", f"`{new}`", said, change, shim=(old, new))


def _of_warp(name: str) -> Mend:
    """The row of a function of warps, which takes a mask of lanes today."""
    change = swap(rf"(?<![\w:.]){name}\s*\(", f"{name}_sync(0xffffffff, ")
    now = f"`{name}_sync(0xffffffff, ...)`, which all lanes of a warp have to reach"
    said = rf"[‘'\"]{name}[’'\"].*(?:undefined|not declared|undeclared|deprecated)"
    said += "|Instruction '(?:vote|shfl)' without '.sync'"
    return Mend(f"`{name}(...)`", now, said, change, everywhere=True)


_HEADERS = """
THC/THC.h ATen/cuda/CUDAContext.h
THC/THCGeneral.h ATen/cuda/CUDAContext.h
THC/THCAtomics.cuh ATen/cuda/Atomic.cuh
THC/THCDeviceUtils.cuh ATen/cuda/DeviceUtils.cuh
THC/THCNumerics.cuh ATen/NumericUtils.h
TH/TH.h ATen/ATen.h
ATen/Type.h ATen/ATen.h
ATen/Error.h c10/util/Exception.h
ATen/Half.h c10/util/Half.h
ATen/optional.h c10/util/Optional.h
ATen/core/optional.h c10/util/Optional.h
ATen/cuda/CUDAGuard.h c10/cuda/CUDAGuard.h
ATen/cuda/CUDAStream.h c10/cuda/CUDAStream.h
"""

MENDS = (
    Mend(
        "`AT_DISPATCH_...(x.type(), ...)`",
        "`x.scalar_type()`",
        r"DeprecatedTypeProperties.* to \S*ScalarType|DeprecatedTypeProperties.*scalar_type",
        _dispatched,
    ),
    Mend(
        "`x.type()` for a dtype",
        "`x.scalar_type()`",
        r"DeprecatedTypeProperties.* to \S*ScalarType.*(?:initiali|argument|return|assign)"
        r"|(?:operator|operands).*DeprecatedTypeProperties.*ScalarType",
        swap(_TYPE + r"(?!\s*(?:\.|->))", ".scalar_type()"),
    ),
    Mend(
        "`x.type().tensor(...)`, `x.type().zeros(...)`",
        "`torch::empty(..., x.options())`, `torch::zeros(..., x.options())`",
        r"DeprecatedTypeProperties.* no member(?: named)? [‘'\"](?:tensor|zeros|ones|randn?)[’'\"]",
        several(
            swap(rf"\b(\w+){_TYPE}\s*\.\s*{_MADE}", r"torch::\2(\3, \1.options())"),
            swap(rf"\b(\w+){_TYPE}\s*\.\s*{_MADE_TENSOR}", r"torch::empty(\2, \1.options())"),
            swap(_FACTORY + _MADE, rf"torch::\3(\4, {_OPTIONS})"),
            swap(_FACTORY + _MADE_TENSOR, rf"torch::empty(\3, {_OPTIONS})"),
        ),
    ),
    Mend(
        "`x.type().dtype()`",
        "`x.scalar_type()`",
        r"DeprecatedTypeProperties.* no member(?: named)? [‘'\"]dtype[’'\"]",
        swap(rf"{_TYPE}\s*\.\s*dtype\s*\(\s*\)", ".scalar_type()"),
    ),
    Mend(
        "`x.is_variable()`",
        "`true`",
        absent("is_variable"),
        swap(r"\b\w+(?:\.|->)is_variable\s*\(\s*\)", "true"),
    ),
    _renamed("AT_CHECK", "TORCH_CHECK"),
    Mend(
        "`PYBIND11_MODULE` without its header",
        "with `torch/extension.h`",
        absent("PYBIND11_MODULE") + r"|expected constructor, destructor, or type conversion before"
        r"|this declaration has no storage class",
        swap(r"\bPYBIND11_MODULE\b", "PYBIND11_MODULE"),
        "torch/extension.h",
    ),
    _renamed("c10::make_unique", "std::make_unique", pattern=r"\bc10::(?:guts::)?make_unique\b"),
    _renamed("torch::jit::RegisterOperators", "torch::RegisterOperators"),
    *(_header(*row.split()) for row in _HEADERS.strip().splitlines()),
    Mend(
        "`extern THCState *state;`",
        "nothing",
        absent("THCState"),
        swap(
            r"\b(?:extern\s+)?THCState\s*\*\s*\w+\s*"
            rf"(?:=\s*{_CONTEXT}(?:lazyInitCUDA|getTHCState)\s*\(\s*\)\s*)?;",
            "",
        ),
    ),
    Mend(
        "`THCState_getCurrentStream(state)`",
        "`at::cuda::getCurrentCUDAStream().stream()`",
        absent("THCState_getCurrentStream"),
        swap(
            rf"\bTHCState_getCurrentStream\s*{_STATE}", "at::cuda::getCurrentCUDAStream().stream()"
        ),
        _THC,
    ),
    _renamed("THCudaCheck", "C10_CUDA_CHECK", "c10/cuda/CUDAException.h"),
    _renamed("THCCeilDiv", "at::ceil_div", "ATen/ceil_div.h"),
    _renamed(
        "at::cuda::ATenCeilDiv",
        "at::ceil_div",
        "ATen/ceil_div.h",
        r"\b(?:at::)?cuda::ATenCeilDiv\b",
    ),
    Mend(
        "`THCudaMalloc(state, n)`",
        "`c10::cuda::CUDACachingAllocator::raw_alloc(n)`",
        absent("THCudaMalloc"),
        swap(r"\bTHCudaMalloc\s*\(\s*\w+\s*,", "c10::cuda::CUDACachingAllocator::raw_alloc("),
        _ALLOCATOR,
    ),
    Mend(
        "`THCudaFree(state, p)`",
        "`c10::cuda::CUDACachingAllocator::raw_delete(p)`",
        absent("THCudaFree"),
        swap(r"\bTHCudaFree\s*\(\s*\w+\s*,", "c10::cuda::CUDACachingAllocator::raw_delete("),
        _ALLOCATOR,
    ),
    Mend(
        "`at::globalContext().getCurrentCUDAStream()`",
        "`at::cuda::getCurrentCUDAStream()`",
        absent("getCurrentCUDAStream"),
        swap(
            rf"(?:{_CONTEXT}|(?:at|c10)::cuda::)getCurrentCUDAStream\b",
            "at::cuda::getCurrentCUDAStream",
        ),
        _THC,
    ),
    Mend(
        "`at::cuda::CUDAGuard`, `OptionalCUDAGuard` without their header",
        "with `c10/cuda/CUDAGuard.h`",
        absent("CUDAGuard", "OptionalCUDAGuard"),
        swap(r"\b(?:(?:at|c10)::)?(?:cuda::)?((?:Optional)?CUDAGuard)\b", r"c10::cuda::\1"),
        "c10/cuda/CUDAGuard.h",
    ),
    Mend(
        "`CUDACachingAllocator` without its header",
        "with `c10/cuda/CUDACachingAllocator.h`",
        absent("CUDACachingAllocator") + "|must be a class or namespace name",
        swap(r"\b((?:c10::cuda::)?CUDACachingAllocator)\b", r"\1"),
        _ALLOCATOR,
    ),
    _renamed("cudaThreadSynchronize", "cudaDeviceSynchronize"),
    _renamed("cudaThreadExit", "cudaDeviceReset"),
    *map(_of_warp, ("__shfl", "__shfl_up", "__shfl_down", "__shfl_xor")),
    *map(_of_warp, ("__any", "__all", "__ballot")),
    Mend(
        "`-std=c++14`, `-std=c++11`",
        "torch's own standard",
        r"C\+\+(?:17|20)|(?:in|of) (?:namespace )?[‘'\"]std[’'\"]|c\+\+1[14].*not defined",
        flags=_without(r"-?-std=(?:c|gnu)\+\+(?:98|03|0x|11|1y|14|1z)"),
    ),
    Mend(
        "`-gencode` and `-arch` of GPUs that this nvcc does not know",
        "the others, or those of `TORCH_CUDA_ARCH_LIST` or of the GPU that is there",
        r"[Uu]nsupported gpu architecture '(?:compute|sm)_(?P<what>\d+)'",
        flags=_without(
            r"-?-?(?:gencode|generate-code)=.*_WHAT\b.*",
            r"-?-(?:arch|code|gpu-architecture|gpu-code)=(?:sm|compute)_WHAT",
        ),
    ),
    Mend(
        "warnings as errors (`-Werror`)",
        "warnings of that kind only warn",
        r"\[-Werror=(?P<what>[\w+-]+)=?\]",
        flags=_no_errors,
    ),
)
