"""The states of an operator in a process: in use, before that, and as its files are now."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from ..cache.key import built_sources, manifest
from ..machine.sources import Sources
from ..operators.session import Session
from .python_side import python_files, run_again, stamp, texts_of
from .rebuild import Rebuilt, Resources
from .report import headline
from .swap import Swap
from .trial import Verdict


@dataclass
class Version:
    """One state of an operator in this process; files are named by path."""

    key: str  # of the build; empty where there is none
    made_of: dict[str, str]  # digests of the files that were compiled
    python: dict[str, tuple | None] = field(default_factory=dict)  # stamps; None if not known
    texts: dict[str, bytes] = field(default_factory=dict)  # of those, as far as they are known
    swap: Swap | None = None  # the library in place; None for the one that was loaded first
    resources: dict[str, Resources] = field(default_factory=dict)
    microseconds: float | None = None
    difference: dict[str, float] = field(default_factory=dict)  # as Verdict.difference


@dataclass
class Edit:
    """What became of one edit of one operator.

    Attributes:
        outcome: `live`, `refused` (tried, and not right), `failed` (did not build), `reverted`,
            `gone` (its files are), `uncompiled` (what changed is not compiled on this machine), or
            `interrupted` (still to come).
        files: those that changed.
        text: the error, or what was wrong.
        notes: what else there is to know.
        seconds: of the work, from when the edit was found until the new code was in place.
    """

    unit: str
    files: list[str]
    outcome: str = "live"
    text: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    rebuilt: Rebuilt | None = None
    verdict: Verdict | None = None
    before: Version | None = None
    when: float = field(default_factory=time.time)

    def __str__(self) -> str:
        """Return what became of it, and its first error, in lines."""
        return "\n".join([headline(self, unit=False), *self.text.split("\n")[:3]]).strip()


class State(NamedTuple):
    """What the files of an operator were at one moment, by path."""

    compiled: dict[str, str]  # digests of the files that its build is made of
    left_out: dict[str, str]  # of those that are not compiled here, and what only they include
    python: dict[str, tuple | None]  # stamps
    gone: tuple[str, ...] = ()  # files of the version in use that are no longer there


class Task(NamedTuple):
    """An operator and what differs of it from the version in use."""

    operator: "Operator"
    compile: list[str]  # files to compile; those of them that are gone too
    run: list[str]  # Python files to run; likewise
    left_out: list[str]  # files that changed, and are not compiled on this machine
    new: bool  # it is not what was dealt with last
    state: State

    @property
    def files(self) -> list[str]:
        """All that differs and can be taken in."""
        return [*self.compile, *self.run]


class Operator:
    """One operator of a session: its `versions`, the last of which is in use.

    `seen` is the state of its files that was dealt with last.
    """

    def __init__(self, session: Session, name: str):
        self.session, self.name = session, name
        sources = Sources(session.root, session.toolchain.header_folders)
        self.versions = [self._loaded(sources)]
        live = self.versions[0]
        self.seen = State(live.made_of, self._left_out_at_first(sources), live.python)

    @property
    def in_use(self) -> bool:
        """True once this process has loaded its library."""
        return self.name in self.session.loaded

    def look(self, sources: Sources) -> Task | None:
        """Return what differs from the version in use; None if nothing does, and nothing is new.

        An edit that was refused goes on to differ until it is mended.
        """
        if self.session.loaded.get(self.name, self.versions[-1].key) != self.versions[-1].key:
            self.versions = [self._loaded(sources)]  # built and loaded past us
        live, state = self.versions[-1], self._state(sources)
        for path, found in state.python.items():  # imported meanwhile, before or after an edit
            if path not in live.python:
                live.python[path] = None if self._was_edited(found, True) else found
        unedited = {p: s for p, s in state.python.items() if live.python[p] == s}
        unread = {p: s for p, s in unedited.items() if p not in live.texts}
        live.texts.update(texts_of(self.session.root, unread))
        differ = [p for p, digest in state.compiled.items() if live.made_of.get(p) != digest]
        differ += [p for p in state.gone if p not in state.python]
        again = [p for p in state.python if p not in unedited]
        left_out = _differing(self.seen.left_out, state.left_out)
        new = (
            any(self.seen.compiled.get(p) != digest for p, digest in state.compiled.items())
            or any(self.seen.python.get(p, live.python[p]) != s for p, s in state.python.items())
            or bool(left_out)
            or self.seen.gone != state.gone
        )
        task = Task(self, differ, again, left_out, new, state)
        return task if new or task.files else None

    def is_gone(self) -> bool:
        """Return True where the file that makes it an operator is no longer there."""
        return not (self.session.root / self.session.units[self.name].sources[0]).exists()

    def put_in_place(self, after: Version, texts: dict[str, bytes]) -> None:
        """Make `after` the version in use, running the Python files `texts` again.

        Raises: BuildError if torch or a Python file refuses; the version before is then in use.
        """
        self._change_to(after, texts)
        self.versions.append(after)

    def go_back(self) -> list[str]:
        """Put the version before the one in use in place again; the files that they differ in.

        Raises: ValueError where that is not known any more.
        """
        newer, older = self.versions[-1], self.versions[-2]
        swapped = older.swap is not newer.swap
        if self.in_use and not swapped and older.key != newer.key:
            raise ValueError(
                f"revert: {self.name!r} was first used after this edit, so the code before it was "
                "never in this process"
            )
        ran = [p for p, found in newer.python.items() if older.python.get(p, found) != found]
        if any(path not in older.texts for path in ran):
            raise ValueError(
                f"revert: the Python side of {self.name!r} was edited before loader looked at it, "
                "so what it was is not known; `%load_ext loader` or `loader.reload()` before "
                "the first edit lets it be kept"
            )
        texts = {p: older.texts[p] for p in ran if older.texts[p] != newer.texts.get(p)}
        self._change_to(older, texts)
        self.versions.pop()
        older.python |= dict.fromkeys(texts)  # the files have what was taken back
        return [*_differing(older.made_of, newer.made_of), *texts]

    def _change_to(self, version: Version, texts: dict[str, bytes]) -> None:
        session, name, before = self.session, self.name, self.versions[-1]
        new, old = version.swap, before.swap
        try:
            if new and new is not old:
                new.commit()
            run_again(session, name, texts, before.texts)
        except BaseException:
            if new and new is not old:
                new.withdraw()
            raise
        if old and new is not old:
            old.withdraw()
        if version.key:
            session.keys[name] = version.key
            session.errors.pop(name, None)
            if name in session.loaded:
                session.loaded[name] = version.key

    def _loaded(self, sources: Sources) -> Version:
        """Return the version that was loaded, or is going to be."""
        session, name = self.session, self.name
        key = session.loaded.get(name) or session.keys.get(name, "")
        if recorded := session.store.manifest(name, key):
            return Version(key, recorded["inputs"]["files"])
        if name in session.errors:
            return Version(key, {})  # whatever mends it is an edit
        return Version(key, manifest(session.units[name], session.toolchain, sources)["files"])

    def _state(self, sources: Sources) -> State:
        session, name, live = self.session, self.name, self.versions[-1]
        compiled = manifest(session.units[name], session.toolchain, sources)["files"]
        python = python_files(session, name)
        gone = [p for p in live.made_of if p not in compiled and not (session.root / p).exists()]
        gone += [p for p, found in python.items() if found is None]
        return State(compiled, self._left_out(sources, compiled), python, tuple(gone))

    def _left_out(self, sources: Sources, compiled: dict[str, str]) -> dict[str, str]:
        """Return the digests of the sources that are not compiled here, and of their headers."""
        unit, found = self.session.units[self.name], {}
        built = built_sources(unit, self.session.toolchain)
        for source in unit.sources:
            if source not in built:
                found |= sources.closure(source)
        return {path: digest for path, digest in found.items() if path not in compiled}

    def _left_out_at_first(self, sources: Sources) -> dict[str, str]:
        """Return the same, without those that were edited since the operator was imported."""
        made_of = self.versions[-1].made_of
        compiled = manifest(self.session.units[self.name], self.session.toolchain, sources)["files"]
        found = self._left_out(sources, compiled)
        return {
            path: made_of.get(path, digest)
            for path, digest in found.items()
            if path in made_of or not self._was_edited(stamp(self.session.root / path), False)
        }

    def _was_edited(self, found: tuple | None, otherwise: bool) -> bool:
        """Return True if a file of this stamp is newer than the import; `otherwise` if unknown."""
        since = self.session.imported.get(self.name)
        return otherwise if since is None or found is None else found[0] / 1e9 >= since


def _differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files that have another digest now, are new, or are gone."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]
