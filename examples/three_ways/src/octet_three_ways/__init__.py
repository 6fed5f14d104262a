"""Octet's add2 and trilinear_interpolation as a wheel; importing it registers `torch.ops.octet`."""

from pathlib import Path

# Before the library, always: this is what brings libtorch.so into the process. A library that is
# opened without it ends in "libc10.so: cannot open shared object file".
try:
    import torch
except ImportError as error:
    raise ImportError(
        "octet_three_ways needs torch, which is not here: pip install torch"
    ) from error

_library = Path(__file__).parent / "_operators.so"
if not _library.exists():
    raise ImportError(
        f"{_library} is missing: this is the source folder, not the installed package; "
        "build and install the wheel, or start Python from another folder"
    )
if torch._C._dispatch_has_kernel("octet::add2"):
    raise ImportError(
        "octet::add2 is registered already, by a build that this process loaded before; "
        "take one build per process, this one or `import loader`'s"
    )
torch.ops.load_library(str(_library))

add2 = torch.ops.octet.add2.default
trilinear_interpolation = torch.ops.octet.trilinear_interpolation.default
