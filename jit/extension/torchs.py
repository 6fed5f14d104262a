"""`loader.accelerate_extensions()`: torch's own ways to build an extension, on loader's engine.

The functions of torch.utils.cpp_extension stay the objects that they are; what changes is the code
inside them. So it reaches whoever imported one before, under whatever name, and giving the code
back restores it. Where that module is not imported yet it is changed when it is: nothing is
imported for this.
"""

import functools
import importlib
import importlib.abc
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

from ..build.progress import say
from ..machine.forks import Lock
from ..machine.sources import HOME

_TORCHS = "torch.utils.cpp_extension"
# Builds the objects of a setup.py; an underscore of torch's, and the narrowest place there is.
_OBJECTS = "_write_ninja_file_and_compile_objects"
# By function of torch's the one of loader's that takes its arguments. `load` and `load_inline` end
# in the last, which some programs call themselves.
_CALLS = {"load": "load", "load_inline": "load_inline", "_jit_compile": "load"}
_said: set[str] = set()
_within = threading.local()  # `torch` is True while this thread is in what was left to torch


class Extensions:
    """torch's ways to build an extension run on loader's: from the call on, until `close()`.

    Usable in a `with` block, whose end closes it. Any number may be open, in any order.
    """

    def __init__(self) -> None:
        self._open = False
        self.__enter__()

    def __enter__(self) -> "Extensions":
        """Itself; opened again if it was closed."""
        if _TORCHS in sys.modules:
            importlib.import_module(_TORCHS)  # waits for a thread that is importing it
        with _state.lock:
            if not self._open:
                _state.acquire()
                self._open = True
        return self

    def __exit__(self, *error: object) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """End it; where it was the only one, all is as torch made it."""
        with _state.lock:
            if self._open:
                self._open = False
                _state.release()

    def __repr__(self) -> str:
        """Tell if it is open."""
        return f"<loader.accelerate_extensions: {'open' if self._open else 'closed'}>"


def accelerate_extensions() -> Extensions:
    """Have torch's `load`, `load_inline` and `BuildExtension` build on loader's engine.

        with loader.accelerate_extensions():
            module = torch.utils.cpp_extension.load_inline(...)  # as loader.load_inline

    or once for the whole process, without `with`; `close()` of what comes back ends that. In
    between `torch.utils.cpp_extension.load` and `load_inline` are `loader.load` and
    `loader.load_inline`, wherever they were imported, before or after; and the objects that a
    setup.py with `BuildExtension` asks for are taken from the cache, or compiled side by side and
    kept there, without ninja. What loader does not build (SYCL, ROCm, device linking) is left to
    torch, which is said in a line.

    It holds for the whole process, all its threads, and processes forked from it.
    `python -m loader run` does the same for a program and for all Pythons that it starts.

    Returns: an object to be closed by `with` or by `close()`; without either it holds until the
        process ends.
    """
    there = sys.modules.get("octet_run.jit.extension.torchs")  # under `python -m loader run`
    return there.Extensions() if there else Extensions()


class _State:
    """The changes to torch, as long as anybody wants them there."""

    def __init__(self) -> None:
        self.lock = Lock()
        self._users, self._undo = 0, list[Callable[[], None]]()

    def acquire(self) -> None:
        self._users += 1
        if self._users == 1:
            if module := sys.modules.get(_TORCHS):
                self.change(module)
            else:
                sys.meta_path.insert(0, _finder)

    def release(self) -> None:
        self._users -= 1
        if not self._users:
            _finder.withdraw()
            undo, self._undo = self._undo, []
            for function in reversed(undo):
                function()

    def change(self, module: ModuleType) -> None:
        """Put our code into the functions of a module that has been imported."""
        if not self._users or self._undo:
            return
        if sys.modules["torch"].version.hip:
            return _left("extensions", "this torch is for ROCm, and loader builds C++ and CUDA")
        for name in (*_CALLS, _OBJECTS):
            function = getattr(module, name, None)
            if changed := _changed(name, function):
                self._set(function, "__code__", changed)
            else:
                return _left(name, f"this torch's {_TORCHS}.{name} is not what loader knows")
        # From torch 2.15 on the class is not finished before somebody asks for it.
        there = vars(module)
        if builder := there.get("_BUILD_EXTENSION_CLASS") or there.get("BuildExtension"):
            self._set(builder, "__init__", _without_ninja(builder.__init__))

    def _set(self, owner: Any, name: str, value: object) -> None:
        before = getattr(owner, name)
        self._undo.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch.utils.cpp_extension as all others do, and has it changed once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of that one module alone."""
        if name != _TORCHS:
            return None
        others = (finder for finder in [*sys.meta_path] if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, found), None)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader)
        return spec

    def withdraw(self) -> None:
        """Take it off Python's list, where it is there."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Another loader, after whose work the module is changed; the module never sees this one."""

    def __init__(self, real: Any):
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__, "it was found"
        module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        with _state.lock:
            _finder.withdraw()
            _state.change(module)


_state, _finder = _State(), _Finder()


def _changed(name: str, function: Any) -> Any:
    """Return code of the same parameters, which calls `instead`; None for no plain function."""
    if not isinstance(function, FunctionType) or function.__closure__ or _is_variadic(function):
        return None
    code = function.__code__
    count = code.co_argcount
    names = code.co_varnames[: count + code.co_kwonlyargcount]
    star = ["*"] if code.co_kwonlyargcount else []
    given = ", ".join(f"{name!r}: {name}" for name in names)
    text = (  # in one line, which a traceback then shows as torch's `def`
        f"def {name}({', '.join([*names[:count], *star, *names[count:]])}): "
        f"from {__name__} import instead as _instead_; return _instead_({name!r}, {{{given}}})\n"
    )
    made: dict[str, Any] = {}
    exec(compile(text, code.co_filename, "exec"), made)
    original = FunctionType(code, function.__globals__, name, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    _originals[name] = original
    return made[name].__code__.replace(co_firstlineno=code.co_firstlineno)


_originals: dict[str, FunctionType] = {}  # functions of torch's with the code that they came with


def _is_variadic(function: FunctionType) -> bool:
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return bool(function.__code__.co_flags & flags or function.__code__.co_posonlyargcount)


def instead(name: str, asked: dict[str, Any]) -> Any:
    """Do what one of torch's functions is asked for by its arguments, or have torch do it.

    Raises: BuildError.
    """
    if getattr(_within, "torch", False):
        return _originals[name](**asked)
    if name == _OBJECTS:
        objects = _room("objects")
        try:
            order = objects.order(asked)
        except ValueError as reason:
            _left("these objects", str(reason))
            return _torchs_own(name, asked)
        return objects.make(order)
    load, call = _room("load"), _CALLS[name]
    try:
        bound = inspect.signature(getattr(load, call)).bind(**asked)
        bound.apply_defaults()
        check = load.arguments.of_files if call == "load" else load.arguments.of_strings
        extension = check(bound.arguments)
    except (TypeError, ValueError, NotImplementedError) as reason:
        _left(f"{call}({asked.get('name')!r})", str(reason))
        return _torchs_own(name, asked)
    return load.loaded(extension)


def _torchs_own(name: str, asked: dict[str, Any]) -> Any:
    """Call a function of torch's as it came, which may call others that are changed."""
    _within.torch = True
    try:
        return _originals[name](**asked)
    finally:
        _within.torch = False


def _room(module: str) -> Any:
    """Return a module of this room, of the `loader` that the program has imported if it has."""
    theirs = sys.modules.get("loader")
    is_ours = getattr(theirs, "__path__", None) == [str(HOME)] and hasattr(theirs, "_session")
    package = "loader.jit.extension" if is_ours else __package__
    return importlib.import_module(f"{package}.{module}")


def _left(what: str, reason: str) -> None:
    """Say, once, what is left to torch."""
    text = f"{what}: left to torch: {reason}"
    if text not in _said:
        _said.add(text)
        say(text)


def _without_ninja(original: Callable) -> Callable:
    """Return BuildExtension's `__init__` for objects that are made without ninja."""

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **{**options, "use_ninja": False})  # else it looks for ninja
        self.use_ninja = options.get("use_ninja", True)

    return __init__
