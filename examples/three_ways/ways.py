"""The three ways to build the same operator sources, each by the command that a user would type.

    jit     `import loader`, which runs torch.utils.cpp_extension.load
    setup   `pip wheel` over setup.py, then `pip install` into a folder of this example's own
    cmake   `cmake` over CMakeLists.txt

All of them write below `build/`, and none needs the network.
"""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BUILD = HERE / "build"
WAYS = ("jit", "setup", "cmake")
OPERATORS = ("add2", "trilinear_interpolation")


def toolchain():
    """The flags, compilers and GPUs for which `import loader` would build, without building.

    Bits are equal only where flags are: -O and -march decide what is vectorised and fused.
    """
    if "loader" in sys.modules:
        return importlib.import_module("loader.jit.machine.toolchain").current(BUILD)
    stub = types.ModuleType("loader")  # the package without its body, which builds
    stub.__path__ = [str(ROOT)]
    sys.modules["loader"] = stub
    try:
        return importlib.import_module("loader.jit.machine.toolchain").current(BUILD)
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "loader"]:
            del sys.modules[name]


def with_cuda(tools) -> bool:
    """Whether the CUDA sources are built too: nvcc, and a GPU or TORCH_CUDA_ARCH_LIST."""
    return bool(tools.nvcc and tools.architectures)


def sources(cuda: bool) -> list[Path]:
    """Every source of the operators; those of CUDA where asked for."""
    kinds = ("cpp", "cu") if cuda else ("cpp",)
    found = [ROOT / "ops" / f"{name}.cpp" for name in OPERATORS]
    for name in OPERATORS:
        for stem in (f"{name}_cpu", name):
            files = (ROOT / "kernels" / f"{stem}.{kind}" for kind in kinds)
            found += [file for file in files if file.exists()]
        found += sorted((ROOT / "kernels").glob(f"{name}.*.cu")) if cuda else []
        found += [f for kind in kinds for f in sorted((ROOT / "kernels" / name).glob(f"*.{kind}"))]
    return found


def environment(way: str) -> dict[str, str]:
    """What a build gets to see: torch's own variables, set to what `import loader` found."""
    tools = toolchain()
    env = {**os.environ, "LOADER_CACHE_DIR": str(BUILD / way / "cache"), "LOADER_BUILD": "lazy"}
    path = [os.path.dirname(sys.executable), *_ninja(), env.get("PATH", os.defpath)]
    env["PATH"] = os.pathsep.join(path)
    env.pop("TORCH_CUDA_ARCH_LIST", None)
    if with_cuda(tools):
        env |= {"TORCH_CUDA_ARCH_LIST": tools.architectures, "CUDA_HOME": tools.cuda_home}
        env.setdefault("CUDACXX", os.path.join(tools.cuda_home, "bin", "nvcc"))
        if "CC" in env:  # torch makes it nvcc's host compiler; CMake has a variable for that
            env.setdefault("CUDAHOSTCXX", env["CC"])
    return env


def _ninja() -> list[str]:
    try:
        import ninja
    except ImportError:
        return []  # then a ninja on PATH has to serve
    return [ninja.BIN_DIR]


def commands(way: str) -> list[list[str]]:
    """The commands that build the operators this way."""
    import torch

    python = sys.executable
    if way == "jit":
        return [[python, "-c", f"import loader; loader.build{OPERATORS}"]]
    if way == "setup":
        folder, pip = BUILD / "setup", [python, "-m", "pip", "--disable-pip-version-check"]
        # Without --no-build-isolation pip would fetch another torch to build against.
        wheel = ["wheel", "--no-build-isolation", "--no-deps", "--no-index", "--no-cache-dir"]
        install = ["install", "--no-deps", "--no-index", "--upgrade", "--target", folder / "site"]
        return [
            [*pip, *wheel, "--wheel-dir", folder / "wheel", HERE],
            [*pip, *install, "--find-links", folder / "wheel", "octet-three-ways"],
        ]
    tools = toolchain()
    options = {
        # Where TorchConfig.cmake lies; without it CMake does not find a torch from pip.
        "CMAKE_PREFIX_PATH": torch.utils.cmake_prefix_path,
        "OCTET_NATIVE": "ON" if "-march=native" in tools.cflags else "OFF",
        "OCTET_CUDA_ARCHITECTURES": tools.architectures if with_cuda(tools) else "",
    }
    if not shutil.which("cmake", path=environment(way)["PATH"]):
        sys.exit("cmake is not on PATH; apt install cmake, or pip install cmake")
    return [
        ["cmake", "-S", HERE, "-B", BUILD / "cmake", *(f"-D{k}={v}" for k, v in options.items())],
        ["cmake", "--build", BUILD / "cmake", "--parallel", str(os.cpu_count())],
    ]


def build(way: str, fresh: bool = False) -> float:
    """Build, from nothing where `fresh`; seconds that it took. Ends the program where it fails."""
    if fresh:
        shutil.rmtree(BUILD / way, ignore_errors=True)
    start = time.perf_counter()
    for command in commands(way):
        words = [str(word) for word in command]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment(way),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout.rstrip()}\n\n{way}: this failed: {shlex.join(words)}")
    return time.perf_counter() - start


def load(way: str):
    """The module `loader` over the operators that were built this way, and none else.

    Where a library has registered `octet::X` already, loader puts its Python side (derivatives,
    fake kernels) on that one. LOADER_BUILD=never proves that nothing is compiled on the side.
    """
    os.environ |= {"LOADER_CACHE_DIR": str(BUILD / way / "cache"), "LOADER_BUILD": "never"}
    sys.path.insert(0, str(ROOT))
    if way == "setup":
        sys.path.insert(0, str(BUILD / "setup" / "site"))
        importlib.import_module("octet_three_ways")
    elif way == "cmake":
        import torch

        torch.ops.load_library(str(BUILD / "cmake" / "octet_operators.so"))
    return importlib.import_module("loader")


def each_in_a_process(script: str, ways: list[str], *options: str) -> dict[str, str]:
    """Run `script --compiler WAY` for each way; its output. One process can hold one build only."""
    outputs = {}
    for way in ways:
        command = [sys.executable, script, "--compiler", way, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{done.stdout}{way}: failed with exit status {done.returncode}")
        outputs[way] = done.stdout
    return outputs
