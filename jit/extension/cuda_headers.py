"""The headers of a CUDA source: which half each is for, and what torch has for kernels."""

import re

from .levels import include_lines, read_header

# Of torch's names those that headers without the rest of torch bring; kernels may have them.
LIGHT = re.compile(
    r"\b(?:at|torch|c10)\s*::\s*(?:(?:Generic)?PackedTensorAccessor(?:32|64)?|TensorAccessor"
    r"|(?:Restrict|Default)PtrTraits|Half|BFloat16|complex)\b"
    r"|\bC10_(?:LAUNCH_BOUNDS_[0-2]|(?:HOST_)?DEVICE|RESTRICT|WARP_SIZE|ALWAYS_INLINE|(?:UN)?LIKELY)\b"
    r"|\bCUDA_KERNEL_ASSERT\b"
)
C10_TYPES = ("Half", "BFloat16", "complex")  # each has a header of its name
FOR_HOST = re.compile(r"(?:torch|ATen|c10|caffe2|pybind11)/.*|Python\.h")
LIBRARY = re.compile(r"(cublas|cudnn|cusparse|cufft|cusolver|nccl|nvrtc|nvtx|nvToolsExt)[\w/.]*")
FOR_NVCC = re.compile(
    r"(?:cub|thrust|cuda|cooperative_groups|nv)/[\w/.]+|cuda_(?:pipeline|awbarrier)\w*\.h"
    r"|device_functions\.h|curand_(?!kernel)\w+\.h"
)
FOR_BOTH = re.compile(
    r"cuda(?:_(?:runtime(?:_api)?|fp\d+|bf16|profiler_api|occupancy|device_runtime_api))?\.h"
    r"|[a-z_]+|c?math\.h|(?:std\w+|float|limits|string|assert|time|ctype|errno)\.h"
    r"|mma\.h|cooperative_groups\.h|curand(?:_kernel)?\.h|math_constants\.h|vector_\w+\.h"
    r"|device_launch_parameters\.h|(?:texture|surface|driver|device|builtin|library)_types\.h"
    r"|sm_\w+\.h|channel_descriptor\.h|host_defines\.h|omp\.h|unistd\.h|inttypes\.h"
)


def is_known(header: str) -> bool:
    """Return True if it is known which half a header is for."""
    kinds = (FOR_HOST, FOR_NVCC, LIBRARY, FOR_BOTH)
    return any(kind.fullmatch(header) for kind in kinds)


def light_headers(code: str) -> str:
    """Return the lines that include what of torch's kernels may name, where they name it."""
    named = {re.split(r"\W+", found)[-1] for found in LIGHT.findall(code)}
    if not named:
        return ""
    headers = ["c10/macros/Macros.h", *(f"c10/util/{n}.h" for n in C10_TYPES if n in named)]
    if any("Accessor" in name or "Traits" in name for name in named):
        headers.append("ATen/core/TensorAccessor.h")
    return include_lines(headers) + "namespace at {}\nnamespace torch { using namespace at; }\n"


def restrict_traits(code: str) -> str:
    """Return the lines that bring RestrictPtrTraits, which torch has for nvcc alone."""
    if not re.search(r"\bRestrictPtrTraits\b", code):
        return ""
    header = "torch/headeronly/core/TensorAccessor.h"
    moved = "RestrictPtrTraits" in read_header(header)
    scope = "torch::headeronly" if moved else "at"
    return (
        f"#include <ATen/core/TensorAccessor.h>\nnamespace {scope} {{\n"
        "template <typename T> struct RestrictPtrTraits { typedef T* __restrict__ PtrType; };\n}\n"
        + "namespace at { using torch::headeronly::RestrictPtrTraits; }\n"
        * moved
    )


def least_and_greatest(code: str) -> str:
    """Return CUDA's `min` and `max` for the host, which it has for nvcc alone."""
    if not re.search(r"(?<![\w.:>])(?:min|max)\s*\(", code):
        return ""
    lines = ["#include <math.h>"]
    for name, than in (("min", "<"), ("max", ">")):
        for signed in ("int", "long", "long long"):
            free = f"unsigned {signed}"
            for a, b in ((signed, signed), (free, free), (signed, free), (free, signed)):
                kind = signed if a == b == signed else free
                chosen = f"({kind})a {than} ({kind})b ? ({kind})a : ({kind})b"
                lines.append(
                    f"inline {kind} {name}(const {a} a, const {b} b) {{ return {chosen}; }}"
                )
        for a, b in (
            ("float", "float"),
            ("double", "double"),
            ("float", "double"),
            ("double", "float"),
        ):
            kind, suffix = ("float", "f") if a == b == "float" else ("double", "")
            body = f"return f{name}{suffix}(a, b);"
            lines.append(f"inline {kind} {name}(const {a} a, const {b} b) {{ {body} }}")
    return "\n".join([*lines, ""])
