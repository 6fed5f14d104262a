"""Functions that a judge in the candidate's process would rely on: has somebody replaced them?

This one relies on none of them there; who replaces `torch.allclose` has nothing good in mind.
"""

import builtins
import importlib
from typing import Any

_WATCHED = """
time: time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time sleep
torch: allclose equal isclose eq ne sub abs max rand randn manual_seed empty empty_like zeros
torch.testing: assert_close
torch.Tensor: __eq__ __ne__ __sub__ __bool__ allclose equal isclose item copy_ clone data_ptr numpy
torch.cuda: synchronize Event Stream current_stream current_device is_available device_count
torch.cuda.Event: record elapsed_time synchronize wait query
torch.cuda.Stream: synchronize wait_stream wait_event
torch.utils.benchmark: Timer
json: dumps loads dump load
os: _exit write read kill getpid fork
sys: exit _getframe
gc: get_objects get_referrers
math: isclose isnan isfinite
"""


def known() -> dict[str, Any]:
    """Return what is watched, as it is now."""
    found: dict[str, Any] = {f"builtins.{n}": v for n, v in vars(builtins).items() if n != "_"}
    for line in _WATCHED.strip().splitlines():
        owner, _, names = line.partition(": ")
        for name in names.split():
            found[f"{owner}.{name}"] = _value(owner, name)
    return found


def changed(before: dict[str, Any]) -> list[str]:
    """Return the names of what is no longer what it was."""
    return [path for path, old in before.items() if _value(*path.rsplit(".", 1)) is not old]


def _value(owner: str, name: str) -> Any:
    try:
        found = importlib.import_module(owner)
    except ImportError:
        module, _, inner = owner.rpartition(".")
        try:
            return getattr(vars(importlib.import_module(module))[inner], "__dict__", {}).get(name)
        except (ImportError, KeyError):
            return None
    return vars(found).get(name)
