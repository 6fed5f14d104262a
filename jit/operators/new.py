"""`python -m loader new NAME`: a working operator, the row of files of another under its name.

There is no template to keep in step: what is copied is a row that is built and tested itself.
"""

import ctypes
import keyword
import os
import re
from pathlib import Path

from ..errors.cxx import KEYWORDS
from ..machine.sources import HOME, Sources, discover

ROW = ("include/X.h", "kernels/X.cu", "kernels/X_cpu.cpp", "ops/X.cpp", "ops/X.py")
MOST = 15  # arguments: kMaxInputs of include/elementwise.h less grad_out

# Names that an operator X gives to others beside its own.
_FORMS = ("", "_fw", "_bw", "_reference", "_backward", "_cpu", "_cuda")
_WORD = r"[a-z][a-z0-9]*(_[a-z0-9]+)*"
_TEST = """{imports}

class Test{camel}({bases}):
    \"\"\"What is tested of every elementwise operator; add values known from elsewhere.\"\"\"

    name, inputs, first = "{name}", {count}, "{first}"{library}
"""


def create(
    name: str,
    folder: Path | None,
    like: str,
    public: frozenset[str],
    arguments: list[str] | None = None,
) -> str:
    """Write the files of operator `name` into `folder`, or the checkout; what to tell the user.

    `public` are the names that are something else in `loader`. With `arguments` the operator is
    elementwise in these tensors. All files or none are written, and none that is there is touched.

    Raises: ValueError for a name that will not do, for a file that exists, where nothing can be
        written, and outside a checkout without a folder.
    """
    root = folder.absolute() if folder and folder.resolve() != HOME.resolve() else HOME
    if root is HOME and not (HOME / "loader.py").exists():
        raise ValueError("loader is installed, not checked out: name a folder with --in FOLDER")
    if like not in (known := _copyable()):
        raise ValueError(f"--like takes one of {', '.join(known)}; got {like!r}")
    _check_name(name, root, public, like)
    if arguments is not None:
        _check_arguments(name, arguments, like)
    files = {}
    for file in ROW:
        text = (HOME / file.replace("X", like)).read_text()
        if arguments is not None:
            text = _with_arguments(text, file, arguments)
        files[root / file.replace("X", name)] = _renamed(text, like, name)
    files[root / f"tests/test_{name}.py"] = _test(files[root / f"ops/{name}.cpp"], name, root)
    _write(files)
    computes = files[root / f"ops/{name}.py"][3:].partition(",")[0]
    return _report(name, like, computes, root)


def _copyable() -> list[str]:
    """The operators that are elementwise and no more than a row of files."""
    return [
        unit
        for unit in discover(HOME)
        if all((HOME / file.replace("X", unit)).is_file() for file in ROW)
        and "OCTET_ELEMENTWISE(" in (HOME / "ops" / f"{unit}.cpp").read_text()
    ]


def _check_name(name: str, root: Path, public: frozenset[str], like: str) -> None:
    """ValueError where files of this name would not compile, or would hide something."""
    wish = "an operator's name is a Python and C++ name in lower case, such as gauss_blur"
    if not re.fullmatch(_WORD, name):
        raise ValueError(f"{wish}; got {name!r}")
    if keyword.iskeyword(name) or name in KEYWORDS:
        language = "Python" if keyword.iskeyword(name) else "C++"
        raise ValueError(f"{wish}; {name!r} is a word of {language}'s own, choose another")
    for folder in dict.fromkeys((HOME, root)):
        units = discover(folder) if (folder / "ops").is_dir() else {}
        taken = {unit + form: unit for unit in units for form in _FORMS}
        taken |= {unit.removesuffix(form): unit for unit in units for form in _FORMS[1:]}
        if name in taken:
            raise ValueError(
                f"{name!r} is taken by the operator {taken[name]} in {folder}/ops; choose another"
            )
    if name in public or (HOME / name).is_dir():
        raise ValueError(f"loader.{name} is something else already; choose another name")
    row, sources = [file.replace("X", like) for file in ROW], Sources(HOME)
    reached = {header for source in row[1:4] for header in sources.closure(source)}
    for header in sorted(reached.difference(row)):
        text = re.sub(r"//.*", "", (HOME / header).read_text())
        if re.search(rf"\b{name}(?:\s*[(<]|::)|\b{_camel(name)}\b", text):
            raise ValueError(f"{name!r} has a meaning in {header}; choose another name")
    try:  # of libc and libm, whose headers every source reaches: `exp`, `read`
        ctypes.CDLL(None)[name]
    except AttributeError:
        return
    raise ValueError(
        f"{name!r} is a function of C's own, which the new one would be confused with; choose "
        f"another, {name}_op say"
    )


def _check_arguments(name: str, arguments: list[str], like: str) -> None:
    """ValueError where an operator cannot have arguments of these names."""
    if like != "square":
        raise ValueError(f"--args makes an operator of its own; leave out --like {like}")
    if not 1 <= len(arguments) <= MOST:
        raise ValueError(f"--args takes 1 to {MOST} names, got {len(arguments)}")
    for argument in arguments:
        if not re.fullmatch(_WORD, argument):
            raise ValueError(f"--args takes names in lower case, such as a b t; got {argument!r}")
        if keyword.iskeyword(argument) or argument in KEYWORDS:
            raise ValueError(f"--args: {argument!r} is a word of a language; choose another")
        if argument in (name, "grad_out", "output_mask") or arguments.count(argument) > 1:
            raise ValueError(f"--args: {argument!r} has a meaning already; choose another")


def _with_arguments(text: str, file: str, names: list[str]) -> str:
    """The text of one of square's files with these arguments instead of `x`.

    The operator computes the sum of their squares at first.
    """
    first, *rest = names
    formula = " + ".join(f"{name} * {name}" for name in names)
    listed, taken = ", ".join(names), ", ".join(f"A {name}" for name in names)
    gradients, result = ", ".join(f"2 * grad_out * {name}" for name in names), "A"
    if rest:
        gradients, result = f"{{{gradients}}}", f"Several<A, {len(names)}>"
    like_first = f": shape, dtype and device of `{first}`, any strides.\n"
    also = "".join(f"        {name}{like_first}" for name in rest)
    changes = {
        "include/X.h": (
            (r"A operator\(\)\(A grad_out, A x\)", f"{result} operator()(A grad_out, {taken})"),
            (r"A operator\(\)\(A x\)", f"A operator()({taken})"),
            (r"2 \* grad_out \* x(?=;)", gradients),
            (r"x \* x(?=;)", formula),
        ),
        "ops/X.cpp": ((r", x\)$", f", {listed})"),),
        "ops/X.py": (
            (r"x: Tensor", ", ".join(f"{name}: Tensor" for name in names)),
            (r"x \* x", formula),
            (r"^        x: any (.*)\n( .*\n)", rf"        {first}: any \1\n\2{also}"),
            (r"_square\(x\)", f"_square({listed})"),
            (r"`x`(?= is no)", "an argument"),
            (r"`x`", f"`{first}`"),
        ),
    }
    for old, new in changes.get(file, ()):
        text, count = re.subn(old, new, text, flags=re.MULTILINE)
        assert count, f"{file.replace('X', 'square')} has changed: nothing fits {old}"
    return text


def _renamed(text: str, like: str, name: str) -> str:
    """The text of a file of `like` as one of `name`, without what is said of `like` alone."""
    if computed := re.match(r'"""(.*, element by element).*', text):
        text = f'"""{computed[1]}."""{text[computed.end() :]}'
        text = re.sub(r'(:\n    """).*', rf"\1Compute {computed[1]}.", text, count=1)
    text = re.sub(rf"{like}(?!\(\))", name, text)  # x.square() is torch's
    text = text.replace(_camel(like), _camel(name))
    includes = re.compile(r'(?:#include ".*"\n){2,}')  # in clang-format's order
    return includes.sub(lambda found: "".join(sorted(found[0].splitlines(True))), text)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _test(registered: str, name: str, root: Path) -> str:
    """The test of what is registered so; outside of the checkout it loads its folder's library."""
    (arguments,) = re.findall(r"OCTET_ELEMENTWISE\(\w+, \w+, (.*)\)", registered)
    first, *rest = arguments.split(", ")
    bases = "BackwardTests, " * ("OCTET_ELEMENTWISE_BACKWARD(" in registered) + "ElementwiseTests"
    imports, library = f"from elementwise import {bases}\n", ""
    if root is not HOME:
        imports = "from pathlib import Path\n\nimport loader\n" + imports.replace(
            "elementwise", "loader.tests.elementwise", 1
        )
        library = "\n    library = loader.Library(Path(__file__).parents[1])"
    return _TEST.format(
        imports=imports,
        camel=_camel(name),
        bases=bases,
        name=name,
        count=1 + len(rest),
        first=first,
        library=library,
    )


def _write(files: dict[Path, str]) -> None:
    """Write all, or none."""
    there = [str(path) for path in files if os.path.lexists(path)]
    if there:
        raise ValueError(f"there is already {', '.join(there)}; nothing was written")
    written = []
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x") as file:
                written.append(path)
                file.write(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise ValueError(f"{error.filename or path} cannot be written: {error.strerror}") from None


def _report(name: str, like: str, computes: str, root: Path) -> str:
    shown = os.path.relpath(root)
    at = "" if shown == "." else f"{root}/" if shown.startswith("..") else f"{shown}/"
    mine = f"mine = loader.Library({str(root)!r}); mine.{name}"
    use = f"loader.{name}" if root is HOME else mine
    width = len(f"{at}kernels/{name}_cpu.cpp")
    return f"""made {name} from {like}; it computes {computes}, so far:
  {f"{at}include/{name}.h":{width}}  the formula and its gradient, for CPU and CUDA
  {at}kernels/{name}.cu
  {at}kernels/{name}_cpu.cpp
  {f"{at}ops/{name}.cpp":{width}}  names of the arguments
  {f"{at}ops/{name}.py":{width}}  function with its docstring, reference
  {at}tests/test_{name}.py
next:
  python -m pytest {at}tests/test_{name}.py  # builds it; passes as it is
  change the formula in include/{name}.h, {name}_reference in ops/{name}.py, the test
  in Python: import loader; {use}(...); after an edit: loader.reload()"""
