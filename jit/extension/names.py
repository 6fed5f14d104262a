"""The names that torch's headers bring: whether a larger header could know a missing one.

The preprocessed text of torch/extension.h is read once a toolchain and kept: its macros, and what
is declared in namespaces. No missing name is ever found among members, parameters and variables.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..errors.cxx import KEYWORDS

_DEFINE = re.compile(r"^#(define|undef) (\w+)", re.MULTILINE)
_SCOPE = re.compile(r"(?:\bnamespace\b|\benum\b(?!\s+(?:class|struct)\b))[^;{}=]*\Z|\bextern\s*\Z")
_NOT_CODE = re.compile(r"""^#.*$|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.MULTILINE)


def _declaring(body: re.Match) -> str:
    """What is left of a body: all of a namespace's or an enumeration's, of others nothing."""
    head = body.string[max(0, body.start() - 200) : body.start()]
    return f" ; {body[1]} ; " if _SCOPE.search(head) else " ; "


# Innermost ones, until there are none; `(*handler)(int)` declares the handler.
_LEFT_OUT: list[tuple[re.Pattern, str | Callable[[re.Match], str]]] = [
    (re.compile(r"\{([^{}]*)\}"), _declaring),
    (re.compile(r"\((?:\s*(?:\w+::)*[*&]+\s*(\w+)\s*\)\s*\()?[^(){}]*\)"), r" \1 "),
    (re.compile(r"<[^<>;{}]*>"), " "),
]
# Values, bases, initialisers of members; words that torch interns, whose names are attr::x.
_BEHIND = re.compile(r"(?<!operator)=[^;{},]*|(?<!:):(?!:)[^;{}]*|\bSymbol\s+\w+")


@dataclass(frozen=True)
class Names:
    """Macros and what namespaces declare, enumerators included."""

    macros: frozenset[str]
    declared: frozenset[str]

    def __contains__(self, name: str) -> bool:
        """True if there is a macro or a declaration of this name."""
        return name in self.macros or name in self.declared


def names_of(preprocessed: str) -> Names:
    """Return the names of a text that a preprocessor made with its #define lines kept (-dD).

    Of the text is left, from the inside outwards, what stands in namespaces alone.
    """
    code = _NOT_CODE.sub("", preprocessed)  # there are no comments
    for pattern, instead in _LEFT_OUT:
        found = 1
        while found:
            code, found = pattern.subn(instead, code)
    code = _BEHIND.sub(" ", code)
    words = re.findall(r"(?<!\w)[A-Za-z_]\w*", code)
    return Names(macros_of(preprocessed), frozenset(words) - KEYWORDS)


def macros_of(preprocessed: str) -> frozenset[str]:
    """Return the macros that are defined at the end of such a text."""
    last = {name: word for word, name in _DEFINE.findall(preprocessed)}
    return frozenset(name for name, word in last.items() if word == "define")
