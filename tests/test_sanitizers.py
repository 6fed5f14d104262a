"""The C++ side of every operator under AddressSanitizer and UndefinedBehaviorSanitizer.

`make sanitize` runs this file. It builds into a cache of its own with the flags below, and runs the
operators' own tests there, after it has seen that faults planted on purpose are caught.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Checkout

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined"


def environment() -> dict:
    """What builds with the sanitizers, and starts Python with their libraries."""
    compiler = os.environ.get("CXX") or "c++"
    runtimes = [
        subprocess.run(
            [*compiler.split(), f"-print-file-name={name}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    return {
        "CXXFLAGS": f"{FLAGS} -fno-omit-frame-pointer -g1",
        "LDFLAGS": FLAGS,
        "LD_PRELOAD": ":".join(filter(os.path.isabs, runtimes)),  # the others are linked in
        "PYTEST_XDIST_WORKER": None,
        # Python itself leaks, and some tests ask for more memory than there is.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CUDA_VISIBLE_DEVICES": "",
    }


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
def test_planted_faults_are_caught(checkout, fault, caught):
    kernel = checkout.root / "kernels/square_cpu.cpp"
    text = kernel.read_text()
    kernel.write_text(text.replace("int64_t end) {", f"int64_t end) {{ {fault}"))
    assert fault in kernel.read_text() and (text != kernel.read_text() or not fault)
    done = checkout.run("import torch, loader; loader.square(torch.ones(3))", **environment())
    if caught:
        assert done.returncode != 0 and caught in done.stderr and "square_cpu" in done.stderr
    else:
        assert done.returncode == 0, done.stderr


def test_every_operator_is_clean(tmp_path):
    """All of its own tests but those of torch.compile, whose own code is not built so, of how it is
    registered, and torch's samples, whose kinds are among its own.
    """
    checkout = Checkout(tmp_path)
    files = [f"tests/test_{path.stem}.py" for path in sorted((ROOT / "ops").glob("*.cpp"))]
    assert all((ROOT / file).exists() for file in files)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files),
            *(
                "-k",
                "not compile and not export and not 2_31 and not cuda and not opcheck and not own_samples",
            ),
        ],
        cwd=ROOT,
        env=checkout.environment(**environment()),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout
    libraries = [*Path(checkout.cache, "store").glob("*/library.so")]
    assert len(libraries) == len(files)
    assert all(b"__asan_init" in library.read_bytes() for library in libraries)
