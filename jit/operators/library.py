"""`loader.Library`: operators of somebody else's folder, built and loaded like loader's own."""

import hashlib
import keyword
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from ..build.receipt import Receipt
from ..errors import no_attribute
from ..errors.table import Table
from ..machine import settings
from ..machine.forks import Lock
from ..machine.sources import HOME, listed
from .session import Session

_loaded: dict[str, "Library"] = {}  # by folder: its operators can be registered only once


class Library(ModuleType):  # so that torch.compile sees in it what it sees in loader
    """The operators of a folder that has `ops/`, `kernels/` and, where needed, `include/`.

        mine = loader.Library("path/to/folder")
        out = mine.cube(x)

    Each operator X is a row of files as loader's own are: `ops/X.cpp`, `ops/X.py` and, as it needs
    them, `kernels/X_cpu.cpp`, `kernels/X.cu`, `include/X.h`; `python -m loader new X --in FOLDER`
    makes one. Their sources may include the headers of loader's `include/` as well. What the cache
    lacks is built here and now, or as LOADER_BUILD says; one that does not compile takes down only
    itself. The operators are `X`, `X_fw`, `X_bw` and `X_reference` of this object, and
    `torch.ops.octet.X`. The same folder gives the same object, however it is named.

    Args:
        path: the folder; a later change of the current one does not matter.
        cache: a folder of its own for the builds; loader's cache where it is not given.

    Raises:
        FileNotFoundError: there is no such folder, or no `ops/` in it.
        ValueError: an operator has no `ops/X.py`, or a name that cannot be used or is taken; the
            folder is loader's own, or is loaded already, with another cache.
    """

    _lock = Lock()
    _session: Session
    _made_of: tuple[str, str | None]

    def __new__(cls, path: Any, cache: Any = None) -> "Library":
        """The object of this folder, made where it is asked for the first time."""
        root = _folder(path)
        caches = settings.cache_dirs(HOME)
        if cache is not None:
            cache = os.path.abspath(os.path.expanduser(os.fsdecode(cache)))
            caches = (Path(cache),)
        with cls._lock:
            known = _loaded.get(root)
            if known is None:
                known = _loaded[root] = cls._load(Path(root), caches)
                known._made_of = root, cache
            elif cache is not None and known._session.caches != caches:
                raise ValueError(
                    f"Library: {root} is loaded already, with the cache "
                    f"{known._session.caches[-1]}; a process can load it once, got cache={cache!r}"
                )
            return known

    def __init__(self, path: Any, cache: Any = None) -> None:
        pass  # see __new__: it may be there already

    @classmethod
    def _load(cls, root: Path, caches: tuple[Path, ...]) -> "Library":
        begun = time.perf_counter()
        for file in listed(root / "ops"):
            if file.endswith(".cpp"):
                _check_operator(root, file.removesuffix(".cpp"))
        # A package of its own, so that two libraries may each have, say, `ops/shapes.py`.
        word, digest = re.sub(r"\W", "_", root.name), hashlib.sha256(os.fsencode(root)).hexdigest()
        package = ModuleType(f"loader.library_{word}_{digest[:8]}", f"The operators of {root}.")
        package.__path__ = [str(root / "ops")]
        library = super().__new__(cls)
        ModuleType.__init__(library, root.name, package.__doc__)
        library._session = Session(root, caches, package.__name__)
        sys.modules[package.__name__] = package
        library._session.receipt = Receipt(repr(library))
        library._session.start()
        library._session.receipt.total = (time.perf_counter() - begun) * 1e3
        return library

    def build(self, *names: str) -> None:
        """As `loader.build`, of this library's operators."""
        self._session.build_named(names)

    def explain(self, *names: str) -> Table:
        """As `loader.explain`, of this library's operators."""
        from .explain import explanation

        return explanation(self._session, self._session.named(names))

    def receipt(self) -> Receipt:
        """As `loader.receipt`, of this library's operators."""
        return self._session.receipt

    def __getattr__(self, name: str) -> Any:
        """An operator, or a form of one such as `X_fw`; built and loaded when first asked for."""
        if name.startswith("_"):
            raise AttributeError(name)
        if unit := self._session.owner(name):
            _check_operator(self._session.root, unit)
        found = self._session.attribute(name)
        if found is None:
            raise no_attribute(repr(self), name, dir(self), self)
        self.__dict__[name] = found
        return found

    def __dir__(self) -> list[str]:
        """The operators in all their forms, too."""
        return sorted({*object.__dir__(self), *self._session.public()})

    def __repr__(self) -> str:
        """As it would be made again."""
        return f"loader.Library({str(self._session.root)!r})"

    def __reduce__(self) -> tuple:
        """A copy is the same object; another process, or a later one, loads the folder itself."""
        return Library, self._made_of


def _folder(path: Any) -> str:
    try:
        root = os.path.realpath(os.path.expanduser(os.fsdecode(path)))
    except TypeError:
        got = type(path).__name__
        raise TypeError(f"Library: path must be the path of a folder, got {got}") from None
    if not os.path.isdir(root):
        raise FileNotFoundError(f"Library: there is no folder {root}")
    if root == os.path.realpath(HOME):
        raise ValueError(f"Library: {root} is loader's own folder, whose operators are loader.X")
    if not os.path.isdir(os.path.join(root, "ops")):
        raise FileNotFoundError(
            f"Library: {root} has no folder ops/ with its operators; give the folder that holds "
            "ops/ and kernels/, or make an operator: "
            f"python -m loader new NAME --in {root}"
        )
    return root


def _check_operator(root: Path, name: str) -> None:
    """ValueError where an operator cannot be offered as an attribute, or has no Python side."""
    if not name.isidentifier() or keyword.iskeyword(name) or hasattr(Library, name):
        raise ValueError(
            f"Library: {root}/ops/{name}.cpp: an operator's name must be a name in Python, and "
            f"none of {', '.join(sorted(n for n in vars(Library) if n[0] != '_'))}; got {name!r}"
        )
    if not (root / "ops" / f"{name}.py").exists():
        raise ValueError(
            f"Library: {root}/ops/{name}.cpp has no {name}.py beside it, which gives the operator "
            "its function, reference and derivative; copy loader's ops/square.py"
        )
