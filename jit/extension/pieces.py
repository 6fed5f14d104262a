"""What nvcc's half and the host's half of a CUDA source have of each of its items.

Never a guess: what cannot be told from the text raises NotUnderstood, and the source stays whole.
What goes to one half alone though the other needs it does not compile there, and stays whole too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import cxx
from .cuda_headers import FOR_HOST, FOR_NVCC, LIBRARY, LIGHT
from .items import Item, NotUnderstood, balanced
from .levels import TORCH_NAMES
from .wording import (
    TYPE,
    WITH_NUMBERS,
    behind_template,
    exported,
    has_state,
    head_of,
    launched_from,
    names_of_item,
    prototype,
    without,
)

_KERNEL = re.compile(r"\b__global__\b")
_DEVICE = re.compile(r"\b__(?:device|constant|managed|shared|grid_constant)__\b")
_QUALIFIERS = re.compile(
    r"(?:\s|\b(?:__(?:host|device|global|forceinline|inline|noinline|restrict|constant|shared)__"
    r"|inline|static|constexpr|const|void|__inline|C10_\w*(?:DEVICE|INLINE|RESTRICT))\b)*"
)
_TEMPLATE = re.compile(r"template\s*<")
_SPECIALISED = re.compile(r"template\s*<\s*>")
_USING = re.compile(r"using\b|typedef\b|namespace\b")
_CONST = re.compile(r"(?:(?:static|inline)\s+)*const(?:expr)?\b")
_INLINE = re.compile(r"\b(?:inline|static|constexpr|__forceinline__|__inline__|__inline)\b")
# Namespaces that only nvcc knows, or whose templates launch kernels; macros that it alone has.
_OF_NVCC = re.compile(
    r"(?<!:)\b(?:cub|thrust|cuda|nvcuda|wmma|cooperative_groups)\b(?=\s*(?:::|;))"
    r"|\b__(?:CUDACC|NVCC|CUDA_ARCH_|CUDA_API|NV_)\w*"
)


@dataclass(frozen=True)
class Piece:
    """An item with its text for nvcc and for the host, each "" where that half has none of it."""

    item: Item
    device: str = ""
    host: str = ""
    names: frozenset[str] = frozenset()  # that it declares
    # A half has it only if it names it, unless it is a root of that half.
    device_root: bool = False
    host_root: bool = False


@dataclass(frozen=True)
class Pieces:
    """All of a source, in its order."""

    all: list[Piece]
    macros: dict[str, set[str]]  # with what they name
    templates: frozenset[str]  # the kernels that are templates

    @property
    def for_nvcc(self) -> bool:
        """Whether there is anything that only nvcc compiles."""
        own = (piece for piece in self.all if not piece.item.bare.startswith("#"))
        return any(piece.device_root and not piece.host_root for piece in own)

    def half(self, device: bool, names: Iterable[str] = ()) -> str:
        """Return the text of one half, with all that it names, and what `names` are."""
        texts = [piece.device if device else piece.host for piece in self.all]
        named, chosen, grown = {*names}, set[int](), True
        while grown:
            grown = False
            for at, (piece, text) in enumerate(zip(self.all, texts, strict=True)):
                root = piece.device_root if device else piece.host_root
                if at in chosen or not text or not (root or named & piece.names):
                    continue
                chosen.add(at)
                grown = True
                if not text.startswith("#"):
                    words = cxx.identifiers(cxx.blanked(text))
                    named |= words.union(*(self.macros[w] for w in words & self.macros.keys()))
        return "".join(self.all[at].item.written(texts[at]) for at in sorted(chosen))


def pieces(items: list[Item], unnamed: str) -> Pieces:
    """Return what each half has of these items. Raises: NotUnderstood."""
    return _Parts(items, unnamed).all()


class _Parts:
    def __init__(self, items: list[Item], unnamed: str):
        self._items, self._unnamed = items, unnamed
        self._macros: dict[str, set[str]] = {}
        self._qualifiers: dict[str, str] = {}  # macros that are nothing else
        self._kernels: set[str] = set()
        self._templates: set[str] = set()
        self._symbols: set[str] = set()
        self._only_nvcc: dict[str, Piece] = {}  # what the host's half does not have, so far
        self._words = {word for item in items for word in cxx.identifiers(item.bare)}

    def all(self) -> Pieces:
        found = [self._piece(item) for item in self._items]
        parted: list[Piece] = []
        for piece in found:
            parted += self._host_checked(piece)
            if not piece.host and not piece.item.bare.startswith("#"):
                self._only_nvcc |= dict.fromkeys(piece.names, piece)
        return Pieces(parted, self._macros, frozenset(self._templates))

    def _piece(self, item: Item) -> Piece:
        """What an item is, by its text alone."""
        if item.bare.startswith("#"):
            return self._directive(item)
        bare = re.sub(r"\w+", lambda m: self._qualifiers.get(m[0], m[0]), item.bare)
        torch = TORCH_NAMES.search(LIGHT.sub(" ", bare)) is not None
        head = bare.partition("{")[0]
        inner = bare[behind_template(bare) :].lstrip()
        is_type = TYPE.match(inner) and not re.search(r"\)\s*$", head.rstrip("; "))
        if _KERNEL.search(bare):
            return self._kernel(item, bare, head, torch)
        if _USING.match(bare) or is_type:
            return self._type(item, bare, inner, torch)
        if _DEVICE.search(head):
            return self._on_device(item, bare, head, torch)
        return self._on_host(item, bare, inner, torch)

    def _directive(self, item: Item) -> Piece:
        directive = next(cxx.directives(item.text))
        if directive.name == "define":
            self._define(directive.rest)
        elif directive.name == "include":
            header = cxx.includes(item.text)[0].name
            if FOR_HOST.fullmatch(header):
                return Piece(item, host=item.text, host_root=True)
            if FOR_NVCC.fullmatch(header):
                return Piece(item, device=item.text, device_root=True)
            if library := LIBRARY.fullmatch(header):
                prefix = "nvtx" if library[1].startswith("nv") else library[1]
                names = {w for w in self._words if w.lower().startswith(prefix)}
                return Piece(item, item.text, item.text, frozenset(names), host_root=True)
        return Piece(item, item.text, item.text, device_root=True, host_root=True)

    def _define(self, rest: str) -> None:
        """Note a macro. Raises: NotUnderstood for one that hides what the split goes by."""
        code = cxx.blanked(rest)
        parts = re.fullmatch(r"(?s)(\w+)(\([^)]*\))?(.*)", code.replace("\\\n", "  "))
        if not parts:
            raise NotUnderstood("a macro without a name")
        name, parameters, body = parts.groups()
        self._macros[name] = self._macros.get(name, set()) | cxx.identifiers(body)
        if not parameters and body.strip() and _QUALIFIERS.fullmatch(body):
            self._qualifiers[name] = body
        elif "<<<" in body or _KERNEL.search(body) or _DEVICE.search(body) or not balanced(body):
            raise NotUnderstood("a macro that hides a launch, a qualifier or a bracket")

    def _kernel(self, item: Item, bare: str, head: str, torch: bool) -> Piece:
        if re.match(r"template\b(?!\s*<)", bare):
            return Piece(item)  # an instance; those that the host asks for are made
        plain = re.sub(rf"{WITH_NUMBERS}|\b(?:__(?:global|grid_constant|noinline)__)\b", " ", head)
        name = re.search(r"\bvoid\s+(?:static\s+)?(\w+)\s*\(", plain)
        odd = re.search(r"\b(?:inline|friend|__forceinline__)\b|#", head)
        if torch or odd or not name or "<<<" in bare or _SPECIALISED.match(bare):
            raise NotUnderstood("an unusual kernel")
        text, linkage, declared = item.text, "", plain.rstrip().rstrip(";")
        if begins := re.match(r'extern\s*"C"', text):
            linkage, declared = 'extern "C" ', declared[begins.end() :]
        if '"' in text[len(begins[0]) if begins else 0 : len(head_of(item))]:
            raise NotUnderstood("a string in a kernel's head")
        if re.search(r"\bstatic\b", plain):  # whose stub the host's half could not name
            declared = re.sub(r"\bstatic\b", " ", declared)
            text = without(item, r"\bstatic\b")
            item = replace(item, scopes=(*item.scopes, self._unnamed))
        self._kernels.add(name[1])
        if _TEMPLATE.match(bare):
            self._templates.add(name[1])
        host = f"{linkage}{' '.join(declared.split())};"
        return Piece(item, text, host, frozenset({name[1]}), device_root=True)

    def _type(self, item: Item, bare: str, inner: str, torch: bool) -> Piece:
        """A type, another name for one, or for a namespace."""
        of_nvcc, on_gpu = _OF_NVCC.search(bare), _DEVICE.search(bare)
        names = names_of_item(inner)
        if re.match(r"(?:using\s+)?namespace\b", bare):
            if of_nvcc:
                return Piece(item, item.text, names=names, device_root=True)
            device = "" if torch else item.text
            return Piece(item, device, item.text, device_root=True, host_root=True)
        variable = re.search(r"\}[^{}]*\w[^{}]*$", bare) and not bare.startswith("typedef")
        if torch or variable or "<<<" in bare or _KERNEL.search(bare):
            if on_gpu or of_nvcc:
                raise NotUnderstood("a type for both sides that one of them cannot have")
            return Piece(item, host=item.text, host_root=True)
        if of_nvcc:
            return Piece(item, item.text, names=names, device_root=True)
        root = on_gpu is not None
        return Piece(item, item.text, item.text, names, root, not root or "operator" in names)

    def _on_device(self, item: Item, bare: str, head: str, torch: bool) -> Piece:
        """A function or variable for the GPU, perhaps for the host too."""
        if torch or "<<<" in bare or "#" in head:
            raise NotUnderstood("device code that names torch or launches")
        names, text = names_of_item(head[behind_template(head) :]), item.text
        if "__host__" not in head:
            return Piece(item, text, names=names, device_root=True)
        if _SPECIALISED.match(bare) or "(" not in head or '"' in text[: len(head_of(item))]:
            raise NotUnderstood("what both halves would define")
        if has_state(bare):
            raise NotUnderstood("a function that keeps something, of which there would be two")
        if _TEMPLATE.match(bare) or _INLINE.search(head):
            return Piece(item, text, text, names, True, "operator" in names)
        return Piece(item, exported(text), prototype(head), names, True, "operator" in names)

    def _on_host(self, item: Item, bare: str, inner: str, torch: bool) -> Piece:
        """A function or variable of the host's, or what both halves may have a copy of."""
        if _SPECIALISED.match(bare):
            raise NotUnderstood("a specialised function")
        value = bare.partition("=")[2] or bare.partition("{")[2]
        constant = "constexpr" in head_of(item)
        if not constant:  # unless a pointer that may change, or computed when the library is loaded
            changes = re.search(r"[*&](?!\s*const\b)", bare.partition("=")[0])
            constant = not changes and not re.search(r"\w\s*\(", value)
        both = _TEMPLATE.match(bare) or (_CONST.match(bare) and constant)
        both = (both or re.match(r"(?:static\s+)?inline\b", bare)) and not has_state(bare)
        if both and not (torch or "<<<" in bare or _OF_NVCC.search(bare) or _DEVICE.search(bare)):
            names = names_of_item(inner)
            return Piece(item, item.text, item.text, names, "operator" in names, True)
        return Piece(item, host=item.text, host_root=True)

    def _host_checked(self, piece: Piece) -> list[Piece]:
        """A piece whose host part compiles without nvcc, or goes to nvcc with a declaration."""
        item, text = piece.item, piece.host
        if not text or item.bare.startswith("#"):
            if text and re.search(r"\b__(?:CUDACC|NVCC|NV_)\w*", item.bare):
                raise NotUnderstood("a directive that asks for nvcc")
            return [piece]
        if text is not item.text:
            return [piece]  # a declaration
        only = sorted(cxx.identifiers(item.bare) & self._only_nvcc.keys())
        launched = launched_from(item, self._kernels)
        needs_nvcc = launched is None or _OF_NVCC.search(item.bare) is not None
        needs_nvcc |= not piece.device and _DEVICE.search(item.bare) is not None
        if launched is not None and not (only or needs_nvcc):
            return [replace(piece, host=launched)]
        if piece.device:
            self._only_nvcc |= dict.fromkeys(piece.names, piece)
            return [replace(piece, host="")]
        if moved := self._moved(item):
            return [moved]
        symbols = [] if needs_nvcc else [self._symbol(self._only_nvcc[name]) for name in only]
        if launched is None or needs_nvcc:
            raise NotUnderstood("a function of the host's that needs nvcc and torch")
        return [*(symbol for symbol in symbols if symbol), replace(piece, host=launched)]

    def _moved(self, item: Item) -> Piece | None:
        """A function that nvcc can have as it is; None for anything else."""
        head = head_of(item)
        name = re.match(r"[\w:<>,&*\s]*[\w>&*]\s+[&*]*(\w+)\s*\(", head)
        if not name or not item.bare.endswith("}") or TORCH_NAMES.search(item.bare):
            return None
        if "template" in head or "operator" in head or '"' in item.text[: len(head)] or "#" in head:
            return None
        own, text = r"\b(?:static|inline|__forceinline__|__inline__)\b", item.text
        if re.search(own, head):
            text, head = without(item, own), re.sub(own, " ", head)
            item = replace(item, scopes=(*item.scopes, self._unnamed))
        else:
            text = exported(text)
        return Piece(item, text, prototype(head), frozenset({name[1]}), device_root=True)

    def _symbol(self, piece: Piece) -> Piece | None:
        """What the host calls a variable of the GPU by; None where that is there already."""
        name = next(iter(piece.names), "")
        if name in self._symbols:
            return None
        self._symbols.add(name)
        head = re.sub(r"\b(?:static|__constant__|__device__)\b", " ", piece.item.bare)
        head = re.split(r"[={;]", head, maxsplit=1)[0]
        plain = re.fullmatch(rf"\s*[\w:<>,*\s]+\b{name}\s*(?:\[[^\]]*\]\s*)*", head)
        if not plain or _DEVICE.search(head):
            raise NotUnderstood("an unusual variable of the GPU")
        asked = f"{self._unnamed} void* octet_symbol_{name}()"
        kind = re.sub(rf"\b{name}\b", f"octet_type_of_{name}", " ".join(head.split()))
        return Piece(
            piece.item,
            f"{asked} {{ return (void*)&{name}; }} }}",
            f"{asked}; }} extern {kind}; static auto& {name} = reinterpret_cast<"
            f"decltype((octet_type_of_{name}))>(*(char*)octet_symbol_{name}());",
            device_root=True,
            host_root=True,
        )
