"""The edit loop: looks at the files, has edits built and tried, and takes them in.

The look at the files and the putting in place happen in a thread that no Ctrl-C reaches, so that an
operator is in its old state or in its new one whenever one comes. Building and trying happen in
threads of their own; an attempt that is not waited for goes on, and a later reload takes it in.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from ..build.slots import cores
from ..errors import BuildError
from ..machine.sources import Sources, listed, source_folders
from ..operators.session import SESSIONS, Session
from .attempt import TIME_LIMIT, Attempt, named, not_built
from .python_side import stamp
from .rebuild import swap_object
from .report import Report
from .trial import Trials
from .versions import Edit, Operator, Task

_MOMENT = 0.05  # seconds, in which a Ctrl-C reaches all processes that it is meant for
_ROUNDS = 5  # in which the files of an operator may change while it is built and tried
T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C in a reload; `report` says what is in use and what is still to come."""

    def __init__(self, report: Report):
        super().__init__(str(report) if report.edits or report.behind else "before the first look")
        self.report = report


class Request:
    """One call of `reload`, served in a thread of its own; `stopped` once nobody waits for it."""

    def __init__(self, names: Iterable[str], force: bool, limit: float):
        self.names, self.force, self.limit = set(names), force, limit
        self.report, self.stopped = Report([]), False


class Reloader:
    """All operators of this process: what changed since they were loaded, and what they were.

    `history` has the edits that were dealt with.
    """

    def __init__(self):
        self.history: list[Edit] = []
        self._operators: dict[tuple[int, str], Operator] = {}
        self._seen: dict[str, tuple | None] = {}
        self._trials: Trials | None = None
        self._renew()
        os.register_at_fork(after_in_child=self._renew)  # the threads are not there

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._room = threading.Semaphore(max(1, cores() // 4))  # for what nobody waits for
        self._sessions: list[Session] = []  # all, once what they have is dealt with
        self._attempts: dict[Operator, Attempt] = {}  # under way, or not taken in yet
        self._settling: list[threading.Thread] = []
        self._inherited, self._trials = self._trials, None  # it answers the parent

    def is_unchanged(self) -> bool:
        """Return True if no source file was touched since the last look; well below 1 ms.

        False too where an edit that was built behind can be taken in.
        """
        return (
            len(self._sessions) == len(SESSIONS)
            and not any(attempt.ended for attempt in [*self._attempts.values()])
            and all(stamp(path) == seen for path, seen in self._seen.items())
        )

    def reload(self, names: Iterable[str] = (), force: bool = False, limit: float = TIME_LIMIT):
        """Take in the edits of the operators named, or of all; a Report of them.

        Raises: Interrupted for a Ctrl-C; what was not taken in by then is still to come.
        """
        request = Request(names, force, limit)

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
        for keeping in [*self._settling]:
            keeping.join()

    def look(self) -> list[Task]:
        """Return what is to do, after a look at every file: what `is_unchanged` compares with.

        The files are looked at before they are read: an edit in between is found the next time.
        """
        sessions, tasks = [*SESSIONS], []
        folders = [folder for session in sessions for folder in source_folders(session.root)]
        paths = [p for at in folders for p in (at, *(os.path.join(at, f) for f in listed(at)))]
        stamps = {path: stamp(path) for path in paths}
        for session in sessions:
            session.discover()
            sources = _sources(session)
            for name in [*session.units]:
                operator = self._operators.get((id(session), name)) or Operator(session, name)
                if operator.is_gone() and (id(session), name) not in self._operators:
                    continue
                self._operators[id(session), name] = operator
                if task := operator.look(sources):
                    tasks.append(task)
        self._seen, self._sessions = stamps, sessions
        return tasks

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
            edit = Edit(name, files, "reverted", seconds=time.perf_counter() - begun)
            task = operator.look(_sources(operator.session))
            if still := [path for path in files if task and path in task.files]:
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
            tasks = self.look()
            sessions, self._sessions = self._sessions, []
            differ = {task.operator for task in tasks}
            self._attempts = {o: a for o, a in self._attempts.items() if o in differ}
            chosen = [t for t in tasks if not request.names or t.operator.name in request.names]
            first, behind = self._in_order([t for t in chosen if t.new or request.force], request)
            for task in first:
                self._begin(task, request)
            for task in first:
                self._finish(task, request)
            for task in behind if not request.stopped else ():
                self._begin(task, request, behind=True)
            to_come = {e.unit for e in request.report.edits if e.outcome == "interrupted"}
            request.report.behind += [o.name for o in self._attempts if o.name not in to_come]
            if len(chosen) == len(tasks) and not request.stopped:
                self._sessions = sessions
        finally:
            self._lock.release()

    def _in_order(self, tasks: list[Task], request: Request) -> tuple[list[Task], list[Task]]:
        """Return those to wait for, and those to be done behind them.

        Behind are operators that are not in use, and whose changed files all concern one that is,
        until they are ready.
        """

        def paths(task: Task) -> set[Path]:
            return {task.operator.session.root / path for path in task.compile}

        def is_waited_for(task: Task) -> bool:
            return bool(task.operator.in_use or request.names or task.run or not_built(task))

        waited = [task for task in tasks if is_waited_for(task)]
        shared = {path for task in waited for path in paths(task)}

        def follows(task: Task) -> bool:
            attempt = self._attempts.get(task.operator)
            done = attempt and attempt.ended and attempt.serves(task, request.force)
            if done or is_waited_for(task):
                return False
            goes_on = attempt and attempt.behind and not attempt.ended
            return bool(goes_on or (paths(task) and paths(task) <= shared))

        behind = {task.operator for task in tasks if follows(task)}
        first = [task for task in tasks if task.operator not in behind]
        return first, [task for task in tasks if task.operator in behind]

    def _begin(self, task: Task, request: Request, behind: bool = False) -> None:
        """Have a task done, if that is not under way: at once, or behind the others."""
        if not_built(task):
            return
        attempt = self._attempts.get(task.operator)
        if attempt is None or (attempt.ended and not attempt.serves(task, request.force)):
            if not task.compile:
                self.settle()  # the library that is tried may still be on its way into the store
            attempt = Attempt(task, self.trials, request.force, request.limit, behind)
            self._attempts[task.operator] = attempt
        elif behind:
            return
        run, name = (self._run_behind, "behind") if behind else (self._run, attempt.operator.name)
        threading.Thread(target=run, args=(attempt,), name=f"loader takes in {name}").start()

    def _run(self, attempt: Attempt) -> None:
        attempt.run(self._tell)

    def _run_behind(self, attempt: Attempt) -> None:
        """Run what nobody waits for, a few at once; as the process ends, only what has begun."""
        with self._room:
            wanted = self._attempts.get(attempt.operator) is attempt
            if wanted and threading.main_thread().is_alive():
                self._run(attempt)

    def _finish(self, task: Task, request: Request) -> None:
        """Wait for what `_begin` began, and take it in."""
        operator = task.operator
        for _ in range(_ROUNDS):
            if said := not_built(task):
                operator.seen = task.state
                self._note(said, request)
                return
            attempt = self._attempts[operator]
            with self._news:
                self._news.wait_for(lambda a=attempt: a.ended or request.stopped)
                if attempt.edit.outcome == "failed":  # killed by a Ctrl-C, it may turn out
                    self._news.wait_for(lambda: request.stopped, _MOMENT)
            if request.stopped:
                attempt.interrupted = True
                request.report.edits.append(Edit(operator.name, named(task), "interrupted"))
                return
            del self._attempts[operator]
            if attempt.error:
                raise attempt.error
            if attempt.serves(task, request.force):
                keeping = [*self._settling, attempt.keeping]
                self._settling = [thread for thread in keeping if thread and thread.is_alive()]
                self._note(attempt.put_in_place(), request)
                return
            task = operator.look(_sources(operator.session))
            if task is None:
                return
            self._begin(task, request)
        text = f"{operator.name}: its sources kept changing while they were built and tried"
        self._note(Edit(operator.name, named(task), "failed", text), request)

    def _note(self, edit: Edit, request: Request) -> None:
        request.report.edits.append(edit)
        self.history.append(edit)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


def _sources(session: Session) -> Sources:
    return Sources(session.root, session.toolchain.header_folders)


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
        return future.result()
    except KeyboardInterrupt:
        stop()
        if not future.cancel():
            wait([future])
        raise
