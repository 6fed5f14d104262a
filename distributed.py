"""Operators on several devices and machines, on `torch.distributed`: `loader.distributed`.

Imported when it is first named. What an operator does with a DTensor needs nothing from here.
"""

import importlib

# Public names, and the module below `loader` that has each.
_ELSEWHERE: dict[str, str] = {
    "encode_sharded": "ops.hash_grid_encoding_sharded",
    "sample_sharded": "ops.grid_sample_sharded",
}

__all__: list[str] = []
__all__ += [name for name in _ELSEWHERE]


def __getattr__(name: str):
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'loader.distributed' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"loader.{_ELSEWHERE[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
