"""From a saved edit to the first result of the new code, in one living process on two cores.

    python -m loader bench edit_loop [--device cuda] [--repeats 9]

Ours: `loader.reload()` and a call, the trial against the reference included, for a CPU kernel, the
CUDA kernel of `square` and the CUDA kernels of `trilinear_interpolation`. Without a GPU the CUDA
files are compiled (TORCH_CUDA_ARCH_LIST=9.0) and swapped in, and the call is one on the CPU.
Peers, each on the smallest kernel of the same kind: `torch.utils.cpp_extension.load` and
`load_inline`, apache-tvm-ffi's `load_inline`, NVIDIA Warp's CPU backend, NVRTC through torch. Those
that are not installed are left out, and the result says so.
"""

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

CASES = {
    "CPU kernel of square": "kernels/square_cpu.cpp",
    "CPU kernel of trilinear_interpolation": "kernels/trilinear_interpolation_cpu.cpp",
    "CUDA kernel of square": "kernels/square.cu",
    "CUDA kernels of trilinear_interpolation": "kernels/trilinear_interpolation.cu",
    "header of square": "include/square.h",
}
CPP = """#include <torch/extension.h>
torch::Tensor squared(torch::Tensor x) { return x * x; }  // @number@
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("squared", &squared); }
"""
TVM = """void squared(tvm::ffi::TensorView x, tvm::ffi::TensorView y) {
  for (int i = 0; i < x.size(0); ++i) {
    float v = static_cast<float*>(x.data_ptr())[i];
    static_cast<float*>(y.data_ptr())[i] = v * v + 0 * @number@;
  }
}
"""
WARP = """import warp as wp

@wp.kernel
def squared(x: wp.array(dtype=float), y: wp.array(dtype=float)):
    i = wp.tid()
    y[i] = x[i] * x[i] + 0.0 * float(@number@)
"""
CUDA = """extern "C" __global__ void squared(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * x[i] + 0 * @number@;
}
"""


def seconds_of(run, repeats: int) -> dict:
    """Median, smallest and largest of `run(number)`, which makes an edit and takes it in.

    A second apart, since nobody edits faster, and the build before is still put into the store.
    """
    times = []
    for number in range(repeats):
        time.sleep(1)
        begun = time.perf_counter()
        run(number)
        times.append(time.perf_counter() - begun)
    return {
        "median": statistics.median(times),
        "least": min(times),
        "most": max(times),
        "runs": repeats,
    }


def ours(folder: str, device: str, repeats: int) -> list[dict]:
    """Each case: the parts and the whole."""
    import torch

    import loader
    from loader.jit.live.reload import reloader

    inputs = {
        "square": (torch.ones(100, device=device),),
        "trilinear_interpolation": (
            torch.ones(10, 8, 4, device=device),
            torch.zeros(10, 3, device=device),
        ),
    }
    for name, arguments in inputs.items():
        getattr(loader, name)(*arguments)
    reloader.stand_by()
    time.sleep(5)
    rows = []
    for case, file in CASES.items():
        if file.endswith(".cu") and not loader._session.toolchain.architectures:
            continue
        unit = Path(file).name.split(".")[0].removesuffix("_cpu")
        text, edits = (Path(folder) / file).read_text(), []

        def edit(number, file=file, text=text, unit=unit, edits=edits):
            Path(folder, file).write_text(f"{text}\n// edit {number}\n")
            report = loader.reload()
            getattr(loader, unit)(*inputs[unit])
            assert report.ok, report
            edits.append(report.edits[0])

        edit(-1)
        edits.clear()
        times = seconds_of(edit, repeats)
        compiled = statistics.median(max(e.rebuilt.compiled.values()) for e in edits)
        rows.append({"who": "loader", "case": case, "compile": compiled, **times})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def peers(folder: str, device: str, repeats: int) -> list[dict]:
    """Those that are here, on the smallest kernel."""
    import torch

    rows = []

    def measure(who: str, case: str, run, repeats: int) -> None:
        rows.append({"who": who, "case": case, **seconds_of(run, repeats)})
        print(json.dumps(rows[-1]), flush=True)

    x = torch.ones(100)

    def tvm(number):
        import tvm_ffi.cpp

        module = tvm_ffi.cpp.load_inline(
            f"squared_{number}",
            cpp_sources=TVM.replace("@number@", str(number)),
            functions="squared",
            build_directory=f"{folder}/tvm{number}",
        )
        module.squared(x, torch.empty_like(x))

    def warp(number):
        import warp

        path = Path(folder, f"warped_{number}.py")
        path.write_text(WARP.replace("@number@", str(number)))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        a = warp.array(x.numpy(), dtype=float, device="cpu")
        warp.launch(module.squared, 100, inputs=[a], outputs=[warp.zeros_like(a)], device="cpu")

    def nvrtc(number):
        y = x.to(device)
        kernel = torch.cuda._compile_kernel(CUDA.replace("@number@", str(number)), "squared")
        kernel((1, 1, 1), (128, 1, 1), (y, torch.empty_like(y), 100))
        torch.cuda.synchronize()

    def torch_load(number):
        from torch.utils.cpp_extension import load

        source = Path(folder, "squared.cpp")
        source.write_text(CPP.replace("@number@", str(number)))
        Path(folder, "build").mkdir(exist_ok=True)
        load("squared", [str(source)], build_directory=f"{folder}/build").squared(x)

    if importlib.util.find_spec("tvm_ffi"):
        measure("apache-tvm-ffi load_inline", "a C++ function", tvm, repeats)
    if importlib.util.find_spec("warp"):
        measure("NVIDIA Warp, CPU backend", "a kernel", warp, repeats)
    if device == "cuda":
        measure("NVRTC, torch.cuda._compile_kernel", "a CUDA kernel", nvrtc, repeats)
    torch_load(-1)
    measure("torch.utils.cpp_extension.load", "a C++ function", torch_load, 2)
    return rows


def main(arguments: list[str]) -> None:
    """Measure ours and the peers in processes of two cores, and keep the results."""
    parser = argparse.ArgumentParser(prog="python -m loader bench edit_loop", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args(arguments)
    from harness import ROOT, circumstances, keep, rows_of

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for room in ("jit", "include", "ops", "kernels"):
            shutil.copytree(ROOT / room, f"{folder}/copy/{room}")
        shutil.copy(ROOT / "loader.py", f"{folder}/copy")
        environment = {**os.environ, "LOADER_CACHE_DIR": f"{folder}/cache", "MAX_JOBS": "2"}
        environment |= {"LOADER_BUILD": "eager", "TORCH_EXTENSIONS_DIR": f"{folder}/extensions"}
        environment |= {"WARP_CACHE_PATH": f"{folder}/warp"}
        if options.device == "cpu":
            environment.setdefault("TORCH_CUDA_ARCH_LIST", "9.0")
        for which, where in (("ours", f"{folder}/copy"), ("peers", folder)):
            code = (
                f"import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]); "
                f"sys.path[:0] = [{folder + '/copy'!r}, {str(Path(__file__).parent)!r}]; "
                f"import edit_loop; edit_loop.{which}({where!r}, {options.device!r}, "
                f"{options.repeats})"
            )
            rows += rows_of(code, where, environment)
    facts = circumstances(options.device, ["square", "trilinear_interpolation"])
    keep("edit_loop", options.device, {**facts, "cores": 2}, rows, options.results)
