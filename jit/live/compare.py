"""An operator beside its reference: is each element within rounding of what it should be?

`X(*arguments)`, its gradients and their derivatives are compared with those of `X_reference` in
float64, for what `samples(device)` in `ops/X.py` yields and for two samples made of it: one with
other strides, one without elements. Beside each runs the fake kernel. By how much an element may
differ, rounding.py finds out; torch.testing has one tolerance for all elements of a tensor, which
hides what is wrong in the small ones. What reference and fake kernel say does not depend on the
library: it is found out while the compiler runs.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from .evaluate import Arriving, emptied, evaluate, of_fakes, spread, unlike
from .guard import Guard
from .rounding import EXACT, LEVELS, UNIT, Level, Rounding, apart, differs, same, share
from .trial import Verdict

_USUAL = 2  # runs of a rounded reference that most kernels need


class Wrong(Exception):
    """An operator does not do what its reference does; the text says how."""


class Comparison:
    """An operator beside its reference, with all samples on some devices.

    `alive` is called now and then, to say that it goes on.
    """

    def __init__(
        self,
        module: ModuleType,
        unit: str,
        devices: list[str],
        alive: Callable[[], None] = lambda: None,
    ):
        self.alive, self.unit = alive, unit
        self.operator = getattr(module, unit)
        self.reference: Callable = getattr(module, f"{unit}_reference", self.operator)
        self.difference: dict[str, float] = {}
        self.notes: list[str] = []
        self._module, self._devices = module, devices
        self._samples: dict[str, list[Sample]] = {}
        self._guards = {device: Guard(device == "cpu") for device in devices}

    def prepare(self, stop: Callable[[], bool]) -> None:
        """Find out what can be known before the library is there, until `stop()`."""
        for device in self._devices if self._missing() is None else ():
            with self._guards[device]:
                for sample in self._on(device):
                    if stop():
                        return
                    with contextlib.suppress(Exception):  # it comes again, with the library
                        sample.prepare()

    def verdict(self) -> Verdict:
        """Try the operator on all samples."""
        if missing := self._missing():
            return Verdict("untried", f"nothing to compare: its ops/*.py has no {missing}")
        try:
            for device in self._devices:
                with self._guards[device] as guard:
                    for sample in self._on(device):
                        sample.check()
                    if outside := guard.outside():
                        raise Wrong(f"on {device} it {outside}")
        except Wrong as error:
            return Verdict("wrong", str(error), self.difference, self.notes)
        return Verdict("right", "", self.difference, self.notes)

    def note(self, text: str) -> None:
        """Keep a text, once."""
        if text not in self.notes:
            self.notes.append(text)

    def _missing(self) -> str | None:
        if not hasattr(self._module, f"{self.unit}_reference"):
            return f"{self.unit}_reference"
        return None if hasattr(self._module, "samples") else "samples(device)"

    def _on(self, device: str) -> "list[Sample]":
        """Return the samples of a device, which is guarded, and those made of the smallest."""
        if device not in self._samples:
            guard = self._guards[device]
            samples = [
                Sample(self, guard, f"sample {i} on {device}", arguments)
                for i, arguments in enumerate(self._yielded(device))
            ]
            least = min(samples, key=lambda sample: sample.rank)
            other = tuple(spread(x) if isinstance(x, Tensor) else x for x in least.arguments)
            samples.append(Sample(self, guard, f"{least.name} with other strides", other, True))
            for arguments in emptied(least.arguments):
                sample = Sample(self, guard, f"{least.name} emptied", arguments, True, twice=False)
                if sample.has_reference():
                    samples.append(sample)
                    break
            self._samples[device] = samples
        return self._samples[device]

    def _yielded(self, device: str) -> Iterator[tuple]:
        """Yield what `samples(device)` does, if that is what the operator takes."""
        call, count = f"samples({device!r}) of ops/{self.unit}.py", 0
        for i, arguments in enumerate(self._module.samples(device)):
            if not isinstance(arguments, (tuple, list)):
                got = type(arguments).__name__
                raise Wrong(f"{call}: sample {i} must be a tuple of arguments, got a {got}")
            try:
                with contextlib.suppress(ValueError):  # torch 2.15's Function.apply has none
                    inspect.signature(self.operator).bind(*arguments)
            except TypeError as error:
                raise Wrong(f"{call}: sample {i} does not fit {self.unit}(): {error}") from None
            count += 1
            yield tuple(arguments)
        if not count:
            raise Wrong(f"{call} yields nothing, so there is nothing to try an edit on")


class Sample:
    """Arguments of an operator, and what its reference and its fake kernel say that they give.

    `optional`: the operator may refuse them, with an error.
    """

    def __init__(
        self,
        of: Comparison,
        guard: Guard,
        name: str,
        arguments: tuple,
        optional: bool = False,
        twice: bool = True,
    ):
        self.name, self.arguments = name, arguments
        self._of, self._guard, self._optional = of, guard, optional
        self._arriving = Arriving()
        self._known_for: tuple | None = None
        self._tensors = [x for x in arguments if isinstance(x, Tensor)]
        dtypes = [x.dtype for x in self._tensors if x.is_floating_point()]
        # The coarsest decides in what its operator computes; integers are rounded from float32.
        self._narrowest = max(dtypes, key=lambda t: torch.finfo(t).eps, default=torch.float32)
        self._twice = twice and self._narrowest.itemsize >= 4
        # The smallest is made others of, of those that are compared most closely.
        self.rank = not self._twice, sum(x.numel() for x in self._tensors)

    def has_reference(self) -> bool:
        """Return True if the reference takes these arguments."""
        with self._guard.off():
            try:
                self._of.reference(*self.arguments)
            except Exception:  # whatever it does with a shape that it does not take
                return False
        return True

    def prepare(self) -> None:
        """Find out what can be known before there is a library."""
        self._of.alive()
        self._ask_fakes(self._twice)
        if isinstance(self._fakes, dict):
            self._ask_reference()
            for _ in range(_USUAL):
                self._of.alive()
                self._widen()

    def check(self) -> None:
        """Compare results, derivatives and fakes; Wrong where one differs."""
        try:
            self._check()
        except Wrong:
            raise
        except Exception as error:
            if not self._optional:
                raise
            self._of.note(f"{self.name} was refused by it: {_first_line(error)}")

    def _check(self) -> None:
        ours = self._run()
        if not self._knows():
            self._ask_reference()
            asked = {**self._arriving.asked}
            self._ask_fakes(False)
            self._arriving.asked = asked
        self._judge(ours)
        text = self._fakes if isinstance(self._fakes, str) else unlike(self._fakes or {}, ours)
        if text:
            raise Wrong(f"{self.name}: {text}")

    def _knows(self) -> bool:
        """Return True if what is known is what reference and fakes would say now."""
        if self._known_for != (self._arriving.asked, self._twice):
            return False
        with self._guard.off():
            pairs = zip(self._tensors, self._seen, strict=True)
            return all(bool(same(x, seen).all()) for x, seen in pairs)

    def _ask_fakes(self, twice: bool) -> None:
        """Have the fake kernel say what it gives; `twice` notes what second derivatives ask for."""
        of, arriving = self._of, self._arriving
        arriving.asked = {}
        found = of_fakes(of.operator, of.unit, self.arguments, arriving, twice)
        if isinstance(found, dict):
            found = {n: x for n, x in found.items() if not n.startswith("the second")}
        self._fakes = found

    def _run(self) -> dict:
        """Return what the operator gives; twice differentiated where that can be."""
        self._of.alive()
        if self._twice:
            self._arriving.asked = {}
            try:
                found = self._evaluate(True)
            except (RuntimeError, NotImplementedError) as error:
                self._twice, text = False, _first_line(error)
            else:
                seconds = [x for name, x in found.items() if name.startswith("the second")]
                if not seconds or any(x is not None for x in seconds):
                    return found
                self._twice, text = False, "its gradients have none"
                found = {n: x for n, x in found.items() if not n.startswith("the second")}
            self._of.note(f"second derivatives were not compared: {text}")
        self._arriving.asked = {}
        return self._evaluate(False)

    def _evaluate(self, twice: bool) -> dict:
        return evaluate(self._of.operator, self.arguments, self._arriving.make, twice)

    def _ask_reference(self) -> None:
        """Run the reference on the arguments as they are now."""
        self._arriving.made()
        with self._guard.off():
            self._seen = [x.clone() for x in self._tensors]
            self._expected = self._by_reference(EXACT)
            self._moved: dict[str, Tensor] = {}
        self._levels, self._runs = iter(LEVELS), 0
        self._known_for = {**self._arriving.asked}, self._twice

    def _by_reference(self, level: Level) -> dict:
        """Return what the reference gives in float64, rounded as `level` says."""
        mode, arriving = Rounding(level), self._arriving
        arguments = tuple(
            mode.off(x) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in self.arguments
        )
        with mode:
            arrives = arriving.blurred if level.units else arriving.exact
            return evaluate(self._of.reference, arguments, arrives, self._twice)

    def _widen(self) -> bool:
        """Run the reference rounded once more; False where that was done in all ways."""
        level = next(self._levels, None)
        if level is None:
            return False
        self._runs += 1
        share = torch.finfo(torch.float64).eps / 2 / UNIT if self._narrowest.itemsize == 8 else 1
        with self._guard.off():
            for name, x in self._by_reference(level).items():
                exact = self._expected[name]
                if isinstance(x, Tensor) and isinstance(exact, Tensor):
                    moved = apart(x.double(), exact.double())
                    moved = moved * share if x.is_floating_point() else moved
                    known = self._moved.get(name)
                    self._moved[name] = moved if known is None else torch.maximum(known, moved)
        return True

    def _judge(self, ours: dict) -> None:
        """Raise Wrong, with a text that says what and where, if a result is not as it should be."""
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
                    raise Wrong(f"{self.name}: {result} is {which}")
                continue
            if got.shape != expected.shape:
                shapes = f"{tuple(got.shape)}, expected {tuple(expected.shape)}"
                raise Wrong(f"{self.name}: {result} has shape {shapes}")
            with self._guard.off():
                while found := differs(got, expected, self._moved.get(result)):
                    self._of.alive()
                    text, hopeless = found
                    if (hopeless and self._runs >= 3) or not self._widen():
                        raise Wrong(f"{self.name}: {result} {text}")
                worst = max(worst, share(got, expected))
        dtype = str(self._narrowest).removeprefix("torch.")
        self._of.difference[dtype] = max(self._of.difference.get(dtype, 0.0), worst)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
