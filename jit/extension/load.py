"""`loader.load` and `loader.load_inline`: torch.utils.cpp_extension's, without the wait.

What differs from torch's: the build comes from the store where it can (looked up by a digest of the
sources, the headers they reach, flags, compilers, torch and Python, and verified before it is
loaded); any number of processes may ask for it at once, one builds, and a kill leaves nothing
behind; a failure says why in a few lines, at the line of the caller's file or notebook cell; and a
source is compiled with no more of torch's headers than it needs (levels.py).

A changed source is a new library at a new place, so it can be loaded under the same name beside the
old one, whose module goes on working.
"""

import importlib.machinery
import importlib.util
import itertools
import shutil
from pathlib import Path

import torch

import loader

from ..build import batch, engine
from ..build.progress import Quiet
from ..cache.key import key
from ..cache.store import Store
from ..errors import BuildError
from ..machine import files
from ..machine import toolchain as tools
from ..machine.forks import Lock
from . import arguments
from .arguments import Extension
from .failure import does_not_load, torch_may_have
from .recipe import ExtensionRecipe

_loaded: dict[str, object] = {}  # what is in this process, by key
_versions: dict[str, int] = {}  # how many modules of a name there have been
_one_at_a_time = Lock()


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
    return _load(arguments.of_files(locals()), build_directory, verbose, keep_intermediates)


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
    gil_not_used=False,
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
        gil_not_used: the functions that are bound may run without Python's lock, side by side.
        name, verbose and the rest: see `load`. A build_directory gets the sources as well.
    Returns: the module, or the path of the library where `is_python_module=False`.
    Raises: BuildError with the compile errors, at the line of the string, or of the file or the
        notebook cell that it stands in; TypeError or ValueError for an unusable argument.
    """
    return _load(arguments.of_strings(locals()), build_directory, verbose, keep_intermediates)


def _load(extension: Extension, build_directory, verbose: bool, keep_intermediates: bool):
    """Find or build, verify, load."""
    caches = loader._session.caches
    toolchain = tools.current.__wrapped__(caches[-1])  # the environment as it is now
    store = Store(caches)
    with _one_at_a_time:
        recipe = ExtensionRecipe(extension, toolchain, verbose=verbose)
        inputs = recipe.inputs()
        library = engine.find(recipe, store, inputs)
        held, failure = library and store.hold(library), ""
        for _ in range(3):
            built = held is None
            if built:
                library, inputs = _built(recipe, store, inputs, keep_intermediates)
            digest = key(inputs)
            result = _placed(extension, library, digest, build_directory)
            try:
                return result if extension.is_standalone else _opened(extension, library, digest)
            except (ImportError, OSError) as error:
                failure, held = str(error), None
            levels = (store.manifest(extension.unit, digest) or {}).get("levels", ())
            store.discard(store.path / f"{extension.unit}-{digest}")
            if built and not torch_may_have(failure, extension, [*levels]):
                break
            recipe = ExtensionRecipe(extension, toolchain, narrow=not built, verbose=verbose)
        raise does_not_load(extension, failure)


def _built(
    recipe: ExtensionRecipe, store: Store, inputs: dict, keep_intermediates: bool
) -> tuple[Path, dict]:
    """Build an extension, or wait for the process that does; its library, and what that is made of.

    Raises: BuildError.
    """
    engine.refuse_if_never(recipe.label, store, recipe.label, cure="")
    if error := recipe.certain_failure(inputs):
        raise error
    job = batch.build(recipe, store, Quiet())
    library = engine.find(recipe, store, job.inputs)
    if library is None or store.hold(library) is None:
        raise BuildError(f"{recipe.label}: its build was removed at once; try again", recipe.label)
    if not keep_intermediates:  # they only make the next edit quicker
        shutil.rmtree(engine.work_folder(recipe, store, job.inputs), ignore_errors=True)
    return library, job.inputs


def _opened(extension: Extension, library: Path, digest: str):
    """Load the library into this process; the module, or its path."""
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
                files.write(folder / ("cuda.cu" if source.cuda else "main.cpp"), source.content)
        files.write(final, library.read_bytes(), 0o755)
    except OSError as error:
        raise BuildError(
            f"{extension.name}: build_directory {folder} cannot be written: {error.strerror}; "
            "name a folder of yours, or leave it out",
            extension.name,
        ) from None
    return str(final)
