"""Build the same operators in three ways, compare their bits, and print their times side by side.

    python examples/three_ways/compare.py [--compiler {jit,setup,cmake} ...]

Without --compiler, all three; each runs in a process of its own, since one process can hold one
build. Fails where any bit of any output differs.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import ways

SIZES = {"small": (1024, 32), "large": (32768, 32)}  # N, F
DTYPES = ("float32", "float64", "float16", "bfloat16")


def devices() -> list[str]:
    """Where there is something to compare: the CPU, and a GPU that the build has kernels for."""
    import torch

    return (
        ["cpu", "cuda"]
        if torch.cuda.is_available() and ways.with_cuda(ways.toolchain())
        else ["cpu"]
    )


def sample(N: int, F: int, dtype, device: str):
    """Cells, points and a gradient to start from, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = (N, 8, F), (N, 3), (N, F)
    feats, points, grad = (torch.rand(shape, generator=generator) * 2 - 1 for shape in shapes)
    return [x.to(device, dtype) for x in (feats, points, grad)]


def digests(loader) -> dict[str, str]:
    """A digest of each output, for odd sizes, where vector loops have a tail."""
    import torch

    found = {}
    for device in devices():
        for dtype in DTYPES:
            for N, F in ((1000, 37), (257, 64)):
                feats, points, grad = sample(N, F, getattr(torch, dtype), device)
                feats.requires_grad_(), points.requires_grad_()
                out = loader.trilinear_interpolation(feats, points)
                out.backward(grad)
                outputs = {
                    "add2": loader.add2(out, grad),
                    "trilinear forward": out,
                    "trilinear grad_feats": feats.grad,
                    "trilinear grad_points": points.grad,
                }
                for name, x in outputs.items():
                    content = x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
                    key = f"{name}, {dtype}, {device}, N = {N}, F = {F}"
                    found[key] = hashlib.sha256(content).hexdigest()
    return found


def microseconds(
    runs: dict[str, Callable[[], object]], device: str, repeats: int
) -> dict[str, tuple[float, float]]:
    """Least and median of `repeats` runs each, which take turns, after up to three to warm up.

    A busy machine adds to a run and never takes away: compare the least.
    """
    import torch

    taken, warm_up = {name: [] for name in runs}, min(3, repeats)
    for i in range(warm_up + repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            if i >= warm_up:
                taken[name].append(1e6 * (time.perf_counter() - start))
    return {name: (min(us), statistics.median(us)) for name, us in taken.items()}


def times(loader, repeats: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Microseconds of each operator and size: ours, and the same in plain PyTorch."""
    import torch

    found = {}
    for device in devices():
        for size, (N, F) in SIZES.items():
            feats, points, grad = sample(N, F, torch.float32, device)
            leaves = feats.clone().requires_grad_(), points.clone().requires_grad_()

            def backward(function, leaves=leaves, grad=grad):
                out = function(*leaves)
                return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)

            ours, plain = loader.trilinear_interpolation, loader.trilinear_interpolation_reference
            rows = {
                "add2": (partial(loader.add2, feats, feats), partial(torch.add, feats, feats)),
                "trilinear forward": (partial(ours, feats, points), partial(plain, feats, points)),
                "trilinear backward": (backward(ours), backward(plain)),
            }
            for name, pair in rows.items():
                both = dict(zip(("ours", "plain"), pair, strict=True))
                found[f"{name}, {size}, {device}"] = microseconds(both, device, repeats)
    return found


def told(least: float, median: float) -> str:
    """`12.3 us (14.5)`, `1,234 us (1,300)`."""
    first, second = (f"{us:,.{int(us < 1000)}f}" for us in (least, median))
    return f"{first} us ({second})"


def show(rows: list[tuple[str, ...]], title: str) -> None:
    """A table, whose first row is its head; by rich where that is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        print(title)
        for row in rows:
            cells = [row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]
            print("  ".join(cells))
        return
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(rows[0]):
        table.add_column(head, justify="right" if i else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 130).print(table)


def differences(found: dict[str, dict]) -> list[str]:
    """What is not equal in every way."""
    first, *rest = found.values()
    return [key for key in first if any(other.get(key) != first[key] for other in rest)]


def main() -> None:
    """Build, run each way in a process of its own, print the table, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compiler", choices=ways.WAYS, nargs="+", default=[*ways.WAYS])
    parser.add_argument("--repeats", type=int, default=30, help="runs behind each time")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:  # the process of one way
        loader = ways.load(options.compiler[0])
        json.dump({"digests": digests(loader), "times": times(loader, options.repeats)}, sys.stdout)
        return

    chosen = [*dict.fromkeys(options.compiler)]
    builds = {}
    for way in chosen:
        print(f"building by {way} ...", file=sys.stderr)
        builds[way] = ways.build(way, fresh=True), ways.build(way)
    outputs = ways.each_in_a_process(
        __file__, chosen, "--measure", "--repeats", str(options.repeats)
    )
    results = {way: json.loads(text) for way, text in outputs.items()}

    rows = [("", *chosen, "plain PyTorch")]
    for name, plain in results[chosen[0]]["times"].items():
        ours = (results[way]["times"][name]["ours"] for way in chosen)
        rows.append((name, *(told(*us) for us in (*ours, plain["plain"]))))
    for i, name in enumerate(("build from nothing", "build again")):
        rows.append((name, *(f"{builds[way][i]:.1f} s" for way in chosen), ""))
    sizes = ", ".join(f"{name}: N = {N}, F = {F}" for name, (N, F) in SIZES.items())
    show(rows, f"The least of {options.repeats} runs (and the median), float32; {sizes}")

    digest = {way: result["digests"] for way, result in results.items()}
    if differ := differences(digest):
        sys.exit("outputs differ between the builds:\n" + "\n".join(differ))
    print(f"{len(digest[chosen[0]])} outputs bit-equal in {', '.join(chosen)}")


if __name__ == "__main__":
    main()
