"""The names that torch's headers bring: whether a larger header could know a missing one.

The preprocessed text of torch/extension.h is read once a toolchain and kept: its macros, and what
is declared in namespaces. Members, parameters and local variables do not count, since no missing
name is ever found among them.
"""

import re
from dataclasses import dataclass

from ..errors.cxx import KEYWORDS, closing

_DEFINE = re.compile(r"^#(define|undef) (\w+)", re.MULTILINE)
_NOT_CODE = re.compile(r"""^#.*$|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'""", re.MULTILINE)
_TOKEN = re.compile(r"[{}();=]|[A-Za-z_]\w*")
_BRACE = re.compile(r"[{}]")
_TEMPLATE = re.compile(r"\s*<")
_INITIALISERS = re.compile(r"\s*(?:noexcept\s*)?:(?!:)")
_VALUE = re.compile(r"[^;{}]*")
_WRAPPED = re.compile(r"\s*(?:\w+::)*[*&]*\s*(\w+)\s*\)\s*\(")  # (*handler)(int)


@dataclass(frozen=True)
class Names:
    """Macros and what namespaces declare, enumerators included."""

    macros: frozenset[str]
    declared: frozenset[str]

    def __contains__(self, name: str) -> bool:
        """True if there is a macro or a declaration of this name."""
        return name in self.macros or name in self.declared


def names_of(preprocessed: str) -> Names:
    """Return the names of a text that a preprocessor made with its #define lines kept (-dD)."""
    code = _NOT_CODE.sub("", preprocessed)  # there are no comments
    return Names(macros_of(preprocessed), frozenset(_declared(code)) - KEYWORDS)


def macros_of(preprocessed: str) -> frozenset[str]:
    """Return the macros that are defined at the end of such a text."""
    last = {name: word for word, name in _DEFINE.findall(preprocessed)}
    return frozenset(name for name, word in last.items() if word == "define")


def _declared(code: str) -> set[str]:
    """The words that stand in namespaces, outside of bodies, classes and parameter lists."""
    found: set[str] = set()
    head: list[str] = []  # words since the last declaration ended
    enums: list[bool] = []  # for each open brace, whether it is an enum's
    parentheses, at = 0, 0
    while match := _TOKEN.search(code, at):
        token, at = match[0], match.end()
        if token == "(":
            if not parentheses and (wrapped := _WRAPPED.match(code, at)):
                found.add(wrapped[1])
            parentheses += 1
        elif token == ")":
            parentheses = max(0, parentheses - 1)
            if not parentheses and _INITIALISERS.match(code, at):
                at = _VALUE.match(code, at).end()
        elif token == "{":
            if "namespace" in head or head[-1:] == ["extern"]:
                enums.append(False)
            elif "enum" in head and not {"class", "struct"} & {*head}:
                enums.append(True)
            else:
                at = _behind_body(code, at)
            head = []
        elif token == "}":
            enums[-1:] = []
            head, parentheses = [], 0
        elif token == ";":
            head, parentheses = [], 0
        elif token == "=":
            if not (parentheses or enums[-1:] == [True] or "operator" in head):
                at = _VALUE.match(code, at).end()
        elif token == "template" and (opened := _TEMPLATE.match(code, at)):
            at = closing(code, opened.end(), "<", ">")
        elif not parentheses:
            if "Symbol" not in head:  # torch interns words such as `x`; they are named attr::x
                found.add(token)
            head.append(token)
    return found


def _behind_body(code: str, at: int) -> int:
    """The place behind the brace that closes the one just before `at`."""
    depth = 1
    while depth and (match := _BRACE.search(code, at)):
        depth += 1 if match[0] == "{" else -1
        at = match.end()
    return at if not depth else len(code)
