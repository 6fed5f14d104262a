"""`loader.reload()`: edits in a living process, found, built, tried and put in place; or refused.

Whatever fails leaves the last good build at work: to compile what changed (rebuild.py), to try it
in another process against the reference (trial.py), to put it in the place of what is in use
(swap.py; python_side.py for `ops/X.py`), to keep it in the store for the next `import loader`.
"""

from ..operators.session import SESSIONS
from .edit import TIME_LIMIT, Edit
from .reloader import Reloader, Request
from .report import Report

reloader = Reloader()
stand_by = reloader.stand_by


def reload(*names: str, force: bool = False, time_limit: float = TIME_LIMIT) -> Report:
    """Take in the edits of the operators named (of all, without a name), and go on working.

    What changed is compiled and tried in another process against `X_reference`, on the arguments of
    `samples(device)` in `ops/X.py`, with two derivatives. If it compiles and is right, every holder
    of the operator runs the new code from the next call on: functions, modules, `torch.compile`
    graphs. GPU work under way ends with the old. Otherwise the old code stays.

    Of the operators that an edited header concerns, those in use come first; the others are built
    behind, and the next reload, or cell, that finds them ready takes them in. Named, they are
    waited for.

    Args:
        names: operators, of `loader` or of a `loader.Library`.
        force: put it in place although the trial failed, also what was refused before.
        time_limit: seconds that a call of the operator may take in the trial.

    Returns: an object that prints as a table for each operator, here and in a notebook; `ok` is
        True if all that changed is in use, `edits` holds them one by one, `behind` names the
        operators that are being built.

    Raises: ValueError for a name that is no operator; KeyboardInterrupt for a Ctrl-C, which says
        what is still to come: the next reload goes on with it.
    """
    known = {name for session in SESSIONS for name in session.units}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no operator; there are {', '.join(sorted(known))}")
    return reloader.reload(Request(names, force, time_limit))


def take_in_edits(differing: bool = False) -> Report | None:
    """Take in what was edited, as before each cell; a report where there was anything, else None.

    `differing` lets in what runs, but differs from its reference, too.

    Raises: Interrupted for a Ctrl-C.
    """
    if reloader.is_unchanged():
        return None
    report = reloader.reload(Request(differing=differing))
    return report if report.edits else None


def history() -> list[Edit]:
    """Return the edits of this process, in their order; the store has those that are in use."""
    reloader.settle()
    return [*reloader.history]


def revert(name: str) -> Report:
    """Go back one edit of an operator: the code that was in use before it is in use again.

    The files stay as they are, and the operator as it is now until they are edited again.

    Returns: a report, as `loader.reload` does.

    Raises: ValueError where this process has taken in no edit of it.
    """
    return Report([reloader.revert(name)])
