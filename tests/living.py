"""A process that runs code bit by bit, as a notebook does, in a checkout that can be edited."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

from conftest import Checkout, keep_only, start_python

_LOOP = """
import contextlib, io, json, os, sys, traceback, torch, warnings
warnings.filters[:] = [f for f in warnings.filters if f[0] != "error"]  # as in a notebook
os.dup2(os.open({stderr!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
names = {{}}
for line in sys.stdin:
    out, failed = io.StringIO(), ""
    with contextlib.redirect_stdout(out):
        try:
            exec(json.loads(line), names)
        except BaseException:
            failed = traceback.format_exc()
    print(json.dumps([out.getvalue(), failed]), flush=True)
"""


class Living:
    """A process that runs code bit by bit, as a notebook does, in a checkout that can be edited."""

    def __init__(self, checkout: Checkout):
        self.checkout, self._kept = checkout, {}
        code = _LOOP.format(stderr=str(checkout.root.parent / "stderr"))
        theirs, ours = os.pipe()
        self._process = start_python(code, checkout.root, checkout.environment(), stdin=theirs)
        os.close(theirs)
        self._stdin = os.fdopen(ours, "w")

    def __call__(self, code: str) -> str:
        """What the code prints; an exception in it fails the test."""
        self._stdin.write(json.dumps(code) + "\n")
        self._stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process died:\n{self.stderr()}"
        out, failed = json.loads(line)
        assert not failed, failed
        return out.strip()

    def edit(self, path: str, old: str, new: str) -> None:
        """Replace text in a file of the checkout; `restore` undoes it."""
        file = self.checkout.root / path
        text = file.read_text()
        self._kept.setdefault(file, text)
        assert old in text
        file.write_text(text.replace(old, new))

    def restore(self) -> None:
        """Every file as it was, and in use."""
        for file, text in self._kept.items():
            file.write_text(text)
        self._kept.clear()
        assert self("print(loader.reload().ok, f(x).tolist())") == "True [0.0, 1.0, 4.0, 9.0]"

    def stderr(self) -> str:
        return (self.checkout.root.parent / "stderr").read_text()

    def end(self) -> None:
        self._stdin.close()
        self._process.wait(timeout=20)
        self._process.stdout.close()
        self._process.stderr.close()


FORWARD = "elementwise_cpu<Square>(*p, begin, end);"
NOTED = FORWARD + ' setenv("OCTET_NOTE", "%s", 1);'
NOTE = "import ctypes; c = ctypes.CDLL(None); c.getenv.restype = ctypes.c_char_p\n"
NOTE += "def note():\n    c.setenv(b'OCTET_NOTE', b'none', 1); f(x); return c.getenv(b'OCTET_NOTE').decode()"


def note_which(living, which: str) -> None:
    """Edit the kernel of square, so that a call of it leaves `which` in the environment."""
    living.edit(
        "kernels/square_cpu.cpp", '#include "square.h"', '#include <cstdlib>\n#include "square.h"'
    )
    living.edit("kernels/square_cpu.cpp", FORWARD, NOTED % which)


def checkout_of(folder: Path, *operators: str, **changes) -> Checkout:
    """A checkout with these operators alone, and such an environment."""
    checkout = Checkout(folder)
    keep_only(checkout.root, *operators)
    given = checkout.environment
    checkout.environment = lambda **more: given(**{**changes, **more})
    return checkout


def square_and_add2(folder: Path, **changes) -> Iterator[Living]:
    """A process that uses both, standing by for edits."""
    living = Living(checkout_of(folder, "square", "add2", **changes))
    living("import torch, loader; from loader import square as f; x = torch.arange(4.)")
    living("print(f(x), loader.add2(x, x), loader.reload())")
    living("from loader.jit.live.reload import reloader; reloader.stand_by()")
    yield living
    living.end()
