"""`python -m loader ...`: what loader does, from a shell.

Runs without the body of `loader` at first, so that nothing is built, nor torch imported, by a
command that does not need it.
"""

import argparse
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..build.steps import Steps
from ..machine import settings, told

_ROOT = Path(__file__).resolve().parents[2]
_NO_BENCH = {"harness", "everything", "compare", "children", "processes"}
_BENCH = sorted({path.stem for path in (_ROOT / "bench").glob("*.py")} - _NO_BENCH)
_PLAIN = 10.0  # seconds between lines on how far a command is, where there is no terminal
_RESUMED = "what is compiled is kept, and the same command goes on from there"
_KEPT = {  # after an interrupt; a benchmark says so itself
    "build": _RESUMED,
    "wheel": f"{_RESUMED}; no wheel was made",
    "cache": "what it had removed is gone, the rest is as it was",
}
_COMMANDS: dict[Callable, tuple] = {}  # `_name`, whose docstring is the help, and its arguments


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loader", description="C++/CUDA operators for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for run, words in _COMMANDS.items():
        command = commands.add_parser(run.__name__[1:], help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        for names, how in words:
            command.add_argument(*names, **how)
    given = sys.argv[1:] if arguments is None else arguments
    theirs = given[1:] if given[:1] == ["run"] and given[1:] not in (["-h"], ["--help"]) else []
    options, rest = parser.parse_known_args(given[: len(given) - len(theirs)])
    options.rest = rest + theirs  # of a benchmark or a program
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # whoever started this may ignore it
    if rest and options.command != "bench":
        parser.parse_args(given)
    if options.command != "run":
        settings.choose("LOADER_BUILD", "lazy", unless_set=True)
    Steps.plain = _PLAIN
    try:
        return options.run(options) or 0
    except (RuntimeError, ValueError) as error:
        told.tell(error)
    except KeyboardInterrupt:
        kept = _KEPT.get(options.command, "nothing of it is left over")
        print(f"\nloader: {options.command}: interrupted; {kept}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `python -m loader cache | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _word(*names: str, **how: Any) -> tuple:
    """An argument of a command, as argparse has them."""
    return names, how


def _command(*words: tuple) -> Callable:
    """Make a command of the function that follows."""

    def enter(function: Callable) -> Callable:
        _COMMANDS[function] = words
        return function

    return enter


_OPERATORS = _word("operators", nargs="*", help="all of them where none is named")
_FOLDER = _word("--in", dest="folder", metavar="FOLDER", help="of this loader.Library")


def _loader() -> Any:
    """The whole of `loader`."""
    if not hasattr(sys.modules["loader"], "build"):
        del sys.modules["loader"]
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("loader")


def _capabilities(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", name):
            raise ValueError(f"--arch takes compute capabilities such as 9.0, got {name!r}")
    return names


@_command(
    _OPERATORS,
    _word("--arch", nargs="+", metavar="X.Y", help="compute capabilities, e.g. 8.0 9.0"),
    _word("--jobs", type=int, metavar="N", help="compilers at once (default: cores)"),
    _word("--portable", action="store_true", help="for any CPU of this kind, not this one alone"),
)
def _build(options: argparse.Namespace) -> None:
    """Compile what the cache lacks."""
    if options.arch:
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(_capabilities(options.arch))
    if options.jobs is not None:
        if options.jobs < 1:
            raise ValueError(f"--jobs must be 1 or more, got {options.jobs}")
        os.environ["MAX_JOBS"] = str(options.jobs)
    if options.portable:
        settings.choose("LOADER_NATIVE", "0")
    loader = _loader()
    if options.arch and loader._session.toolchain.nvcc is None:
        raise ValueError("--arch needs nvcc, which is not here; `python -m loader doctor` says how")
    loader.build(*options.operators)
    if not options.operators:
        from ..operators.node import NODE

        if error := NODE.build():
            print(f"loader: {error}\nOperators work without it, called by Python", file=sys.stderr)


@_command(
    _word("--arch", nargs="+", metavar="X.Y", help="compute capabilities, e.g. 8.0 9.0"),
    _word("--cpu", action="store_true", help="without CUDA"),
    _word("--out", metavar="FOLDER", default="dist", help="where it goes (default: dist)"),
)
def _wheel(options: argparse.Namespace) -> None:
    """Make a wheel that needs no compiler: the operators' builds are inside."""
    from .wheel import contents, make

    if bool(options.arch) == options.cpu:
        raise ValueError("wheel: name GPUs, as in --arch 8.0 9.0, or say --cpu")
    out = Path(options.out).expanduser()
    print(contents(make(_ROOT, out, _capabilities(options.arch or []))))


@_command(_OPERATORS)
def _explain(options: argparse.Namespace) -> None:
    """Say why each operator was built."""
    print(_loader().explain(*options.operators))


@_command(
    _word("name", help="its name, and that of its files"),
    _word("--in", dest="folder", metavar="FOLDER", help="another folder, for loader.Library"),
    _word("--args", nargs="+", metavar="ARG", help="names of its arguments: elementwise in all"),
    _word("--like", metavar="OPERATOR", default="square", help="made of which elementwise one"),
)
def _new(options: argparse.Namespace) -> None:
    """Make a working operator, to be changed into your own."""
    from ..operators.new import create

    folder = Path(options.folder).expanduser() if options.folder else None
    public = frozenset(dir(_loader()))
    print(create(options.name, folder, options.like, public, options.args))


@_command(
    _word("--json", action="store_true", help="for bug reports"),
)
def _doctor(options: argparse.Namespace) -> int:
    """Check all that a build needs; exit status 0 if it is there."""
    from .doctor import doctor

    report = doctor(_ROOT, settings.cache_dirs(_ROOT))
    text, encoding = report.json() if options.json else str(report), sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0 if report.ok else 1


@_command(
    _word("--prune", action="store_true", help="make room as a build would"),
    _word("--max-size", metavar="SIZE", help="remove all but so much, e.g. 500MB"),
    _word("--max-age", metavar="AGE", help="remove what was not used for so long, e.g. 30d"),
    _word("--clear", action="store_true", help="remove all that is not in use"),
)
def _cache(options: argparse.Namespace) -> None:
    """List what the build cache holds, or make room in it."""
    from ..cache import prune as cache
    from ..cache.store import Store
    from ..errors.table import bytes_text

    store, size, age = Store(settings.cache_dirs(_ROOT)), options.max_size, options.max_age
    most = None if size is None else settings.size(size, "--max-size")
    longest = None if age is None else settings.age(age, "--max-age")
    if options.clear:
        most, longest = 0, None
    elif most is None and longest is None:
        if not options.prune:
            return print(cache.listing(store))
        most = settings.cache_limit()
    removed, freed, kept = cache.prune(store, most, longest)
    left = f"; {kept} in use stay" if kept else ""
    print(f"removed {removed} ({bytes_text(freed)}) from {store.path.parent}{left}")


@_command(
    _word(
        "program",
        nargs=argparse.REMAINDER,
        help="script.py, -m module, or a command, and its arguments",
    ),
)
def _run(options: argparse.Namespace) -> int:
    """Run a program as it stands; its C++ and CUDA extensions are built by loader."""
    from .run import NoProgram, run

    try:
        run(options.rest)
    except NoProgram as error:
        print(f"loader: {error}", file=sys.stderr)
    return 2


@_command(
    _word("operator"),
    _word("--set", metavar="NAME", help="one of `ncu --list-sets`, instead of ours"),
    _word("--output", metavar="FILE", help="keep ncu's report in FILE.ncu-rep"),
    _FOLDER,
)
def _profile(options: argparse.Namespace) -> None:
    """Measure one operator's CUDA kernels with NVIDIA's ncu."""
    loader = _loader()
    from .profile import profile

    print(profile(loader, options.operator, options.folder, options.set, options.output))


@_command(
    _OPERATORS,
    _word("--tool", nargs="+", choices=("memcheck", "racecheck", "initcheck")),
    _FOLDER,
)
def _sanitize(options: argparse.Namespace) -> int:
    """Run operators under compute-sanitizer; exit status 1 for findings."""
    loader = _loader()
    from .sanitize import TOOLS, sanitize

    return sanitize(loader, options.operators, options.folder, tuple(options.tool or TOOLS))


@_command(
    _word("candidates", nargs="+", help="files, FILE:FUNCTION, operators, or a folder of files"),
    _word("--reference", metavar="FILE", help="what they are to equal: a file, or FILE:FUNCTION"),
    _word("--inputs", metavar="NAME", help="function that makes arguments (default: get_inputs)"),
    _word("--json", metavar="FILE", help="write all that was found out"),
    _word("--jobs", type=int, default=1, metavar="N", help="candidates at once"),
    _word("--device", choices=("cpu", "cuda"), help="default: the GPU where there is one"),
    _word("--compiled", action="store_true", help="time torch.compile of the reference too"),
    _word("--untimed", action="store_true", help="do not time them"),
    _word("--general", action="store_true", help="refuse what other shapes or dtypes break"),
    _word("--precision", default="own", help="of products: own, tf32, float16 or bfloat16"),
    _word("--seconds", type=float, default=60.0, help="the longest that one answer may take"),
    _word("--memory", default="8GiB", help="the most that a candidate may use"),
    _word("--readable", nargs="+", metavar="PATH", help="what candidates may read besides"),
)
def _judge(options: argparse.Namespace) -> int:
    """Say whether kernels that nobody trusts are right, safe and fast; exit status 0 if all are."""
    _loader()
    from loader.jit.judge.judge import main as judge

    return judge(options)


@_command(
    _word("file", nargs="?", help="a photograph or a volume; the MNI brain where none is named"),
    _word("--operator", metavar="NAME", help="send it through this operator"),
    _word("--library", metavar="FOLDER", help="offer the operators of this loader.Library"),
)
def _view(options: argparse.Namespace) -> int:
    """Look at a photograph or a volume through the operators, while their kernels are edited."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # compilers want the same cores
    _loader()
    try:
        from loader.viewer.qt.app import main as show
    except ImportError as error:
        if (error.name or "").startswith("loader"):
            raise
        raise ValueError(f"view: {error}; {_cure(error)}") from None
    return show(options.file, options.operator, options.library)


def _cure(error: ImportError) -> str:
    """Return how to get what the viewer lacks: a package, or a library of the system."""
    if error.name or not (library := re.match(r"(lib[\w.+-]+\.so[.\d]*):", str(error))):
        return "pip install 'octet-loader[viewer]', or PySide6-Essentials and pillow"
    return (
        f"Qt needs {library[1]} of the system; Debian, Ubuntu: apt install libegl1 libgl1 "
        "libfontconfig1 libglib2.0-0 libdbus-1-3 libxkbcommon-x11-0 libxcb-cursor0 "
        "libxcb-icccm4 libxcb-keysyms1 libxcb-image0 libxcb-render-util0 libxcb-shape0"
    )


@_command(
    _word("name", nargs="?", choices=_BENCH or None, help="its own options follow"),
    _word("--all", nargs=argparse.REMAINDER, help="what this machine can run and has not yet"),
    _word("--compare", nargs=2, metavar=("OLD", "NEW"), help="folders of results: what got slower"),
)
def _bench(options: argparse.Namespace) -> int:
    """Run benchmarks of bench/ and keep their results, or compare what is kept."""
    if not _BENCH:
        raise ValueError("bench: the benchmarks are in loader's checkout; this copy is installed")
    if sum(given is not None for given in (options.name, options.all, options.compare)) != 1:
        raise ValueError("bench takes one of a benchmark's name, --all and --compare OLD NEW")
    _loader()
    sys.path.insert(0, str(_ROOT / "bench"))
    name = options.name or ("compare" if options.compare else "everything")
    given = options.compare or options.all or options.rest
    try:
        return importlib.import_module(name).main(given) or 0
    except KeyboardInterrupt:
        return 130
