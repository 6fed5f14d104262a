"""What the pages have of tables in the code: settings, the doctor's findings, operators, notebooks.

    python docs/made.py

puts each between its marks, on every page; `make docs` runs it, and a test holds it current.
"""

import ast
import json
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["LOADER_BUILD"] = "lazy"  # nothing is built for a table

_MARK = "<!-- `make docs` makes this: {} -->"
_END = "<!-- end -->"


def settings() -> str:
    """Return the table of settings."""
    from loader.jit.machine.settings import SETTINGS

    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    for s in SETTINGS:
        values = ", ".join(f"`{value}`" for value in s.allowed) or s.values
        lines.append(f"| `{s.name}` | {values} | `{s.default}` | {s.meaning} |")
    return "\n".join(lines)


def operators() -> str:
    """Return the README's table of operators, with a link to the page of each."""
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)\((.*?)\)` (\|.*)$", text, re.MULTILINE)
    head = ["| operator | shapes | differentiable in | |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| [{n}](operators/{n}.md)`({a})` {rest}" for n, a, rest in rows)])


def notebooks() -> str:
    """Return a list of the notebooks: the first heading of each, and the sentence below it."""
    lines = []
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        text = "".join(next(c["source"] for c in cells if c["cell_type"] == "markdown"))
        title, _, rest = text.lstrip("# ").partition("\n")
        about = re.split(r"(?<=\.)\s", rest.strip())[0]
        lines.append(f"- [{title}](../examples/{path.name}): {about}")
    return "\n".join(lines)


def findings() -> str:
    """Return what the doctor may find that is not well, and its cures, as its sources have them."""
    folder = ROOT / "jit" / "tools" / "doctor"
    common = _constants(ast.parse((folder / "context.py").read_text()), {})
    lines = ["| it looks at | it may find | and says |", "|---|---|---|"]
    for name in ("software.py", "system.py"):
        tree = ast.parse((folder / name).read_text())
        functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        constants = _constants(tree, common)
        for subject, check in _checks(tree):
            found = _returned(functions, check, constants)
            rows = [
                row
                for row in dict.fromkeys(found)
                if row[0] != "ok" and not row[1].startswith("not checked")
            ]
            for k, (state, text, cure) in enumerate(rows):
                where = f"**{subject}**" if k == 0 else ""
                lines.append(f"| {where} | {state}: {_cell(text)} | {_cure(cure)} |")
    return "\n".join(lines)


def messages() -> str:
    """Return what compilers, linkers and the system say, and what that means."""
    from loader.jit.errors import advice

    lines = ["| where a message has | |", "|---|---|"]
    for table in (advice.MACHINE, advice.ERRORS, advice.LIBRARIES):
        for pattern, text in table:
            said = " or ".join(f"`{_plain(part)}`" for part in _alternatives(pattern.pattern)[:2])
            lines.append(f"| {said} | {_cell(text.replace('{what}', '...'))} |")
    return "\n".join(lines)


def kinds() -> str:
    """Return the kinds of errors that programs are told."""
    from loader.jit.errors.problem import KINDS

    return "\n".join(["| `kind` | |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in KINDS.items())])


def mends() -> str:
    """Return what is mended in the sources of old extensions."""
    from loader.jit.extension.mends import MENDS

    rows = (f"| {mend.what} | {mend.now} |" for mend in MENDS)
    return "\n".join(["| in the source | what the compiler gets |", "|---|---|", *rows])


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern that are alternatives of the whole of it."""
    depth, parts = 0, [""]
    for mark in pattern:
        depth += (mark == "(") - (mark == ")")
        if mark == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += mark
    return parts


def _plain(pattern: str) -> str:
    """A pattern as what it finds: the first of its alternatives, ... for what may be anything."""
    text = pattern.replace(r"\(", "").replace("[`']", "'")
    text = re.sub(r"\\b|[\^$]", "", text)
    text = re.sub(r"\[[^]]*\][+*?]?|\\S\+|\\w[+*]|\\d\+|\.\*", "...", text)
    while found := re.search(r"\((?:\?:|\?P<\w+>)?([^()|]*)[^()]*\)\??", text):
        text = text[: found.start()] + found[1] + text[found.end() :]
    return re.sub(r"\\(.)", r"\1", re.sub(r"(\.\.\.)+", "...", text)).replace("|", "").strip(": ")


def _checks(tree: ast.Module) -> list[tuple[str, ast.expr]]:
    """Subjects and their checks, in the order of the report."""
    (table,) = [
        n.value
        for n in tree.body
        if isinstance(n, ast.AnnAssign) and getattr(n.target, "id", "") == "CHECKS"
    ]
    return [(ast.literal_eval(k), v) for k, v in zip(table.keys, table.values, strict=True)]


def _constants(tree: ast.Module, known: dict[str, str]) -> dict[str, str]:
    """The module's own texts by name."""
    found = dict(known)
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            found[node.targets[0].id] = _text(node.value, found)
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return):
            inner: dict[str, str] = dict(found)
            _walk(node.body, inner, [])
            if isinstance(node.body[-1].value, ast.JoinedStr):  # what ends in a text is a cure
                found[f"{node.name}()"] = _text(node.body[-1].value, inner)
    return found


def _returned(functions: dict, check: ast.expr, names: dict[str, str]) -> list[tuple]:
    """State, text and cure of all that a check may return, with ... for what is filled in."""
    if isinstance(check, ast.Lambda):
        call = check.body
        if not isinstance(call, ast.Call) or call.func.id not in functions:
            return []
        node = functions[call.func.id]
        given = zip(node.args.args, call.args, strict=True)
        texts = {a.arg: _text(value, names) for a, value in given}
        names = names | {name: text for name, text in texts.items() if text != "..."}
    else:
        node = functions[check.id]
    found = []
    _walk(node.body, dict(names), found)
    return found


def _walk(body: list[ast.stmt], names: dict[str, str], found: list[tuple]) -> None:
    """Statements in their order: texts that are given a name, and what is returned."""
    for node in body:
        if isinstance(node, ast.Assign):
            _remember(node, names)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = names.get(node.target.id, "") + _text(node.value, names)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple):
            state, *texts = (_text(e, names) for e in node.value.elts)
            found.append(("problem" if state == "..." else state, texts[0], "".join(texts[1:])))
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(getattr(node, inner, None), list):
                _walk(getattr(node, inner), names, found)
        for handler in getattr(node, "handlers", []):
            _walk(handler.body, names, found)


def _remember(node: ast.Assign, names: dict[str, str]) -> None:
    (target,) = node.targets
    pairs = [(target, node.value)]
    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
        pairs = [*zip(target.elts, node.value.elts, strict=True)]
    for name, value in pairs:
        if isinstance(name, ast.Name):
            names[name.id] = _text(value, names)


def _text(node: ast.expr, names: dict[str, str]) -> str:
    """The text that an expression gives, with ... for what only a run can tell."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_text(v, names) for v in values)
        case ast.FormattedValue(value=value):
            return _text(value, names)
        case ast.Name(id=name):
            return names.get(name, "...")
        case ast.BinOp(left=left, right=right):
            return _text(left, names) + _text(right, names)
        case ast.IfExp(body=body, orelse=other):
            return " / ".join(filter(None, (_text(body, names), _text(other, names))))
        case ast.BoolOp(op=ast.Or(), values=[*_, last]):
            return _text(last, names)
        case ast.Call(func=ast.Name(id=name)):
            return names.get(f"{name}()", "...")
        case _:
            return "..."


def _cell(text: str) -> str:
    """As Markdown wants it in a table."""
    for mark, escaped in (("|", "\\|"), ("*", "\\*"), ("__", "\\_\\_"), ("<", "&lt;")):
        text = text.replace(mark, escaped)
    return re.sub(r"\.{4,}", "...", text).strip()


def _cure(text: str) -> str:
    """Its commands as code."""
    lines = [f"`{line[2:]}`" if line.startswith("$ ") else _cell(line) for line in text.split("\n")]
    return "the cure that fits the message" if text == "..." else "<br>".join(filter(None, lines))


MADE = {f.__name__: f for f in (settings, operators, notebooks, findings, messages, kinds, mends)}


def filled(text: str) -> str:
    """Return a page with its tables as the code has them."""
    marks = re.escape(_MARK).replace(r"\{\}", r"(\w+)") + r"\n.*?" + re.escape(_END)

    def made(found: re.Match) -> str:
        return f"{_MARK.format(found[1])}\n{MADE[found[1]]()}\n{_END}"

    return re.sub(marks, made, text, flags=re.DOTALL)


def pages() -> list[Path]:
    """Return those that may have marks."""
    return [p for p in sorted((ROOT / "docs").rglob("*.md")) if p.parent.name != "notebooks"]


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
