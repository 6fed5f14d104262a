"""The edit loop: looks at the files, has edits built and tried, and takes them in.

The look at the files and the putting in place happen in a thread that no Ctrl-C reaches, so that an
operator is in its old state or in its new one whenever one comes. Building and trying happen in
threads of their own; an attempt that is not waited for goes on, and a later reload takes it in.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from ..build.slots import cores
from ..errors import BuildError
from ..machine.sources import Sources, listed, source_folders
from ..operators.session import SESSIONS, Session
from .attempt import TIME_LIMIT, Attempt, named, not_built
from .python_side import stamp
from .rebuild import swap_object
from .report import Report
from .trial import Trials, guard_library
from .versions import Edit, Operator, Task

_MOMENT = 0.05  # seconds, in which a Ctrl-C reaches all processes that it is meant for
_ROUNDS = 5  # in which the files of an operator may change while it is built and tried


class Interrupted(KeyboardInterrupt):
    """A Ctrl-C in a reload; `report` says what is in use and what is still to come."""

    def __init__(self, report: Report):
        super().__init__(str(report) if report.edits or report.behind else "before the first look")
        self.report = report


class Request:
    """One call of `reload`, served in a thread of its own.

    Attributes:
        edits: those that were dealt with so far; `behind` those whose attempts are not waited for.
        stopped: True once the caller waits no longer.
    """

    def __init__(self, names: Iterable[str], force: bool, limit: float):
        self.names, self.force, self.limit = set(names), force, limit
        self.edits: list[Edit] = []
        self.behind: list[str] = []
        self.stopped = False


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
        self._sessions: list[Session] = []  # all, once what they have is dealt with
        self._attempts: dict[Operator, Attempt] = {}  # under way, or not taken in yet
        self._behind: deque[Attempt] = deque()
        self._workers: list[threading.Thread] = []
        self._settling: list[Attempt] = []
        self._inherited, self._trials = self._trials, None  # it answers the parent

    def stand_by(self) -> None:
        """Get ready for edits: note what there is, and start the process that tries them."""
        _unbroken(self._stand_by)

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

        def stop():
            with self._news:
                request.stopped = True
                self._news.notify_all()

        try:
            _unbroken(lambda: self._serve(request), stop)
        except KeyboardInterrupt:
            raise Interrupted(Report(request.edits, request.behind)) from None
        return Report(request.edits, request.behind)

    def revert(self, name: str) -> Edit:
        """Put the state of an operator before its last edit in place again."""
        edits: list[Edit] = []
        _unbroken(lambda: edits.append(self._revert(name)))
        return edits[0]

    def settle(self) -> None:
        """Wait until the store has all that is in use."""
        for attempt in [*self._settling]:
            attempt.settle()

    def look(self) -> list[Task]:
        """Return what is to do, after a look at every file: what `is_unchanged` compares with.

        The files are looked at before they are read: an edit in between is found the next time.
        """
        stamps, tasks = {}, []
        for session in SESSIONS:
            for folder in source_folders(session.root):
                paths = [folder, *(os.path.join(folder, file) for file in listed(folder))]
                stamps.update((path, stamp(path)) for path in paths)
        sessions = [*SESSIONS]
        for session in sessions:
            session.discover()
            sources = _sources(session)
            for name in [*session.units]:
                operator = self._operators.get((id(session), name))
                if operator is None:
                    operator = Operator(session, name)
                    if operator.is_gone():
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
            self._trials = Trials(guard_library(SESSIONS[0].caches[-1]))
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
            still = [path for path in files if task and path in task.files]
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
            if not request.stopped:
                for task in behind:
                    self._begin(task, request, behind=True)
                self._work_behind()
            to_come = {edit.unit for edit in request.edits if edit.outcome == "interrupted"}
            request.behind += [o.name for o in self._attempts if o.name not in to_come]
            if len(chosen) == len(tasks) and not request.stopped:
                self._sessions = sessions
        finally:
            self._lock.release()

    def _in_order(self, tasks: list[Task], request: Request) -> tuple[list[Task], list[Task]]:
        """Return those to wait for, and those to be done behind them.

        Behind are operators that are not in use, and whose changed files all concern one that is,
        until they are ready.
        """
        waited = {
            task.operator
            for task in tasks
            if task.operator.in_use or request.names or task.run or not_built(task)
        }
        shared = {
            task.operator.session.root / path
            for task in tasks
            if task.operator in waited
            for path in task.compile
        }
        first, behind = [], []
        for task in tasks:
            attempt = self._attempts.get(task.operator)
            files = {task.operator.session.root / path for path in task.compile}
            goes_on = attempt and attempt.behind and not attempt.ended
            follows = goes_on or (files and files <= shared)
            if attempt and attempt.ended and attempt.serves(task, request.force):
                follows = False
            (behind if follows and task.operator not in waited else first).append(task)
        return first, behind

    def _begin(self, task: Task, request: Request, behind: bool = False) -> None:
        """Have a task done, if that is not under way: at once, or behind the others."""
        attempt = self._attempts.get(task.operator)
        if not_built(task):
            return
        if attempt and attempt.ended and not attempt.serves(task, request.force):
            attempt = None
        if attempt is None:
            if not task.compile:
                self.settle()  # the library that is tried may still be on its way into the store
            attempt = Attempt(task, self.trials, request.force, request.limit)
            self._attempts[task.operator] = attempt
            if behind:
                attempt.behind = True
                self._behind.append(attempt)
        if not behind:
            attempt.start(self._tell)

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
                request.edits.append(Edit(operator.name, named(task), "interrupted"))
                return
            del self._attempts[operator]
            if attempt.error:
                raise attempt.error
            if attempt.serves(task, request.force):
                self._settling = [a for a in self._settling if a.is_settling()] + [attempt]
                self._note(attempt.put_in_place(), request)
                return
            task = operator.look(_sources(operator.session))
            if task is None:
                return
            self._begin(task, request)
        text = f"{operator.name}: its sources kept changing while they were built and tried"
        self._note(Edit(operator.name, named(task), "failed", text), request)

    def _note(self, edit: Edit, request: Request) -> None:
        request.edits.append(edit)
        self.history.append(edit)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()

    def _work_behind(self) -> None:
        """Have threads for what nobody waits for."""
        self._workers = [*filter(threading.Thread.is_alive, self._workers)]
        while len(self._workers) < min(len(self._behind), max(1, cores() // 4)):
            worker = threading.Thread(target=self._empty_behind, name="loader builds behind")
            self._workers.append(worker)
            worker.start()

    def _empty_behind(self) -> None:
        """Do one after the other; the end of the process waits for those that are begun."""
        while self._behind and threading.main_thread().is_alive():
            with contextlib.suppress(IndexError):  # another thread took the last
                attempt = self._behind.popleft()
                if self._attempts.get(attempt.operator) is attempt:
                    attempt.run(self._tell)


def _sources(session: Session) -> Sources:
    return Sources(session.root, session.toolchain.header_folders)


def _unbroken(work: Callable[[], None], stop: Callable[[], None] = lambda: None) -> None:
    """Do `work` where no Ctrl-C reaches it, and wait for its end.

    A Ctrl-C calls `stop`, and is raised at that end. Raises what `work` raises.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    begun, ended, failures = threading.Event(), threading.Event(), []

    def run():
        begun.set()
        try:
            work()
        except BaseException as error:
            failures.append(error)
        finally:
            ended.set()

    try:
        threading.Thread(target=run, name="loader reloads").start()
        ended.wait()
    except KeyboardInterrupt:
        stop()
        if begun.wait(0.1):  # a second Ctrl-C does not wait
            ended.wait()
        raise
    if failures:
        raise failures.pop()
