"""What the site needs beyond Sphinx: API entries from the sources, formulas as MathML.

    ```{api} ops/square.py square
    ```

stands for the function's, or the class's, signature and docstring. The file is parsed and never
imported, so the site is built without torch, a compiler or a build.
"""

import ast
import inspect
import re
from pathlib import Path

import notebook_pages
from docutils import nodes
from docutils.statemachine import StringList
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).parents[1]
_SECTION = re.compile(r"(Args|Returns|Raises|Attributes|Source):\s*(.*)")


class Api(SphinxDirective):
    """One function or class, with the methods that are named after it; `as` gives another name."""

    required_arguments = 2  # file and name
    optional_arguments = 20  # methods

    def run(self) -> list[nodes.Node]:
        """Parse the entry as Markdown in its place."""
        file, name, *members = self.arguments
        self.env.note_dependency(str(ROOT / file))
        lines = entry(file, name, members).splitlines()
        made = nodes.container()
        self.state.nested_parse(StringList(lines, file), self.content_offset, made)
        return made.children


def entry(file: str, name: str, members: list[str], prefix: str = "") -> str:
    """Return the Markdown of an object and its members."""
    tree = ast.parse((ROOT / file).read_text())
    prefix = {"nn.py": "loader.nn", "distributed.py": "loader.distributed"}.get(file, "loader")
    if file.endswith("_sharded.py"):
        prefix = "loader.distributed"
    node = _named(tree, name, file)
    parts = [_directive(node, f"{prefix}.{name}", [])]
    for member in members:
        inner = _named(node, member, f"{file} {name}")
        parts.append(_directive(inner, f"{prefix}.{name}.{member}", ["self"]))
    return "\n".join(parts)


def _named(tree: ast.AST, name: str, where: str) -> ast.AST:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return node
    raise ValueError(f"{where} has no function or class {name}")


def _directive(node: ast.AST, name: str, dropped: list[str]) -> str:
    """The object's entry, as Sphinx has them for Python."""
    kind, signature = "function", node
    if isinstance(node, ast.ClassDef):
        found = [n for n in node.body if getattr(n, "name", "") == "__init__"]
        kind, signature, dropped = "class", found[0] if found else None, ["self"]
    elif dropped:
        kind = "method"
    head = name + (_signature(signature, dropped) if signature else "")
    text = markdown(ast.get_docstring(node, clean=False) or "")
    return f"````{{py:{kind}}} {head}\n\n{text}\n````\n"


def _signature(node: ast.FunctionDef, dropped: list[str]) -> str:
    """Arguments with their defaults; of what types they are the docstring says."""
    arguments = ast.parse(ast.unparse(node)).body[0].args
    for argument in (*arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    arguments.args = [a for a in arguments.args if a.arg not in dropped]
    return f"({ast.unparse(arguments)})"


def markdown(docstring: str) -> str:
    """Return a docstring as Markdown: its sections as headed lists."""
    made, section, begun = [], None, False
    for line in inspect.cleandoc(docstring).splitlines():
        if found := _SECTION.match(line):
            section, rest = found.groups()
            begun = bool(rest)  # on this line, and so a paragraph
            made += ["", f"**{section}**: {_escaped(rest)}"] if rest else ["", f"**{section}**", ""]
        elif not line.strip():
            made.append("")
            section = None if begun else section
        elif section is None:
            made.append(line if line.startswith("    ") else _escaped(line))
        elif begun:
            made.append(_escaped(line.strip()))
        elif not line.startswith(" "):
            section = None
            made += ["", _escaped(line)]
        else:
            made.append(_item(line, section))
    return "\n".join(made)


def _item(line: str, section: str) -> str:
    """A line of a section: the name before the colon begins an item of a list."""
    found = re.match(r"    ([\w.]+(?:, [\w.]+| and [\w.]+)*(?: and the rest)?): (.*)", line)
    if found and section in ("Args", "Raises", "Attributes"):
        return f"- `{found[1]}`: {_escaped(found[2])}"
    return ("  " if section in ("Args", "Raises", "Attributes") else "") + _escaped(line.strip())


def _escaped(text: str) -> str:
    """Stars outside of code are stars."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else p.replace("*", r"\*") for p in parts)


def _inline(self, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=False))
    raise nodes.SkipNode


def _block(self, node: nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def _leave_out(app, page: str, text: list[str]) -> None:
    """In a toctree `page?` is a page only where it is there."""
    there = app.env.found_docs
    text[0] = re.sub(
        r"^(\w+)\?\n", lambda m: f"{m[1]}\n" if m[1] in there else "", text[0], flags=re.MULTILINE
    )


def setup(app) -> dict:
    """Called by Sphinx."""
    app.add_directive("api", Api)
    app.connect("source-read", _leave_out)
    app.connect("builder-inited", notebook_pages.write)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
