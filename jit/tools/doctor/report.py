"""The doctor's report: findings as a table, in a terminal, a notebook, a bug report."""

import html
import json
import os
import pwd
import re
import shutil
import textwrap
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The outcome of one check; in `cure` lines that begin with "$ " are commands."""

    subject: str
    state: str  # "ok", "warning" or "error"
    found: str
    cure: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """All findings; printed, it is a table."""

    findings: list[Finding]
    versions: dict

    @property
    def ok(self) -> bool:
        """True if a build would work."""
        return all(finding.state != "error" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The outcome in one sentence."""
        counts = [(sum(f.state == s for f in self.findings), s) for s in ("error", "warning")]
        some = ", ".join(f"{n} {state}{'s' * (n > 1)}" for n, state in counts if n)
        return f"A build would {'' if self.ok else 'not '}work" + (f": {some}." if some else ".")

    def __str__(self) -> str:
        """A table as wide as the terminal."""
        room = min(shutil.get_terminal_size((100, 24)).columns, 120)
        wide = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            state = finding.state.upper() if finding.state == "error" else finding.state
            lines += _wrap(f"{state:<7}  {finding.subject:<{wide}}  ", finding.found, room)
            for line in finding.cure.splitlines():
                lines += _wrap(" " * (wide + 11) + ("" if line[:2] == "$ " else "> "), line, room)
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__  # at a prompt too

    def _repr_html_(self) -> str:
        colours = {"ok": "green", "warning": "darkorange", "error": "red"}
        rows = []
        for finding in self.findings:
            cures = [html.escape(line) for line in finding.cure.splitlines()]
            cures = [f"<code>{c[2:]}</code>" if c[:2] == "$ " else c for c in cures]
            state = f"<b style='color:{colours[finding.state]}'>{finding.state}</b>"
            found = "<br>".join([html.escape(finding.found), *cures])
            cells = (state, html.escape(finding.subject), found)
            row = "".join(f"<td style='text-align:left'>{cell}</td>" for cell in cells)
            rows.append(f"<tr>{row}</tr>")
        return f"<table>{''.join(rows)}</table><p>{html.escape(self.verdict)}</p>"

    def json(self) -> str:
        """The same for a bug report: without the user's name, which paths may hold."""
        findings = [asdict(finding) for finding in self.findings]
        facts = {"ok": self.ok, "versions": self.versions, "findings": findings}
        return json.dumps(_anonymous(facts), indent=1)


def _wrap(head: str, text: str, room: int) -> list[str]:
    """Text behind a head, broken to the room; commands stay whole, to be copied."""
    if text.startswith("$ "):
        return [head + text]
    width, indent = max(room, len(head) + 30), " " * len(head)
    lines = textwrap.wrap(text, width - len(head), break_long_words=False, break_on_hyphens=False)
    return [(indent if i else head) + line for i, line in enumerate(lines)]


def _anonymous(value: Any) -> Any:
    """Strings without the user's name and home, in all of a JSON value."""
    if isinstance(value, dict):
        return {key: _anonymous(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_anonymous(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        home, name = (user := pwd.getpwuid(os.geteuid())).pw_dir, user.pw_name
    except KeyError:
        return value
    for path in {home, os.path.expanduser("~"), os.path.realpath(home)} - {"/", ""}:
        value = re.sub(rf"{re.escape(path)}(?=/|\b)", "~", value)
    return re.sub(rf"(?<=/){re.escape(name)}(?=/|$)", "USER", value)
