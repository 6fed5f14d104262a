"""An operator beside its reference: is each element within rounding of what it should be?

What is compared: `X(*arguments)`, its gradients and their derivatives with those of
`X_reference(*arguments)` in float64, for the arguments that `samples(device)` in `ops/X.py` yields,
and for two that are made of these: one with other strides, one without elements. Beside each runs
the fake kernel. By how much an element may differ, rounding.py finds out; torch.testing has one
tolerance for all elements of a tensor, which hides what is wrong in the small ones.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .evaluate import Arriving, evaluate
from .guard import Guard
from .rounding import EXACT, LEVELS, UNIT, Level, Rounding
from .trial import Verdict
from .variants import differs_from_fake, emptied, spread

_ROUNDINGS = 4  # of a result in its own dtype: what 16-bit derivatives take in several steps
_SLACK = 4  # times what rounding did to the reference: other formulas, other orders of sums


class Wrong(Exception):
    """An operator does not do what its reference does; the text says how."""


@dataclass
class Findings:
    """What was seen on the way.

    Attributes:
        alive: called now and then, to say that the trial goes on.
        difference: the largest by dtype, as a share of the largest value.
        notes: what could not be compared, and why.
    """

    alive: Callable[[], None]
    difference: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a text, once."""
        if text not in self.notes:
            self.notes.append(text)


def compare(
    module, unit: str, devices: list[str], alive: Callable[[], None] = lambda: None
) -> Verdict:
    """Return how an operator does beside its reference on each device; `alive()` while it runs."""
    operator = getattr(module, unit)
    reference = getattr(module, f"{unit}_reference", None)
    if not hasattr(module, "samples") or reference is None:
        missing = "samples(device)" if reference else f"{unit}_reference"
        return Verdict("untried", f"nothing to compare: its ops/*.py has no {missing}")
    findings = Findings(alive)
    try:
        for device in devices:
            with Guard(device == "cpu") as guard:
                _on(device, module, unit, (operator, reference), guard, findings)
                if outside := guard.outside():
                    raise Wrong(f"on {device} it {outside}")
    except Wrong as error:
        return Verdict("wrong", str(error), findings.difference, findings.notes)
    return Verdict("right", "", findings.difference, findings.notes)


def _on(device: str, module, unit: str, functions: tuple, guard: Guard, findings: Findings) -> None:
    """Try all samples of a device; Wrong where one differs."""
    operator, reference = functions
    smallest: Sample | None = None
    for i, arguments in enumerate(_samples(module, unit, operator, device)):
        sample = Sample(f"sample {i} on {device}", arguments, reference, guard)
        sample.check(operator, unit, findings)
        if smallest is None or sample.rank < smallest.rank:
            smallest = sample
    if smallest:
        smallest.check_spread(operator, unit, findings)
        smallest.check_emptied(operator, unit, findings)


def _samples(module, unit: str, operator: Callable, device: str) -> Iterator[tuple]:
    """What `samples(device)` yields, if that is what the operator takes."""
    call, count = f"samples({device!r}) of ops/{unit}.py", 0
    for i, arguments in enumerate(module.samples(device)):
        if not isinstance(arguments, (tuple, list)):
            got = type(arguments).__name__
            raise Wrong(f"{call}: sample {i} must be a tuple of arguments, got a {got}")
        try:
            inspect.signature(operator).bind(*arguments)
        except TypeError as error:
            raise Wrong(f"{call}: sample {i} does not fit {unit}(): {error}") from None
        count += 1
        yield tuple(arguments)
    if not count:
        raise Wrong(f"{call} yields nothing, so there is nothing to try an edit on")


class Sample:
    """Arguments of an operator, and what the reference says that they give."""

    def __init__(self, name: str, arguments: tuple, reference: Callable, guard: Guard):
        self.name, self.arguments = name, arguments
        self._reference, self._guard = reference, guard
        self._arriving = Arriving()
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        dtypes = [x.dtype for x in tensors if x.is_floating_point()]
        # The coarsest decides in what its operator computes; integers are rounded from float32.
        self.narrowest = max(dtypes, key=lambda t: torch.finfo(t).eps, default=torch.float32)
        self._twice = self.narrowest.itemsize >= 4
        # The smallest is made others of, of those that are compared most closely.
        self.rank = not self._twice, sum(x.numel() for x in tensors)

    def check(self, operator: Callable, unit: str, findings: Findings) -> None:
        """Compare results, derivatives and fakes; Wrong where one differs."""
        ours = self._run(operator, self.arguments, findings)
        with self._guard.off():
            self._expected, self._moved = self._by_reference(EXACT), {}
        self._levels, self._runs = iter(LEVELS), 0
        self._judge(ours, self.name, findings)
        if text := differs_from_fake(operator, unit, self.arguments, self._arriving, ours):
            raise Wrong(f"{self.name}: {text}")

    def check_spread(self, operator: Callable, unit: str, findings: Findings) -> None:
        """The same numbers in tensors of other strides."""
        arguments = tuple(spread(x) if isinstance(x, Tensor) else x for x in self.arguments)
        name = f"{self.name} with other strides"
        try:
            ours = self._run(operator, arguments, findings)
        except Exception as error:  # it takes no others, and says so
            findings.note(f"{name} was refused by it: {_first_line(error)}")
            return
        self._judge(ours, name, findings)
        if text := differs_from_fake(operator, unit, arguments, self._arriving, ours):
            raise Wrong(f"{name}: {text}")

    def check_emptied(self, operator: Callable, unit: str, findings: Findings) -> None:
        """The same without elements, if the reference has a result for that."""
        for arguments in emptied(self.arguments):
            sample = Sample(f"{self.name} emptied", arguments, self._reference, self._guard)
            sample._twice = False
            with self._guard.off():
                try:
                    self._reference(*arguments)
                except Exception:  # whatever it does with a shape that it does not take
                    continue
            try:
                sample.check(operator, unit, findings)
            except Wrong:
                raise
            except Exception as error:
                findings.note(f"{sample.name} was refused by it: {_first_line(error)}")
            return

    def _run(self, operator: Callable, arguments: tuple, findings: Findings) -> dict:
        """What the operator gives; twice differentiated where that can be."""
        findings.alive()
        if self._twice:
            try:
                found = evaluate(operator, arguments, self._arriving, make=True, twice=True)
            except (RuntimeError, NotImplementedError) as error:
                self._twice, text = False, _first_line(error)
            else:
                seconds = [x for name, x in found.items() if name.startswith("the second")]
                if not seconds or any(x is not None for x in seconds):
                    return found
                self._twice, text = False, "its gradients have none"
                found = {n: x for n, x in found.items() if not n.startswith("the second")}
            findings.note(f"second derivatives were not compared: {text}")
        return evaluate(operator, arguments, self._arriving, make=True)

    def _by_reference(self, level: Level) -> dict:
        """What the reference gives in float64, rounded as `level` says."""
        mode = Rounding(level)
        arguments = tuple(
            mode.off(x) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.arguments
        )
        with mode:
            return evaluate(
                self._reference,
                arguments,
                self._arriving,
                twice=self._twice,
                blurred=level.units > 0,
            )

    def _widen(self) -> bool:
        """Run the reference rounded once more; False where that was done in all ways."""
        level = next(self._levels, None)
        if level is None:
            return False
        self._runs += 1
        share = torch.finfo(torch.float64).eps / 2 / UNIT if self.narrowest.itemsize == 8 else 1
        for name, x in self._by_reference(level).items():
            exact = self._expected[name]
            if isinstance(x, Tensor) and isinstance(exact, Tensor):
                moved = _apart(x.double(), exact.double())
                moved = moved * share if x.is_floating_point() else moved
                known = self._moved.get(name)
                self._moved[name] = moved if known is None else torch.maximum(known, moved)
        return True

    def _judge(self, ours: dict, name: str, findings: Findings) -> None:
        """Wrong, with a text that says what and where, if a result is not as it should be."""
        worst = 0.0
        for result, got_ in ours.items():
            got, expected = got_, self._expected.get(result)
            if result.startswith("the second derivative"):  # none is zero
                some = next((x for x in (got, expected) if x is not None), None)
                got, expected = (
                    torch.zeros_like(some) if x is None and some is not None else x
                    for x in (got, expected)
                )
            if not isinstance(got, Tensor) or not isinstance(expected, Tensor):
                if got is not expected and got != expected:
                    which = "missing" if got is None else "none of the reference's"
                    raise Wrong(f"{name}: {result} is {which}")
                continue
            if got.shape != expected.shape:
                shapes = f"{tuple(got.shape)}, expected {tuple(expected.shape)}"
                raise Wrong(f"{name}: {result} has shape {shapes}")
            with self._guard.off():
                while (found := _differs(got, expected, self._moved.get(result))).count:
                    findings.alive()
                    hopeless = self._runs >= 3 and found.hopeless
                    if hopeless or not self._widen():
                        raise Wrong(f"{name}: {result} {found.text}")
                worst = max(worst, _share(got, expected))
        dtype = str(self.narrowest).removeprefix("torch.")
        findings.difference[dtype] = max(findings.difference.get(dtype, 0.0), worst)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """How far two tensors are apart, element by element; 0 where both are the same or NaN."""
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, (a - b).abs()).nan_to_num(torch.inf, torch.inf)


def _allowed(got: Tensor, expected: Tensor, moved: Tensor | None) -> Tensor:
    """By how much each element may differ; `moved`: what rounding did to the reference's."""
    if not got.is_floating_point():
        return torch.zeros_like(expected) if moved is None else moved
    kind = torch.finfo(got.dtype)
    least = kind.tiny * (1 if got.dtype.itemsize > 2 else kind.eps)
    own = _ROUNDINGS * kind.eps * expected.nan_to_num(0, 0, 0).abs() + least
    return own if moved is None else own + _SLACK * moved


class Difference(NamedTuple):
    """At how many places a result is not as it should be; hopeless if by far and at many."""

    count: int
    hopeless: bool = False
    text: str = ""


def _differs(got: Tensor, expected: Tensor, moved: Tensor | None) -> Difference:
    """Compare a result with the reference's, which rounding has `moved`."""
    expected = expected.double().to(got.device)
    numbers = got.double()
    apart = torch.where(expected.to(got.dtype) == got, 0.0, _apart(numbers, expected))
    allowed = _allowed(got, expected, moved)
    wrong = (apart > allowed) | (numbers.isnan() & ~expected.isnan() & allowed.isfinite())
    count = int(wrong.sum())
    if not count:
        return Difference(0)
    at = torch.unravel_index(torch.where(wrong, apart, -1.0).argmax(), apart.shape)
    at = tuple(int(index) for index in at)
    text = (
        f"differs from the reference at {count} of {got.numel()} places, by most at {at}: "
        f"{float(numbers[at]):.9g}, expected {float(expected[at]):.9g}, which rounding changes by "
        f"no more than {float(allowed[at]):.1e}"
    )
    return Difference(count, int((apart > 16 * allowed).sum()) > 0.01 * got.numel(), text)


def _share(got: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value."""
    if not got.numel():
        return 0.0
    expected = expected.double().to(got.device)
    scale = max(1e-30, float(expected.nan_to_num(0, 0, 0).abs().max()))
    return min(float(_apart(got.double(), expected).max()) / scale, 1e30)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
