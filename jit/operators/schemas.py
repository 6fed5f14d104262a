"""Schemas of operators whose libraries are not loaded yet: torch knows them from the import on.

A TorchScript archive or an AOTInductor package looks its operators up by schema when it is read, in
C++, where no `loader.X` is named. So the schemas of a library are noted in the store when it is
first loaded, and later imports declare them, with stand-in kernels that load the library when one
is called. The library itself leaves out what is declared already (include/torch/glue.h, `define`).
"""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..machine import files

_RECORD = ".schemas.json"
DECLARED = "OCTET_DECLARED"  # tells libraries: this process's number, then the operators' names

# By library: what torch forgets its schemas with, and, until it is loaded, its stand-ins.
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
        register(unit, schemas[unit], functools.partial(_stand_in, unit, load))


def is_declared(library: str) -> bool:
    """True if it is this module by which torch knows a library's operators."""
    return library in _declared


def withdraw(library: str) -> None:
    """Take the stand-ins of a library away: it is about to bring the kernels."""
    if library in _declared:
        del _declared[library][1:]


def register(library: str, schemas: list[str], stand_in: Callable[[str], Callable]) -> None:
    """Define operators that a library will bring, with `stand_in(name)` for the kernel of each."""
    known = torch._C._dispatch_library("FRAGMENT", "octet", "")
    kernels = torch._C._dispatch_library("IMPL", "octet", "CompositeExplicitAutograd")
    for schema in schemas:
        name = known.define(schema.removeprefix("octet::"))
        kernels.impl(name, "CompositeExplicitAutograd", stand_in(name))
        _names.append(name)
    _declared[library] = [known, kernels]
    _tell()


def _stand_in(unit: str, load: Callable[[str], object], name: str) -> Callable:
    def kernel(*args: Any, **named: Any) -> Any:
        load(unit)
        return getattr(torch.ops.octet, name).default(*args, **named)

    return kernel


def _tell() -> None:
    """Tell libraries which schemas they need not define, in this process and no other."""
    if _names:
        os.environ[DECLARED] = f"{os.getpid()} {' '.join(_names)}"


os.register_at_fork(after_in_child=_tell)
