"""`loader.load` and `loader.load_inline`: torch.utils.cpp_extension's, without the wait.

What differs from torch's: the build comes from the store where it can (looked up by a digest of the
sources, the headers they reach, flags, compilers, torch and Python, and verified before it is
loaded); any number of processes may ask for it at once, one builds, and a kill leaves nothing
behind; a failure says why in a few lines, at the line of the caller's file or notebook cell; and a
source is compiled with no more of torch's headers than it needs (inline_text.py).

A changed source is a new library at a new place, so it can be loaded under the same name beside the
old one, whose module goes on working.
"""

import hashlib
import importlib.machinery
import importlib.util
import itertools
import os
import re
import shutil
import sys
import sysconfig
import threading
from dataclasses import dataclass, field
from pathlib import Path

import torch

import loader

from ..cache.key import FORMAT, key
from ..cache.store import Store
from ..errors import BuildError
from ..machine import toolchain as tools
from ..machine.sources import Sources, included

_loaded: dict[str, object] = {}  # what is in this process, by key
_versions: dict[str, int] = {}  # how many modules of a name there have been
_one_at_a_time = threading.RLock()


def _unlock() -> None:
    """Free what a thread held that a forked child does not have."""
    global _one_at_a_time  # noqa: PLW0603
    _one_at_a_time = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


@dataclass(frozen=True)
class Source:
    """A source as text: a file, or strings that were joined, under the name that errors show."""

    name: str
    text: str
    cuda: bool
    folder: str = ""  # of a file: where its own "headers" lie

    @property
    def content(self) -> bytes:
        """The text as it is on disk."""
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
    callers: tuple[str, ...] = field(default=(), compare=False)  # files to look for a string in

    @property
    def unit(self) -> str:
        """The name of its builds in the store."""
        return f"inline.{self.name}"


def load(
    name,
    sources,
    extra_cflags=None,
    extra_cuda_cflags=None,
    extra_sycl_cflags=None,
    extra_ldflags=None,
    extra_include_paths=None,
    build_directory=None,
    verbose=False,
    with_cuda=None,
    with_sycl=None,
    is_python_module=True,
    is_standalone=False,
    keep_intermediates=True,
):
    """Build a C++ or CUDA extension from files, or take it from the cache, and load it.

    Args:
        name: of the module, what TORCH_EXTENSION_NAME stands for.
        sources: a path or several; `.cu` files are for nvcc.
        extra_cflags, extra_cuda_cflags, extra_ldflags: lists of flags for the C++ compiler, nvcc
            and the linker, after loader's own.
        extra_include_paths: folders of headers.
        build_directory: gets a copy of the library; made where it is missing.
        verbose: print the commands and what they print.
        with_cuda: give the sources CUDA's headers and libraries; by default where there is a `.cu`.
        is_python_module: import it as a module; otherwise load it as a library (TORCH_LIBRARY).
        is_standalone: build a program.
        keep_intermediates: keep the object files, which make the next edit quicker to build.
    Returns: the module; the path of the library or of the program where it is no module.
    Raises: BuildError with the compile errors; TypeError, ValueError or FileNotFoundError for an
        argument that cannot be used.
    """
    _refuse_sycl("load", with_sycl, extra_sycl_cflags)
    paths = [sources] if isinstance(sources, (str, os.PathLike)) else sources
    read = tuple(_source_file(path) for path in _listed("load", "sources", paths, os.PathLike))
    if not read:
        raise ValueError("load: sources must name at least one file, got none")
    extension = Extension(
        *_common("load", name, extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths)(
            read, None
        ),
        with_cuda=any(s.cuda for s in read) if with_cuda is None else bool(with_cuda),
        is_python_module=bool(is_python_module),
        is_standalone=bool(is_standalone),
    )
    if is_python_module and is_standalone:
        raise ValueError(
            "load: is_python_module and is_standalone exclude each other; for a program set "
            "is_python_module=False"
        )
    return _load(extension, build_directory, verbose, keep_intermediates)


def load_inline(
    name,
    cpp_sources,
    cuda_sources=None,
    sycl_sources=None,
    functions=None,
    extra_cflags=None,
    extra_cuda_cflags=None,
    extra_sycl_cflags=None,
    extra_ldflags=None,
    extra_include_paths=None,
    build_directory=None,
    verbose=False,
    with_cuda=None,
    with_sycl=None,
    is_python_module=True,
    with_pytorch_error_handling=True,
    keep_intermediates=True,
    use_pch=False,
    no_implicit_headers=False,
):
    """Build a C++ or CUDA extension from strings, or take it from the cache, and load it.

    Args:
        cpp_sources: C++ code, a string or several, joined. torch's headers need not be included.
        cuda_sources: CUDA code likewise. To call a function of it from Python declare it in
            `cpp_sources` and name it in `functions`.
        functions: names of the functions to bind, or a dict from name to docstring.
        with_pytorch_error_handling: turn torch's errors and warnings into Python's.
        use_pch: accepted; loader itself decides when to use a precompiled header.
        no_implicit_headers: the sources include whatever they need.
        name, verbose and the rest: see `load`. A build_directory gets the sources as well.
    Returns: the module, or the path of the library where `is_python_module=False`.
    Raises: BuildError with the compile errors, at the line of the string, or of the file or the
        notebook cell that it stands in; TypeError or ValueError for an unusable argument.
    """
    _refuse_sycl("load_inline", with_sycl, extra_sycl_cflags, sycl_sources)
    cpp = _strings("cpp_sources", cpp_sources)
    cuda = _strings("cuda_sources", cuda_sources or [])
    if use_pch not in (True, False):
        raise TypeError(f"load_inline: use_pch must be True or False, got {use_pch!r}")
    sources = [Source("cpp_sources.cpp", "\n".join(cpp), cuda=False)]
    if cuda:
        sources.append(Source("cuda_sources.cu", "\n".join(cuda), cuda=True))
    extension = Extension(
        *_common(
            "load_inline",
            name,
            extra_cflags,
            extra_cuda_cflags,
            extra_ldflags,
            extra_include_paths,
        )(tuple(sources), _functions(functions)),
        with_cuda=bool(cuda) if with_cuda is None else bool(with_cuda),
        is_python_module=bool(is_python_module),
        is_standalone=False,
        implicit_headers=not no_implicit_headers,
        error_handling=bool(with_pytorch_error_handling),
        callers=_callers(),
    )
    return _load(extension, build_directory, verbose, keep_intermediates)


def _load(extension: Extension, build_directory, verbose: bool, keep_intermediates: bool):
    """Find or build, verify, load."""
    caches = loader._session.caches
    toolchain = tools.current.__wrapped__(caches[-1])  # the environment as it is now
    store = Store(caches)
    with _one_at_a_time:
        inputs = manifest(extension, toolchain)
        digest = key(inputs)
        library, narrow = store.verified(extension.unit, digest), True
        held = library and store.hold(library)
        failure = None
        for _ in range(3):
            built = held is None
            if built:
                from . import build as inline_build

                library = inline_build.build(extension, toolchain, store, inputs, verbose, narrow)
                store.hold(library)
                if not keep_intermediates:
                    inline_build.forget_objects(extension, store, inputs)
            result = _placed(extension, library, digest, build_directory)
            try:
                return result if extension.is_standalone else _opened(extension, library, digest)
            except (ImportError, OSError) as error:
                failure, held = str(error), None
            levels = (store.manifest(extension.unit, digest) or {}).get("levels", ())
            store.discard(store.path / f"{extension.unit}-{digest}")
            if built and not (narrow and {"kernels", "tensor"} & {*levels}):
                break
            narrow = not built
        from .build import does_not_load

        raise does_not_load(extension, failure)


def manifest(extension: Extension, toolchain: tools.Toolchain) -> dict:
    """All that the binary depends on."""
    made_by = dict(toolchain.identity)
    del made_by["cflags"], made_by["ldflags"]  # the operators' own; here all flags are the caller's
    flags = [*extension.cflags, *extension.cuda_cflags]
    made_by["cpu"] = tools.cpu_features() if any("native" in flag for flag in flags) else ""
    made_by.pop("cuda_flags", None)
    if extension.with_cuda:
        made_by["nvcc"] = toolchain.nvcc
    else:
        made_by.pop("nvcc", None)
        made_by["architectures"] = ""
    asked = {
        "functions": None if extension.functions is None else [*extension.functions.items()],
        "flags": [extension.cflags, extension.cuda_cflags, extension.ldflags],
        "include_paths": extension.include_paths,
        "form": [
            extension.with_cuda,
            extension.is_python_module,
            extension.is_standalone,
            extension.implicit_headers,
            extension.error_handling,
        ],
        "order": [source.name for source in extension.sources],
    }
    return {
        "format": FORMAT,
        "unit": extension.unit,
        "files": headers(extension, toolchain),
        "toolchain": made_by,
        "python": [sysconfig.get_config_var("SOABI"), sysconfig.get_path("include")],
        "asked": _plain(asked),
    }


def _plain(value):
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Texts(Sources):
    """Digests of sources that are in memory and of the headers on disk that they reach."""

    def __init__(self, extension: Extension, toolchain: tools.Toolchain):
        known = os.path.dirname(torch.__file__)  # torch's own headers go by its version
        folders = [folder for folder in extension.include_paths if not folder.startswith(known)]
        self._texts = {os.path.join("/", s.name): s.content for s in extension.sources}
        super().__init__(Path("/"), (*folders, *toolchain.header_folders))

    def _read_file(self, path: str):
        if path not in self._texts:
            return super()._read_file(path)
        content = self._texts[path]
        return hashlib.sha256(content).hexdigest(), included(content)


def headers(extension: Extension, toolchain: tools.Toolchain) -> dict[str, str]:
    """SHA-256 of the sources, of the headers that they reach, and of our own binding."""
    texts = _Texts(extension, toolchain)
    found: dict[str, str] = {}
    for source in extension.sources:
        found |= texts.closure(os.path.join("/", source.name))
    binding = os.path.join(loader.__path__[0], "include", "inline_binding.h")
    return dict(sorted(found.items())) | {"inline_binding.h": texts._read(binding)[0]}


def _opened(extension: Extension, library: Path, digest: str):
    """The library in this process: the module, or its path."""
    if not extension.is_python_module:
        torch.ops.load_library(str(library))
        return str(library)
    if digest not in _loaded:
        for version in itertools.count(_versions.get(extension.name, 0)):
            # pybind11 keeps one module a name and gives that back; Python asks PyInit of the last
            # part of the name alone.
            name = f"v{version}.{extension.name}" if version else extension.name
            file_loader = importlib.machinery.ExtensionFileLoader(name, str(library))
            spec = importlib.util.spec_from_file_location(name, str(library), loader=file_loader)
            module = importlib.util.module_from_spec(spec)
            if module.__file__ == str(library):
                break
        file_loader.exec_module(module)
        module.__name__, _versions[extension.name] = extension.name, version + 1
        spec.name = extension.name
        _loaded[digest] = module
    return _loaded[digest]


def _placed(extension: Extension, library: Path, digest: str, build_directory) -> str:
    """Put a copy into the build directory, where there is one, and programs anywhere; its path."""
    if not build_directory:
        if not extension.is_standalone:
            return str(library)
        build_directory = loader._session.caches[-1] / "work"
        build_directory = build_directory / f"{extension.unit}.programs" / digest[:12]
    folder = Path(build_directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / (extension.name + ("" if extension.is_standalone else ".so"))
        for source in extension.sources:
            if not source.folder:
                stem = "main.cpp" if not source.cuda else "cuda.cu"
                _write(folder / stem, source.content)
        _write(final, library.read_bytes(), executable=True)
    except OSError as error:
        raise BuildError(
            f"{extension.name}: build_directory {folder} cannot be written: {error.strerror}; "
            "name a folder of yours, or leave it out",
            extension.name,
        ) from None
    return str(final)


def _write(path: Path, content: bytes, executable: bool = False) -> None:
    """Give a file its content in one step, unless it has it."""
    try:
        if path.read_bytes() == content:
            return
    except FileNotFoundError:
        pass
    draft = path.with_name(f".{path.name}-{os.getpid()}-{os.urandom(4).hex()}")
    draft.write_bytes(content)
    if executable:
        draft.chmod(0o755)
    shutil.move(draft, path)


def _common(call: str, name, cflags, cuda_cflags, ldflags, include_paths):
    """The arguments that `load` and `load_inline` share, checked."""
    if not isinstance(name, str):
        raise TypeError(f"{call}: name must be a str, got {type(name).__name__}")
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        raise ValueError(
            f"{call}: name must be a Python identifier of ASCII letters, got {name!r}; "
            "it becomes the name of the module"
        )
    flags = [
        tuple(_listed(call, argument, value))
        for argument, value in (
            ("extra_cflags", cflags),
            ("extra_cuda_cflags", cuda_cflags),
            ("extra_ldflags", ldflags),
        )
    ]
    folders = _listed(call, "extra_include_paths", include_paths, os.PathLike)
    absolute = tuple(os.path.abspath(os.fspath(folder).strip()) for folder in folders)
    return lambda sources, functions: (name, sources, functions, *flags, absolute)


def _listed(call: str, argument: str, value, *kinds: type) -> list:
    """A list of strings (or of `kinds`); TypeError for anything else."""
    if value is None:
        return []
    if isinstance(value, (str, bytes, os.PathLike)) or not isinstance(value, (list, tuple)):
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


def _strings(argument: str, value) -> list[str]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)):
        raise TypeError(
            f"load_inline: {argument} must be a str or a list of str, got {type(value).__name__}"
        )
    for text in given:
        if not isinstance(text, str):
            cure = "; decode it first" if isinstance(text, bytes) else ""
            raise TypeError(
                f"load_inline: {argument} must be C++ as str, got {type(text).__name__}{cure}"
            )
        if "\0" in text:
            raise ValueError(f"load_inline: {argument} has a NUL character in it, so is no text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"load_inline: {argument} is no text that can be encoded: {error.reason} at "
                f"character {error.start}"
            ) from None
    return [*given]


def _functions(functions) -> dict[str, str] | None:
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


def _source_file(path) -> Source:
    path = os.path.abspath(os.fspath(path))
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise type(error)(
            error.errno, f"load: the source cannot be read: {error.strerror}", path
        ) from None
    text = content.decode(errors="surrogateescape")
    return Source(path, text, path.endswith((".cu", ".cuh")), os.path.dirname(path))


def _refuse_sycl(call: str, with_sycl, *others) -> None:
    if with_sycl or any(others):
        raise NotImplementedError(
            f"{call}: SYCL sources and flags are not supported, C++ and CUDA are; for SYCL use "
            f"torch.utils.cpp_extension.{call}"
        )


def _callers() -> tuple[str, ...]:
    """The files of those who called `load_inline`, the nearest first: one has the string."""
    frame, files = sys._getframe(2), []
    while frame and len(files) < 6:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return tuple(dict.fromkeys(files))
