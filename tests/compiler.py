"""A compiler that compiles nothing twice in a session: what `c++`, `g++` and `nvcc` are to checkouts.

Hundreds of tests build the same few sources in caches of their own. Here an object is kept under
the digest of its preprocessed source, the arguments and the compiler; a test's folder in any of
these does not count, nor does a comment. A source whose place the compiler speaks of is compiled anew.
Nor is it optimised much, which takes half of the time, but where OCTET_OPTIMIZE says so: 1, or the
folder whose sources are to be. What the operators compute is tested with the checkout's own build,
in which flags are what they are.

It is called thousands of times, most often for what is left to the compiler at once: so this half
imports next to nothing, and what compiled_once.py imports is as little as a hit needs.
"""

import os
import sys

PROGRAMS = ("bin/c++", "bin/g++", "cuda/nvcc")
_quick: list[dict] = []  # what `for_no_gpu` returns, once that is known


def install(folder):
    """Make the programs, in folders of `folder`, of which `bin` is one for the front of PATH."""
    import contextlib
    import shutil

    for program in PROGRAMS:
        (folder / program).parent.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(
        f"#!{sys.executable} -IS\nimport sys\n"
        f"sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})\n"
        "import compiler\ncompiler.main()\n"
    )
    draft.chmod(0o755)
    for program in PROGRAMS:
        if shutil.which(os.path.basename(program)):
            with contextlib.suppress(FileExistsError):  # of another worker
                os.link(draft, folder / program)
    draft.unlink()
    return folder


def for_no_gpu() -> dict:
    """What has nvcc take half to a fifth of its time for code that nobody runs here."""
    import contextlib
    import re
    import subprocess

    if not _quick:
        said = ""
        with contextlib.suppress(OSError):
            command = ["nvcc", "--version"]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        release = re.search(r"release (\d+)\.(\d+)", said)
        knows = release and (int(release[1]), int(release[2])) >= (12, 9)
        _quick.append({"NVCC_APPEND_FLAGS": "-Ofc=max"} if knows else {})
    return _quick[0]


def real(name: str, folder: str) -> str:
    """The program of this name behind the one in `folder`."""
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(place, name)
        if os.access(path, os.X_OK) and not os.path.samefile(place, folder):
            return path
    sys.exit(f"{name}: not found")


def is_plain(words: list[str]) -> bool:
    """True if these words compile one source of somebody's to one object.

    What names places in its object, or makes more than an object, is left alone; the list of the
    headers reached is made by the preprocessor, where it is told a file for it.
    """
    sources = [word for word in words if word.endswith((".cpp", ".cu")) and ".cudafe" not in word]
    if not words.count("-c") == words.count("-o") == len(sources) == 1:
        return False
    listed = "-MF" in words and sources[0].endswith(".cpp")

    def is_other(word: str) -> bool:
        dependencies = word.startswith("-M") or (word.startswith("--") and "-dependenc" in word)
        debug = word.startswith("-g") and word[2:] in ("", *"0123456789")
        return debug or word.startswith(("@", "-fsanitize")) or (dependencies and not listed)

    return not any(map(is_other, words))


def main() -> None:
    place, name = os.path.split(os.path.abspath(sys.argv[0]))
    program, words = real(name, place), sys.argv[1:]
    if not is_plain(words):
        os.execv(program, [program, *words])
    import compiled_once

    where = os.environ.get("OCTET_OPTIMIZE")
    much = where and any(f"/{where}/" in word for word in words if word.endswith(".cpp"))
    quickly = name != "nvcc" and not (much or where == "1")
    if quickly:
        words = ["-O1" if word == "-O3" else word for word in words]
    compiled_once.main(program, words, quickly)
