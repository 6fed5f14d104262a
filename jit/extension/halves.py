"""A CUDA source as two, so that nvcc, which parses all three times, never sees torch's headers.

Kernels go to nvcc and host functions to the C++ compiler. A launch `k<<<grid, block>>>(x)` becomes
what nvcc itself makes of it: the configuration is pushed and the kernel's stub called, which has
the kernel's name and lies in nvcc's half. Of a kernel template that half has the instances that the
host's object asks for. Host functions that need nvcc but not torch go to nvcc as they are; what
both halves need, types and constants and templates, is in both.
"""

import re
from dataclasses import dataclass

from ..errors import cxx
from .cuda_headers import (
    C10_TYPES,
    is_known,
    least_and_greatest,
    light_headers,
    restrict_traits,
)
from .inputs import Find
from .items import NotUnderstood, items, unnamed
from .levels import CUDA_HEADERS, include_lines, standard_headers
from .pieces import Pieces, pieces

_CUDA_HEADERS = include_lines(CUDA_HEADERS)
# The templates are what cuda_runtime.h has for nvcc alone.
_LAUNCHES = (
    _CUDA_HEADERS
    + """extern "C" unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*);
inline bool octet_configure(dim3 grid, dim3 block, size_t shared = 0,
                            struct CUstream_st* stream = nullptr) {
    return __cudaPushCallConfiguration(grid, block, shared, stream) == 0;
}
template <class T>
inline cudaError_t cudaFuncSetAttribute(T* kernel, cudaFuncAttribute attribute, int value) {
    return ::cudaFuncSetAttribute((const void*)kernel, attribute, value);
}
template <class T>
inline cudaError_t cudaGetSymbolAddress(void** to, const T& symbol) {
    return ::cudaGetSymbolAddress(to, (const void*)&symbol);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbol(const T& symbol, const void* from, size_t count,
                                      size_t offset = 0,
                                      cudaMemcpyKind kind = cudaMemcpyHostToDevice) {
    return ::cudaMemcpyToSymbol((const void*)&symbol, from, count, offset, kind);
}
template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(const T& symbol, const void* from, size_t count,
                                           size_t offset, cudaMemcpyKind kind,
                                           cudaStream_t stream = nullptr) {
    return ::cudaMemcpyToSymbolAsync((const void*)&symbol, from, count, offset, kind, stream);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t count, size_t offset = 0,
                                        cudaMemcpyKind kind = cudaMemcpyDeviceToHost) {
    return ::cudaMemcpyFromSymbol(to, (const void*)&symbol, count, offset, kind);
}
"""
)
# So that the host's half finds the stubs of template kernels, and no other library does.
LINKED_STUBS = ["-static-global-template-stub=false", "-Xcompiler", "-fvisibility=hidden"]
# Types of instances that can be written in nvcc's half, as a demangler spells them.
_SPELLED = re.compile(
    rf"\bc10::(?:{'|'.join(C10_TYPES)}|ArrayRef)\b|\bat::detail::IndexBoundsCheck\b"
    r"|\btorch::headeronly::(?:detail::)?\w+"
)


@dataclass(frozen=True)
class Halves:
    """What the GPU runs, for nvcc, and the host's part, for the C++ compiler."""

    code: str  # the whole, with the user's own headers in it, comments and strings blanked
    whole: str
    parts: Pieces

    @property
    def device(self) -> str:
        """What nvcc compiles."""
        return self._device("")

    @property
    def host(self) -> str:
        """What the C++ compiler compiles."""
        of_nvcc = restrict_traits(self.code) + least_and_greatest(self.code)
        return _LAUNCHES + of_nvcc + self.parts.half(device=False)

    @property
    def for_nvcc(self) -> bool:
        """Whether nvcc is needed; a source for the host alone is compiled as C++."""
        return self.parts.for_nvcc

    @property
    def templates(self) -> frozenset[str]:
        """The kernels that are templates."""
        return self.parts.templates

    def with_instances(self, symbols: list[str]) -> str | None:
        """Return the device's half with the instances that the host's object lacks.

        `symbols` are its undefined ones, demangled. None where one cannot be written as C++.
        """
        found = ((re.match(r"void (?:\w+::)*(\w+)<", symbol), symbol) for symbol in symbols)
        lacking = [symbol for name, symbol in found if name and name[1] in self.templates]
        asked = "".join(f"template __global__ {symbol};\n" for symbol in lacking)
        # A lambda, a type without a name, one of a header of torch's, or what a macro changes.
        if re.search(r"\{|\(anonymous|\[|'|\b(?:at|torch|c10)::", _SPELLED.sub("", asked)):
            return None
        if cxx.identifiers(asked) & self.parts.macros.keys():
            return None
        return self._device(asked)

    def _device(self, asked: str) -> str:
        text = self.parts.half(device=True, names=cxx.identifiers(asked))
        headers = _CUDA_HEADERS + standard_headers(self.code, device=True)
        headers += light_headers(cxx.blanked(text) + asked)
        return f'{headers}{text}#line 1 "instances"\n{asked}' if asked else headers + text


def halves(text: str, name: str, find: Find = lambda header, file: None) -> Halves | None:
    """Split a CUDA source where that is safe; None where it is not.

    `find` gives path and text of a header of the user's own, by its name and the file that
    includes it. What is not understood leaves the source whole.
    """
    try:
        found = items(name, text, find, is_known)
        parts = pieces(found, unnamed(name, text))
    except NotUnderstood:
        return None
    code = "\n".join(item.bare for item in found)
    if re.search(r"\boctet_\w+", code):
        return None
    return Halves(code, "\n".join(item.text for item in found), parts)
