"""Schemas of operators whose libraries are not loaded yet: torch knows them from the import on.

A TorchScript archive or an AOTInductor package looks its operators up by schema when it is read, in
C++, where no `loader.X` is named. So the schemas of a library are noted in the store when it is
first loaded, and later imports declare them, with stand-in kernels that load the library when one
is called. The library itself leaves out what is declared already (include/torch/glue.h, `define`).
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..machine import files

_RECORD = ".schemas.json"
DECLARED = "OCTET_DECLARED"  # tells libraries: this process's number, then the operators' names

# By unit: what torch forgets its schemas with, and, until its library is loaded, its stand-ins.
_declared: dict[str, list] = {}
_names: list[str] = []


def recorded(layers: Sequence[Path]) -> dict[str, dict[str, list[str]]]:
    """Return the schemas that were noted: by unit, and by the key of its library."""
    found: dict[str, dict[str, list[str]]] = {}
    for layer in layers:
        for unit, (key, schemas) in (files.read_record(layer / _RECORD) or {}).items():
            found.setdefault(unit, {})[key] = schemas
    return found


def note(layer: Path, unit: str, key: str, belongs: Callable[[str], bool]) -> None:
    """Write down the schemas of a unit that was loaded: those whose names `belongs` is true of."""
    known = files.read_record(layer / _RECORD) or {}
    if known.get(unit, [""])[0] == key:
        return
    files.write_record(layer / _RECORD, known | {unit: [key, known_to_torch(belongs)]})


def known_to_torch(belongs: Callable[[str], bool]) -> list[str]:
    """Return the schemas of our operators that torch has now, of whose names `belongs` is true."""
    names = (name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names())
    ours = {name for name in names if name.startswith("octet::") and belongs(name[7:])}
    return sorted(str(s) for name in ours for s in torch._C._jit_get_schemas_for_operator(name))


def declare(schemas: dict[str, list[str]], load: Callable[[str], object]) -> None:
    """Register these schemas by unit; whoever calls one of them has `load(unit)` done first."""
    for unit in schemas.keys() - _declared.keys():
        library = torch._C._dispatch_library("FRAGMENT", "octet", "")
        kernels = torch._C._dispatch_library("IMPL", "octet", "CompositeExplicitAutograd")
        for schema in schemas[unit]:
            name = library.define(schema.removeprefix("octet::"))
            kernels.impl(name, "CompositeExplicitAutograd", _stand_in(unit, name, load))
            _names.append(name)
        _declared[unit] = [library, kernels]
    _tell()


def is_declared(unit: str) -> bool:
    """True if it is this module by which torch knows the unit."""
    return unit in _declared


def withdraw(unit: str) -> None:
    """Take the stand-ins of a unit away: its library is about to bring the kernels."""
    if unit in _declared:
        del _declared[unit][1:]


def _stand_in(unit: str, name: str, load: Callable[[str], object]) -> Callable:
    def kernel(*args: Any, **named: Any) -> Any:
        load(unit)
        return getattr(torch.ops.octet, name).default(*args, **named)

    return kernel


def _tell() -> None:
    """Tell libraries which schemas they need not define, in this process and no other."""
    if _names:
        os.environ[DECLARED] = f"{os.getpid()} {' '.join(_names)}"


os.register_at_fork(after_in_child=_tell)
