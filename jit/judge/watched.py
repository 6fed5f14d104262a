"""A candidate called once under compute-sanitizer, which sees each access to memory."""

import os
from typing import Any, NamedTuple

from torch import Tensor

from ..machine import child
from . import cases, exhibits
from .asked import Asked, Misused, Turn
from .cases import Case
from .jail import Ended, Jail
from .verdict import Refused

_FOUND = 86  # the exit status of compute-sanitizer for findings, unlike Python's own
_MARK = "========="  # begins its lines
_MOST = 20  # of them
_TEXT = 2000  # characters of what it says where it does not work


class Absent(Exception):
    """The tool does not get as far as to the candidate."""


class Again(NamedTuple):
    """How a candidate is loaded and made."""

    source: list
    text: str | None
    init: dict
    tensors: list[Tensor]  # of the arguments that it is made with


def become(tool: str, folder: str, device: str, channel: Any) -> None:
    """Turn this process into a witness in a Python of its own, under the tool; never returns."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor has bounds of its own
    channel.set_inheritable(True)
    words = ["--tool", "memcheck", "--error-exitcode", str(_FOUND), "--report-api-errors", "no"]
    words += child.command("judge.witness.resumed", "candidate", folder, device, channel.fileno())
    os.execv(tool, [tool, *words])


def findings(jail: Jail, again: Again, case: Case, turn: Turn | None) -> str:
    """Call the candidate once; what the tool found, "" for nothing.

    Raises: Ended, Refused, Absent.
    """
    asked = Asked(jail, "candidate", turn)
    try:
        asked.ask("wake", share=1.0)
    except (Ended, Misused, Refused) as error:
        said = [line for line in jail.output().splitlines() if line.startswith(_MARK)]
        raise Absent("; ".join([str(error), *said[:_MOST]])[:_TEXT]) from None
    asked.ask("load", source=again.source, text=again.text, classes=["ModelNew"])
    layout, file = exhibits.pack(again.tensors)
    try:
        init = {**again.init, "layout": layout.json()}
        asked.ask("make", [file], init=init, seed=cases.secret())
    finally:
        os.close(file)
    asked.give(case)
    asked.results("call", case.tensors, guarded=False, keep=False, seed=1)
    if jail.finish() != _FOUND:
        return ""
    return report(jail) or "compute-sanitizer found errors, and does not say which"


def report(jail: Jail) -> str:
    """Return the beginning of what the tool has said so far."""
    lines = [line for line in jail.output().splitlines() if line.startswith(_MARK)]
    return "\n".join(lines[:_MOST])
