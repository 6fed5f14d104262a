"""What an operator does with DTensors: which of its sizes may be cut over ranks, by their names.

A rule is an operator's shapes, as "(N, 8, F), (N, 3) -> (N, F)": arguments and results in their
order. Cut along a size that has a name, and that all results have, each rank computes its part of
the results from its parts of the arguments, and needs all of those without the size. So the
gradients to these are partial sums, of which DTensor makes the whole when somebody needs it.
`_` is a size that may not be cut, as is a number; `...` stands for any sizes, each of which may be.
Where DTensors come in other placements, DTensor brings them into the cheapest that is served; at
the least each rank computes everything.

DTensors exist in few processes, and their import takes longer than torch's own operators do. So
rules are given to torch when `torch.distributed.tensor` has been imported, or at once where it was.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

import torch

TENSORS = "torch.distributed.tensor"

Names = tuple[str, ...]  # of a tensor's sizes
# Of the arguments, None for one that is no tensor; of the results, None where nothing is computed.
Cut = tuple[Sequence[Names | None], Sequence[Names | None]]
Find = Callable[..., Cut]  # the same by an operator's arguments


class Shapes:
    """The shapes of an operator's arguments and results; several where they differ by rank.

    Raises: ValueError for what is not written as such.
    """

    def __init__(self, text: str | Sequence[str]):
        texts = (text,) if isinstance(text, str) else tuple(text)
        self._forms = [tuple(map(_patterns, _sides(form))) for form in texts]
        self.inputs, self.outputs = map(len, self._forms[0])

    def named(
        self, inputs: Sequence[Any], outputs: Sequence[Any] = ()
    ) -> tuple[list[Names], list[Names]]:
        """Return the names for tensors of these ranks; without names where nothing fits.

        A name that not all results have stands for a sum over it, which nobody may take apart.
        """
        tensors = [*inputs, *(outputs or [None] * self.outputs)]
        ranks = [None if x is None else len(x.shape) for x in tensors]
        names: list[Names] = [()] * len(tensors)
        for form in self._forms:
            count = _any_rank(patterns := [*form[0], *form[1]], ranks)
            if count is not None:
                names = [_expanded(pattern, count) for pattern in patterns]
                break
        results = names[self.inputs :]
        free = {name for name in results[0] if all(name in x for x in results)}
        free -= _unequal(names, tensors)
        names = [tuple(n if n in free else "_" for n in pattern) for pattern in names]
        return names[: self.inputs], names[self.inputs :]


def _unequal(names: Sequence[Names], tensors: Sequence[Any]) -> set[str]:
    """Return the names of sizes that differ, as of a tensor that an operator expands."""
    first: dict[str, int] = {}
    found = set()
    for of, x in zip(names, tensors, strict=True):
        for name, size in zip(of, () if x is None else x.shape, strict=False):
            if first.setdefault(name, size) != size:
                found.add(name)
    return found


def _sides(text: str) -> tuple[str, str]:
    inputs, arrow, outputs = text.partition("->")
    if not arrow:
        raise ValueError(f'sharding: expected shapes as "(N, F), (N) -> (N, F)", got {text!r}')
    return inputs, outputs


def _patterns(text: str) -> list[Names]:
    """Of "(N, 8, F), (N, 3)", the parts of each: a number cannot be cut."""
    found = []
    for part in text.replace(" ", "").rstrip(")").split("),"):
        names = tuple(filter(None, part.removeprefix("(").split(",")))
        bad = [n for n in names if not (n.isidentifier() or n.isdigit() or n == "...")]
        bad += [n for n in names if names.count(n) > 1 and n != "_" and not n.isdigit()]
        if not part.startswith("(") or bad:
            raise ValueError(f'sharding: expected shapes as "(N, F), (N)", got {text.strip()!r}')
        found.append(tuple("_" if n.isdigit() else n for n in names))
    return found


def _any_rank(patterns: Sequence[Names], ranks: Sequence[int | None]) -> int | None:
    """The number of sizes that `...` stands for; None where the ranks do not fit the patterns."""
    free = 0
    for pattern, rank in zip(patterns, ranks, strict=True):
        if rank is None:
            continue
        more = rank - len(pattern)
        if "..." in pattern:
            free = more + 1
            more = min(free, 0)
        if more:
            return None
    return free


def _expanded(pattern: Names, count: int) -> Names:
    """With names of their own, by their places, for the sizes of `...`."""
    if "..." not in pattern:
        return pattern
    at = pattern.index("...")
    return (*pattern[:at], *(f"...{i}" for i in range(count)), *pattern[at + 1 :])


def forward(shapes: Shapes, args: Sequence[Any]) -> Cut:
    """Return the names of an operator's arguments, tensors first, and of its results."""
    tensors = args[: shapes.inputs]
    inputs, outputs = shapes.named(tensors)
    return [*_present(inputs, tensors), *[None] * (len(args) - len(tensors))], outputs


def backward(
    shapes: Shapes, args: Sequence[Any], need: Sequence[bool], arriving: Sequence[int] = ()
) -> Cut:
    """Return the names of a backward's arguments and of its gradients.

    `args`: a tensor for each of `arriving`, the numbers of the operator's tensors, one for each of
    its results, its tensors, options. `need`: of the gradients, which are computed.
    """
    first = len(arriving) + shapes.outputs
    inputs, outputs = shapes.named(args[first : first + shapes.inputs], args[len(arriving) : first])
    given = [*(inputs[i] for i in arriving), *outputs, *inputs]
    gradients = [*(outputs if arriving else ()), *inputs]
    rest = [None] * (len(args) - len(given))
    found = [x if wanted else None for x, wanted in zip(gradients, need, strict=False)]
    return [*_present(given, args[: len(given)]), *rest], found


def _present(names: Sequence[Names], tensors: Sequence[Any]) -> list[Names | None]:
    return [None if x is None else n for n, x in zip(names, tensors, strict=True)]


def replicated(args: Sequence[Any], results: int) -> Cut:
    """Return what serves every operator: whole tensors."""
    return [() if hasattr(x, "shape") else None for x in args], [()] * results


def _acceptable(find: Find, *args: Any) -> list[tuple[list, list]]:
    """Return what `torch.distributed.tensor.experimental.register_sharding` asks for.

    The first is taken where several cost nothing.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    inputs, outputs = find(*args)
    free = {n for names in inputs for n in names or () if n != "_"}

    def placements(every: Sequence[Names | None], name: str, without: Any, nothing: Any) -> list:
        return [
            nothing if names is None else Shard(names.index(name)) if name in names else without
            for names in every
        ]

    return [
        (
            placements(outputs, name, Partial() if name else Replicate(), Replicate()),
            placements(inputs, name, Replicate(), None),
        )
        for name in ("", *sorted(free))
    ]


def in_halves(
    shapes: Shapes, function: Callable, tensors: Sequence[Any]
) -> Iterator[tuple[str, tuple]]:
    """Yield each name, and the results put together from those of two halves along it."""
    inputs, outputs = shapes.named(tensors)
    for name in sorted({name for of in inputs for name in of} - {"_"}):
        halves = [
            x.tensor_split(2, of.index(name)) if name in of else (x, x)
            for x, of in zip(tensors, inputs, strict=True)
        ]
        results = [function(*half) for half in zip(*halves, strict=True)]
        pairs = zip(*[x if isinstance(x, tuple) else (x,) for x in results], strict=True)
        ends = zip(pairs, outputs, strict=True)
        yield name, tuple(torch.cat(pair, of.index(name)) for pair, of in ends)


_waiting: dict[str, tuple[Any, Find]] = {}


def offer(op: Any, find: Find) -> None:
    """Have DTensor run a registered operator by a rule, from when there are DTensors."""
    if hasattr(sys.modules.get(TENSORS), "DTensor"):
        _register(op, find)
        return
    _waiting[op.name()] = op, find  # in the place of one that was defined before
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _register(op: Any, find: Find) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(op)(functools.partial(_acceptable, find))
    # What is found for some arguments is kept, and register_sharding has it found by tensors and
    # integers alone: a convolution of mode "full" would be given the shape of one of mode "same".
    lists = any("[]" in str(argument.type) for argument in op._schema.arguments)
    known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    known[op] = RuntimeSchemaInfo(static_argnum=0, needs_pytree=lists)


class _Finder(MetaPathFinder, Loader):
    """Gives DTensor the rules when it is imported."""

    _loader: Any

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return DTensor's own spec, with this as what loads it."""
        if name != TENSORS:
            return None
        sys.meta_path.remove(self)
        found: Any = importlib.util.find_spec(name)
        if found is not None:
            self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: Any) -> Any:
        """Make the module as its own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run it, and register what has waited."""
        self._loader.exec_module(module)
        module.__spec__.loader = module.__loader__ = self._loader
        while _waiting:
            _register(*_waiting.popitem()[1])


_finder = _Finder()
