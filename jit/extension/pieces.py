"""What nvcc's half and the host's half of a CUDA source have of each of its items.

Never a guess: what cannot be told from the text raises NotUnderstood, and the source stays whole.
What goes to one half alone though the other needs it does not compile there, and stays whole too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..errors import cxx
from .items import Item, NotUnderstood, balanced
from .levels import TORCH_NAMES, include_lines, read_header

_KERNEL = re.compile(r"\b__global__\b")
_DEVICE = re.compile(r"\b__(?:device|constant|managed|shared|grid_constant)__\b")
_QUALIFIERS = re.compile(
    r"(?:\s|\b(?:__(?:host|device|global|forceinline|inline|noinline|restrict|constant|shared)__"
    r"|inline|static|constexpr|const|void|__inline|C10_\w*(?:DEVICE|INLINE|RESTRICT))\b)*"
)
_TEMPLATE = re.compile(r"template\s*<")
_SPECIALISED = re.compile(r"template\s*<\s*>")
_TYPE = re.compile(r"(?:typedef|struct|class|enum|union)\b")
_USING = re.compile(r"using\b|typedef\b|namespace\b")
_CONST = re.compile(r"(?:(?:static|inline)\s+)*const(?:expr)?\b")
_ALIGN = {"__align__", "alignas"}
_INLINE = re.compile(r"\b(?:inline|static|constexpr|__forceinline__|__inline__|__inline)\b")
# Of torch's names those that headers without the rest of torch bring; kernels may have them.
LIGHT = re.compile(
    r"\b(?:at|torch|c10)\s*::\s*(?:(?:Generic)?PackedTensorAccessor(?:32|64)?|TensorAccessor"
    r"|(?:Restrict|Default)PtrTraits|Half|BFloat16|complex)\b"
    r"|\bC10_(?:LAUNCH_BOUNDS_[0-2]|(?:HOST_)?DEVICE|RESTRICT|WARP_SIZE|ALWAYS_INLINE|(?:UN)?LIKELY)\b|\bCUDA_KERNEL_ASSERT\b"
)
C10_TYPES = ("Half", "BFloat16", "complex")  # each has a header of its name
_FOR_HOST = re.compile(r"(?:torch|ATen|c10|caffe2|pybind11)/.*|Python\.h")
_LIBRARY = re.compile(r"(cublas|cudnn|cusparse|cufft|cusolver|nccl|nvrtc|nvtx|nvToolsExt)[\w/.]*")
_FOR_NVCC = re.compile(
    r"(?:cub|thrust|cuda|cooperative_groups|nv)/[\w/.]+|cuda_(?:pipeline|awbarrier)\w*\.h"
    r"|device_functions\.h|curand_(?!kernel)\w+\.h"
)
_FOR_BOTH = re.compile(
    r"cuda(?:_(?:runtime(?:_api)?|fp\d+|bf16|profiler_api|occupancy|device_runtime_api))?\.h"
    r"|[a-z_]+|c?math\.h|(?:std\w+|float|limits|string|assert|time|ctype|errno)\.h"
    r"|mma\.h|cooperative_groups\.h|curand(?:_kernel)?\.h|math_constants\.h|vector_\w+\.h"
    r"|device_launch_parameters\.h|(?:texture|surface|driver|device|builtin|library)_types\.h"
    r"|sm_\w+\.h|channel_descriptor\.h|host_defines\.h|omp\.h|unistd\.h|inttypes\.h"
)
# Namespaces that only nvcc knows, or whose templates launch kernels; macros that it alone has.
_OF_NVCC = re.compile(
    r"(?<!:)\b(?:cub|thrust|cuda|nvcuda|wmma|cooperative_groups)\b(?=\s*(?:::|;))"
    r"|\b__(?:CUDACC|NVCC|CUDA_ARCH_|CUDA_API|NV_)\w*"
)
_WITH_NUMBERS = (
    r"\b(?:__(?:launch_bounds|cluster_dims|maxnreg|block_size)__|C10_LAUNCH_BOUNDS_[0-2])"
    r"\s*\((?:[^()]|\([^()]*\))*\)"
)
_LAUNCH = re.compile(r"(\w+)\s*(?:<(?:[^<>;{}]|<[^<>;{}]*>)*>)?\s*<<<")


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


def is_known(header: str) -> bool:
    """Return True if it is known which half a header is for."""
    kinds = (_FOR_HOST, _FOR_NVCC, _LIBRARY, _FOR_BOTH)
    return any(kind.fullmatch(header) for kind in kinds)


def light_headers(code: str) -> str:
    """Return the lines that include what of torch's kernels may name, where they name it."""
    named = {re.split(r"\W+", found)[-1] for found in LIGHT.findall(code)}
    if not named:
        return ""
    headers = ["c10/macros/Macros.h", *(f"c10/util/{n}.h" for n in C10_TYPES if n in named)]
    if any("Accessor" in name or "Traits" in name for name in named):
        headers.append("ATen/core/TensorAccessor.h")
    return include_lines(headers) + "namespace at {}\nnamespace torch { using namespace at; }\n"


def restrict_traits(code: str) -> str:
    """Return the lines that bring RestrictPtrTraits, which torch has for nvcc alone."""
    if not re.search(r"\bRestrictPtrTraits\b", code):
        return ""
    header = "torch/headeronly/core/TensorAccessor.h"
    moved = "RestrictPtrTraits" in read_header(header)
    scope = "torch::headeronly" if moved else "at"
    return (
        f"#include <ATen/core/TensorAccessor.h>\nnamespace {scope} {{\n"
        "template <typename T> struct RestrictPtrTraits { typedef T* __restrict__ PtrType; };\n}\n"
        + "namespace at { using torch::headeronly::RestrictPtrTraits; }\n"
        * moved
    )


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
        inner = bare[_behind_template(bare) :].lstrip()
        is_type = _TYPE.match(inner) and not re.search(r"\)\s*$", head.rstrip("; "))
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
            if _FOR_HOST.fullmatch(header):
                return Piece(item, host=item.text, host_root=True)
            if _FOR_NVCC.fullmatch(header):
                return Piece(item, device=item.text, device_root=True)
            if library := _LIBRARY.fullmatch(header):
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
        plain = re.sub(rf"{_WITH_NUMBERS}|\b(?:__(?:global|grid_constant|noinline)__)\b", " ", head)
        name = re.search(r"\bvoid\s+(?:static\s+)?(\w+)\s*\(", plain)
        odd = re.search(r"\b(?:inline|friend|__forceinline__)\b|#", head)
        if torch or odd or not name or "<<<" in bare or _SPECIALISED.match(bare):
            raise NotUnderstood("an unusual kernel")
        text, linkage, declared = item.text, "", plain.rstrip().rstrip(";")
        if begins := re.match(r'extern\s*"C"', text):
            linkage, declared = 'extern "C" ', declared[begins.end() :]
        if '"' in text[len(begins[0]) if begins else 0 : len(_head(item))]:
            raise NotUnderstood("a string in a kernel's head")
        if re.search(r"\bstatic\b", plain):  # whose stub the host's half could not name
            declared = re.sub(r"\bstatic\b", " ", declared)
            text = _without(item, r"\bstatic\b")
            item = replace(item, scopes=(*item.scopes, self._unnamed))
        self._kernels.add(name[1])
        if _TEMPLATE.match(bare):
            self._templates.add(name[1])
        host = f"{linkage}{' '.join(declared.split())};"
        return Piece(item, text, host, frozenset({name[1]}), device_root=True)

    def _type(self, item: Item, bare: str, inner: str, torch: bool) -> Piece:
        """A type, another name for one, or for a namespace."""
        of_nvcc, on_gpu = _OF_NVCC.search(bare), _DEVICE.search(bare)
        names = _names(inner)
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
        names, text = _names(head[_behind_template(head) :]), item.text
        if "__host__" not in head:
            return Piece(item, text, names=names, device_root=True)
        if _SPECIALISED.match(bare) or "(" not in head or '"' in text[: len(_head(item))]:
            raise NotUnderstood("what both halves would define")
        host = text if _TEMPLATE.match(bare) or _INLINE.search(head) else _prototype(head)
        return Piece(item, text, host, names, True, "operator" in names)

    def _on_host(self, item: Item, bare: str, inner: str, torch: bool) -> Piece:
        """A function or variable of the host's, or what both halves may have a copy of."""
        if _SPECIALISED.match(bare):
            raise NotUnderstood("a specialised function")
        value = bare.partition("=")[2] or bare.partition("{")[2]
        constant = "constexpr" in bare[: bare.find("{")] or not re.search(r"\w\s*\(", value)
        both = _TEMPLATE.match(bare) or (_CONST.match(bare) and constant)
        both = both or re.match(r"(?:static\s+)?inline\b", bare)
        if both and not (torch or "<<<" in bare or _OF_NVCC.search(bare) or _DEVICE.search(bare)):
            names = _names(inner)
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
        launched = _launched(item, self._kernels)
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
        head = _head(item)
        name = re.match(r"[\w:<>,&*\s]*[\w>&*]\s+[&*]*(\w+)\s*\(", head)
        if not name or not item.bare.endswith("}") or TORCH_NAMES.search(item.bare):
            return None
        if "template" in head or "operator" in head or '"' in item.text[: len(head)] or "#" in head:
            return None
        own, text = r"\b(?:static|inline|__forceinline__|__inline__)\b", item.text
        if re.search(own, head):
            text, head = _without(item, own), re.sub(own, " ", head)
            item = replace(item, scopes=(*item.scopes, self._unnamed))
        return Piece(item, text, _prototype(head), frozenset({name[1]}), device_root=True)

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


def _head(item: Item) -> str:
    return item.bare.partition("{")[0]


def _behind_template(bare: str) -> int:
    """The place behind each `template <...>` at the beginning, 0 where there is none."""
    at = 0
    while opened := re.compile(r"\s*template\s*<").match(bare, at):
        at = cxx.closing(bare, opened.end(), "<", ">")
    return at


def _prototype(head: str) -> str:
    return " ".join(head.split()).rstrip(";") + ";"


def _without(item: Item, words: str) -> str:
    """An item's text with these words of its head blanked."""
    head = _head(item)
    if not re.search(words, head):
        raise NotUnderstood("a macro says what linkage this has")
    for found in re.finditer(words, head):
        head = head[: found.start()] + " " * len(found[0]) + head[found.end() :]
    begins = re.match(r'extern\s*"C"', item.text)
    kept = begins.end() if begins else 0
    return item.text[:kept] + head[kept:] + item.text[len(head) :]


def _names(inner: str) -> frozenset[str]:
    """What an item without its `template <...>` declares, enumerators included."""
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
    if _TYPE.match(inner):
        words = cxx.identifiers(re.sub(r"\([^()]*\)|<[^<>]*>|:.*", " ", head)) - _ALIGN
        if inner.startswith("enum"):
            words |= cxx.identifiers(inner.partition("{")[2])
        if "operator" in inner:
            words |= {"operator"} if re.search(r"\bfriend\b", inner) else set()
        return frozenset(words)
    head = re.sub(_WITH_NUMBERS, " ", head)
    head = re.split(r"[=;]", head, maxsplit=1)[0]
    named = re.search(r"(\w+)\s*(?:\(|\[|$)", head.rstrip())
    return frozenset({named[1]} if named else ())


def _launched(item: Item, kernels: set[str]) -> str | None:
    """A host function with each `<<<` written out; None where one is no plain launch."""
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
