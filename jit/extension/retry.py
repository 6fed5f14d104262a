"""Which errors of a compiler more of torch's headers may mend.

A source that fails with few headers is tried with more, up to torch's own way, which takes 20
seconds. That is left out only where it is certain to fail too: where each error is in the caller's
own text and concerns a name that the larger headers do not have, a member of a class that is the
same in all of them, a function of the caller's own, or syntax that no macro could change.
"""

import re
from collections.abc import Callable, Collection

from .names import Names

_ERROR = re.compile(
    r"(?P<file>[^\s:(][^:(]*)(?::\d+(?::\d+)?:|\(\d+\):) (?:catastrophic |fatal )?error"
    r"(?: #[\w-]+)?: (?P<text>.*)"
)
# Errors without a place, of tools that larger headers do not change.
_TOOL = re.compile(
    r"ptxas |nvcc (?:fatal|error)|(?:\S*(?:c\+\+|g\+\+|clang|cc1plus)\S*): (?:fatal )?error: "
    r"(?:unrecognized|unknown|unsupported|argument|invalid|cannot|\S+: No such)"
)
BINDING = "functions.cpp"  # what binds functions, behind a source
_NAMED = [
    r"[‘'](?:\w+::)*(\w+)(?:<.*>)?[’'] (?:was not declared|has not been declared|does not name a"
    r"|is not a member of|is not a (?:template|class|namespace)|in .* does not name a)",
    r"there are no arguments to [‘'](\w+)[’']",
    r"(?:use of undeclared identifier|unknown type name|no template named) '(?:\w+::)*(\w+)'",
    r"no (?:member|type|template) named '(\w+)' in namespace",
    r"identifier \"(?:\w+::)*(\w+)\" is undefined",
    r"namespace \".*\" has no (?:actual )?member \"(\w+)\"",
]
_MEMBER = [
    r"[‘'].*[’'] has no member named [‘'](\w+)[’']",
    r"no member named '(\w+)' in '",
    r"(?:class|struct|union) \".*\" has no member \"(\w+)\"",
]
_CALL = [
    r"(?:no matching function for call to|call of overloaded) [‘'](?P<call>[^(’']*)\(",
    r"no matching (?:member )?function for call to '(?P<call>[^']*)'",
    r"no instance of (?:overloaded )?function (?:template )?\"(?P<call>[^\"(]*)\"",
]
# What concerns things that have no name: operators, conversions, instances, what is incomplete.
_NAMELESS = re.compile(
    r"no match for|incomplete|forward declaration|no operator|invalid operands|no suitable|no viab"
    r"|redefin|ambiguous|static.assert|conflict|different kind|redeclar|deleted|no type named"
    r"|constraint|substitution|specializ|template|deduc|must be declared|internal compiler"
    r"|no instance|no matching|is not a type|name followed by|octet_binding|default argument"
)
_OVERLOADED = re.compile(r"overloaded function|(?:unable to|could not|couldn.t) deduce")
_EARLIER = re.compile(r"(?P<file>[^\s:(][^:(]*):\d+(?::\d+)?: note: .*previous")


def may_need_more(
    said: str,
    own_files: Collection[str],
    words: Collection[str],
    wide: Callable[[], Names],
    macros: Callable[[], Collection[str]],
) -> bool:
    """Return False only if no larger header can mend what a compiler said, `said`.

    An error outside of `own_files`, the names of the caller's text, is no proof of anything.
    `words` are that text's identifiers; `wide` gives the names that the largest headers have,
    `macros` the macros that the headers of this try have.
    """

    def mendable(text: str) -> bool:
        """True if more headers may mend one error in the caller's text."""
        if _OVERLOADED.search(text):
            # More headers bring no fewer functions of a name, but complete the types of torch's.
            return bool(re.search(r"function \"(?:at|c10|torch)::", text))
        if "octet_binding" in text:
            return True
        if name := _first(_NAMED, text):
            return name in wide()
        if name := _first(_MEMBER, text):
            return name in wide().macros
        if call := _first(_CALL, text):
            last = _first([r"(\w+)\s*(?:<.*>)?$"], call)
            if last and re.match(r"(?:at|torch)::Tensor(?:Base)?::", call):
                # Tensors are whole wherever they are named, but for what these methods take.
                return last.startswith("index") or "brace-enclosed" in text
            return not last or last in wide()
        return bool(_NAMELESS.search(text)) or bool({*words} & wide().macros - {*macros()})

    found, lines = False, said.splitlines()
    errors = [error for error in map(_ERROR.match, lines) if error]
    if errors and all(error["file"] == BINDING for error in errors):  # the source itself is fine
        missing = (_first(_NAMED[:1], error["text"]) for error in errors)
        if any(name and name not in wide() for name in missing):
            return False
    for at, line in enumerate(lines):
        if error := _ERROR.match(line):
            found = True
            if error["file"] not in own_files:
                return True
            if not _again(error["text"], lines[at + 1 :], own_files) and mendable(error["text"]):
                return True
        elif _TOOL.match(line):
            found = True
        elif re.match(r"\S*[^\s:]+: (?:fatal )?error\b", line):
            return True
    return not found


def _again(text: str, after: list[str], own_files: Collection[str]) -> bool:
    """True if an error is that the caller's text defines something twice."""
    if "redefinition" not in text and "previous" not in text:
        return False
    earlier = next((m for m in map(_EARLIER.match, after) if m), None)
    return bool(earlier and earlier["file"] in own_files)


def _first(patterns: list[str], text: str) -> str | None:
    """The first group of the first pattern that is found."""
    found = (re.search(pattern, text) for pattern in patterns)
    return next((match[1] for match in found if match), None)
