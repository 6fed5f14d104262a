"""The C++ side of every operator under AddressSanitizer and UndefinedBehaviorSanitizer.

`make sanitize` runs this file. It builds into caches of its own with the flags below, and runs the
operators' own tests there, after it has seen that faults planted on purpose are caught.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Checkout

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1"
# Of GCC, a tenth less of its time: registers are given out in whole functions, and checks are calls
# in those with hundreds of them. What is checked is the same.
OF_GCC = "-fira-region=one --param asan-instrumentation-with-call-threshold=300"
PARTS = 3  # of all operators, for as many workers
OPERATORS = sorted(path.stem for path in (ROOT / "ops").glob("*.cpp"))


# With -O0 the tests run longer than a compiler takes less, but not for these.
LITTLE_RUN = "*/ops/*.cpp|*/kernels/square_cpu.cpp|*/double_cpu.rest.cpp|*/convolve2d/others_cpu.*"


def compiler(checkout: Checkout) -> dict:
    """What builds with the sanitizers."""
    program = checkout.root.parent / "sanitizing-c++"
    if not program.exists():
        command = os.environ.get("CXX") or "c++"
        said = subprocess.run(
            [*command.split(), "-E", "-dM", "-x", "c++", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        more = OF_GCC if "__clang__" not in said else ""
        program.write_text(
            f'#!/bin/sh\nlevel=-O1\nfor a; do case "$a" in {LITTLE_RUN}) level=-O0;; esac; done\n'
            f'exec {command} "$@" $level {FLAGS} {more}\n'
        )
        program.chmod(0o755)
    return {"CXX": program}


def runtimes() -> dict:
    """What starts Python with the sanitizers' libraries; a compiler needs no such start."""
    command = (os.environ.get("CXX") or "c++").split()
    libraries = [
        subprocess.run(
            [*command, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {
        "LD_PRELOAD": ":".join(filter(os.path.isabs, libraries)),  # the others are linked in
        "LOADER_BUILD": "never",
        "PYTEST_XDIST_WORKER": None,
        "OCTET_COMPILERS": None,
        # Python itself leaks, and some tests ask for more memory than there is. g++ 13, where the
        # last is on, misaligns vectors of 64 bytes by it (GCC bug 110027).
        "ASAN_OPTIONS": "malloc_context_size=4:"  # frames noted of who allocates; 30 cost a fifth
        "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def build(checkout: Checkout, *names: str) -> dict:
    """Build these operators with the sanitizers; the environment in which they can be used."""
    chosen = compiler(checkout)
    done = checkout.command("build", *names, **chosen)
    assert done.returncode == 0, done.stderr
    return chosen | runtimes()


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    """A checkout whose one kernel gets one fault after the other."""
    return Checkout(tmp_path_factory.mktemp("square"), only="square")


@pytest.mark.parametrize(
    ("fault", "caught"),
    [
        ("", ""),
        (
            "static_cast<char*>(p->out[0])[p->numel * 4] = 0;",
            "AddressSanitizer: heap-buffer-overflow",
        ),
        (
            "volatile int large = 2147483647; large = large + int(end > 0);",
            "runtime error: signed integer overflow",
        ),
    ],
    ids=["none", "write out of bounds", "overflow"],
)
def test_planted_faults_are_caught(square, fault, caught):
    kernel = square.root / "kernels/square_cpu.cpp"
    text = (ROOT / "kernels/square_cpu.cpp").read_text()
    kernel.write_text(text.replace("int64_t end) {", f"int64_t end) {{ {fault}"))
    assert fault in kernel.read_text() and (text != kernel.read_text() or not fault)
    environment = build(square, "square")
    done = square.run("import torch, loader; loader.square(torch.ones(3))", **environment)
    if caught:
        assert done.returncode != 0 and caught in done.stderr and "square_cpu" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_is_clean(part, tmp_path):
    """All of its own tests but those of torch.compile, whose own code is not built so, of how it is
    registered, torch's samples, whose kinds are among its own, derivatives by each element, which
    take the same kernels hundreds of times more, of the node, which is not built so, and of memory
    that cannot be had, which the sanitizer speaks of itself. In the references' place are the
    operators once more, see sanitized.py.
    """
    names = OPERATORS[part::PARTS]
    folder = ROOT / "tests"
    files = [str(file) for name in names for file in sorted(folder.glob(f"test_{name}*.py"))]
    assert names and all(str(folder / f"test_{name}.py") in files for name in names)
    checkout = Checkout(tmp_path)
    environment = build(checkout, *names)
    for tool in ("ASAN_OPTIONS", "UBSAN_OPTIONS"):  # pytest takes in what is said to stderr
        environment[tool] += f":log_path={tmp_path}/found"
    libraries = [*Path(checkout.cache, "store").glob("*/library.so")]
    built = {library.parent.name.rpartition("-")[0] for library in libraries}
    rests = {f"{name}.rest" for name in names if [*(ROOT / "kernels" / name).glob("*.rest.*")]}
    assert built == {*names} | rests
    assert all(b"__asan_init" in library.read_bytes() for library in libraries)
    left_out = "compile", "export", "2_31", "cuda", "opcheck", "own_samples"
    left_out += (
        "hessians",
        "forward_mode",
        "alone",
        "C++",
        "alias_of_the_reference",
        "cannot_be_had",
    )
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "tests.sanitized", *files),
            *("-k", " and ".join(f"not {word}" for word in left_out)),
        ],
        cwd=ROOT,
        env=checkout.environment(**environment),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    found = "".join(path.read_text()[:4000] for path in tmp_path.glob("found.*"))
    assert done.returncode == 0 and not found, found + done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
