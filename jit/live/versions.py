"""The versions of an operator in a process: in use, before that, and as its files are now."""

from dataclasses import dataclass, field

from ..cache.key import built_sources, manifest
from ..machine.sources import Sources
from ..operators.session import Session
from .python_side import Stamp, python_files, run_again, stamp, texts_of
from .rebuild import Resources
from .swap import Swap


@dataclass
class Version:
    """The files of an operator at one moment, by path, and what this process has of them.

    Two are equal if the files are.
    """

    made_of: dict[str, str]  # digests of the files that are compiled
    left_out: dict[str, str] = field(default_factory=dict)  # of those that are not, on this machine
    python: dict[str, Stamp | None] = field(default_factory=dict)  # None if gone, or not known
    gone: tuple[str, ...] = ()  # files of the version in use that are no longer there
    key: str = field(default="", compare=False)  # of the build; empty where there is none
    texts: dict[str, bytes] = field(default_factory=dict, compare=False)  # of `python`, if known
    swap: Swap | None = field(default=None, compare=False)  # None: the library loaded first
    resources: dict[str, Resources] = field(default_factory=dict, compare=False)
    microseconds: float | None = field(default=None, compare=False)
    difference: dict[str, float] = field(default_factory=dict, compare=False)  # as a Verdict's


def sources_of(session: Session) -> Sources:
    """Return a session's sources, each to be read once from now on."""
    tools = session.toolchain
    return Sources(session.root, tools.header_folders, named=tools.named_files)


class Operator:
    """One operator of a session: its `versions`, the last of which is in use.

    `seen` is the version that was dealt with last, taken in or not.
    """

    def __init__(self, session: Session, name: str, sources: Sources):
        self.session, self.name = session, name
        self.versions = [self._loaded(sources)]
        self.seen = self.versions[0]

    @property
    def in_use(self) -> bool:
        """True once this process has loaded its library."""
        return self.name in self.session.loaded

    def look(self, sources: Sources) -> Version:
        """Return the version that its files are now; that in use learns what can still be known."""
        session, name = self.session, self.name
        if session.loaded.get(name, self.versions[-1].key) != self.versions[-1].key:
            self.versions = [self._loaded(sources)]  # built and loaded past us
        live, made_of = self.versions[-1], self._made_of(sources)
        python = python_files(session, name)
        gone = [p for p in live.made_of if p not in made_of and not (session.root / p).exists()]
        gone += [p for p, found in python.items() if found is None]
        for path, found in python.items():  # imported meanwhile, before or after an edit
            if path not in live.python:
                live.python[path] = None if self._was_edited(found, True) else found
        unread = {p: s for p, s in python.items() if live.python[p] == s and p not in live.texts}
        live.texts.update(texts_of(session.root, unread))
        return Version(made_of, self._left_out(sources, made_of), python, tuple(gone))

    def is_gone(self) -> bool:
        """Return True where the file that makes it an operator is no longer there."""
        return not (self.session.root / self.session.units[self.name].sources[0]).exists()

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
        self.change_to(older, texts)
        self.versions.pop()
        older.python |= dict.fromkeys(texts)  # the files have what was taken back
        return [*differing(older.made_of, newer.made_of), *texts]

    def change_to(self, version: Version, texts: dict[str, bytes]) -> None:
        """Put a version in the place of the one in use, running the Python files `texts` again.

        Raises: BuildError if torch or a Python file refuses; the version before is then in use.
        """
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
            for library in session.units[name].libraries[1:]:
                session.errors.pop(library, None)
            session.errors.pop(name, None)
            if name in session.loaded:
                session.loaded[name] = version.key

    def _loaded(self, sources: Sources) -> Version:
        """Return the version that was loaded, or is going to be."""
        session, name = self.session, self.name
        key = session.loaded.get(name) or session.keys.get(name, "")
        made_of = now = self._made_of(sources)
        if recorded := session.store.manifest(name, key):
            made_of = recorded["inputs"]["files"]
        elif name in session.errors:
            made_of = {}  # whatever mends it is an edit
        left_out = {  # but for those that were edited since the operator was imported
            path: made_of.get(path, digest)
            for path, digest in self._left_out(sources, now).items()
            if path in made_of or not self._was_edited(stamp(session.root / path), False)
        }
        return Version(made_of, left_out, key=key)

    def _made_of(self, sources: Sources) -> dict[str, str]:
        session = self.session
        return manifest(session.units[self.name], session.toolchain, sources)["files"]

    def _left_out(self, sources: Sources, made_of: dict[str, str]) -> dict[str, str]:
        """Return the digests of the sources that are not compiled here, and of their headers."""
        unit, found = self.session.units[self.name], dict[str, str]()
        built = built_sources(unit, self.session.toolchain)
        for source in (source for source in unit.sources if source not in built):
            found |= sources.closure(source)
        return {path: digest for path, digest in found.items() if path not in made_of}

    def _was_edited(self, found: Stamp | None, otherwise: bool) -> bool:
        """Return True if a file of this stamp is newer than the import; `otherwise` if unknown."""
        since = self.session.imported.get(self.name)
        return otherwise if since is None or found is None else found[0] / 1e9 >= since


def differing(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """Return the files that have another digest now, are new, or are gone."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]
