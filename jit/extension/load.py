"""`loader.load` and `loader.load_inline`: torch.utils.cpp_extension's, without the wait.

A build comes from the store where it can, by a digest of all that goes in; of any number of
processes that ask for it one builds, and a kill leaves nothing behind; a failure says why, at the
line of the caller's file or cell; torch's headers are compiled only as needed (levels.py). A
changed source is a new library at a new place, loaded under the same name beside the old one, whose
module goes on working.
"""

import importlib.util
import itertools
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..build import batch, engine
from ..build.progress import Quiet
from ..cache.key import key
from ..cache.store import Store
from ..errors import BuildError
from ..machine import files, settings
from ..machine import toolchain as tools
from ..machine.forks import Lock
from ..machine.sources import HOME
from . import arguments
from .arguments import Extension
from .failure import does_not_load, no_module, torch_may_have
from .mending import warn
from .recipe import ExtensionRecipe

File = str | os.PathLike[str]
Text = str | Sequence[str]
Words = Sequence[str] | None

_loaded: dict[str, ModuleType] = {}  # what is in this process, by key
_versions: dict[str, int] = {}  # how many modules of a name there have been
_one_at_a_time = Lock()


def load(
    name: str,
    sources: File | Sequence[File],
    extra_cflags: Words = None,
    extra_cuda_cflags: Words = None,
    extra_sycl_cflags: Words = None,
    extra_ldflags: Words = None,
    extra_include_paths: Sequence[File] | None = None,
    build_directory: File | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    is_standalone: bool = False,
    keep_intermediates: bool = True,
) -> Any:
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
    return loaded(arguments.of_files(locals()))


def load_inline(
    name: str,
    cpp_sources: Text,
    cuda_sources: Text | None = None,
    sycl_sources: Text | None = None,
    functions: Text | Mapping[str, str] | None = None,
    extra_cflags: Words = None,
    extra_cuda_cflags: Words = None,
    extra_sycl_cflags: Words = None,
    extra_ldflags: Words = None,
    extra_include_paths: Sequence[File] | None = None,
    build_directory: File | None = None,
    verbose: bool = False,
    with_cuda: bool | None = None,
    with_sycl: bool | None = None,
    is_python_module: bool = True,
    with_pytorch_error_handling: bool = True,
    keep_intermediates: bool = True,
    use_pch: bool = False,
    no_implicit_headers: bool = False,
    gil_not_used: bool = False,
) -> Any:
    """Build a C++ or CUDA extension from strings, or take it from the cache, and load it.

    Args:
        cpp_sources: C++ code, a string or several, joined. torch's headers need not be included.
        cuda_sources: CUDA code likewise. To call a function of it from Python declare it in
            `cpp_sources` and name it in `functions`.
        functions: names of the functions to bind, or a dict from name to docstring.
        with_pytorch_error_handling: turn torch's errors and warnings into Python's.
        use_pch: accepted; loader itself decides when to use a precompiled header.
        no_implicit_headers: the sources include whatever they need.
        gil_not_used: the functions that are bound may run without Python's lock, side by side.
        name, verbose and the rest: see `load`. A build_directory gets the sources as well.
    Returns: the module, or the path of the library where `is_python_module=False`.
    Raises: BuildError with the compile errors, at the line of the string, or of the file or the
        notebook cell that it stands in; TypeError or ValueError for an unusable argument.
    """
    return loaded(arguments.of_strings(locals()))


def caches() -> tuple[Path, ...]:
    """Return the folders of the build cache: those of `loader`, as it was imported, if it was."""
    session = getattr(sys.modules[__name__.partition(".")[0]], "_session", None)
    return session.caches if session else settings.cache_dirs(HOME)


def loaded(extension: Extension) -> Any:
    """Return the module, or the path, of an extension that is found or built, verified, loaded.

    Raises: BuildError.
    """
    folders = caches()
    toolchain = tools.current.__wrapped__(folders[-1])  # the environment as it is now
    store = Store(folders)
    with _one_at_a_time:
        recipe = ExtensionRecipe(extension, toolchain)
        inputs, failure = recipe.inputs(), ""
        library = _held(recipe, store, inputs)
        for _ in range(3):
            built = library is None
            if library is None:
                library, inputs = _built(extension, recipe, store, inputs)
            digest = key(inputs)
            result = _placed(extension, library, digest)
            try:
                made = result if extension.is_standalone else _opened(extension, library, digest)
                return _told(extension, made, store, digest)
            except (ImportError, OSError) as error:
                failure, library = str(error), None
            levels = (store.manifest(extension.unit, digest) or {}).get("levels", ())
            store.discard(store.path / f"{extension.unit}-{digest}")
            if built and not torch_may_have(failure, extension, [*levels]):
                break
            recipe = ExtensionRecipe(extension, toolchain, narrow=not built)
        raise does_not_load(extension, failure)


def _told(extension: Extension, made: Any, store: Store, digest: str) -> Any:
    """Return what was made; where its source was mended it has that as `__mends__`, with a word."""
    if rows := (store.manifest(extension.unit, digest) or {}).get("mends"):
        if isinstance(made, ModuleType):
            made.__mends__ = rows  # type: ignore[attr-defined]
        warn(extension.name, rows)
    return made


def _held(recipe: ExtensionRecipe, store: Store, inputs: dict) -> Path | None:
    """The library made of `inputs`, verified and marked as in use; None where there is none."""
    library = engine.find(recipe, store, inputs)
    return library if library and store.hold(library) is not None else None


def _built(
    extension: Extension, recipe: ExtensionRecipe, store: Store, inputs: dict
) -> tuple[Path, dict]:
    """Build an extension, or wait for the process that does; its library, and what that is made of.

    Raises: BuildError.
    """
    engine.refuse_if_never(recipe.label, store, recipe.label, cure="")
    if error := no_module(extension, inputs["files"]):
        raise error
    job = batch.build(recipe, store, Quiet())
    library = _held(recipe, store, job.inputs)
    if library is None:
        text = f"{recipe.label}: its build was removed at once; try again"
        raise BuildError(text, recipe.label, kind="damaged")
    if not extension.keep_intermediates:  # they only make the next edit quicker
        shutil.rmtree(engine.work_folder(recipe, store, job.inputs), ignore_errors=True)
    return library, job.inputs


def _opened(extension: Extension, library: Path, digest: str) -> ModuleType | str:
    """Load the library into this process; the module, or its path."""
    if not extension.is_python_module:
        torch.ops.load_library(str(library))
        return str(library)
    if digest not in _loaded:
        for version in itertools.count(_versions.get(extension.name, 0)):
            # pybind11 keeps one module a name and gives that back; Python asks PyInit of the last
            # part of the name alone.
            name = f"v{version}.{extension.name}" if version else extension.name
            file_loader = ExtensionFileLoader(name, str(library))
            spec = ModuleSpec(name, file_loader, origin=str(library))
            spec.has_location = True
            module = importlib.util.module_from_spec(spec)
            if module.__file__ == str(library):
                break
        file_loader.exec_module(module)
        module.__name__ = module.__name__.removeprefix(f"v{version}.")
        _versions[extension.name] = version + 1
        spec.name = extension.name
        _loaded[digest] = module
    return _loaded[digest]


def _placed(extension: Extension, library: Path, digest: str) -> str:
    """Put a copy into the build directory, where there is one, and programs anywhere; its path."""
    if not (extension.build_directory or extension.is_standalone):
        return str(library)
    programs = caches()[-1] / "work" / f"{extension.unit}.programs"
    folder = Path(extension.build_directory or programs / digest[:12])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / (extension.name + ("" if extension.is_standalone else ".so"))
        for source in extension.sources:
            if not source.folder:
                files.write(folder / ("cuda.cu" if source.cuda else "main.cpp"), source.content)
        files.write(final, library.read_bytes(), 0o755)
    except OSError as error:
        raise BuildError(
            f"{extension.name}: build_directory {folder} cannot be written: {error.strerror}; "
            "name a folder of yours, or leave it out",
            extension.name,
        ) from None
    return str(final)
