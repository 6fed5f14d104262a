"""`loader.explain()`: why each operator was built, and the edits that this process has seen."""

import sys
import time

from ..cache.explain import why_built
from ..errors.table import Table, duration
from .session import Session


def explanation(session: Session, names: list[str]) -> Table:
    """Return, for each unit, whether it is in the store, when it was built there, and why."""
    table = Table("Why each operator was built", ("operator", "state", "why"))
    edits = _edits()
    missing = session.find(names)
    for name in names:
        if name in missing:
            state = "not built yet"
            why = why_built(session.store, session.units[name], missing[name])
        else:
            recorded = session.store.manifest(name, session.keys[name]) or {}
            seconds = sum(recorded.get("seconds", {}).values())
            ago = duration(time.time() - recorded.get("made", 0))
            state, why = f"built {ago} ago in {seconds:.1f} s", recorded.get("why", [])
            levels = recorded.get("seconds_by_level", {}).items()
            parts = [f"{level} {taken:.1f} s" for level, taken in sorted(levels) if level]
            state += f", of which {', '.join(parts)}" if parts else ""
        first, *rest = why or ["not recorded"]
        table.rows.append((name, state, first))
        table.rows += [("", "", line) for line in rest]
        for edit in (edit for edit in edits if edit.unit == name):
            when = time.strftime("%H:%M:%S", time.localtime(edit.when))
            headline, *more = str(edit).split("\n")
            table.rows.append(("", f"{when} in this session", headline))
            table.rows += [("", "", line) for line in more]
    return table


def _edits() -> list:
    """Return the edits that this process has taken in or refused.

    `live` is not imported for that: a process that did not edit has none.
    """
    reload = sys.modules.get("loader.jit.live.reload")
    return reload.history() if reload else []
