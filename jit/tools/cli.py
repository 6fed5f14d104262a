"""`python -m loader ...`: what loader does, from a shell.

Runs without the body of `loader` at first, so that nothing is built, nor torch imported, by a
command that does not need it.
"""

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

from ..machine import settings

_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    options, rest = _parser().parse_known_args(arguments)
    if rest and options.command != "bench":
        _parser().parse_args(arguments)
    settings.choose("LOADER_BUILD", "lazy", unless_set=True)
    try:
        return options.run(options, rest)
    except (RuntimeError, ValueError) as error:
        print(f"loader: {error}", file=sys.stderr)
    except BrokenPipeError:  # as in `python -m loader cache | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loader", description="C++/CUDA operators for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run, name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    build = command(_build, "build", "compile what the cache lacks")
    build.add_argument("operators", nargs="*", help="all of them where none is named")
    build.add_argument(
        "--arch", nargs="+", metavar="X.Y", help="compute capabilities to build for, e.g. 8.0 9.0"
    )
    build.add_argument("--jobs", type=int, metavar="N", help="compilers at once (default: cores)")
    build.add_argument(
        "--portable", action="store_true", help="for any CPU of this kind, not just for this one"
    )
    command(_explain, "explain", "say why each operator was built").add_argument(
        "operators", nargs="*", help="all of them where none is named"
    )
    new = command(_new, "new", "make a working operator, to be changed into your own")
    new.add_argument("name", help="its name, and that of its files")
    new.add_argument(
        "--in", dest="folder", metavar="FOLDER", help="a folder for loader.Library, not this one"
    )
    new.add_argument(
        "--args", nargs="+", metavar="ARG", help="names of its arguments: elementwise in all"
    )
    new.add_argument("--like", choices=("square", "add2"), default="square", help="made of which")
    doctor = command(
        _doctor, "doctor", "check all that a build needs; exit status 0 if it is there"
    )
    doctor.add_argument("--json", action="store_true", help="for bug reports")
    cache = command(_cache, "cache", "list what the build cache holds, or make room in it")
    cache.add_argument("--prune", action="store_true", help="make room as a build would")
    cache.add_argument("--max-size", metavar="SIZE", help="remove all but so much, e.g. 500MB")
    cache.add_argument(
        "--max-age", metavar="AGE", help="remove what was not used for so long, e.g. 30d"
    )
    cache.add_argument("--clear", action="store_true", help="remove all that is not in use")
    profile = command(_profile, "profile", "measure one operator's CUDA kernels with NVIDIA's ncu")
    profile.add_argument("operator")
    profile.add_argument("--set", metavar="NAME", help="one of `ncu --list-sets`, instead of ours")
    profile.add_argument("--output", metavar="FILE", help="keep ncu's report in FILE.ncu-rep")
    sanitize = command(
        _sanitize, "sanitize", "run operators under compute-sanitizer; exit status 1 for findings"
    )
    sanitize.add_argument("operators", nargs="*", help="all of them where none is named")
    sanitize.add_argument("--tool", nargs="+", choices=("memcheck", "racecheck", "initcheck"))
    for tool in (profile, sanitize):
        tool.add_argument("--in", dest="folder", metavar="FOLDER", help="of this loader.Library")
    bench = command(_bench, "bench", "run a benchmark of bench/ and keep its results")
    bench.add_argument("name", choices=_benchmarks() or None, help="its own options follow")
    return parser


def _loader():
    """The whole of `loader`."""
    if not hasattr(sys.modules["loader"], "build"):
        del sys.modules["loader"]
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("loader")


def _build(options, _) -> int:
    if options.arch:
        for name in options.arch:
            if not re.fullmatch(r"\d+\.\d+[af]?(\+PTX)?", name):
                raise ValueError(f"--arch takes compute capabilities such as 9.0, got {name!r}")
        os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(options.arch)
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
    return 0


def _new(options, _) -> int:
    from ..operators.new import create

    folder = Path(options.folder).expanduser() if options.folder else None
    public = frozenset(dir(_loader()))
    print(create(options.name, folder, options.like, public, options.args))
    return 0


def _explain(options, _) -> int:
    print(_loader().explain(*options.operators))
    return 0


def _doctor(options, _) -> int:
    from .doctor import main as doctor

    return doctor(["--json"] if options.json else [], _ROOT, settings.cache_dirs(_ROOT))


def _cache(options, _) -> int:
    from ..cache import prune as cache
    from ..cache.store import Store
    from ..errors.table import bytes_text

    store = Store(settings.cache_dirs(_ROOT))
    given = options.max_size, options.max_age
    most = None if given[0] is None else settings.size(given[0], "--max-size")
    age = None if given[1] is None else settings.age(given[1], "--max-age")
    if options.clear:
        most, age = 0, None
    elif most is None and age is None:
        if not options.prune:
            print(cache.listing(store))
            return 0
        most = settings.cache_limit()
    removed, freed, kept = cache.prune(store, most, age)
    left = f"; {kept} in use stay" if kept else ""
    print(f"removed {removed} ({bytes_text(freed)}) from {store.path.parent}{left}")
    return 0


def _profile(options, _) -> int:
    loader = _loader()
    from .profile import profile

    print(profile(loader, options.operator, options.folder, options.set, options.output))
    return 0


def _sanitize(options, _) -> int:
    loader = _loader()
    from .sanitize import TOOLS, sanitize

    return sanitize(loader, options.operators, options.folder, tuple(options.tool or TOOLS))


def _benchmarks() -> list[str]:
    """The names of the benchmarks, which an installed copy has none of."""
    return sorted(path.stem for path in (_ROOT / "bench").glob("*.py") if path.stem != "harness")


def _bench(options, rest: list[str]) -> int:
    if not _benchmarks():
        raise ValueError("bench: the benchmarks are in loader's checkout; this copy is installed")
    _loader()
    sys.path.insert(0, str(_ROOT / "bench"))
    importlib.import_module(options.name).main(rest)
    return 0
