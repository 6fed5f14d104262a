"""How long `load_inline` takes: ours and torch.utils.cpp_extension's, in one run.

Three classic snippets: `hello` returns a std::string, `sin_add` is torch's own example, and
`square_matrix` is a CUDA kernel with `torch::Tensor` in its `.cu`, `template` the same as a kernel
template that is dispatched on the dtype and bound in the `.cu`. Each figure is the time of the
one call in a process that has imported torch, which is not counted:

cold    nothing is there
edit    the source was changed since (of `square_matrix` the kernel)
warm    nothing was changed; a new process
error   a mistake was made since (`sin_add` calls `x.sinn()`): how long until the error

    python -m loader bench inline [--repeats 3] [--theirs 1]

`bind` is `sin_add` bound by hand with pybind11, so that torch's headers are wanted: cold makes the
precompiled header that later extensions share, `shared` is another extension's first build then.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

HELLO = 'std::string hello() { return "Hello World!"; }'
SIN_ADD = "at::Tensor sin_add(at::Tensor x, at::Tensor y) { return x.sin() + y.sin(); }"
KERNEL = """
__global__ void square_matrix_kernel(const float* matrix, float* result, int width, int height) {
    int row = blockIdx.y * blockDim.y + threadIdx.y;
    int col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row < height && col < width) {
        int idx = row * width + col;
        result[idx] = matrix[idx] * matrix[idx];
    }
}
torch::Tensor square_matrix(torch::Tensor matrix) {
    const auto height = matrix.size(0);
    const auto width = matrix.size(1);
    auto result = torch::empty_like(matrix);
    dim3 threads(16, 16);
    dim3 blocks((width + threads.x - 1) / threads.x, (height + threads.y - 1) / threads.y);
    square_matrix_kernel<<<blocks, threads>>>(
        matrix.data_ptr<float>(), result.data_ptr<float>(), width, height);
    return result;
}
"""
BIND = SIN_ADD + '\nPYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("sin_add", &sin_add); }'
TEMPLATE = """#include <torch/extension.h>
template <typename T> __global__ void square_kernel(const T* x, T* y, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i];
}
torch::Tensor square(torch::Tensor x) {
    auto y = torch::empty_like(x);
    AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "square", ([&] {
        square_kernel<scalar_t><<<(x.numel() + 255) / 256, 256>>>(
            x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel());
    }));
    return y;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("square", &square); }
"""
SNIPPETS = {
    "hello": {"cpp_sources": HELLO, "functions": ["hello"]},
    "sin_add": {"cpp_sources": SIN_ADD, "functions": ["sin_add"]},
    "square_matrix": {
        "cpp_sources": "torch::Tensor square_matrix(torch::Tensor matrix);",
        "cuda_sources": KERNEL,
        "functions": ["square_matrix"],
    },
    "bind": {"cpp_sources": BIND},
    "template": {"cpp_sources": "", "cuda_sources": TEMPLATE},
}
EDITS = {
    "hello": ("World", "Moon"),
    "sin_add": ("x.sin()", "x.cos()"),
    "square_matrix": ("* matrix[idx];", "* matrix[idx] + 1;"),
    "bind": ("x.sin()", "x.cos()"),
    "template": ("x[i] * x[i];", "x[i] * x[i] + T(1);"),
}
MISTAKES = {
    "hello": ('"Hello World!"', "greting"),
    "sin_add": ("x.sin()", "x.sinn()"),
    "square_matrix": ("blockIdx.y", "blokIdx.y"),
    "bind": ("x.sin()", "x.sinn()"),
    "template": ("empty_like", "empty_lik"),
}
CALL = """
import json, sys, time
sys.path.insert(0, {root!r})
import torch
if {ours}:
    import loader
    from loader import load_inline
else:
    from torch.utils.cpp_extension import load_inline
arguments = json.loads(sys.stdin.read())
begun = time.perf_counter()
try:
    load_inline(**arguments)
    ended = "built"
except RuntimeError:
    ended = "failed"
print("seconds", time.perf_counter() - begun, ended)
"""


def seconds(ours: bool, cache: Path, name: str, arguments: dict, fails: bool = False) -> float:
    """Return the time of one call in a process of its own; whether it fails is as expected."""
    env = os.environ | {"LOADER_CACHE_DIR": str(cache), "LOADER_BUILD": "lazy"}
    env |= {"TORCH_EXTENSIONS_DIR": str(cache / "theirs")}
    env.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env["PATH"]])  # has ninja
    code = CALL.format(root=str(Path(__file__).parent.parent), ours=ours)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps({"name": name, **arguments}),
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    time, ended = done.stdout.split("seconds ")[1].split()
    assert ended == ("failed" if fails else "built"), (name, ended)
    return float(time)


def edited(name: str, change: tuple[str, str]) -> dict:
    """Return the arguments after an edit."""
    part = "cuda_sources" if "cuda_sources" in SNIPPETS[name] else "cpp_sources"
    return SNIPPETS[name] | {part: SNIPPETS[name][part].replace(*change)}


def measure(ours: bool, name: str) -> dict[str, float]:
    """Each stage once, beginning with an empty cache."""
    cache = Path(tempfile.mkdtemp(prefix="octet-bench-"))
    try:
        times = {"cold": seconds(ours, cache, name, SNIPPETS[name])}
        if name == "bind" and ours:
            times["shared"] = seconds(ours, cache, "bind_too", SNIPPETS[name])
        times["warm"] = seconds(ours, cache, name, SNIPPETS[name])
        times["edit"] = seconds(ours, cache, name, edited(name, EDITS[name]))
        mistaken = edited(name, MISTAKES[name])
        times["error"] = seconds(ours, cache, name, mistaken, fails=True)
        return times
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def main(arguments=None) -> None:
    """Measure, print a line for each case, keep the results."""
    parser = argparse.ArgumentParser(prog="python -m loader bench inline")
    parser.add_argument("--repeats", type=int, default=3, help="runs of ours")
    parser.add_argument("--theirs", type=int, default=1, help="runs of torch's own")
    parser.add_argument("--results", type=Path, help="folder of the result file")
    parser.add_argument("names", nargs="*", default=[*SNIPPETS])
    options = parser.parse_args(arguments)
    import torch

    from harness import circumstances, keep

    rows = []
    for name in options.names or SNIPPETS:
        if "cuda_sources" in SNIPPETS[name] and not shutil.which("nvcc"):
            continue
        taken = {"loader": [], "torch": []}
        for turn in range(max(options.repeats, options.theirs)):  # by turns: the load changes
            if turn < options.repeats:
                taken["loader"].append(measure(True, name))
            if turn < options.theirs:
                taken["torch"].append(measure(False, name))
        for who, runs in taken.items():
            for stage in runs[0] if runs else ():
                values = [run[stage] for run in runs]
                rows.append(
                    {
                        "snippet": name,
                        "who": who,
                        "stage": stage,
                        "seconds": statistics.median(values),
                        "runs": values,
                        "load": os.getloadavg()[0],
                    }
                )
                print(f"{name:15} {who:7} {stage:7} {rows[-1]['seconds']:8.3f} s", flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    facts = circumstances(device, []) | {"cores": len(os.sched_getaffinity(0))}
    facts["cuda_compiler"] = torch.version.cuda if shutil.which("nvcc") else None
    print(keep("inline", device, facts, rows, options.results))


if __name__ == "__main__":
    main()
