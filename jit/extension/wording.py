"""An item's text, read and rewritten: what it declares, its declaration, its launches."""

import re

from ..errors import cxx
from .items import Item, NotUnderstood

TYPE = re.compile(r"(?:typedef|struct|class|enum|union)\b")
_ALIGN = {"__align__", "alignas"}
WITH_NUMBERS = (
    r"\b(?:__(?:launch_bounds|cluster_dims|maxnreg|block_size)__|C10_LAUNCH_BOUNDS_[0-2])"
    r"\s*\((?:[^()]|\([^()]*\))*\)"
)
_LAUNCH = re.compile(r"(\w+)\s*(?:<(?:[^<>;{}]|<[^<>;{}]*>)*>)?\s*<<<")


def head_of(item: Item) -> str:
    """Return what stands before an item's body."""
    return item.bare.partition("{")[0]


def behind_template(bare: str) -> int:
    """Return the place behind each `template <...>` at the beginning, 0 where there is none."""
    at = 0
    while opened := re.compile(r"\s*template\s*<").match(bare, at):
        at = cxx.closing(bare, opened.end(), "<", ">")
    return at


def has_state(bare: str) -> bool:
    """Return True for a function of which each half would have its own, with what it keeps."""
    head, _, body = bare.partition("{")
    return re.search(r"\bstatic\b", head) is not None and re.search(r"\bstatic\b", body) is not None


def exported(text: str) -> str:
    """Return a function that other libraries see, in a half whose stubs they do not."""
    linkage = re.match(r'(?:extern\s*"C"\s*)?', text)
    at = linkage.end() if linkage else 0
    return f'{text[:at]}__attribute__((visibility("default"))) {text[at:]}'


def prototype(head: str) -> str:
    """Return the declaration of the function that begins so."""
    return " ".join(head.split()).rstrip(";") + ";"


def without(item: Item, words: str) -> str:
    """Return an item's text with these words of its head blanked."""
    head = head_of(item)
    if not re.search(words, head):
        raise NotUnderstood("a macro says what linkage this has")
    for found in re.finditer(words, head):
        head = head[: found.start()] + " " * len(found[0]) + head[found.end() :]
    begins = re.match(r'extern\s*"C"', item.text)
    kept = begins.end() if begins else 0
    return item.text[:kept] + head[kept:] + item.text[len(head) :]


def names_of_item(inner: str) -> frozenset[str]:
    """Return what an item without its `template <...>` declares, enumerators included."""
    head = inner.partition("{")[0]
    if "operator" in head:
        return frozenset({"operator"})
    if named := re.match(r"(?:using|namespace)\s+(\w+)\s*=", inner):
        return frozenset({named[1]})
    if re.match(r"using\b", inner):
        return frozenset(re.findall(r"(\w+)\s*[;,]", inner))
    if inner.startswith("typedef"):
        last = re.findall(r"\(\s*\*\s*(\w+)\s*\)|(\w+)\s*(?:\[[^\]]*\]\s*)*[;,]", inner)
        kind = re.findall(r"(?:struct|class|enum|union)\s+(\w+)", head)
        return frozenset([word for pair in last for word in pair if word] + kind)
    if TYPE.match(inner):
        words = cxx.identifiers(re.sub(r"\([^()]*\)|<[^<>]*>|:.*", " ", head)) - _ALIGN
        if inner.startswith("enum"):
            words |= cxx.identifiers(inner.partition("{")[2])
        if "operator" in inner:
            words |= {"operator"} if re.search(r"\bfriend\b", inner) else set()
        return frozenset(words)
    head = re.sub(WITH_NUMBERS, " ", head)
    head = re.split(r"[=;]", head, maxsplit=1)[0]
    named = re.search(r"(\w+)\s*(?:\(|\[|$)", head.rstrip())
    return frozenset({named[1]} if named else ())


def launched_from(item: Item, kernels: set[str]) -> str | None:
    """Return a host function with each `<<<` written out; None where one is no plain launch."""
    bare, pieces, at = item.bare, [], 0
    launches = [*_LAUNCH.finditer(bare)]
    if len(launches) != bare.count("<<<"):
        return None
    for found in launches:
        begin, end = found.start(), bare.find(">>>", found.end())
        while before := re.search(r"(\w+)?::\s*$", bare[:begin]):
            begin = before.end(1) if before[1] in cxx.KEYWORDS else before.start()
            if before[1] in cxx.KEYWORDS:
                break
        arguments = re.compile(r">>>\s*\(").match(bare, end) if end >= 0 else None
        if not arguments or "<<<" in bare[found.end() : end] or begin < at:
            return None
        local = re.search(rf"\bauto\b[\s*&]*{found[1]}\s*=", bare[:begin])
        if (found[1] not in kernels and not local) or bare[:begin].rstrip()[-1:] in (".", ">"):
            return None
        closes = cxx.closing(bare, arguments.end(), "(", ")")
        configuration, kernel = item.text[found.end() : end], item.text[begin : found.end() - 3]
        call = f"{kernel}{item.text[end + 3 : closes]}"
        pieces.append(
            f"{item.text[at:begin]}(!octet_configure({configuration}) ? (void)0 : {call})"
        )
        at = closes
    return "".join([*pieces, item.text[at:]])
