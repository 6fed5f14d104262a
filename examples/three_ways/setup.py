"""The operators as a wheel, by setuptools.

pip wheel --no-build-isolation --no-deps examples/three_ways
"""

import os
import sys
from pathlib import Path

try:
    import torch
except ImportError:
    sys.exit(
        "setup.py: torch is needed to build, and is not here. pip builds in an environment of its "
        "own, without your torch: pass --no-build-isolation"
    )
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

sys.path.insert(0, str(Path(__file__).resolve().parent))  # pip leaves it out
from guards import check_host_compiler, check_name, check_stems
from ways import BUILD, ROOT, sources, toolchain, with_cuda

NAME = "octet_three_ways"


def cuda_runtime(home: Path, at: Path) -> list[str]:
    """Where -lcudart finds the runtime: NVIDIA's wheels have libcudart.so.13 alone, so link it."""
    libraries = [home / name for name in ("lib64", "lib")]
    for found in sorted(file for path in libraries for file in path.glob("libcudart.so*")):
        if found.name == "libcudart.so":
            return [str(found.parent)]
        link = at / "libcudart.so"
        link.unlink(missing_ok=True)
        link.symlink_to(found)
        return [str(at)]
    return []


tools = toolchain()
cuda = with_cuda(tools)
folder = BUILD / "setup"
folder.mkdir(parents=True, exist_ok=True)
# Absolute paths: the objects of `../../ops/add2.cpp` would land outside of the build folder.
files = sources(cuda)
check_name(NAME)
check_stems(files)
if cuda:
    check_host_compiler(os.path.join(tools.cuda_home, "bin", "nvcc"), os.environ.get("CC"), folder)
    os.environ["TORCH_CUDA_ARCH_LIST"] = tools.architectures

# No more of torch's headers than 2.10 knows, which the wheel then serves as well.
define = ["-DTORCH_TARGET_VERSION=0x020a000000000000", *(["-DOCTET_CUDA"] if cuda else [])]
extension = (CUDAExtension if cuda else CppExtension)(
    # No Python module but a plain library, which registers the operators when it is loaded: it
    # needs neither Python's headers nor libtorch_python, which py_limited_api leaves out.
    f"{NAME}._operators",
    [str(file) for file in files],
    include_dirs=[str(ROOT / "include")],
    library_dirs=cuda_runtime(Path(tools.cuda_home), folder) if cuda else [],
    extra_compile_args={
        "cxx": [*tools.cflags, *define],
        "nvcc": [*tools.cuda_flags, *define],
    },
    extra_link_args=["-Wl,--as-needed", *tools.ldflags],
    py_limited_api=True,
)

setup(
    name="octet-three-ways",
    version="0.1.0",
    description=f"Octet's add2 and trilinear_interpolation, built for torch {torch.__version__}",
    package_dir={"": "src"},
    packages=[NAME],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
    install_requires=["torch>=2.10"],
    python_requires=">=3.10",
    zip_safe=False,
    options={
        "build": {"build_base": str(folder)},
        "egg_info": {"egg_base": str(folder)},
        "bdist_wheel": {"py_limited_api": "cp310"},  # one wheel for every Python from 3.10 on
    },
)
