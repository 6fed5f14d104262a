"""The library of what few calls of a unit need (include/torch/rest.h), beside the unit's own.

The unit's library asks for it by an operator, which has a stand-in here until it is loaded. Both
must be made of the same inputs, since they share more than an interface.
"""

import _thread
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import BuildError
from ..machine.sources import is_rest, unit_of
from . import schemas

if TYPE_CHECKING:
    from ..cache.store import Store


def representative(library: str) -> str:
    """Return the name of an operator that a library brings."""
    return f"rest_of_{unit_of(library)}" if is_rest(library) else library


def declare(library: str, load: Callable[[str], object]) -> None:
    """Let a library of this kind be loaded by the first call that needs it, if it is not yet."""
    name = representative(library)
    if not is_rest(library) or torch._C._dispatch_has_kernel(f"octet::{name}"):
        return

    def kernel() -> str:
        try:
            load(library)
        except KeyboardInterrupt:
            _thread.interrupt_main()  # torch would make another error of it
            return "interrupted"
        except Exception as error:
            return str(error)
        return getattr(torch.ops.octet, name).default()

    schemas.register(library, [f"octet::{name}() -> str"], lambda _: kernel)


def key_in_use(library: str, store: "Store", loaded: dict[str, str], keys: dict[str, str]) -> str:
    """Return the key of a library that is made of what its unit's is.

    `loaded` and `keys` have the keys of libraries that are loaded, and that will be.
    """
    from ..cache import key

    unit = unit_of(library)
    own = loaded.get(unit) or keys[unit]
    if library == unit:
        return own
    recorded = store.manifest(unit, own)
    return key.key(recorded["inputs"] | {"unit": library}) if recorded else keys[library]


def settle(library: str, store: "Store", loaded: dict[str, str], keys: dict[str, str]) -> None:
    """Put the key that a library of this kind is to be loaded by into `keys`.

    Raises: BuildError where what fits the unit's own is no longer to be had.
    """
    wanted = key_in_use(library, store, loaded, keys)
    if not store.has(library, wanted) and wanted != keys[library]:
        raise BuildError(
            f"{library}: its sources have changed since the rest of the operator was loaded, "
            "before it was built of what they were; loader.reload() takes them in",
            library,
        )
    keys[library] = wanted
