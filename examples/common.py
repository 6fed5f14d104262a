"""Shared by the examples: loader from this checkout, their options, times, pictures."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ["MPLBACKEND"] = "Agg"  # matplotlib draws into files

import torch

import loader

BUSY = 0.15  # of the processors taken by others: more, and times say little


def options(doc: str, example: str, **more: dict) -> argparse.Namespace:
    """The command line: `--device`, `--out`, and `more`, by name what argparse is told of each."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    for name, told in more.items():
        parser.add_argument(f"--{name}", **told)
    parser.add_argument("--out", type=Path, default=HERE / "out" / f"{example}.png")
    found = parser.parse_args()
    if found.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; take --device cpu")
    return found


def save(figure, file: Path, dpi: int = 110) -> None:
    """Write a picture, and the folder that it goes to."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=dpi)


class Samples(list):
    """Milliseconds of single calls. A busy machine adds to a call and never takes away, so the
    least is what the call costs, and the median what it cost here.
    """

    def __str__(self) -> str:
        """`0.49 ms (median 0.52)`."""
        return f"{min(self):.2f} ms (median {statistics.median(self):.2f})"


def take_turns(
    runs: dict[str, Callable], devices: dict[str, str], rounds: int = 7, flush: bool = False
) -> dict[str, Samples]:
    """Times of each run, by name, one call of each in every round: what slows the machine down for
    a while slows them all. `devices` says where each runs.
    """
    times = {name: Samples() for name in runs}
    for name, run in runs.items():
        loader.time(run, device=devices[name], repeats=1, warmup=1, flush=flush)
    for _ in range(rounds):
        for name, run in runs.items():
            many = 10 if devices[name] == "cuda" else 1
            taken = loader.time(run, device=devices[name], repeats=many, warmup=0, flush=flush)
            times[name] += taken.samples
    return times


class Others:
    """The share of this machine's processors that other processes take from now on."""

    def __init__(self):
        self._begun = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds: on the clock, of all processors at work, and of this process and its own."""
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _, _, *interrupts_and_stolen = map(int, words)
        busy = user + nice + system + sum(interrupts_and_stolen)
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])

    def share(self) -> float:
        """The share of all processors that others have had."""
        clock, busy, own = (b - a for a, b in zip(self._begun, self._now(), strict=True))
        return max(0.0, busy - own) / max(clock * (os.cpu_count() or 1), 1e-9)

    def report(self) -> None:
        """Print a line where the machine was too busy for its times to mean much."""
        share = self.share()
        if share > BUSY:
            print(
                f"this machine was busy: other processes took {100 * share:.0f} % of its "
                "processors meanwhile; compare the least times, or run it again"
            )
