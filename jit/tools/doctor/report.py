"""The doctor's report: findings as a table, in a terminal, a notebook, a bug report."""

import json
import os
import pwd
import re
import shutil
import textwrap
from dataclasses import asdict, dataclass

from ...errors.table import Table


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
        """A table as wide as the terminal; commands stay whole, to be copied."""
        room = min(shutil.get_terminal_size((100, 24)).columns, 120)
        wide = max(len(finding.subject) for finding in self.findings)
        lines = []
        for finding in self.findings:
            state = finding.state.upper() if finding.state == "error" else finding.state
            texts = [finding.found]
            texts += [c if c.startswith("$ ") else f"> {c}" for c in finding.cure.splitlines()]
            text = "\n".join(
                c if c.startswith("$ ") else _wrapped(c, max(room - wide - 11, 30)) for c in texts
            )
            head = f"{state:<7}  {finding.subject:<{wide}}  "
            lines.append(head + text.replace("\n", "\n" + " " * len(head)))
        return "\n".join([*lines, "", self.verdict])

    __repr__ = __str__  # at a prompt too

    def _repr_html_(self) -> str:
        table = Table(self.verdict, ("state", "subject", "found"))
        table.rows = [(f.state, f.subject, f"{f.found}\n{f.cure}".strip()) for f in self.findings]
        return table._repr_html_()

    def json(self) -> str:
        """The same for a bug report: without the user's name, which paths may hold."""
        findings = [asdict(finding) for finding in self.findings]
        facts = {"ok": self.ok, "versions": self.versions, "findings": findings}
        return _anonymous(json.dumps(facts, indent=1, ensure_ascii=False))


def _wrapped(text: str, width: int) -> str:
    indent = "  " if text.startswith("> ") else ""
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _anonymous(text: str) -> str:
    """A text in JSON without the user's name and home."""
    try:
        home, name = (user := pwd.getpwuid(os.geteuid())).pw_dir, user.pw_name
    except KeyError:
        return text
    for path in {home, os.path.expanduser("~"), os.path.realpath(home)} - {"/", ""}:
        text = re.sub(rf"{re.escape(path)}(?=/|\b)", "~", text)
    return re.sub(rf'(?<=/){re.escape(name)}(?=[/"])', "USER", text)
