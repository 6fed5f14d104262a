"""What a referee asks of a confined process, and how it takes the answers: as data, looked at."""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from . import exhibits
from .cases import Case
from .exhibits import Layout, Mapped
from .jail import Jail
from .verdict import Refused

MOST = 1 << 35  # bytes of results
_ROOM = 1 << 20  # bytes, for results of other shapes than are due
_TEXT = 8000  # characters of an error
_RESULTS = {"tree": dict, "layout": list}
# And what is timed, for which it is alone.
_ON_THE_GPU = {"make", "call", "exact", "again", "hold", "fetch"}
_JUDGES = 8  # that may be at work at once in several processes
_COPIES = 24  # of its arguments that a judgement may have in a GPU's memory
_KEEPERS = 8  # of a judgement, that keep as much each
_ALIAS = [int, str, int]  # which result lies in the memory of which argument or result
_CALLED: dict[str, Any] = {
    "outside": str,
    "types": [str, ...],
    "aliases": [_ALIAS, ...],
    "patched": [str, ...],
}
_CALLED |= {"late": bool, "devices": [str, ...]}
# What an answer has to have, since it may come from a process that somebody else has taken over.
_ANSWERS: dict[str, dict[str, Any]] = {
    "call": {"results": _RESULTS, **_CALLED},
    "again": {"results": _RESULTS},
    "exact": {"results": _RESULTS, "rule": str},
    "inputs": {"arguments": _RESULTS},
    "timed": {"claimed_ms": [float, ...], "idle_ms": [float, ...], "prints": [[int, ...], ...]},
    "copying": {"ms": float},
    "wake": {"memory": int},
}
_nobody = contextlib.nullcontext()


class Misused(Exception):
    """The user's mistake: the candidate cannot be judged."""


class Lost(Misused):
    """The reference's GPU takes no more calls: what it was called with is nothing for it."""

    case = ""  # by which, if it may be left out


class Crowded(Exception):
    """A GPU's memory did not do for all who are judged at once."""


class Options(NamedTuple):
    """What is asked of a judgement."""

    inputs: str = "get_inputs"
    given: str = ""  # a file with lists of arguments, instead of a function that makes them
    precision: str = "own"
    timed: bool = True
    compiled: bool = False  # race against torch.compile of the reference too
    device: str = "cpu"
    sanitizer: str = ""  # the program that the candidate is run under once more
    general: bool = False  # other shapes, dtypes and determinism count
    without: tuple[str, ...] = ()  # cases that are nothing for the reference
    alone: bool = False  # on the GPU, from first to last


class Turn:
    """What those who judge at once share: the GPU and the clock, each alone or all beside others.

    Who waits to be alone comes before those who come later. It may be taken again.
    """

    def __init__(self, path: str, at_once: int = 1):
        """Open the files by which they wait for each other: they must not be inherited from one.

        `at_once`: how many there may be; judges in other processes are reckoned with.
        """
        how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._file, self._next = os.open(path, how), os.open(f"{path}.next", how)
        self._depth, self._at_once = 0, max(at_once, _JUDGES)
        self.memory = 0  # bytes of the GPU
        self.crowded = at_once > 1  # whether others are judged meanwhile

    def __enter__(self) -> "Turn":
        """Wait until nobody else has it."""
        self._take(fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        """Let others have it."""
        self._depth -= 1
        if not self._depth:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def share(self, role: str) -> float:
        """Return the part of a GPU's memory that one may take: beside others a candidate's is less.

        What needs more is judged again, alone.
        """
        return 1 / (2 * self._at_once) if self.crowded and role == "candidate" else 1.0

    def room(self) -> int:
        """Return how many bytes a process may keep on the GPU for calls that are timed."""
        return self.memory // (_KEEPERS * self._at_once)

    @contextlib.contextmanager
    def beside(self, size: int) -> Iterator[None]:
        """Work beside others, with arguments of `size` bytes; alone where memory is too small."""
        few = size * _COPIES * self._at_once <= self.memory
        self._take(fcntl.LOCK_SH if few else fcntl.LOCK_EX)
        try:
            yield
        finally:
            self.__exit__()

    def _take(self, how: int) -> None:
        if not self._depth:
            fcntl.flock(self._next, fcntl.LOCK_EX)
            fcntl.flock(self._file, how)
            fcntl.flock(self._next, fcntl.LOCK_UN)
        self._depth += 1


class Asked:
    """A confined process, as the referee knows it, and the memory by which it gets arguments."""

    def __init__(self, jail: Jail, role: str, turn: Turn | None = None, crowded: bool = False):
        """Know it; `turn` is for its work on a GPU: alone where that is timed.

        `crowded`: whether others are at work there meanwhile, as `turn` says where it is given.
        """
        self.jail, self.role, self.turn = jail, role, turn
        self.crowded = turn.crowded if turn else crowded
        self._layout: tuple = ()
        self._mapped: Mapped | None = None

    def alone(self) -> contextlib.AbstractContextManager:
        """Have the GPU for nobody else, if it is at work on one."""
        return self.turn or _nobody

    def ask(self, what: str, files: Sequence[int] = (), **words: Any) -> dict:
        """Ask for one thing. Raises: Ended; Refused or Misused with what it raised."""
        size = self._layout[0].size if self._layout else 0
        with self.turn.beside(size) if self.turn and what in _ON_THE_GPU else _nobody:
            answer = self.jail.ask({"do": what, **words}, files)
        self.check(answer, what)
        return answer

    def check(self, answer: dict, what: str) -> None:
        """Raise what the answer says was raised there."""
        if "error" in answer:
            for file in answer["files"]:
                os.close(file)
            build = answer.get("build") if isinstance(answer.get("build"), dict) else None
            self._raised(what, str(answer["error"])[:_TEXT], str(answer.get("kind")), build)
        if not all(_fits(answer.get(name), form) for name, form in _ANSWERS.get(what, {}).items()):
            for file in answer["files"]:
                os.close(file)
            raise Refused("results", f"its process answers {what!r} with something else")

    def _raised(self, what: str, text: str, kind: str, build: dict | None) -> None:
        if kind == "memory" and self.crowded:
            raise Crowded(text)
        if self.role == "reference" or kind == "unusable":
            text = text if kind == "unusable" else f"the reference raises: {text}"
            raise (Lost if kind == "lost" else Misused)(text)
        if kind == "exited":
            text = f"it calls sys.exit(): {text}"
        data = {"build": build} if build else {}
        raise Refused("loads" if what in ("load", "make") else "runs", text, **data)

    def tensors(self, answer: dict, name: str) -> list[Tensor]:
        """Copy the tensors of an answer. Raises: Refused where they are none."""
        try:
            files = answer["files"]
            found = exhibits.unpack(answer[name]["layout"], files[0], MOST)
        except (exhibits.Malformed, LookupError, TypeError, OSError) as error:
            raise Refused("results", f"what it hands out is no result: {error}") from None
        finally:
            for file in answer["files"]:
                os.close(file)
        return found

    def results(self, what: str, like: Sequence[Tensor], **words: Any) -> tuple[dict, list[Tensor]]:
        """Ask for results, in memory of this process with room for some more than these.

        Returns: answer and results. Raises: as `ask`, Refused for what are no results.
        """
        file = exhibits.make(2 * Layout.of(like).size + _ROOM)
        try:
            answer = self.ask(what, [file], **words)
            for other in answer["files"]:
                os.close(other)
            return answer, self.tensors({**answer, "files": [os.dup(file)]}, "results")
        finally:
            os.close(file)

    def give(self, case: Case) -> None:
        """Put arguments where it sees them: at the same addresses as long as shapes are."""
        layout = Layout.of(case.tensors)
        if self._layout != (layout, case.tree):
            file = exhibits.make(layout.size)
            try:
                words = {"tree": case.tree, "layout": layout.json(), "size": layout.size}
                self._mapped = Mapped(file, layout)
                self.ask("place", [file], **words)
            finally:
                os.close(file)
            self._layout = (layout, case.tree)
        assert self._mapped
        self._mapped.fill(case.tensors)
        self._mapped.paint()

    def spoilt(self) -> bool:
        """True if something beside its arguments was written."""
        assert self._mapped
        return self._mapped.is_spoilt()

    def now(self) -> list[Tensor]:
        """Return the arguments as they lie there now."""
        assert self._mapped
        return self._mapped.copies()


def _fits(value: Any, form: Any) -> bool:
    """True for plain data of a form: a type, a dict or list of forms, `[form, ...]` for many."""
    if isinstance(form, dict):
        return isinstance(value, dict) and all(_fits(value.get(k), f) for k, f in form.items())
    if isinstance(form, list):
        if not isinstance(value, list):
            return False
        forms = form[:1] * len(value) if form[-1] is ... else form
        return len(forms) == len(value) and all(map(_fits, value, forms))
    return type(value) is form
