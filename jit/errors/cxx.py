"""The text of C++ and CUDA sources, read without a compiler: what is code, and what it names.

Every function that blanks keeps the length of the text and its line breaks, so that a place found
in what is left is a place in the source.
"""

import ctypes
import re
from collections.abc import Iterator
from typing import NamedTuple

_KEYWORDS = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
constinit continue decltype default delete do double dynamic_cast else enum explicit export extern
false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr
operator or or_eq private protected public register reinterpret_cast requires return short signed
sizeof static static_assert static_cast struct switch template this thread_local throw true try
typedef typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq
"""
# Those that are, or end, the name of a type; those before an expression, where a type might stand.
_TYPES = "bool char double float int long short signed unsigned void wchar_t"
_STATEMENTS = "case co_await co_return co_yield delete else goto new return throw"
KEYWORDS, TYPES, STATEMENTS = (frozenset(w.split()) for w in (_KEYWORDS, _TYPES, _STATEMENTS))

_SPLICE = r"(?:\\\r?\n)*"  # continued lines, which may part even `/` from `*`
# Patterns are compiled when they are used: a warm start does without.
_NOT_CODE = (
    rf"(?s)(?P<comment>/{_SPLICE}/(?:\\\r?\n|[^\n])*|/{_SPLICE}\*.*?(?:\*{_SPLICE}/|\Z))"
    r'|(?<!\w)(?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\(.*?(?:\)(?P=mark)"|\Z)'
    r'|(?:(?<!\w)(?:u8|[uUL]))?"(?:\\\r\n|\\.|[^"\\\n])*"'
    # An apostrophe behind a digit or a letter parts the digits of a number: 1'000.
    r"|(?<!\w)(?:u8|[uUL])?'(?:\\\r\n|\\.|[^'\\\n])+'"
)
_DIRECTIVE = rf"(?m)^[ \t]*#(?:[ \t]|{_SPLICE})*(?P<name>\w*)[ \t]*(?P<rest>(?:\\\r?\n|[^\n])*)"
_INCLUDE = r'(?:<(?P<system>[^>\n]+)>|"(?P<quoted>[^"\n]+)")'


def blanked(text: str, strings: bool = True) -> str:
    """Return `text` with comments turned to blanks; strings and characters too, unless told not to.

    A prefix such as `u8R` is blanked with its string. What does not end is blanked to the end of
    the text, but for a string or character, which is left as it is.
    """

    def blank(match: re.Match) -> str:
        return _blanks(match) if strings or match["comment"] is not None else match[0]

    return re.sub(_NOT_CODE, blank, text)


def without_directives(code: str) -> str:
    """Return `code`, in which comments are blanked, with its preprocessor's lines blanked too."""
    return re.sub(_DIRECTIVE, _blanks, code)


def _blanks(match: re.Match) -> str:
    return re.sub(r"[^\r\n]", " ", match[0])


class Directive(NamedTuple):
    """A line of the preprocessor's, with the lines that continue it; `rest` as it is written."""

    name: str
    rest: str


def directives(text: str) -> Iterator[Directive]:
    """Yield the preprocessor's lines of a source, comments left out."""
    code = blanked(text)
    for match in re.finditer(_DIRECTIVE, blanked(text, strings=False)):
        if "#" in code[match.start() : match.end()]:  # else within a string of several lines
            yield Directive(match["name"], match["rest"].strip())


class Include(NamedTuple):
    """A header's name as a source has it; `quoted` where that is "name" and not <name>."""

    name: str
    quoted: bool


def includes(text: str) -> list[Include]:
    """Return the headers that a source includes by name, in its order."""
    named = (re.match(_INCLUDE, d.rest) for d in directives(text) if d.name == "include")
    return [Include(m["system"] or m["quoted"], m["system"] is None) for m in named if m]


def identifiers(code: str) -> set[str]:
    """Return the words of a text without comments and strings, keywords left out."""
    return {*re.findall(r"(?<!\w)(?<!\d\.)[A-Za-z_]\w*", code)} - KEYWORDS


def closing(code: str, position: int, opens: str, closes: str) -> int:
    """Return the place behind the bracket that closes the one just before `position`."""
    depth = 1
    while depth and position < len(code):
        character = code[position]
        depth += (character == opens) - (character == closes)
        position += 1
    return position


def literal(text: str) -> str:
    """Return a C++ string literal of `text`, in one line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("\r", "\\r").replace("??", "?\\?") + '"'


def demangled(text: str) -> str:
    """Return `text` with its symbols as C++ spells them, where there is a libstdc++ to tell."""
    if "_Z" not in text:
        return text
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return text
    demangle.restype = ctypes.c_void_p

    def spelt(match: re.Match) -> str:
        status = ctypes.c_int()
        told = demangle(match[0].encode(), None, None, ctypes.byref(status))
        if not told:
            return match[0]
        try:
            return ctypes.string_at(told).decode(errors="replace")
        finally:
            ctypes.CDLL(None).free(ctypes.c_void_p(told))

    return re.sub(r"(?<![\w$.])_Z[\w$.]+", spelt, text)
