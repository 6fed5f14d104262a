"""`python -m loader ...`: what loader does, from a shell."""

import argparse
import sys

import loader


def main(arguments: list[str] | None = None) -> int:
    """Run one command; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m loader", description="C++/CUDA operators for PyTorch."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile what the cache lacks")
    build.add_argument("operators", nargs="*", help="all of them where none is named")
    bench = commands.add_parser("bench", help="run a benchmark of bench/ and keep its results")
    names = sorted(
        path.stem for path in (loader._root / "bench").glob("*.py") if path.stem != "harness"
    )
    bench.add_argument("name", choices=names)
    bench.add_argument("rest", nargs=argparse.REMAINDER, help="options of the benchmark")
    options = parser.parse_args(arguments)
    if options.command == "build":
        try:
            loader.build(*options.operators)
        except (loader.BuildError, ValueError) as error:
            print(f"loader: {error}", file=sys.stderr)
            return 1
    if options.command == "bench":
        import importlib

        sys.path.insert(0, str(loader._root / "bench"))
        importlib.import_module(options.name).main(options.rest)
    return 0
