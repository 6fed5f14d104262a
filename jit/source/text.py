"""Read the text of a CUDA source without a compiler: its kernels, and names of parameters.

Types are not read here: the compilers tell them, whatever macros, templates and typedefs they hide
behind (signature.py).
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..errors.cxx import TYPES, blanked, closing, without_directives
from .signature import split_commas

_TOKEN = r"\bnamespace\s+([\w:]*)\s*\{|\btemplate\s*<|\b__global__\b|[{};]"
# `extern "C"` before a kernel, or a block of them; not what declares a device function.
_EXTERN_C = r'\bextern\s*"C"(?!\s*__device__)'
_HEAD = r"[^;{}()]*?\b(\w+)\s*\("  # of a kernel, up to a bracket that opens
# What may stand, with brackets, between `__global__` and the kernel's name.
_ATTRIBUTES = ("__launch_bounds__", "__attribute__", "__maxnreg__", "__cluster_dims__", "alignas")


class Declared(NamedTuple):
    """A `__global__` function as its text has it."""

    name: str  # with its namespaces
    parameters: list[str]  # their names, "" where one has none
    template: bool


def with_cxx_names(source: str) -> str:
    """Return `source` with C++'s linkage for its kernels: their symbols then tell all types."""
    for match in reversed([*re.finditer(_EXTERN_C, blanked(source, strings=False))]):
        end = match.end() - 1  # before the quotation mark
        source = f"{source[:end]}++{source[end:]}"
    return source


def kernels(source: str) -> list[Declared]:
    """Return the kernels of a source, a preprocessed one too."""
    code, of_token, of_head = without_directives(blanked(source)), *map(re.compile, (_TOKEN, _HEAD))
    found, scopes, template, position = dict[str, Declared](), list[str](), False, 0
    while match := of_token.search(code, position):
        position, token = match.end(), match[0]
        if token.endswith("<"):
            template, position = True, closing(code, position, "<", ">")
            continue
        if token == "__global__":
            while head := of_head.match(code, position):
                position = closing(code, head.end(), "(", ")")
                if head[1] not in _ATTRIBUTES:
                    path = "::".join([*filter(None, scopes), head[1]])
                    if path not in found or code[position:].lstrip()[:1] == "{":
                        names = [*map(_name, split_commas(code[head.end() : position - 1]))]
                        found[path] = Declared(path, names, template)
                    break
        elif token.endswith("{"):
            scopes.append(match[1] or "")
        elif token == "}":
            scopes[-1:] = []
        template = False
    return [*found.values()]


def parameters(kernel: str, there: Sequence[Declared]) -> list[str]:
    """Return the names of a kernel's parameters, an instance's too; none if the text has it not."""
    name = kernel.partition("<")[0].rstrip()
    return next((declared.parameters for declared in there if declared.name == name), [])


def _name(parameter: str) -> str:
    """Return the name of a parameter; "" where it has none or one cannot tell."""
    text = re.sub(r"=.*|\[.*", "", parameter, flags=re.DOTALL).strip()
    match = re.search(r"[\s*&>](\w+)$", text)
    if not match or match[1] in TYPES | {"const", "__restrict__"}:
        return ""
    type = re.sub(r"\b(?:const|volatile|struct|typename)\b", "", text)
    return match[1] if type.split() != [match[1]] else ""  # `const Pair` is a type alone
