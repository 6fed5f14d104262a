"""Building one unit again after an edit: only what changed, and nothing but compiler and linker.

The engine's workshop has the objects of the build before, so an edit of a kernel costs the
compilation of that file and a link, of the library that takes the place of the one in use
(swap.cpp), with all that the unit has. Those for the store are linked from the same objects when
that is in use; of a build for any x86-64 the loops of other levels are compiled then.
"""

import os
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..build.engine import work_folder
from ..build.workshop import Compile, CompileError, Object, Workshop, locked_workshop
from ..cache.key import key
from ..cache.store import Store, cannot_write, make_private
from ..errors import BuildError
from ..machine.sources import HOME, Sources
from ..operators.recipe import OperatorRecipe
from ..operators.session import Session

SWAP = Path(__file__).with_name("swap.cpp")

_PTXAS = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)' for '\w+'\n"
    r"(?:.*Function properties for.*\n)?"
    r"(?:.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n)?"
    r".*Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?"
)


@dataclass(frozen=True)
class Resources:
    """What one CUDA kernel takes, by ptxas."""

    registers: int
    spills: int  # bytes stored and loaded
    shared: int  # bytes of static shared memory


@dataclass
class Rebuilt:
    """A unit that was built again; its lock is held until it is kept or discarded."""

    inputs: dict  # the manifest of the sources that it is made of; `key` is its digest
    key: str
    swap: Path  # the library that can take the place of the one in use
    seconds: float
    compiled: dict[str, float]  # seconds that each file took which was compiled
    resources: dict[str, Resources]  # of the CUDA kernels that were compiled, by mangled name
    _recipe: OperatorRecipe
    _apart: list[OperatorRecipe]  # of the unit's libraries in the store
    _objects: list[Object]  # for the level of this machine
    _shop: Workshop
    _close: ExitStack

    def keep(self, store: Store, **facts: Any) -> None:
        """Link it for the store, and put it there, for the next process.

        Not if its sources have changed before all levels were compiled: another edit is to follow.
        Raises: BuildError, OSError.
        """
        with self._close:
            try:
                objects = self._objects
                if self._recipe.levels != (1,):
                    objects = self._recipe.objects(self._shop, self._recipe.levels)
                    if self._recipe.inputs() != self.inputs:
                        return
                for recipe in self._apart:
                    libraries = recipe.links(self._shop, objects)
                    try:
                        store.publish(libraries, self.inputs | {"unit": recipe.unit}, **facts)
                    finally:
                        for library in libraries.values():
                            library.unlink(missing_ok=True)
            except CompileError as error:
                text = f"the library for the store could not be made:\n{error}"
                raise BuildError(text) from None

    def discard(self) -> None:
        """Remove the library, and let others build the unit again."""
        self._close.close()


def rebuild(session: Session, name: str) -> Rebuilt:
    """Compile what changed of a unit and link it, in its work folder.

    Raises: BuildError.
    """
    begun = time.perf_counter()
    unit, tools, store = session.units[name], session.toolchain, session.store
    recipe = OperatorRecipe(unit, tools, store)
    apart = [OperatorRecipe(unit, tools, store, library) for library in unit.libraries]
    recipe.check_machine()
    for _ in range(5):
        inputs = recipe.inputs()
        folder = work_folder(recipe, store, inputs)
        with ExitStack() as stack:
            try:
                make_private(folder.parent)
                shop = stack.enter_context(locked_workshop(folder))
                level = recipe.level_here
                objects = recipe.objects(shop, [level])
                swap = recipe.link(shop, objects, level, str(swap_object(session)))
                stack.callback(swap.unlink, missing_ok=True)
            except CompileError as error:
                raise recipe.explain(str(error), shop) from None
            except OSError as error:
                raise cannot_write(session.caches[-1], error) from None
            if recipe.inputs() != inputs:
                continue
            return Rebuilt(
                inputs=inputs,
                key=key(inputs),
                swap=swap,
                seconds=time.perf_counter() - begun,
                compiled={o.source: o.seconds for o in objects if o.seconds is not None},
                resources=_resources("\n".join(o.said for o in objects)),
                _recipe=recipe,
                _apart=apart,
                _objects=objects,
                _shop=shop,
                _close=stack.pop_all(),
            )
    text = f"{name}: its sources kept changing while they were compiled"
    raise BuildError(text, name, kind="changed")


def swap_object(session: Session) -> Path:
    """Return swap.cpp compiled. Raises: BuildError."""
    return own_part(session, SWAP)


def own_part(session: Session, source: Path, link: bool = False) -> Path:
    """Return a C++ file of this room compiled, or linked to a library, in a folder of its own.

    Raises: BuildError.
    """
    compiler = session.toolchain.command("CXX")
    command = (*compiler, "-O1", "-fPIC", "-std=c++17", "-fvisibility=hidden")

    def made_of() -> dict[str, str]:
        path = os.path.relpath(source, HOME)
        return {**Sources(HOME).closure(path), "compiler": session.toolchain.cxx or ""}

    work = session.caches[-1] / "work"
    make_private(work)
    try:
        with locked_workshop(work / source.stem) as shop:
            (made,) = shop.compile([Compile(source.name, command, str(source), made_of)])
            library = made.path.with_suffix(".so")
            if link and not library.exists():
                words = [*compiler, "-shared", made.path.name, "-ldl"]
                os.replace(shop.link(words, library.name), library)
            return library if link else made.path
    except CompileError as error:
        raise BuildError(f"{source.name} could not be compiled:\n{error}") from None


def _resources(output: str) -> dict[str, Resources]:
    """What ptxas said of each kernel."""
    found = {}
    for entry in _PTXAS.finditer(output):
        numbers = [int(entry[group] or 0) for group in ("registers", "stores", "loads", "shared")]
        found[entry["kernel"]] = Resources(numbers[0], numbers[1] + numbers[2], numbers[3])
    return found
