"""A CUDA source as its items: directives, and what is declared or defined in its namespaces.

The text is read without a compiler, so whatever is not understood is no list of items at all.
Headers of the user's own stand as items in the place where they are included.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..errors import cxx
from .inputs import Find

_SOLID = re.compile(r"\S")
_LINE = re.compile(r"(?:\\\r?\n|[^\n])*")
_NAMESPACE = re.compile(r"((?:inline\s+)?namespace\b\s*([\w:\s]*))\{")
_LINKAGE = re.compile(r'extern\s+"C"\s*\{')
_ONLY = re.compile(r"namespace\b(?![^;{]*=)|asm\b|[^\w\[~:#;]")  # begins no item that is understood
_GOES_ON = re.compile(r"(?:typedef|struct|class|enum|union)\b")
_CONDITIONAL = {"if", "ifdef", "ifndef", "elif", "else", "endif"}
_INSIDE = _CONDITIONAL | {"pragma", "error", "warning"}


class NotUnderstood(Exception):
    """The text cannot be taken apart for certain."""


@dataclass(frozen=True)
class Item:
    """A directive, or a declaration or definition with the namespaces that it stands in."""

    text: str
    bare: str  # without comments and strings
    file: str
    line: int
    scopes: tuple[str, ...] = ()  # what opens each namespace, `namespace a {`

    def written(self, text: str) -> str:
        """Return `text` as standing in this item's place; "" for none."""
        if not text:
            return ""
        opened = "".join(f"{scope}\n" for scope in self.scopes)
        closed = "\n}" * len(self.scopes)
        return f"{opened}#line {self.line} {cxx.literal(self.file)}\n{text}{closed}\n"


def unnamed(file: str, text: str) -> str:
    """Return what opens a namespace of one source's own, which both its halves can name."""
    digest = hashlib.sha256(f"{file}\n{text}".encode(errors="surrogateescape")).hexdigest()
    return f"inline namespace octet_{digest[:12]} {{"


def items(file: str, text: str, find: Find, known: Callable[[str], object]) -> list[Item]:
    """Return the items of a source. Raises: NotUnderstood.

    Headers that are `known` are items; those of the user's own are read.
    """
    return [*_Reader(find, known, unnamed(file, text)).read(file, text)]


class _Reader:
    def __init__(self, find: Find, known: Callable[[str], object], unnamed: str):
        self._find, self._known, self._unnamed = find, known, unnamed
        self._once: set[str] = set()  # headers with `#pragma once` that were read
        self._open: list[str] = []  # files that are being read

    def read(self, file: str, text: str) -> Iterator[Item]:
        if file in self._open or len(self._open) > 20:
            raise NotUnderstood(f"{file} includes itself")
        self._open.append(file)
        code = cxx.blanked(text)
        yield from self._range(file, text, code, 0, len(text), ())
        self._open.pop()

    def _range(
        self, file: str, text: str, code: str, at: int, end: int, scopes: tuple[str, ...]
    ) -> Iterator[Item]:
        """The items between two places, which lie in these namespaces."""
        while (starts := _SOLID.search(code, at, end)) is not None:
            begin = starts.start()
            line = 1 + text.count("\n", 0, begin)
            if code[begin] == "#":
                found = _LINE.match(text, begin)
                at = found.end() if found else end
                item = Item(text[begin:at], code[begin:at], file, line, scopes)
                yield from self._directive(item)
                continue
            opened = self._scope(text, code, begin)
            if opened:
                closes = cxx.closing(code, opened[0], "{", "}")
                if closes > end or code[closes - 1] != "}":
                    raise NotUnderstood("a namespace does not end")
                inner = (*scopes, *opened[1])
                yield from self._range(file, text, code, opened[0], closes - 1, inner)
                at = closes
                continue
            at = _end(code, begin, end)
            item = Item(text[begin:at], code[begin:at], file, line, scopes)
            _check_inside(item)
            if item.bare != ";":
                yield item

    def _scope(self, text: str, code: str, begin: int) -> tuple[int, list[str]] | None:
        """Where a namespace's inside begins, and what opens it; None where there is none."""
        if linkage := _LINKAGE.match(text, begin):
            return linkage.end(), ['extern "C" {']
        found = _NAMESPACE.match(code, begin)
        if not found:
            return None
        return found.end(), [f"{found[1].strip()} {{" if found[2].strip() else self._unnamed]

    def _directive(self, item: Item) -> Iterator[Item]:
        directive = next(cxx.directives(item.text), None)
        if directive is None or (directive.name == "include" and item.scopes):
            raise NotUnderstood("a directive in a string, or a header in a namespace")
        if directive.name == "pragma" and directive.rest.split()[:1] == ["once"]:
            if len(self._open) > 1:
                self._once.add(item.file)
            return
        if directive.name != "include":
            yield replace(item, scopes=())
            return
        header = next(iter(cxx.includes(item.text)), None)
        if header is None:
            raise NotUnderstood("a macro names the header")
        found = self._find(header.name, item.file) if header.quoted else None
        if not found and self._known(header.name):
            text = f"#include <{header.name}>"
            yield replace(item, scopes=(), text=text, bare=text)
            return
        found = found or self._find(header.name, "")
        if not found:
            raise NotUnderstood("a header that may hold anything")
        if found[0] not in self._once:
            yield from self.read(*found)


def _end(code: str, begin: int, end: int) -> int:
    """Where a declaration or definition ends."""
    if _ONLY.match(code, begin):
        raise NotUnderstood("no item begins so")
    goes_on, depth = _GOES_ON.match(code, begin), 0
    for at in range(begin, end):
        depth += (code[at] in "({[") - (code[at] in ")}]")
        if depth < 0:
            break
        if depth == 0 and code[at] == ";":
            return at + 1
        if depth == 0 and code[at] == "}" and not goes_on:  # as it does in `struct S {};`
            head = code[begin : code.index("{", begin)].rstrip()
            if not head.endswith("=") and not re.match(r"\s*;", code[at + 1 : at + 81]):
                return at + 1
    raise NotUnderstood("an item does not end")


def _check_inside(item: Item) -> None:
    """Raise NotUnderstood unless each branch of the conditions within an item is whole."""
    if "#" not in item.bare:
        return
    depth, at = 0, 0
    lines = [*re.finditer(r"(?m)^[ \t]*#[ \t]*(\w+)(?:\\\r?\n|[^\n])*", item.bare)]
    for found in lines:
        if found[1] not in _INSIDE:
            raise NotUnderstood(f"#{found[1]} within an item")
        if found[1] not in _CONDITIONAL:
            continue
        if depth and not balanced(item.bare[at : found.start()]):
            raise NotUnderstood("a condition parts a bracket from its other")
        depth += (found[1] in ("if", "ifdef", "ifndef")) - (found[1] == "endif")
        at = found.end()
        if depth < (found[1] != "endif"):
            raise NotUnderstood("a condition ends that began before")
    if depth:
        raise NotUnderstood("a condition does not end")


def balanced(code: str) -> bool:
    """Return True if brackets are closed in the order in which they were opened."""
    left, pairs = [], {")": "(", "]": "[", "}": "{"}
    for character in re.sub(r"[^()\[\]{}]", "", code):
        if character not in pairs:
            left.append(character)
        elif not left or left.pop() != pairs[character]:
            return False
    return not left
