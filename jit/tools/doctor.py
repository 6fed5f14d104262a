"""The doctor: looks at all that a build needs, before anything is built, and says how to mend it.

Each check looks at one thing and gives its findings: an error where a build would not work, a
warning where it would but something is off. What can be tried is tried, by the command that a build
would run: versions that look right are no proof. Nothing is left behind, and no network is needed.

This file does without torch, which may be what is broken: a process of its own imports it.
"""

import argparse
import html
import json
import os
import platform
import pwd
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from ..machine.toolchain import _architectures
from .checks import CHECKS, Context, Found, _last_line, _run, _TorchMissing, check_layer

# What torch says of itself. GPUs are hidden from it: to initialise CUDA takes seconds.
_TORCH = """
import json, sys, warnings
sys.path[:] = json.loads(sys.argv[1])
facts = {}
def note(name, ask):
    try:
        facts[name] = ask()
    except BaseException as error:
        facts[name + "_error"] = f"{type(error).__name__}: {error}".strip().split("\\n")[0]
def numpy():
    import numpy
    facts["numpy"] = numpy.__version__
    torch.from_numpy(numpy.zeros(1))
    return numpy.__version__
def extension():
    import torch.utils.cpp_extension
    note("flags", torch.utils.cpp_extension._get_cuda_arch_flags)
with warnings.catch_warnings(record=True):
    note("setuptools", lambda: __import__("setuptools").__version__)
    note("torch", lambda: __import__("torch").__version__)
    if "torch" in facts:
        import torch
        facts |= {"cuda": torch.version.cuda, "git": torch.version.git_version}
        note("numpy", numpy)
        note("extension", extension)
print("\\nFACTS", json.dumps(facts))
"""


@dataclass(frozen=True)
class Finding:
    """What one check saw; `cure` says what to do, its lines that begin with "$ " are commands."""

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
        """Whether a build would work."""
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


def doctor(root: Path, caches: tuple[Path, ...]) -> Report:
    """Look at everything that a build into the last of `caches` needs; takes a few seconds."""
    folder, probe, refusal = _make_probe(caches[-1])
    layers = [("cache", partial(check_layer, layer)) for layer in caches[:-1]]
    checks = [*CHECKS, *layers]
    try:
        with ThreadPoolExecutor(len(checks) + 1) as pool:  # most of the time they wait
            architectures = _try_architectures(probe)
            torch = pool.submit(_ask_torch, architectures)
            context = Context(root, caches[-1], folder, probe, refusal, architectures, torch.result)
            findings = [*pool.map(lambda check: _guarded(*check, context), checks)]
    finally:
        shutil.rmtree(probe, ignore_errors=True)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    return Report(findings, versions | torch.result())


def _make_probe(cache: Path) -> tuple[Path, Path, str | None]:
    """The nearest folder that exists, a new one for trials, and why that is not in the former."""
    folder = cache
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        return folder, Path(tempfile.mkdtemp(prefix=".doctor-", dir=folder)), None
    except OSError as error:
        return folder, Path(tempfile.mkdtemp(prefix="loader-doctor-")), error.strerror


def _try_architectures(probe: Path) -> str:
    try:
        return _architectures(probe)
    except Exception:
        return ""  # check_gpu will fail on the same, and say so


def main(arguments: list[str], root: Path, caches: tuple[Path, ...]) -> int:
    """`python -m loader doctor`: print the report; exit status 0 only if a build would work."""
    parser = argparse.ArgumentParser(
        prog="python -m loader doctor", description="Check all that a build needs."
    )
    parser.add_argument("--json", action="store_true", help="for bug reports")
    options = parser.parse_args(arguments)
    report = doctor(root, caches)
    text = report.json() if options.json else str(report)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding))
    return 0 if report.ok else 1


def _guarded(subject: str, check: Callable[[Context], Found], context: Context) -> Finding:
    """The finding of a check; one that fails itself must not hide the others'."""
    try:
        return Finding(subject, *check(context))
    except _TorchMissing:
        return Finding(subject, "warning", "not checked: torch does not import")
    except Exception as error:
        return Finding(subject, "warning", f"not checked: {type(error).__name__}: {error}")


def _ask_torch(architectures: str) -> dict:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TORCH_CUDA_ARCH_LIST": architectures or "9.0"}
    command = [sys.executable, "-c", _TORCH, json.dumps(sys.path)]
    _, said = _run(command, 3, **hidden)
    for line in said.splitlines():
        if line.startswith("FACTS "):
            return json.loads(line.removeprefix("FACTS "))
    return {"torch_error": _last_line(said)}


def _wrap(head: str, text: str, room: int) -> list[str]:
    """Text behind a head, broken to the room; commands stay whole, to be copied."""
    if text.startswith("$ "):
        return [head + text]
    width, indent = max(room, len(head) + 30), " " * len(head)
    lines = textwrap.wrap(text, width - len(head), break_long_words=False, break_on_hyphens=False)
    return [(indent if i else head) + line for i, line in enumerate(lines)]


def _anonymous(value):
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
