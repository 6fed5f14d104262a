"""Octet: C++/CUDA operators for PyTorch that compile themselves when imported.

    import loader
    out = loader.trilinear_interpolation(feats, points)
    out.sum().backward()

What `import loader` does, in this order:

1. Find the operators: each is a row of files, `ops/X.cpp`, `ops/X.py`, `kernels/X.cu`,
   `kernels/X_cpu.cpp`, `include/X.h`, found by looking in the folders.
2. Give each a key: a digest over its sources, the headers they reach, flags, architectures, torch,
   compilers and CPU features. Nothing is run for that, so a warm import costs milliseconds.
3. Look for each key in the store, `tmp_build/store/` (`LOADER_CACHE_DIR` moves it).
4. Build what is missing, side by side, in a process of its own (`LOADER_BUILD=lazy` waits until an
   operator is used, `never` raises then). Any number of processes may do so at once: one builds,
   the others wait for its lock, and whoever is killed when, a reader sees whole entries or none.

An operator's library is verified against its digest and loaded when the operator is first used. One
that does not compile takes down only itself: using it raises its compile error as BuildError.
"""

import os
import sys
from pathlib import Path

# Makes `loader.jit` and `loader.ops` submodules, in a checkout and in an installed package alike.
__path__ = [os.path.dirname(os.path.abspath(__file__))]

if __name__ == "__main__":
    sys.path.insert(0, __path__[0])
    from loader.jit.cli import main

    sys.exit(main())

import torch

from loader.jit import index as _index
from loader.jit import key as _key
from loader.jit import settings as _settings
from loader.jit import store as _store
from loader.jit import toolchain as _toolchain
from loader.jit import units as _units
from loader.jit.errors import BuildError

__version__ = "0.1.0"

_root = Path(__path__[0])
_cache = _settings.cache_dir(_root)
_operators = _units.discover(_root)
_keys: dict[str, str] = {}
_errors: dict[str, BuildError] = {}
_loaded: dict[str, str] = {}
_FORMS = ("", "_fw", "_bw", "_reference")

__all__ = ["BuildError", "build"]
__all__ += [name + form for name in _operators for form in _FORMS]


def build(*names: str) -> None:
    """Build the operators named (all of them, without a name) that the cache does not hold.

    Sources are looked at anew, so an operator whose build failed can be mended and built again. One
    that is in use already stays as it is until the process ends.

    Raises: BuildError with the compile errors; ValueError for a name that is no operator.
    """
    _operators.update(_units.discover(_root))
    for name in names:
        if name not in _operators:
            raise ValueError(f"{name!r} is no operator; there are {', '.join(_operators)}")
    errors = _build_missing([*(names or _operators)])
    if errors:
        raise BuildError("\n\n".join(map(str, errors.values())), next(iter(errors)))


def _find(names: list[str]) -> list[str]:
    """Work out the keys of these operators; those that the store lacks."""
    toolchain, sources = _toolchain.current(_cache), _units.Sources(_root)
    store, missing, paths = _store.Store(_cache), [], set()
    for name in names:
        inputs = _key.manifest(_operators[name], toolchain, sources)
        paths.update(inputs["files"])
        _keys[name] = _key.key(inputs)
        if store.has(name, _keys[name]):
            continue
        tools = {"cxx": toolchain.cxx, "nvcc": toolchain.nvcc}
        unknown = tuple(tool for tool, identity in tools.items() if identity is None)
        like = store.find_like(inputs, unknown) if unknown else None
        if like:
            _keys[name] = like
        else:
            missing.append(name)
    if not missing and set(names) == set(_operators):
        _index.Index(store.path, _root, toolchain).remember(_keys, sorted(paths))
    return missing


def _find_quickly() -> bool:
    """Whether nothing has changed since all operators were last found in the store."""
    store = _store.Store(_cache)
    keys = _index.Index(store.path, _root, _toolchain.current(_cache)).keys()
    if keys is None or not store.has_all(keys):
        return False
    _keys.update(keys)
    return True


def _build_missing(names: list[str]) -> dict[str, BuildError]:
    missing = [name for name in _find(names) if name in _loaded or not _registered(name)]
    for name in names:
        _errors.pop(name, None)
    if missing:
        from loader.jit.build import build as run

        _errors.update(
            run([_operators[m] for m in missing], _toolchain.current(_cache), _root, _cache)
        )
        _find(missing)
    return {name: _errors[name] for name in names if name in _errors}


def _registered(name: str) -> bool:
    """Whether a library that somebody else loaded, a wheel's say, has this operator already."""
    return torch._C._dispatch_has_kernel(f"octet::{name}")


def _load(name: str) -> None:
    """Load the library of an operator, verified; build it first where that is still to do."""
    if name in _loaded or _registered(name):
        return
    if name in _errors:
        raise _errors[name]
    store = _store.Store(_cache)
    if name not in _keys:
        _find([name])
    library = store.verified(name, _keys[name])
    if library is None:
        if _settings.value("LOADER_BUILD") == "never":
            raise BuildError(
                f"{name}: there is no build of these sources for this machine in {_cache}, and "
                "LOADER_BUILD=never forbids to compile it; unset that, "
                "or run `python -m loader build`",
                name,
            )
        store.discard(name, _keys[name])  # where it was there, but damaged
        if errors := _build_missing([name]):
            raise errors[name]
        library = store.verified(name, _keys[name])
        if library is None:
            raise BuildError(
                f"{name}: its library was damaged again right after its build in {_cache}", name
            )
    torch.ops.load_library(str(library))
    _loaded[name] = _keys[name]


def _owner(name: str) -> str | None:
    """The operator that a public name such as `square_bw` belongs to."""
    owners = [unit for unit in _operators if name == unit or name.startswith(unit + "_")]
    return max(owners, key=len, default=None)


def __getattr__(name: str):
    owner = None if name.startswith("_") else _owner(name)
    if owner:
        import importlib

        module = importlib.import_module(f"loader.ops.{owner}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    import difflib

    close = difflib.get_close_matches(name, __all__, 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise AttributeError(
        f"module 'loader' has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__]
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Namespace(torch._ops._OpNamespace):
    """`torch.ops.octet`, which loads an operator's library when it is first named there."""

    __module__ = torch._ops._OpNamespace.__module__  # operators take theirs from it, to be pickled

    def __getattr__(self, name: str):
        if owner := _owner(name):
            __import__(f"loader.ops.{owner}")
        return super().__getattr__(name)


torch.ops.octet = _Namespace("octet")

if _settings.value("LOADER_BUILD") == "eager" and not _find_quickly():
    for _message in dict.fromkeys(map(str, _build_missing([*_operators]).values())):
        print(f"loader: {_message}", file=sys.stderr)
