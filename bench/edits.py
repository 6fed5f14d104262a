"""Does a living process survive any edit? Good, broken, wrong, endless, out of bounds, at random.

    python -m loader bench edits --count 200

Every edit rewrites `kernels/square_cpu.cpp` of a copy of the sources, in one process. A good one
leaves its number in the environment when it runs, so that is seen which edit is in use.
"""

import argparse
import ctypes
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

FILE = "kernels/square_cpu.cpp"
_TEXT = """\
#include <cstdlib>

#include "elementwise_cpu.h"
#include "square.h"

void square_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    @body@
    setenv("OCTET_EDIT", "@number@", 1);
}

void square_backward_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    @backward@
}
"""
_RIGHT = "elementwise_cpu<Square>(*p, begin, end);"
_BACKWARD = "elementwise_cpu<SquareBackward>(*p, begin, end);"
_BYTES = "auto* out = static_cast<char*>(p->out[0]);"
_SIZE = (
    "const int64_t bytes = p->numel * (p->dtype == DType::kDouble ? 8 : p->dtype == DType::kFloat "
    "? 4 : 2);"
)
# Kind, body of the forward, body of the backward.
KINDS = [
    ("good", _RIGHT, _BACKWARD),
    ("good", "for (int64_t i = begin; i < end; ++i) elementwise_cpu<Square>(*p, i, i + 1);", ""),
    ("good", "const int64_t half = begin + (end - begin) / 2; elementwise_cpu<Square>(*p, begin, "
             "half); elementwise_cpu<Square>(*p, half, end);", ""),
    ("good", "struct Again { float operator()(float x) const { return x * x; } double "
             "operator()(double x) const { return x * x; } }; "
             "elementwise_cpu<Again>(*p, begin, end);", ""),
    ("broken", "elementwise_cpu<Square>(*p, begin, end)", ""),
    ("broken", "elementwise_cpu<Square>(*p, start, end);", ""),
    ("broken", "elementwise_cpu<Quadrat>(*p, begin, end);", ""),
    ("broken", "missing_function(p); " + _RIGHT, ""),  # the linker lets it pass, dlopen does not
    ("wrong", "if (end > begin) elementwise_cpu<Square>(*p, begin, end - 1);", ""),
    ("wrong", "struct Cube { float operator()(float x) const { return x * x * x; } double "
              "operator()(double x) const { return x * x * x; } }; "
              "elementwise_cpu<Cube>(*p, begin, end);", ""),
    ("wrong", _RIGHT, "elementwise_cpu<Square>(*p, begin, end);"),
    ("wrong", _RIGHT, "// no gradient"),
    ("endless", "for (volatile int i = 0;; i = i + 1) {}", ""),
    ("endless", _RIGHT, "while (true) setenv(\"OCTET_ENDLESS\", \"1\", 1);"),
    ("outside", f"{_RIGHT} {_BYTES} {_SIZE} out[bytes] = 1;", ""),
    ("outside", f"{_RIGHT} {_BYTES} {_SIZE} out[bytes + 4096] = 1;", ""),
    ("outside", f"{_RIGHT} {_BYTES} out[-1] = 1;", ""),
    ("outside", f"{_RIGHT} {_BYTES} out[int64_t(1) << 40] = 1;", ""),
    ("outside", f"{_RIGHT} *static_cast<volatile int*>(nullptr) = 1;", ""),
    ("outside", "abort();", ""),
    ("outside", "_Exit(0);", ""),
]  # fmt: skip


def edits(count: int, seed: int):
    """`count` random edits: number, kind, text of the file."""
    generator = random.Random(seed)
    for number in range(1, count + 1):
        kind, body, backward = generator.choice(KINDS)
        text = _TEXT.replace("@body@", body).replace("@number@", str(number))
        yield number, kind, text.replace("@backward@", backward or _BACKWARD)


def run(count: int, seed: int, limit: float) -> dict:
    """Return what became of `count` edits here, where `loader` lies in the current folder."""
    import torch

    import loader
    from loader.jit.live.reload import reloader

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    function, x = loader.square, torch.randn(1000)
    expected = x * x
    function(x)
    reloader.stand_by()
    live, mistakes, outcomes, seconds = None, [], Counter(), []
    begun, memory = time.perf_counter(), 0
    for number, kind, text in edits(count, seed):
        Path(FILE).write_text(text)
        report = loader.reload(time_limit=limit)
        (edit,) = report.edits
        right = torch.equal(function(x), expected)
        marked = (getenv(b"OCTET_EDIT") or b"").decode()
        live = str(number) if kind == "good" else live
        outcomes[f"{kind}: {edit.outcome}"] += 1
        if not right or marked != (live or "") or (edit.outcome == "live") != (kind == "good"):
            mistakes.append([number, kind, edit.outcome, edit.text, marked])
        if kind == "good":
            seconds.append(edit.seconds)
        if number == 5:  # what is made once is there by then
            memory = _resident()
    return {
        "count": count,
        "seed": seed,
        "outcomes": dict(sorted(outcomes.items())),
        "mistakes": mistakes,
        "seconds": round(time.perf_counter() - begun, 1),
        "median_seconds_of_a_good_edit": round(sorted(seconds)[len(seconds) // 2], 3),
        "bytes_an_edit": (_resident() - memory) // max(1, count - 5),
    }


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments: list[str]) -> None:
    """Run the edits in a process and a copy of their own, and keep what came of them."""
    parser = argparse.ArgumentParser(prog="python -m loader bench edits", description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds for a trial")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    from harness import ROOT, circumstances, keep, rows_of

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        for room in ("jit", "include"):
            shutil.copytree(ROOT / room, copy / room)
        for file in ("loader.py", "ops/square.cpp", "ops/square.py", FILE):
            (copy / file).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / file, copy / file)
        code = (
            f"import sys, json; sys.path[:0] = [{str(copy)!r}, {str(Path(__file__).parent)!r}]; "
            f"import edits; print(json.dumps(edits.run({options.count}, {options.seed}, "
            f"{options.limit})))"
        )
        environment = {**os.environ, "LOADER_CACHE_DIR": f"{folder}/cache", "LOADER_BUILD": "eager"}
        (row,) = rows_of(code, str(copy), environment)
    keep("edits", "cpu", circumstances("cpu", ["square"]), [row], options.results)
    if row["mistakes"]:
        sys.exit(f"{len(row['mistakes'])} of {row['count']} edits ended as they should not")
