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
4. Begin to build what is missing, behind, side by side (`LOADER_BUILD=eager` waits for all of it,
   `lazy` builds when an operator is used, `never` raises then). Any number of processes may do so
   at once: one builds, the others wait for its lock, and whoever is killed when, a reader sees
   whole entries or none.
5. Tell torch the schemas of operators that were loaded before, so that stored programs find them.

An operator's library is verified against its digest and loaded when the operator is first used,
which waits for that library alone and moves it to the front. One that does not compile takes down
only itself: using it raises its compile error as BuildError.
"""

import os
import sys
from pathlib import Path
from time import perf_counter as _now

# Makes `loader.jit` and `loader.ops` submodules, in a checkout and in an installed package alike.
__path__ = [os.path.dirname(os.path.abspath(__file__))]

# An installed `python -m loader` imports the package first; then this is in sys.argv still.
_asked = sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("loader", "-mloader")
if __name__ == "__main__" or _asked:
    # Only the package: `python -m loader doctor` has to work where `import torch` does not.
    sys.modules["loader"] = type(sys)("loader")
    sys.modules["loader"].__path__ = __path__
    from loader.jit.tools.cli import main

    sys.exit(main())

import torch

_begun = _now()  # torch's own import is not counted

from loader.jit.errors import BuildError
from loader.jit.errors import no_attribute as _no_attribute
from loader.jit.machine import settings as _settings
from loader.jit.operators.offered import offered as _offered
from loader.jit.operators.session import Session as _Session
from loader.jit.operators.session import owner as _owner

__version__ = "0.1.0"

_root = Path(__path__[0])
_again = "_session" in globals()  # `%reload_ext loader` runs this file once more
if not _again:
    _session = _Session(_root, _settings.cache_dirs(_root))

# Public names that few processes use, and the module below `loader` that has each, or is it.
_ELSEWHERE = {
    "MendWarning": "jit.extension.mending",
    "Library": "jit.operators.library",
    "accelerate_extensions": "jit.extension.torchs",
    "judge": "jit.judge.judge",
    "distributed": "distributed",
    "load": "jit.extension.load",
    "load_inline": "jit.extension.load",
    "nn": "nn",
    "operator": "jit.operators.define",
    "reload": "jit.live.reload",
    "revert": "jit.live.reload",
    "source_module": "jit.source.module",
    "time": "jit.machine.timing",
    "watch": "jit.live.watch",
} | _offered(_root)

__all__ = ["BuildError", "build", "doctor", "explain", "receipt"]
__all__ += [name for name in (*_ELSEWHERE, *_session.public())]


def build(*names: str) -> None:
    """Build the operators named (all of them, without a name) that the cache does not hold.

    Sources are looked at anew, so an operator whose build failed can be mended and built again. One
    that is in use already stays as it is until the process ends.

    Raises: BuildError with the compile errors; ValueError for a name that is no operator.
    """
    _session.build_named(names)


def receipt():
    """Return what this process did for each operator, in what time: `print(loader.receipt())`.

    Returns: an object that prints as a table, here and in a notebook. Its `units` hold, by
    operator, `result` (hit, built, waited, failed, missing or foreign) and the milliseconds of each
    stage: hash, lookup, wait, compile, link, verify, dlopen; `total` those of `import loader`.
    """
    return _session.receipt


def explain(*names, **options):
    """Why the operators named (all, without a name) were built; or which way a call takes, and why.

    `explain("grid_sample")` says what had changed since the build before. `explain(loader.
    grid_sample, input, grid, padding_mode="border")` calls the function, and computes the gradients
    that its arguments ask for, and says which kernels and layouts were chosen on the way, of which,
    and what each takes by the model (`include/rates/`). `LOADER_VERBOSE=1` prints the same on
    stderr when a choice is first made.

    Returns: an object that prints as a table, here and in a notebook; its `rows` are (operator,
    state, why), of a call (operator, choice, way, model, why). For an operator that is not built,
    the difference from the last build of it.

    Raises: ValueError for a name that is no operator; what the function called raises.
    """
    if names and callable(names[0]):
        from loader.jit.operators.choices import explained

        return explained(names[0], names[1:], options)
    if options:
        raise TypeError(
            f"explain: {next(iter(options))!r} is an option of a call; name its function"
        )
    from loader.jit.operators.explain import explanation

    return explanation(_session, _session.named(names))


def doctor():
    """Check all that a build needs on this machine: `print(loader.doctor())`.

    Returns: an object that prints as a table of findings with their cures, here and in a notebook;
    `ok` says whether a build would work, `findings` holds them one by one, `json()` is for reports.
    """
    from loader.jit.tools.doctor import doctor as examine

    return examine(_root, _session.caches)


def load_ipython_extension(shell) -> None:
    """`%load_ext loader`: take in edited sources before each cell; `%%cuda` for kernels in one."""
    from loader.jit.live.notebook import load

    load(shell)


def unload_ipython_extension(shell) -> None:
    """`%unload_ext loader`."""
    from loader.jit.live.notebook import unload

    unload(shell)


def __getattr__(name: str):
    if name in _ELSEWHERE:
        import importlib

        module = importlib.import_module(f"loader.{_ELSEWHERE[name]}")
        globals()[name] = module if _ELSEWHERE[name] == name else getattr(module, name)
        return globals()[name]
    found = _session.attribute(name)
    if found is None:
        raise _no_attribute("module 'loader'", name, __all__, sys.modules[__name__])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Namespace(torch._ops._OpNamespace):
    """`torch.ops.octet`, which loads an operator's library when it is first named there."""

    __module__ = torch._ops._OpNamespace.__module__  # operators take theirs from it, to be pickled

    def __getattr__(self, name: str):
        if owner := _owner(name):
            session, unit = owner
            session.module(unit)
        return super().__getattr__(name)


if not _again:
    torch.ops.octet = _Namespace("octet")

    if _settings.value("LOADER_ERRORS") == "json":
        from loader.jit.machine.told import print_as_json as _print_as_json

        _print_as_json()
    if _settings.value("LOADER_VERBOSE") == "1":
        from loader.jit.operators.choices import LISTENERS as _LISTENERS

        _LISTENERS.verbose()
    _session.start()
    _session.receipt.total = (_now() - _begun) * 1e3
