"""The arguments of `load` and `load_inline`, checked, as plain data."""

import os
import re
import sys
import traceback
from dataclasses import dataclass, field
from itertools import islice

# Through which a call of torch's own `load_inline` comes; see torchs.py.
_BETWEEN = "torch.utils.cpp_extension", f"{__package__}.torchs"
_BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file by it


@dataclass(frozen=True)
class Source:
    """A source as text: a file, or strings that were joined, under the name that errors show."""

    name: str
    text: str
    cuda: bool
    folder: str = ""  # of a file: where its own "headers" lie

    @classmethod
    def of_file(cls, path: str, content: bytes, cuda: bool) -> "Source":
        """A file as it was read, without a byte order mark: there will be more in front of it."""
        text = content.decode(errors="surrogateescape").removeprefix(_BYTE_ORDER_MARK)
        return cls(path, text, cuda, os.path.dirname(path))

    @property
    def content(self) -> bytes:
        """The text as it is on disk, but for a byte order mark."""
        return self.text.encode(errors="surrogateescape")


@dataclass(frozen=True)
class Extension:
    """All that was asked for, in plain data."""

    name: str
    sources: tuple[Source, ...]
    functions: dict[str, str] | None  # name to docstring, bound behind the first source
    cflags: tuple[str, ...]
    cuda_cflags: tuple[str, ...]
    ldflags: tuple[str, ...]
    include_paths: tuple[str, ...]
    with_cuda: bool
    is_python_module: bool
    is_standalone: bool
    implicit_headers: bool = False
    error_handling: bool = True
    gil_not_used: bool = False
    # What does not enter the key: the last are files to look for a string in.
    build_directory: str | os.PathLike[str] | None = field(default=None, compare=False)
    verbose: bool = field(default=False, compare=False)
    keep_intermediates: bool = field(default=True, compare=False)
    callers: tuple[str, ...] = field(default=(), compare=False)

    @property
    def unit(self) -> str:
        """The name of its builds in the store."""
        return f"inline.{self.name}"


def of_files(asked: dict) -> Extension:
    """Return what `load` is asked for by its arguments, checked."""
    _refuse_sycl("load", asked)
    paths, with_cuda = asked["sources"], asked["with_cuda"]
    paths = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    sources = tuple(map(_source_file, _listed("load", "sources", paths, os.PathLike)))
    if not sources:
        raise ValueError("load: sources must name at least one file, got none")
    extension = Extension(
        **_common("load", asked),
        sources=sources,
        functions=None,
        with_cuda=any(s.cuda for s in sources) if with_cuda is None else bool(with_cuda),
        is_standalone=bool(asked["is_standalone"]),
    )
    if extension.is_python_module and extension.is_standalone:
        raise ValueError(
            "load: is_python_module and is_standalone exclude each other; for a program set "
            "is_python_module=False"
        )
    return extension


def of_strings(asked: dict) -> Extension:
    """Return what `load_inline` is asked for by its arguments, checked."""
    _refuse_sycl("load_inline", asked)
    cpp = _strings("cpp_sources", asked["cpp_sources"])
    cuda = _strings("cuda_sources", asked["cuda_sources"] or [])
    if asked["use_pch"] not in (True, False):
        raise TypeError(f"load_inline: use_pch must be True or False, got {asked['use_pch']!r}")
    sources = [Source("cpp_sources.cpp", "\n".join(cpp), cuda=False)]
    if cuda:
        sources.append(Source("cuda_sources.cu", "\n".join(cuda), cuda=True))
    return Extension(
        **_common("load_inline", asked),
        sources=tuple(sources),
        functions=_functions(asked["functions"]),
        with_cuda=bool(cuda if asked["with_cuda"] is None else asked["with_cuda"]),
        is_standalone=False,
        implicit_headers=not asked["no_implicit_headers"],
        error_handling=bool(asked["with_pytorch_error_handling"]),
        gil_not_used=bool(asked["gil_not_used"]),
        callers=_callers(),
    )


def _common(call: str, asked: dict) -> dict:
    """Return the fields that both calls have."""
    name, folders = asked["name"], asked["extra_include_paths"]
    if not isinstance(name, str):
        raise TypeError(f"{call}: name must be a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(
            f"{call}: name must be a Python identifier of ASCII letters, got {name!r}; "
            "it becomes the name of the module"
        )
    folders = _listed(call, "extra_include_paths", folders, os.PathLike)
    return {
        "name": name,
        "include_paths": tuple(os.path.abspath(os.fspath(path).strip()) for path in folders),
        "is_python_module": bool(asked["is_python_module"]),
        "build_directory": asked["build_directory"],
        "verbose": bool(asked["verbose"]),
        "keep_intermediates": bool(asked["keep_intermediates"]),
    } | {
        flags: tuple(_listed(call, f"extra_{flags}", asked[f"extra_{flags}"]))
        for flags in ("cflags", "cuda_cflags", "ldflags")
    }


def _refuse_sycl(call: str, asked: dict) -> None:
    if any(value for name, value in asked.items() if "sycl" in name):
        raise NotImplementedError(
            f"{call}: SYCL sources and flags are not supported, C++ and CUDA are; for SYCL use "
            f"torch.utils.cpp_extension.{call}"
        )


def _listed(call: str, argument: str, value: object, *kinds: type) -> list:
    """Return a list of strings (or of `kinds`); TypeError for anything else."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        cure = f"; write [{value!r}]" if isinstance(value, str) else ""
        raise TypeError(
            f"{call}: {argument} must be a list of str, got {type(value).__name__}{cure}"
        )
    for item in value:
        if not isinstance(item, (str, *kinds)):
            raise TypeError(
                f"{call}: {argument} must hold str, got {type(item).__name__} ({item!r:.60})"
            )
        if isinstance(item, str) and ("\0" in item or ("\n" in item and argument != "sources")):
            raise ValueError(f"{call}: {argument} must not hold line breaks or NUL, got {item!r}")
    return [*value]


def _strings(argument: str, value: object) -> list[str]:
    """Return sources as a list of texts; TypeError or ValueError for what is no text."""
    given, call = [value] if isinstance(value, str) else value, f"load_inline: {argument}"
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{call} must be a str or a list of str, got {type(value).__name__}")
    for text in given:
        if not isinstance(text, str):
            cure = "; decode it first" if isinstance(text, bytes) else ""
            raise TypeError(f"{call} must be C++ as str, got {type(text).__name__}{cure}")
        if "\0" in text:
            raise ValueError(f"{call} has a NUL character in it, so is no text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{call} is no text that can be encoded: {error.reason} at character {error.start}"
            ) from None
    return [text.removeprefix(_BYTE_ORDER_MARK) for text in given]


def _functions(functions: object) -> dict[str, str] | None:
    """Return the functions to bind, each with its docstring."""
    if functions is None:
        return None
    if isinstance(functions, str):
        functions = [functions]
    if not isinstance(functions, (list, tuple, dict)):
        raise ValueError(
            "load_inline: functions must be a list of names or a dict from name to docstring, got "
            f"{type(functions).__name__}"
        )
    named = dict(functions) if isinstance(functions, dict) else {name: name for name in functions}
    for name, doc in named.items():
        if not isinstance(name, str) or not isinstance(doc, str):
            raise TypeError(
                f"load_inline: functions must hold names and docstrings as str, got {name!r}: "
                f"{doc!r:.60}"
            )
        if not re.fullmatch(r"[A-Za-z_]\w*(?:::[A-Za-z_]\w*)*", name, re.ASCII):
            raise ValueError(f"load_inline: functions must hold names of functions, got {name!r}")
    return named


def _source_file(path: str | os.PathLike[str]) -> Source:
    """Return a file as a source; OSError where it cannot be read."""
    path = os.path.abspath(os.fspath(path))
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise type(error)(
            error.errno, f"load: the source cannot be read: {error.strerror}", path
        ) from None
    return Source.of_file(path, content, path.endswith((".cu", ".cuh")))


def _callers() -> tuple[str, ...]:
    """Return the files of those who called `load_inline`, the nearest first: one has the string."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(3)))
    theirs = (f for f in frames if f.f_globals.get("__name__") not in _BETWEEN)
    return tuple(dict.fromkeys(frame.f_code.co_filename for frame in islice(theirs, 6)))
