"""torch's headers, parsed once for many sources: for compiled_once.py, which compiles by them.

What an operator's glue includes of torch takes a compiler longer than the glue itself. So a header
that holds just these includes is precompiled for the second source that asks for them with the same
flags. It comes before all that a source has: the glue's own headers have no macro that torch's would
see. Of what extensions include there are too many kinds, each of which takes six seconds to make.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import subprocess
import sys

_STABLE = re.compile(r"^#include <(torch/csrc/stable/\w+\.h)>", re.MULTILINE)


def read(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def wanted(words: list[str], own: list[str], others: list[str]) -> str:
    """What a source that reaches these files, of tests and of the machine, includes of torch."""
    if not any(word.startswith("-DTORCH_TARGET_VERSION") for word in words):
        return ""
    names = {name for path in own for name in _STABLE.findall(read(path))}
    reached = sorted(name for name in names if any(p.endswith(f"/include/{name}") for p in others))
    return "".join(f"#include <{name}>\n" for name in reached)


def first(program: str, words: list[str], source: str, files: list[str], facts: str, tests) -> list:
    """These words, with a precompiled header before all else where there is one for them.

    `files` are all that the source reaches, `facts` what else decides about what is made.
    """
    own = [path for path in files if tests.match(path)]
    text = wanted(words, own, [path for path in files if not tests.match(path)])
    if not text:
        return words
    named = "-DTORCH_EXTENSION_NAME="  # which torch's headers do not know
    flags = [word for word in words if word not in ("-c", "-MD", "-MMD", source)]
    flags = [word for word in flags if not word.startswith(named)]
    for name in ("-MF", "-o"):
        if name in flags:
            del flags[flags.index(name) : flags.index(name) + 2]
    about = [word for word in flags if not word.startswith("-I")], text
    key = hashlib.sha256(f"{facts} {about}".encode()).hexdigest()
    place = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(sys.argv[0]))), key)
    try:
        os.mkdir(place)
        return words  # it may be the only one
    except FileExistsError:
        header, made = f"{place}/prelude.h", f"{place}/prelude.h.gch"
    if not os.path.exists(header):
        with open(f"{place}/lock", "w") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            make([program, *flags], text, header, made)
    return ["-include", header, *words] if os.path.exists(made) else words


def make(command: list[str], text: str, header: str, made: str) -> None:
    """Precompile it, unless another process has; where that fails there is a header alone."""
    if os.path.exists(header):
        return
    draft = f"{header}.draft"
    with open(draft, "w") as file:
        file.write(text)
    words = ["-x", "c++-header", draft, "-o", f"{made}.draft"]
    done = subprocess.run([*command, *words], capture_output=True, check=False)
    if done.returncode == 0 and not done.stderr:
        os.rename(f"{made}.draft", made)
    os.rename(draft, header)
