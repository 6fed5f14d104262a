"""The edit loop: looks at the files, has edits built and tried, and takes them in.

The look at the files and the putting in place happen in a thread that no Ctrl-C reaches, so that an
operator is in its old state or in its new one whenever one comes. Building and trying happen in
threads of their own; an edit that is not waited for goes on, and a later reload takes it in.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..build.slots import cores
from ..build.workshop import in_turns
from ..errors import BuildError
from ..machine.sources import listed, source_folders
from ..operators.session import SESSIONS, Session
from .edit import TIME_LIMIT, Edit
from .python_side import Stamp, stamp
from .rebuild import swap_object
from .report import Report
from .trial import Trials
from .versions import Operator, sources_of

_MOMENT = 0.05  # seconds, in which a Ctrl-C reaches all processes that it is meant for
_ROUNDS = 5  # in which the files of an operator may change while it is built and tried
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C in a reload; `report` says what is in use and what is still to come."""

    def __init__(self, report: Report):
        super().__init__(str(report) if report.edits or report.behind else "before the first look")
        self.report = report


@dataclass
class Request:
    """One call of `loader.reload`; `stopped` once nobody waits for it."""

    names: tuple[str, ...] = ()
    force: bool = False
    limit: float = TIME_LIMIT
    differing: bool = False
    stopped: bool = False
    report: Report = field(default_factory=lambda: Report([]))


class Reloader:
    """All operators of this process: what changed since they were loaded, and what they were.

    `history` has the edits that were dealt with.
    """

    def __init__(self) -> None:
        self.history: list[Edit] = []
        self._operators: dict[tuple[Session, str], Operator] = {}
        self._seen: dict[str, Stamp | None] = {}
        self._trials: Trials | None = None
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # the threads are not there

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._room = threading.Semaphore(max(1, cores() // 4))  # for what nobody waits for
        self._sessions: list[Session] = []  # all, once what they have is dealt with
        self._edits: dict[Operator, Edit] = {}  # under way, or not taken in yet
        self._inherited, self._trials = self._trials, None  # it answers the parent

    def is_unchanged(self) -> bool:
        """Return True if no source file was touched since the last look; well below 1 ms.

        False too where an edit that was built behind can be taken in.
        """
        return (
            len(self._sessions) == len(SESSIONS)
            and not any(edit.ended for edit in [*self._edits.values()])
            and all(stamp(path) == seen for path, seen in self._seen.items())
        )

    def reload(self, request: Request) -> Report:
        """Take in the edits of the operators named, or of all; a Report of them.

        Raises: Interrupted for a Ctrl-C; what was not taken in by then is still to come.
        """

        def stop() -> None:
            request.stopped = True
            self._tell()

        try:
            _unbroken(lambda: self._serve(request), stop)
        except KeyboardInterrupt:
            raise Interrupted(request.report) from None
        return request.report

    def revert(self, name: str) -> Edit:
        """Put the state of an operator before its last edit in place again."""
        return _unbroken(lambda: self._revert(name))

    def stand_by(self) -> None:
        """Get ready for edits: note what there is, and start the process that tries them."""
        _unbroken(self._stand_by)

    def settle(self) -> None:
        """Wait until the store has all that is in use."""
        for edit in self.history:
            if edit.keeping:
                edit.keeping.join()

    def look(self) -> list[Edit]:
        """Return what is to do, after a look at every file: what `is_unchanged` compares with.

        The files are looked at before they are read: an edit in between is found the next time.
        """
        sessions, edits = [*SESSIONS], []
        folders = [folder for session in sessions for folder in source_folders(session.root)]
        paths = [p for at in folders for p in (at, *(os.path.join(at, f) for f in listed(at)))]
        stamps = {path: stamp(path) for path in paths}
        for session in sessions:
            session.discover()
            sources = sources_of(session)
            for name in [*session.units]:
                known = self._operators.get((session, name))
                operator = known or Operator(session, name, sources)
                if known or not operator.is_gone():
                    self._operators[session, name] = operator
                    edits.append(Edit(operator, operator.look(sources)))
        self._seen, self._sessions = stamps, sessions
        return [edit for edit in edits if edit.new or edit.files]

    @property
    def trials(self) -> Trials:
        """The process that tries edits."""
        if self._trials is None:
            self._trials = Trials(SESSIONS[0])
        return self._trials

    def _stand_by(self) -> None:
        with self._lock:
            if self.look():
                self._sessions = []  # edited already: look again before the next cell
            self.trials.start()
            with contextlib.suppress(BuildError, OSError):  # the first edit will tell
                swap_object(SESSIONS[0])

    def _revert(self, name: str) -> Edit:
        with self._lock:
            operator = next((o for o in self._operators.values() if o.name == name), None)
            if operator is None or len(operator.versions) == 1:
                raise ValueError(f"revert: there is no edit of {name!r} in this process to go back")
            begun = time.perf_counter()
            files = operator.go_back()
            seconds = time.perf_counter() - begun
            edit = _found(operator)
            still = [path for path in files if path in edit.files]
            edit.outcome, edit.files, edit.seconds = "reverted", files, seconds
            if still:
                holds = "still holds" if len(still) == 1 else "still hold"
                edit.text = (
                    f"{', '.join(still)} {holds} the edit: a new process has it; this one once a "
                    f"file of the operator changes, or by loader.reload({name!r}, force=True)"
                )
            self.history.append(edit)
            return edit

    def _serve(self, request: Request) -> None:
        """Do what a request asks for, until it is stopped."""
        while not self._lock.acquire(timeout=0.05):
            if request.stopped:
                return
        try:
            found = self.look()
            sessions, self._sessions = self._sessions, []
            differ = {edit.operator for edit in found}
            self._edits = {o: edit for o, edit in self._edits.items() if o in differ}
            chosen = [e for e in found if not request.names or e.unit in request.names]
            wanted = [edit for edit in chosen if edit.new or request.force]
            self._put_behind(wanted, request)
            first = [edit for edit in wanted if not edit.behind]
            for edit in first:
                self._begin(edit, request)
            for edit in first:
                self._finish(edit, request)
            for edit in wanted if not request.stopped else ():
                if edit.behind:
                    self._begin(edit, request)
            to_come = {e.unit for e in request.report.edits if e.outcome == "interrupted"}
            request.report.behind += [o.name for o in self._edits if o.name not in to_come]
            if len(chosen) == len(found) and not request.stopped:
                self._sessions = sessions
        finally:
            self._lock.release()

    def _put_behind(self, edits: list[Edit], request: Request) -> None:
        """Mark those that are done behind the others.

        They are of operators not in use, and their changed files all concern one that is.
        """

        def paths(edit: Edit) -> set[Path]:
            return {edit.operator.session.root / path for path in edit.compile}

        def is_waited_for(edit: Edit) -> bool:
            return bool(edit.operator.in_use or request.names or edit.run or edit.ended)

        shared = {path for edit in edits if is_waited_for(edit) for path in paths(edit)}
        for edit in edits:
            begun = self._edits.get(edit.operator)
            done = begun and begun.ended and begun.serves(edit, request.force)
            if not done and not is_waited_for(edit):
                goes_on = begun and begun.behind and not begun.ended
                edit.behind = bool(goes_on) or paths(edit) <= shared

    def _begin(self, edit: Edit, request: Request) -> None:
        """Have an edit worked on, if that is not under way."""
        begun = self._edits.get(edit.operator)
        redo = begun is None or (begun.ended and not begun.serves(edit, request.force))
        if redo or edit.ended:
            if not edit.compile:
                self.settle()  # the library that is tried may still be on its way into the store
            edit.force, edit.differing = request.force, request.differing
            begun = self._edits[edit.operator] = edit
        elif edit.behind:
            return
        if begun and not begun.ended:
            name = f"loader takes in {'behind' if edit.behind else edit.unit}"
            arguments = begun, request.limit, edit.behind
            threading.Thread(target=self._work, args=arguments, name=name).start()

    def _work(self, edit: Edit, limit: float, behind: bool) -> None:
        """Have an edit built and tried.

        Of those that nobody waits for a few at once; as the process ends, only what has begun.
        """
        with self._room if behind else contextlib.nullcontext():
            wanted = self._edits.get(edit.operator) is edit and threading.main_thread().is_alive()
            if wanted or not behind:
                edit.work(self.trials, limit)
        self._tell()

    def _finish(self, edit: Edit, request: Request) -> None:
        """Wait for what `_begin` began, and take it in."""
        operator = edit.operator
        for _ in range(_ROUNDS):
            begun = self._edits[operator]
            if not self._has_ended(begun, request):
                begun.interrupted = True
                to_come = Edit(operator, edit.after)
                to_come.outcome, to_come.notes = "interrupted", []
                request.report.edits.append(to_come)
                return
            del self._edits[operator]
            if begun.error:
                raise begun.error
            if begun.serves(edit, request.force):
                begun.put_in_place()
                self._note(begun, request)
                return
            edit = _found(operator)
            if not (edit.new or edit.files):
                return
            self._begin(edit, request)
        edit.outcome = "failed"
        edit.text = f"{edit.unit}: its sources kept changing while they were built and tried"
        self._note(edit, request)

    def _has_ended(self, edit: Edit, request: Request) -> bool:
        """Wait until an edit was built and tried; False if somebody waits no longer."""
        with self._news:
            self._news.wait_for(lambda: edit.ended or request.stopped)
            if edit.outcome == "failed":  # killed by a Ctrl-C, it may turn out
                self._news.wait_for(lambda: request.stopped, _MOMENT)
        return not request.stopped

    def _note(self, edit: Edit, request: Request) -> None:
        request.report.edits.append(edit)
        self.history.append(edit)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


def _found(operator: Operator) -> Edit:
    """Return what differs of an operator now."""
    return Edit(operator, operator.look(sources_of(operator.session)))


def _unbroken(work: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Return what `work` does, done where no Ctrl-C reaches it; one calls `stop`.

    That Ctrl-C is raised once the work has ended; a second one does not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    try:
        threading.Thread(target=run, name="loader reloads").start()
        in_turns(future)
        return future.result()
    except KeyboardInterrupt:
        stop()
        if not future.cancel():
            in_turns(future)
        raise
