"""A living process against a user who means harm, checked after each step against a model.

    python tests/hostile.py --seed 1 --steps 300

One process uses `square` and `add2`, whose files are edited at random, one or both at once: good
edits, broken ones, wrong by 1e-3, by one element, by strides, endless, out of bounds; kernels,
headers of one and of both, Python sides; deletions, renames, reverts, `%reload_ext`, a Ctrl-C at
any moment. After each step each operator must compute what it should, and be in one state as a
whole: that of the last good edit. In the end a new process must find the newest good code.
"""

import argparse
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from hostile_edits import OPERATORS, Attacker  # noqa: E402


class Victim:
    """The process that is edited: calls its operators, takes in edits, is interrupted."""

    def __init__(self):
        import torch
        from IPython.core.interactiveshell import InteractiveShell

        import loader
        from loader.jit.live.reload import history, stand_by

        self.loader, self.torch, self.history = loader, torch, history
        self.c = ctypes.CDLL(None)
        self.c.getenv.restype = ctypes.c_char_p
        self.functions = {op: getattr(loader, op) for op in OPERATORS}
        for op in OPERATORS:
            self.call(op)
        stand_by()
        self.shell = InteractiveShell.instance()
        self.shell.run_line_magic("load_ext", "loader")

    def call(self, op: str) -> tuple[bool, str]:
        """True if the operator computes what it should; what its state leaves behind."""
        self.c.unsetenv(f"OCTET_EDIT_{op}".encode())
        x = self.torch.randn(33, 20).t()[::2].requires_grad_()
        arguments = (x, self.torch.ones_like(x))[: 1 if op == "square" else 2]
        out = self.functions[op](*arguments)
        out.sum().backward()
        expected, slope = (x * x, 2 * x) if op == "square" else (x + 1, self.torch.ones_like(x))
        right = self.torch.allclose(out, expected, 1e-6, 1e-6)
        right = right and self.torch.allclose(x.grad, slope, 1e-6, 1e-6)
        mark = (self.c.getenv(f"OCTET_EDIT_{op}".encode()) or b"").decode()
        return right, f"{mark} {getattr(sys.modules[f'loader.ops.{op}'], 'MARK', 0)}"

    def reload(self, by_cell: bool):
        """Take in the edits; the report, or None where a cell showed it."""
        if by_cell:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                self.shell.run_cell("pass")
            return None
        return self.loader.reload(time_limit=1)

    def interrupted(self, work, delay: float, whole_group: bool) -> bool:
        """Do `work` with a Ctrl-C after `delay` seconds; True if that came in time."""
        group = os.killpg if whole_group else os.kill
        timer = threading.Timer(delay, group, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            work()
            timer.cancel()
            timer.join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            return True
        finally:
            timer.join()
        return False


class Run:
    """One run: the steps, and what was wrong after each."""

    def __init__(self, seed: int):
        self.attacker, self.victim = Attacker(seed), Victim()
        self.random, self.model = self.attacker.random, self.attacker.model
        self.mistakes: list[list] = []
        self.counts: Counter = Counter()

    def first(self) -> None:
        """Have kernels in use that can be told apart."""
        for op in OPERATORS:
            self.attacker.number += 1
            self.attacker.kernel(op, True)
        self.reload("begin")

    def step(self, number: int) -> None:
        """One thing that a user may do."""
        dice, label = self.random.random(), f"step {number}"
        if dice < 0.08:
            self.revert(label)
        elif dice < 0.13:
            self.counts["reload_ext"] += 1
            with redirect_stdout(io.StringIO()):
                self.victim.shell.run_line_magic("reload_ext", "loader")
            self.check(f"{label}: reload_ext")
        else:
            done = [self.attacker.edit() for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
            self.counts.update(text.split(": ")[-1] for text in done)
            label = f"{label}: {', '.join(done)}"
            if self.random.random() < 0.25:
                self.interrupt(label)
            elif self.random.random() < 0.9:  # or more edits before the next look
                self.reload(label)

    def reload(self, label: str) -> None:
        """Take in what is due, and nothing else."""
        due, by_cell = self.model.due(), self.random.random() < 0.3
        known = len(self.victim.history())
        self.victim.reload(by_cell)
        edits = self.victim.history()[known:]
        live = {edit.unit for edit in edits if edit.outcome == "live" and edit.files}
        if live != due:
            what = [[e.unit, e.outcome, e.files, e.text[:300]] for e in edits]
            self.mistakes.append([label, f"due: {sorted(due)}", what])
        self.model.reloaded()
        self.check(label)

    def interrupt(self, label: str) -> None:
        """Interrupt a reload: each operator is in its old state or in its new one."""
        by_cell, delay = self.random.random() < 0.3, self.random.uniform(0, 1)
        due = self.model.due()
        hit = self.victim.interrupted(
            lambda: self.victim.reload(by_cell), delay, self.random.random() < 0.5
        )
        self.counts["interrupted" if hit else "interrupted too late"] += 1
        for op in OPERATORS:
            _, mark = self.victim.call(op)
            if op in due and mark == self.model.disk[op].mark:
                self.model.take(op)
        if not hit and not by_cell:
            self.model.reloaded()
        self.check(f"{label}, interrupted after {delay:.3f} s")

    def revert(self, label: str) -> None:
        """Go back one edit; the files hold it still."""
        op = self.random.choice([*OPERATORS])
        before = self.model.before[op]
        self.counts["revert"] += 1
        try:
            self.victim.loader.revert(op)
            if not before:
                self.mistakes.append([label, "reverted what was not there"])
                return
            self.model.live[op] = before.pop()
        except ValueError as error:
            if before:
                self.mistakes.append([label, str(error)])
        self.check(f"{label}: revert {op}")

    def check(self, label: str) -> None:
        """Each operator computes what it should, in the state that the model says."""
        for op in OPERATORS:
            right, mark = self.victim.call(op)
            if not right or mark != self.model.live[op].mark:
                self.mistakes.append([label, op, right, mark, self.model.live[op].mark])

    def last(self) -> None:
        """Everything good again, in use, and found in the store by a new process."""
        self.attacker.mend()
        for op in OPERATORS:
            self.attacker.number += 1
            self.attacker.kernel(op, True)
        self.reload("end")
        code = (
            "import json, hostile; v = hostile.Victim(); print(json.dumps([[*v.call(op), "
            "v.loader.receipt().units[op]['result']] for op in hostile.OPERATORS]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LOADER_BUILD": "never", "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        expected = [[True, self.model.disk[op].mark, "hit"] for op in OPERATORS]
        found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr
        if found != expected:
            self.mistakes.append(["a new process", found, expected])


def inside(seed: int, steps: int) -> dict:
    """All steps, in this process, whose current folder is a checkout of its own."""
    begun, run = time.perf_counter(), Run(seed)
    run.first()
    for number in range(steps):
        run.step(number)
        if run.mistakes:
            break  # what follows would be wrong too
    else:
        run.last()
    seconds = round(time.perf_counter() - begun, 1)
    return {
        "seed": seed,
        "steps": steps,
        "mistakes": run.mistakes,
        "counts": dict(sorted(run.counts.items())),
        "seconds": seconds,
    }


def outside(seed: int, steps: int, folder: Path) -> dict:
    """The same in a process and a checkout below `folder`."""
    from conftest import Checkout, ended, start_program

    checkout = Checkout(folder, only=(*OPERATORS,))
    words = [__file__, "--inside", "--seed", seed, "--steps", steps]
    env = {**checkout.environment(LOADER_BUILD="eager"), "PYTHONPATH": str(checkout.root)}
    # A Ctrl-C of its whole group is its own.
    done = ended(start_program(words, checkout.root, env, start_new_session=True), timeout=7200)
    if done.returncode:
        sys.stderr.write(done.stderr[-10000:])
        raise SystemExit(f"the process ended with exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Run the steps, print what came of them; exit status 1 for a mistake."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", default="a folder with ä space", help="name of the checkout's")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(inside(options.seed, options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        result = outside(options.seed, options.steps, Path(folder) / options.folder)
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["mistakes"]))


if __name__ == "__main__":
    main()
