"""Spoils files below a build cache, in ten ways, their times kept, and looks what becomes of it.

    python tests/damage.py               every file, every pair of them, and all at once
    python tests/damage.py --share 0.1   a tenth of the pairs, drawn by --seed

A process with torch in it forks a child for each case; the child imports loader from a checkout of
one tiny operator, or builds an extension or a kernel from a string, and has to end up with the very
library that the first build made, or a BuildError.
"""

import argparse
import gc
import hashlib
import itertools
import os
import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

TINY = """
extern "C" __attribute__((visibility("default"))) int answer() { return 42; }
static volatile char padding[1 << 14] = {1};
"""


KINDS = {
    "operator": "loader._session.load('square')",
    "extension": "loader.load_inline('hello', 'int answer() { return 42; }', functions=['answer'])",
    "kernel": "loader.source_module('__global__ void f(int* x) { *x = K; }', K=42).f(torch.ones(1).int(), block=1)",
}


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if data else b"\1"


WAYS = {
    "flipped": flipped,
    "halved": lambda data: data[: len(data) // 2],
    "one byte short": lambda data: data[:-1],
    "one byte more": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "text": lambda data: b"not what it was\n",
    "zeros": lambda data: bytes(len(data) or 1),
    "noise": lambda data: random.Random(len(data)).randbytes(len(data) or 1),
    "folder": None,
    "missing": None,
}


def spoil(path: Path, way: str) -> None:
    """Damage one file, and give it back its times."""
    found = path.stat()
    if WAYS[way]:
        path.write_bytes(WAYS[way](path.read_bytes()))
    else:
        path.unlink()
        if way == "missing":
            return
        path.mkdir()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def use(checkout, kind: str, out: Path) -> None:
    """The life of a child: import loader from the checkout, load, tell the library's digest."""
    os.chdir(checkout.root)
    sys.path.insert(0, str(checkout.root))
    environment = checkout.environment()
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        import torch

        import loader

        warnings.filterwarnings("error", "kernels from a string")  # which do without the cache
        try:
            exec(KINDS[kind], {"loader": loader, "torch": torch})
        except (loader.BuildError, UserWarning) as error:
            out.write_text(f"refused: {error}")
            os._exit(0)
        maps = Path("/proc/self/maps").read_text().splitlines()
        (library,) = {line.split()[-1] for line in maps if str(checkout.cache) in line}
        out.write_text(hashlib.sha256(Path(library).read_bytes()).hexdigest())
    except BaseException as error:
        out.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def child(checkout, kind: str, out: Path) -> str:
    """What a child says; `killed by N` where it did not come to that."""
    out.unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        use(checkout, kind, out)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return out.read_text() if out.exists() else f"ended with {status}"


def run(folder: Path, kind: str, share: float, seed: int) -> tuple[int, list[str], list[str]]:
    """Number of cases, what was refused, and what went wrong in each that did."""
    import torch  # noqa: F401  before the forks
    from conftest import Checkout

    gc.freeze()  # or each child looks through all of torch's objects, and copies them
    checkout = Checkout(folder, only="square")
    (checkout.root / "ops/square.cpp").write_text(TINY)
    for kernel in (checkout.root / "kernels").glob("square*"):
        kernel.unlink()
    good = child(checkout, kind, folder / "out")
    assert len(good) == 64, good
    assert child(checkout, kind, folder / "out") == good
    pristine = folder / "pristine"
    shutil.copytree(checkout.cache, pristine)
    files = sorted(p.relative_to(pristine) for p in pristine.rglob("*") if p.is_file())
    dice = random.Random(seed)
    sets = [(file,) for file in files] + [tuple(files)]
    sets += [pair for pair in itertools.combinations(files, 2) if dice.random() < share]
    refused, wrong = [], []
    for spoilt, way in itertools.product(sets, WAYS):
        shutil.rmtree(checkout.cache)
        shutil.copytree(pristine, checkout.cache)
        for file in spoilt:
            spoil(checkout.cache / file, way)
        for attempt in ("first", "second"):
            said = child(checkout, kind, folder / "out")
            if said != good:
                told = refused if said.startswith("refused: ") else wrong
                told.append(f"{kind}: {way}: {', '.join(map(str, spoilt))}: {attempt}: {said}")
    return len(sets) * len(WAYS), refused, wrong


def main() -> int:
    """Run, and print what went wrong."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--share", type=float, default=1.0, help="of the pairs of files")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kind", choices=KINDS, nargs="*", default=[*KINDS])
    chosen = options.parse_args()
    failed = False
    for kind in chosen.kind:
        with tempfile.TemporaryDirectory() as folder:
            cases, refused, wrong = run(Path(folder), kind, chosen.share, chosen.seed)
        counts = f"{cases} cases, {len(refused)} refused, {len(wrong)} wrong"
        print(f"{kind}: {counts}", *refused, *wrong, sep="\n", flush=True)
        failed |= bool(wrong)
    return failed


if __name__ == "__main__":
    sys.exit(main())
