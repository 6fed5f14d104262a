"""One candidate judged: what is asked of two confined processes, and what is made of the answers.

This process runs neither's code. Seeds are made once the candidate has been loaded; it learns
arguments when it is called with them, and of the reference's results nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cases, clock, compare, exhibits, watched
from .asked import MOST, Asked, Lost, Misused, Options, Turn
from .cases import Case
from .jail import Ended, Jail
from .verdict import BUSY, Ledger, Refused

_WAKING = 60.0  # seconds that a GPU may take to be there
_CLASSES = {"candidate": ["ModelNew"], "reference": ["Model"]}


class Expected(NamedTuple):
    """What the reference makes of a case."""

    tree: Any
    plain: list[Tensor]  # in its own dtype
    exact: list[Tensor]
    allowed: list[Tensor]
    after: list[Tensor]  # its arguments after the call
    aliases: list
    rule: str


class Referee:
    """Judges one candidate against one reference."""

    def __init__(
        self,
        candidate: Jail,
        reference: Jail,
        compiled: Jail | None,
        options: Options,
        turn: Turn,
    ):
        self._turn = turn
        on_gpu = turn if options.device == "cuda" else None
        self.candidate = Asked(candidate, "candidate", on_gpu)
        self.reference = Asked(reference, "reference", on_gpu)
        others = self.reference.crowded
        self.compiled = Asked(compiled, "reference", crowded=others) if compiled else None
        self._options = options
        self._ledger = Ledger(options.general)
        self._guarded, self._case = False, ""
        self._allowed: list[float] = []  # by which results as given may differ, in the mean
        self.data, self._init = dict[str, Any](), dict[str, Any]()
        self._given: list[list] = []

    def judge(self, candidate: list, reference: list, text: str | None) -> dict:
        """Return all that was found out, as plain data. Raises: Misused."""
        begun = time.perf_counter()
        self._source = candidate, text
        try:
            self._wake()
            self._load(candidate, reference, text)
            self._values()
            if self._options.general:
                self._others()
            if self._options.timed:
                self._times()
            if not self._options.general:
                self._others()
        except Refused as refused:
            self._ledger.failed(refused.check, str(refused))
            self.data |= refused.data
        except Ended as ended:
            self._ended(ended)
        self._seconds = time.perf_counter() - begun
        return self._summary(self._seconds)

    def sanitize(self, jail: Jail) -> dict:
        """Run an accepted candidate once more, under compute-sanitizer; all that was found out."""
        begun = time.perf_counter()
        again = watched.Again(*self._source, self._init, self._init_tensors)
        try:
            turn = self._turn if self._options.device == "cuda" else None
            found = watched.findings(jail, again, self.drawn("as given"), turn)
        except watched.Absent as absent:
            self._ledger.skipped("sanitizer", f"it does not work here: {absent}")
            found = ""
        except Refused as refused:
            found = f"{refused.check}: {refused}\n{watched.report(jail)}".strip()
        except Ended as ended:
            found = f"{ended}\n{watched.report(jail) or jail.output()[-400:]}"
        if found:
            self._ledger.failed("sanitizer", found)
        self._ledger.passed("sanitizer")
        return self._summary(self._seconds + time.perf_counter() - begun)

    def _ended(self, ended: Ended) -> None:
        where = f" ({self._case})" if self._case else ""
        if not self.reference.jail.alive:
            raise Misused(f"the reference: {ended}{where}") from None
        if self.compiled and not self.compiled.jail.alive:
            raise Misused(f"torch.compile of the reference: {ended}{where}") from None
        outside = ended.reason == "crashed" and self._guarded and "memory" in str(ended)
        self._ledger.failed("bounds" if outside else "runs", f"{ended}{where}")
        self.data["ended"] = ended.reason

    def _summary(self, seconds: float) -> dict:
        jail = self.candidate.jail
        return {
            **self._ledger.summary(),
            "seconds": seconds,
            "peak_memory": jail.used(),
            "isolation": {k: v for k, v in jail.in_force.items() if k != "exit"},
            "output": {"bytes": jail.printed, "text": jail.output()[:4000]},
            **self.data,
        }

    def _wake(self) -> None:
        """Have all be ready, on a GPU with a context of its own each; that is made meanwhile."""
        asked = [each for each in (self.reference, self.compiled, self.candidate) if each]
        for each in asked:
            each.jail.send({"do": "wake", "share": self._turn.share(each.role)})
        for each in asked:
            answer = each.jail.answer(max(_WAKING, each.jail.limits.seconds))
            each.check(answer, "wake")
            self._turn.memory = answer["memory"]

    def _load(self, candidate: list, reference: list, text: str | None) -> None:
        order = {"do": "load", "source": reference, "text": None, "classes": _CLASSES["reference"]}
        self.reference.jail.send(order)  # while the candidate builds
        begun = time.perf_counter()
        failure: Exception | None = None
        classes = _CLASSES["candidate"]
        try:
            self.candidate.ask("load", source=candidate, text=text, classes=classes)
        except (Refused, Ended, Misused) as error:
            failure = error
        self.data["load_seconds"] = time.perf_counter() - begun
        answer = self.reference.jail.answer()
        if "error" in answer:
            raise Misused(f"the reference cannot be loaded: {answer['error']}")
        if failure:
            raise failure
        self._init = {"tree": answer["init"]["tree"], "layout": answer["init"]["layout"]}
        self._init_tensors = exhibits.unpack(self._init["layout"], answer["files"][0], MOST)
        if self.compiled:
            again = self.compiled.ask("load", source=reference, text=None, classes=["Model"])
            for file in again["files"]:
                os.close(file)
        self._make(answer["files"][0])
        self._ledger.passed("loads")

    def _make(self, file: int) -> None:
        """Make both models, with the same secret seed."""
        seed = cases.secret()
        try:
            for witness in (self.reference, self.candidate):
                witness.ask("make", [file], init=self._init, seed=seed)
            if self.compiled:
                self.compiled.ask("make", [file], init=self._init, seed=seed, compiled=True)
        finally:
            os.close(file)

    def drawn(self, name: str, number: int = 0) -> Case:
        """Return arguments as the user gives them, drawn anew where a function does."""
        if self._options.given:
            if not self._given:
                self._given = torch.load(self._options.given, weights_only=True)
            arguments = self._given[number % len(self._given)]
            tensors: list[Tensor] = []
            case = Case(name, exhibits.flatten(list(arguments), tensors), tensors)
            return case if number < len(self._given) else cases.shuffled(case, name)
        answer = self.reference.ask("inputs", name=self._options.inputs, seed=cases.secret())
        tree = answer["arguments"]["tree"]
        return Case(name, tree, self.reference.tensors(answer, "arguments"))

    def _all_cases(self) -> Iterator[tuple[str, Case]]:
        """Yield the cases, each with the check that is for it."""
        first, second = self.drawn("as given"), self.drawn("as given, drawn again", 1)
        if not first.tensors:
            raise Misused("the inputs hold no tensor")
        yield "values", first
        yield "caching", second
        if changed := cases.half_changed(second, first):
            yield "caching", changed
        for case in cases.distributions(first):
            yield "values", case
        if not self._options.given:
            yield "values", self.drawn("as given, drawn a third time", 2)
        yield "determinism", first

    def _values(self) -> None:
        self._results: list[list[Tensor]] = []
        lasting = True  # a result of the reference's own is no argument
        for check, case in self._all_cases():
            self._case = case.name
            required = case.name.startswith("as given")
            expected = self._expected(case, required)
            if expected is None:
                continue
            self._results.append(self._called(case, expected, check))
            if required:
                self._allowed = [float(x.mean()) if x.numel() else 0.0 for x in expected.allowed]
            lasting = lasting and not expected.aliases
            first, last = self._results[0], self._results[-1]
            if check == "determinism" and not compare.same_bits(first, last):
                self._ledger.failed(check, "the same arguments gave other bits the second time")
            self._ledger.passed(check)
        self._case = ""
        if lasting:
            self._still_there(first)
        if self._options.device == "cuda":
            self._ledger.passed("streams")
        ran = "runs", "results", "written", "bounds", "inputs_unchanged", "aliasing", "tampering"
        self._ledger.passed(*ran)
        self.candidate.jail.used()  # while it is there for sure

    def _others(self) -> None:
        """Try other shapes and dtypes, of which a candidate need not know, and may crash."""
        given = self.drawn("as given")
        others = [("other_shapes", case) for case in cases.other_shapes(given)]
        others += [("other_dtypes", case) for case in cases.other_dtypes(given)]
        for check, case in others:
            self._case = case.name
            expected = self._expected(case, False)
            if expected is None:
                continue
            try:
                self._called(case, expected, check)
                self._ledger.passed(check)
            except Refused as refused:
                self._ledger.failed(check, f"{case.name}: {str(refused).splitlines()[-1]}")
            except Ended as ended:
                if not self.reference.jail.alive:
                    raise
                self._ledger.failed(check, f"{case.name}: {ended}")
                break
        self._case = ""

    def _still_there(self, first: list[Tensor]) -> None:
        """Look at the first result again, after later calls with other arguments in their place."""
        _, now = self.candidate.results("again", first, number=0)
        if not compare.same_bits(now, first):
            raise Refused("aliasing", "a result changed after it was returned, by a later call")

    def _expected(self, case: Case, required: bool, closely: bool = False) -> Expected | None:
        """Ask the reference; None where it has nothing to compare with."""
        if case.name in self._options.without:
            return None
        reference = self.reference
        try:
            reference.give(case)
            answer = reference.ask("call", guarded=False, keep=False, seed=1)
            plain = reference.tensors(answer, "results")
            after = reference.now()
            reference.give(case)
            own = self._options.precision
            found = reference.ask("exact", seed=1, precision=own, closely=closely)
            pairs = reference.tensors(found, "results")
        except Lost as lost:
            lost.case = "" if required else case.name
            raise
        except Misused:
            if required:
                raise
            return None
        exact, allowed = pairs[::2], pairs[1::2]
        finite = all(bool(x.isfinite().all()) for x in exact if x.is_floating_point())
        whole = any(not x.is_floating_point() and not x.is_complex() for x in exact)
        if not required and (not finite or (whole and case.name == cases.SPARSE)):
            return None  # which of equal numbers comes first is nobody's mistake
        self.data.setdefault("tolerance", found["rule"])
        tree = answer["results"]["tree"]
        return Expected(tree, plain, exact, allowed, after, answer["aliases"], found["rule"])

    def _called(self, case: Case, expected: Expected, check: str) -> list[Tensor]:
        """Call the candidate, and look at all that can be seen. Raises: Refused, Ended."""
        self.candidate.give(case)
        self._guarded = True
        keep = check in ("values", "caching")
        words = {"guarded": True, "keep": keep, "seed": 1}
        answer, got = self.candidate.results("call", expected.plain, **words)
        if other := compare.unlike(answer, got, expected.tree, expected.plain):
            raise Refused("results", other)
        if wrong := {*answer["devices"]} - {self._options.device}:
            raise Refused("results", f"a result is on {wrong.pop()}, not {self._options.device}")
        if answer["late"]:
            raise Refused("streams", "a result changed once all streams were waited for")
        if outside := "wrote beside an argument" if self.candidate.spoilt() else answer["outside"]:
            raise Refused("bounds", f"it {outside[:300]}")
        if patched := answer["patched"]:
            raise Refused("tampering", f"it replaced {', '.join(patched[:5])}"[:500])
        if not compare.same_bits(self.candidate.now(), expected.after):
            raise Refused("inputs_unchanged", "an argument is not what the reference leaves of it")
        self._right(case, got, expected, check)
        shared = {result for result, *_ in expected.aliases}  # by the reference itself
        if named := [a for a in answer["aliases"] if a[0] not in shared]:
            number, what, other = named[0]
            whose = f"argument {other}" if what == "input" else f"the result of call {other + 1}"
            raise Refused("aliasing", f"result {number} lies in the memory of {whose}")
        return got

    def _right(self, case: Case, got: list[Tensor], expected: Expected, check: str) -> None:
        """Each element within rounding."""
        if any(map(compare.differs, got, expected.exact, expected.allowed)):
            expected = self._expected(case, True, closely=True) or expected
        due = zip(got, expected.exact, expected.allowed, strict=True)
        for i, (x, exact, allowed) in enumerate(due):
            wrong = compare.differs(x, exact, allowed)
            if not wrong:
                if check not in ("other_shapes", "other_dtypes"):
                    share = self.data.get("share_of_tolerance", 0.0)
                    self.data["share_of_tolerance"] = max(share, compare.share(x, exact, allowed))
                continue
            if check not in ("other_shapes", "other_dtypes"):
                self.data["worst"] = {"case": case.name, "result": i, **wrong}
            text = (
                f"{case.name}: result {i} is wrong at {wrong['wrong']} of {wrong['of']} places, "
                f"most at {tuple(wrong['index'])}: {wrong['got']}, expected {wrong['expected']}, "
                f"within {wrong['allowed']:.2g}"
            )
            if wrong["unwritten"] == wrong["wrong"]:
                raise Refused("written", f"{text}; these were never written")
            is_old = compare.is_old(x, exact, allowed, [given[i] for given in self._results])
            own = check != "determinism" and (check != "caching" or is_old)
            raise Refused(check if own else "values", text)

    def _times(self) -> None:
        self._guarded, self._case = False, "the calls that are timed"
        cpu = self._options.device == "cpu"  # whose cores are to be idle
        if self.compiled:  # which compiles, and lets others have the GPU meanwhile
            try:
                self.compiled.give(self.drawn("timed", 2))
                self.compiled.ask("call", guarded=False, keep=cpu, seed=1)
                self.compiled.turn = self.reference.turn
            except (Ended, Misused):  # which is not the candidate's fault
                self.compiled = None
        sides = self.candidate, self.reference, self.compiled
        contest = clock.Contest(*sides, self.drawn, self._options, self._allowed)
        with self._turn if cpu else contextlib.nullcontext():  # a GPU's batches take turns
            taken = self.data["time"] = clock.race(contest)
        self._ledger.passed("timed_values")
        if not (cpu or taken["resolved"]):
            self._ledger.warned("streams", BUSY)
