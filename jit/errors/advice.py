"""Known cures of failures: tables of what is printed and what to say.

A row is a pattern to be found in a line, in one or more lines that end in |, and below it the
advice, which may use the pattern's group as {what}. The first row that matches counts.
"""

import re


def _table(text: str) -> list[tuple[re.Pattern, str]]:
    rows = re.findall(r"^(\S.*)\n((?: .*\n)+)", text.replace("|\n", "|"), re.MULTILINE)
    return [(re.compile(pattern), " ".join(advice.split())) for pattern, advice in rows]


def advice(table: list[tuple[re.Pattern, str]], line: str) -> str | None:
    """Return what the table says about a line of output."""
    for pattern, text in table:
        if match := pattern.search(line):
            return text.format(**match.groupdict())
    return None


# The machine's fault, whichever file was being compiled.
MACHINE = _table(r"""
(?P<what>No space left on device|Disk quota exceeded)
    {what}: free some space, or set LOADER_CACHE_DIR to a folder on another disk (and TMPDIR, where
    compilers keep temporary files)
Killed signal|compiler error: Killed|signal 9\b|command: Killed|\d Killed |\[code=137\]|
instance of 'std::bad_alloc'|virtual memory exhausted|: out of memory|Cannot allocate memory
    the compiler was killed, most likely for lack of memory; set MAX_JOBS=1 to compile one file at
    a time, or free memory (a container may have a limit of its own)
unsupported GNU version! gcc versions later than (?P<what>\d+)
    this nvcc takes g++ up to version {what}: install g++-{what} and name it in CC or NVCC_CCBIN,
    e.g. CC=g++-{what}
unsupported clang version! clang version must be less than (?P<what>\d+)
    this nvcc takes clang below version {what}: install one, or g++, and name it in CC or NVCC_CCBIN
(?:Unsupported gpu architecture '|Unknown CUDA arch \()(?P<what>[\w.+]+)
    {what} is unknown to this nvcc or torch: name one that `nvcc --list-gpu-arch` lists in
    TORCH_CUDA_ARCH_LIST, e.g. TORCH_CUDA_ARCH_LIST=9.0 for sm_90, or install a newer toolkit
\b(?P<what>nvcc|cicc|ptxas|cudafe\+\+|fatbinary|nvlink): (?:command )?(?:not found|No such file)
    {what} is missing: install the whole CUDA toolkit of torch's CUDA version, or pip install
    nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt of that version; CUDA_HOME names another
\b(?P<what>cuda(?:_runtime\w*|_fp\w+|_bf16)?\.h|(?:cu(?:blas|rand|fft|sparse|solver)\w*|nvrtc|nvml)\.h|
(?:crt|cub|nv|thrust)/[\w./]+)(?:: No such|' file not)
    the header {what} of CUDA is missing: install the CUDA toolkit of torch's CUDA version, or pip
    install nvidia-cuda-runtime (and nvidia-cuda-cccl) of that version; CUDA_HOME names another
Python\.h(?:: No such|' file not)
    the headers of Python are missing: install them (Debian, Ubuntu: apt install python3-dev)
sh: (?:line )?(?:\d+: )?(?P<what>\S+): (?:command )?(?:not found|No such file)
    the program {what} is missing: install it, or name another in CXX and CC
""")

# What cures one error of a compiler.
ERRORS = _table(r"""
internal compiler error|died due to signal
    a fault of the compiler itself: name another in CXX, or change the line it stumbles over
too much shared data
    static __shared__ memory ends at 48 KiB: use `extern __shared__` and
    cudaFuncAttributeMaxDynamicSharedMemorySize
texture is not a template|"cuda(?:Bind|Unbind)Texture\w*" is undefined
    texture references went with CUDA 12: make a texture object with cudaCreateTextureObject and
    hand it to the kernel as an argument
"cudaDeviceProp" has no member "(?P<what>\w+)"
    CUDA 13 has no cudaDeviceProp::{what}: ask cudaDeviceGetAttribute for it
[‘'](?P<what>gesv|solve|symeig|eig|lstsq|qr|cholesky|btrifact)[’'] is not a member of .(?:at|torch)
    torch has no {what} any more: at::linalg_solve, at::linalg_eigh, at::linalg_eig,
    at::linalg_lstsq, at::linalg_qr, at::linalg_cholesky and at::linalg_lu_factor took its place
DeprecatedTypeProperties
    x.type() is no dtype any more: write x.scalar_type(), or x.options() to make a tensor like x
""")

# Linkers and dlopen; undefined and doubly defined symbols are symbols.py's.
LIBRARIES = _table(r"""
(?:cannot find|unable to find library|library not found:) -l(?P<what>[^\s:]+)
    the linker does not find lib{what}.so: install the package that has it, or name its folder in
    LIBRARY_PATH (for a library of CUDA, the toolkit's folder in CUDA_HOME)
recompile with -fPIC
    an object or a static library was compiled without -fPIC, which a shared library needs:
    compile it again with -fPIC, or link the shared form of that library
(?:^|: )(?P<what>[^:]+): cannot open shared object file
    {what} is not found when the library is loaded: install the package that has it, or name its
    folder in LD_LIBRARY_PATH; what belongs to torch or CUDA must have torch's version
(?:^|: )(?P<what>[^:]+): (?:invalid ELF header|file too short|wrong ELF class|ELF file)
    {what} is no shared library for this machine: damaged, a linker script, or made for another
    processor; delete it and build again
version [`'](?P<what>(?:GLIBCXX|CXXABI)_[\d.]+)' not found
    {what} is missing: the library was built by a newer g++ than the libstdc++ that Python loads;
    set CXX to an older g++, or take a newer libstdc++ (conda: conda install libstdcxx-ng)
version [`'](?P<what>GLIBC_[\d.]+)' not found
    {what} is missing: the library was built on a newer system; build it again on this one
cannot allocate memory in static TLS block
    no room is left for the library's thread-local variables: load it earlier (import it first, or
    name it in LD_PRELOAD), or set GLIBC_TUNABLES=glibc.rtld.optional_static_tls=4096
failed to map segment|cannot enable executable stack
    the system refuses to run code from that folder, which may be mounted noexec: set
    LOADER_CACHE_DIR to a folder on another file system
does not define (?:module export|init) function
    the library has no Python module in it: PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) is missing, or
    load it with is_python_module=False
\b(?:ld(?:\.\w+)?|mold): .*(?:cannot (?:find|open)|unable to|unrecognized|unknown|No such file)
    the linker stopped:
""")

# Undefined symbols that the checkout does not declare, without arguments: whose they are.
OWNERS = _table(r"""
^(?:vtable|typeinfo|VTT) for
    a virtual member function of that class is defined nowhere
(?:^| )(?:at|c10|torch|caffe2)::\S*$|^aoti_torch_|^torch_
    PyTorch's: compile with the headers of the torch that loads it (delete the build and build
    again), and use no function newer than that torch
^_*cuda[A-Z]
    the CUDA runtime's: link with -lcudart
^(?P<what>cublas|cufft|curand|cusparse|cusolver|nvrtc|nccl)
    NVIDIA's: link with -l{what}
^cu[A-Z]
    the CUDA driver's: link with -lcuda
^(?:GOMP|omp|__kmpc)_
    OpenMP's: compile and link with -fopenmp
^_?Py[A-Z]
    Python's own: only Python can load the library
^std::|^__cxa|^__gxx|^operator (?:new|delete)
    the C++ library's: link with g++ or clang++
""")
