"""`python -m loader new NAME`: a working operator, square's row of files under another name.

There is no template to keep in step: the row that is copied is the one that README names for it.
"""

import ctypes
import keyword
import os
import re
from pathlib import Path

from ..machine.sources import HOME, discover
from .arguments import CXX_WORDS, check_arguments, formula, with_arguments

ROW = ("include/X.h", "kernels/X.cu", "kernels/X_cpu.cpp", "ops/X.cpp", "ops/X.py")
TEST = "tests/test_X.py"
LIKE = {"square": "x * x", "add2": "a + b"}  # of what it can be made, and what they compute

# Names that an operator X gives to others beside its own.
_FORMS = ("", "_fw", "_bw", "_reference", "_backward", "_cpu", "_cuda")
_SHARED = (
    "common.h",
    "torch/glue.h",
    "torch/shapes.h",
    "elementwise.h",
    "elementwise_cpu.h",
    "torch/elementwise_glue.h",
)
# What is said of square and add2 alone.
_OWN = {
    ": the smallest complete operator with a backward kernel": "",
    ": the smallest operator of two arguments": "",
    "Square each element.": "Compute x * x, element by element.",
}


def create(
    name: str,
    folder: Path | None,
    like: str,
    public: frozenset[str],
    arguments: list[str] | None = None,
) -> str:
    """Write the files of operator `name` into `folder`, or the checkout; what to tell the user.

    `public` are the names that are something else in `loader`. With `arguments` the operator is
    elementwise in these tensors. All files or none are written, and none
    that is there is touched.

    Raises: ValueError for a name that will not do, for a file that exists, where nothing can be
        written, and outside a checkout without a folder.
    """
    outside = folder is not None and folder.resolve() != HOME.resolve()
    if not outside and not (HOME / "loader.py").exists():
        raise ValueError("loader is installed, not checked out: name a folder with --in FOLDER")
    root = folder.absolute() if outside else HOME
    _check_name(name, root, public)
    if arguments is not None:
        check_arguments(name, arguments, like)
    files = {}
    for file in (*ROW, TEST):
        text = (HOME / file.replace("X", like)).read_text()
        if arguments is not None:
            text = with_arguments(file, text, arguments)
        files[root / file.replace("X", name)] = _renamed(text, like, name)
    if outside:
        test = root / TEST.replace("X", name)
        files[test] = _outside(files[test], name)
    _write(files)
    computes = LIKE[like] if arguments is None else formula(arguments)
    return _report(name, like, computes, root, outside)


def _check_name(name: str, root: Path, public: frozenset[str]) -> None:
    """ValueError where files of this name would not compile, or would hide something."""
    wish = "an operator's name is a Python and C++ name in lower case, such as gauss_blur"
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ValueError(f"{wish}; got {name!r}")
    language = "Python" if keyword.iskeyword(name) else "C++"
    if keyword.iskeyword(name) or name in CXX_WORDS.split():
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
    camel = _camel(name)
    for header in _SHARED:
        text = re.sub(r"//.*", "", (HOME / "include" / header).read_text())
        if re.search(rf"\b{name}(?:\s*[(<]|::)|\b{camel}\b", text):
            raise ValueError(f"{name!r} has a meaning in include/{header}; choose another name")
    try:  # of libc and libm, whose headers every source reaches: `exp`, `read`
        ctypes.CDLL(None)[name]
    except AttributeError:
        return
    raise ValueError(
        f"{name!r} is a function of C's own, which the new one would be confused with; choose "
        f"another, {name}_op say"
    )


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _renamed(text: str, like: str, name: str) -> str:
    """The text of a file of `like` as one of `name`."""
    for phrase, instead in _OWN.items():
        text = text.replace(phrase, instead)
    text = re.sub(rf"{like}(?!\(\))", name, text)  # x.square() is torch's
    text = text.replace(_camel(like), _camel(name))
    includes = re.compile(r'(?:#include ".*"\n){2,}')  # in clang-format's order
    return includes.sub(lambda found: "".join(sorted(found[0].splitlines(True))), text)


# Outside the checkout a test brings what the checkout's own tests find in theirs.
_HEAD = """
mine = loader.Library(Path(__file__).parents[1])
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request):
    return request.param
"""


def _outside(text: str, name: str) -> str:
    """The text of a test as one of a folder that `loader.Library` loads."""
    if "import pytest\n" not in text:
        text = text.replace("import torch\n", "import pytest\nimport torch\n", 1)
    changes = (
        (r"\A", "from pathlib import Path\n\n"),
        (r"from elementwise import (.*)\n\nimport loader\n", r"\nimport loader\nfrom loader.tests."
         rf"elementwise import \1\n{_HEAD}"),
        (r"\bloader\.(?=" + name + r"\b|" + name + "_)", "mine."),
        (r"(\n    name, inputs, first = .*\n)", r"\1    library = mine\n"),
    )  # fmt: skip
    for old, new in changes:
        text, count = re.subn(old, new, text)
        assert count, f"tests/test_X.py has changed: nothing fits {old}"
    return text


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


def _report(name: str, like: str, computes: str, root: Path, outside: bool) -> str:
    shown = os.path.relpath(root)
    at = "" if shown == "." else f"{root}/" if shown.startswith("..") else f"{shown}/"
    files = {
        f"include/{name}.h": "the formula and its gradient, for CPU and CUDA",
        f"kernels/{name}.cu": "",
        f"kernels/{name}_cpu.cpp": "",
        f"ops/{name}.cpp": "names of the arguments",
        f"ops/{name}.py": "function with its docstring, reference",
        f"tests/test_{name}.py": "",
    }
    width = max(map(len, files)) + len(at)
    use = f"mine = loader.Library({str(root)!r}); mine.{name}" if outside else f"loader.{name}"
    lines = [
        f"made {name} from {like}; it computes {computes}, so far:",
        *(f"  {at + file:{width}}  {what}".rstrip() for file, what in files.items()),
        "next:",
        f"  python -m pytest {at}tests/test_{name}.py  # builds it; passes as it is",
        f"  change the formula in include/{name}.h, {name}_reference in ops/{name}.py, the test",
        f"  in Python: import loader; {use}(...); after an edit: loader.reload()",
    ]
    return "\n".join(lines)
