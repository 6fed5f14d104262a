"""Read the text of a CUDA source without a compiler: its kernels, and names of parameters.

Types are not read here: the compilers tell them, whatever macros, templates and typedefs they hide
behind (signature.py).
"""

import re
from dataclasses import dataclass

from ..errors.cxx import TYPES, blanked, closing, without_directives
from .signature import split_commas

_TOKEN = re.compile(
    r"\bnamespace\s+([\w:]*)\s*\{|\bextern\s*\"[^\"]*\"\s*\{|\btemplate\s*<|\b__global__\b|[{};]"
)
# `extern "C"` before a kernel, or a block of them; not what declares a device function.
_EXTERN_C = re.compile(r'\bextern(\s*)"C"(?!\s*__device__)')


# What may stand, with brackets, between `__global__` and the kernel's name.
_ATTRIBUTES = ("__launch_bounds__", "__attribute__", "__maxnreg__", "__cluster_dims__", "alignas")


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function as its text has it."""

    name: str  # with its namespaces
    parameters: tuple[str, ...]  # their names, "" where one has none
    template: bool


def with_cxx_names(source: str) -> str:
    """`source` with its kernels' linkage turned to C++'s, whose symbols spell out all types."""
    code, parts, end = blanked(source, strings=False), [], 0
    for match in _EXTERN_C.finditer(code):
        parts += [source[end : match.start()], f'extern{match[1]}"C++"']
        end = match.end()
    return "".join([*parts, source[end:]])


def kernels(source: str, marker: str = "__global__") -> list[Kernel]:
    """The kernels of a source, or of a preprocessed one where `__global__` has become `marker`."""
    code = without_directives(blanked(source, strings=False))
    if marker != "__global__":
        code = code.replace(marker, "__global__".ljust(len(marker)))
    code = re.sub(
        r'"[^"\n]*"', lambda m: m[0] if m[0] in ('"C"', '"C++"') else " " * len(m[0]), code
    )
    found, scopes, template, position = {}, [], False, 0
    while match := _TOKEN.search(code, position):
        position, token = match.end(), match[0]
        if token.endswith("<"):
            template, position = True, closing(code, position, "<", ">")
        elif token == "__global__":
            head = re.compile(r"(?:[^;{}()]|\([^;{}()]*\))*?\b(\w+)\s*\(").match(code, position)
            while head and head[1] in _ATTRIBUTES:
                after = closing(code, head.end(), "(", ")")
                head = re.compile(r"[^;{}()]*?\b(\w+)\s*\(").match(code, after)
            if not head:
                continue
            position = closing(code, head.end(), "(", ")")
            names = _names(code[head.end() : position - 1])
            path = "::".join([*filter(None, scopes), head[1]])
            if path not in found or code[position:].lstrip()[:1] == "{":
                found[path] = Kernel(path, names, template)
            template = False
        elif token.endswith("{"):
            scopes.append(match[1] or "")
            template = False
        elif token == "}":
            scopes[-1:] = []
        else:
            template = False
    return [*found.values()]


def _names(parameters: str) -> tuple[str, ...]:
    """The name of each parameter, "" where it has none or one cannot tell."""
    names = []
    for parameter in split_commas(parameters):
        text = re.sub(r"=.*|\[.*", "", parameter, flags=re.DOTALL).strip()
        match = re.search(r"[\s*&>](\w+)$", text)
        names.append(match[1] if match and not _is_type(match[1], text) else "")
    return () if [*names] == [""] and parameters.strip() == "void" else tuple(names)


def _is_type(word: str, text: str) -> bool:
    """True if the last word of a parameter is its type: `const float`, `unsigned int`."""
    others = re.sub(r"\b(?:const|volatile|struct|typename)\b", "", text)
    return word in TYPES | {"const", "__restrict__"} or others.split() == [word]
