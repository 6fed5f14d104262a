"""Random edits of `square` and `add2` in the current folder, and a model of what should be so."""

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import edits

OPERATORS = {"square": "Square", "add2": "Add2"}
COMMON = "include/elementwise_cpu.h"
_KERNEL = """\
#include <cstdlib>

#include "elementwise_cpu.h"
#include "@operator@.h"

#ifndef OCTET_COMMON
#define OCTET_COMMON "0"
#endif
#ifndef OCTET_OWN
#define OCTET_OWN "0"
#endif

void @operator@_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    @body@
    setenv("OCTET_EDIT_@operator@", "@number@." OCTET_OWN "." OCTET_COMMON, 1);
}
"""
_BACKWARD = """
void square_backward_cpu(const ElementwiseParams* p, int64_t begin, int64_t end) {
    @backward@
}
"""
_OFF = (
    "struct Off { template <typename A> A operator()(@A a@) const { const A right = "
    "@Function@()(@a@); return @wrong@; } }; elementwise_cpu<Off>(*p, begin, end);"
)
# Kinds beside those of bench/edits.py, of any elementwise operator: kind, body.
_KINDS = [
    ("wrong", _OFF.replace("@wrong@", "right + A(1e-3)")),
    ("wrong", _OFF.replace("@wrong@", "right * A(1.001)")),
    ("wrong", _OFF.replace("@wrong@", "right < A(1e-3) ? A(0) : right")),
    ("wrong", "elementwise_cpu<@Function@>(*p, begin, end); if (begin == 0 && p->dtype == "
              "DType::kFloat) static_cast<float*>(p->out[0])[0] += 1;"),
    ("wrong", "ElementwiseParams q = *p; for (int d = 0; d < q.dims; ++d) q.in_stride[0][d] = "
              "q.in_stride[1][d] = q.out_stride[0][d]; elementwise_cpu<@Function@>(q, begin, end);"),
]  # fmt: skip


class State(NamedTuple):
    """The numbers of an operator's files; negative where a file is not good."""

    kernel: int = 0
    own: int = 0
    common: int = 0
    python: int = 0

    @property
    def good(self) -> bool:
        return min(self) >= 0

    @property
    def mark(self) -> str:
        """What the operator, in this state, leaves behind when it is called."""
        compiled = f"{self.kernel}.{self.own}.{self.common}" if self.kernel else ""
        return f"{compiled} {self.python}"


@dataclass
class Model:
    """What should be so: the files, the state in use, those before it, what was dealt with."""

    disk: dict[str, State] = field(default_factory=lambda: dict.fromkeys(OPERATORS, State()))
    live: dict[str, State] = field(default_factory=lambda: dict.fromkeys(OPERATORS, State()))
    before: dict[str, list[State]] = field(default_factory=lambda: {o: [] for o in OPERATORS})
    seen: dict[str, State | None] = field(default_factory=lambda: dict.fromkeys(OPERATORS, State()))

    def due(self) -> set[str]:
        """The operators that the next reload gives new code."""
        return {
            name
            for name, state in self.disk.items()
            if state.good and state not in (self.live[name], self.seen[name])
        }

    def reloaded(self) -> None:
        """All that is due is in use."""
        for name in self.due():
            self.take(name)
        self.seen.update(self.disk)

    def take(self, name: str) -> None:
        """What the files say is in use."""
        self.before[name].append(self.live[name])
        self.live[name] = self.seen[name] = self.disk[name]


class Attacker:
    """Edits the files of a checkout, which is the current folder."""

    def __init__(self, seed: int):
        self.random, self.model, self.number = random.Random(seed), Model(), 0
        self.originals = {
            path: Path(path).read_text()
            for op in OPERATORS
            for path in (f"include/{op}.h", f"ops/{op}.py", COMMON)
        }
        for op in OPERATORS:  # what is gone back to has a mark as well
            Path(f"ops/{op}.py").write_text(self.originals[f"ops/{op}.py"] + "\n\nMARK = 0\n")
        self.kernels = {op: [] for op in OPERATORS}
        for kind, body, backward in edits.KINDS:
            self.kernels["square"].append((kind, body, backward))
            if "struct" not in body and not backward.replace(
                "elementwise_cpu<SquareBackward>(*p, begin, end);", ""
            ):
                self.kernels["add2"].append((kind, body.replace("<Square>", "<Add2>"), ""))
        for op, function in OPERATORS.items():
            names = ["a"] if op == "square" else ["a", "b"]
            for kind, body in _KINDS:
                text = body.replace("@Function@", function).replace("@a@", ", ".join(names))
                text = text.replace("@A a@", ", ".join(f"A {name}" for name in names))
                self.kernels[op].append((kind, text, ""))

    def edit(self) -> str:
        """Change one file, for the better or the worse; what was done."""
        op = self.random.choice([*OPERATORS])
        what = self.random.choices(
            [self.kernel, self.own, self.common, self.python, self.gone], [12, 2, 1, 3, 2]
        )[0]
        self.number += 1
        return what(op, self.random.random() < 0.5)

    def mend(self) -> None:
        """Make every file good."""
        for op in OPERATORS:
            for what, value in self.model.disk[op]._asdict().items():
                if value < 0:
                    self.number += 1
                    getattr(self, what)(op, True)

    def kernel(self, op: str, good: bool) -> str:
        """Write the kernel anew."""
        wanted = [k for k in self.kernels[op] if (k[0] == "good") == good]
        kind, body, backward = self.random.choice(wanted)
        text = _KERNEL + (_BACKWARD if op == "square" else "")
        text = text.replace("@operator@", op).replace("@body@", body)
        text = text.replace("@number@", str(self.number))
        right = "elementwise_cpu<SquareBackward>(*p, begin, end);"
        text = text.replace("@backward@", backward or right)
        self.write(f"kernels/{op}_cpu.cpp", text, "kernel", good, op)
        return f"{op}: kernel {kind}"

    def own(self, op: str, good: bool) -> str:
        """Change the operator's own header."""
        text = self.originals[f"include/{op}.h"] + f'#define OCTET_OWN "{self.number}"\n'
        wrong = [("return a + b;", "return a - b;")] if op == "add2" else [("x * x;", "x + x;")]
        text = text if good else text.replace(*self.random.choice([*wrong, ("struct", "strict")]))
        self.write(f"include/{op}.h", text, "own", good, op)
        return f"{op}: own header {'good' if good else 'bad'}"

    def common(self, op: str, good: bool) -> str:
        """Change the header of both."""
        text = self.originals[COMMON] + f'#define OCTET_COMMON "{self.number}"\n'
        wrong = [("for (int64_t i = 0;", "for (int64_t i = 1;"), ("template", "#error\ntemplate")]
        text = text if good else text.replace(*self.random.choice(wrong))
        self.write(COMMON, text, "common", good, *OPERATORS)
        return f"common header {'good' if good else 'bad'}"

    def python(self, op: str, good: bool) -> str:
        """Change the Python side."""
        text = self.originals[f"ops/{op}.py"] + f"\n\nMARK = {self.number}\n"
        worse = [
            "def def\n",
            "raise ValueError('no')\n",
            f"_right = {op}\ndef {op}(*x):\n    return _right(*x) * 1.001\n",
            f"del {op}\n",
        ]
        self.write(
            f"ops/{op}.py", text + ("" if good else self.random.choice(worse)), "python", good, op
        )
        return f"{op}: Python side {'good' if good else 'bad'}"

    def gone(self, op: str, rename: bool) -> str:
        """Delete a file, or rename it."""
        what, path = self.random.choice(
            [
                ("kernel", f"kernels/{op}_cpu.cpp"),
                ("own", f"include/{op}.h"),
                ("python", f"ops/{op}.py"),
                ("common", COMMON),
            ]
        )
        if Path(path).exists():
            if rename:
                os.replace(path, path.replace(".", "_renamed."))
            else:
                os.unlink(path)
        self.note(what, False, *(OPERATORS if what == "common" else [op]))
        return f"{path} {'renamed' if rename else 'deleted'}"

    def write(self, path: str, text: str, what: str, good: bool, *operators: str) -> None:
        """Save a file, as an editor does."""
        draft = Path(f"{path}~")
        draft.write_text(text)
        os.replace(draft, path)
        Path(path.replace(".", "_renamed.")).unlink(missing_ok=True)
        self.note(what, good, *operators)

    def note(self, what: str, good: bool, *operators: str) -> None:
        """Have the model know."""
        for op in operators:
            number = self.number if good else -self.number
            self.model.disk[op] = self.model.disk[op]._replace(**{what: number})
