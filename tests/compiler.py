"""A compiler that compiles nothing twice in a session: what `c++`, `g++` and `nvcc` are to checkouts.

Hundreds of tests build the same few sources in caches of their own. Here an object is kept under
the digest of its preprocessed source, the arguments and the compiler; a test's folder in any of
these does not count, nor does a comment. A source whose place the compiler speaks of is compiled anew.
"""

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

PROGRAMS = ("bin/c++", "bin/g++", "cuda/nvcc")
# Flags of what is left alone: objects that name places, more products than an object. The list of
# the headers reached is made by the preprocessor, where it is told a file for it.
_OTHERS = {
    True: re.compile(r"@|-g\d?$|-fsanitize"),
    False: re.compile(r"@|-g\d?$|-fsanitize|-M|--\w+-dependenc"),
}
_ENVIRONMENT = re.compile(
    r"C?PATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|COMPILER_PATH|GCC_|NVCC_|SOURCE"
)


def install(folder: Path) -> Path:
    """Make the programs, in folders of `folder`, of which `bin` is one for the front of PATH."""
    for program in PROGRAMS:
        (folder / program).parent.mkdir(parents=True, exist_ok=True)
    draft = folder / f"draft-{os.getpid()}"
    draft.write_text(f"#!{sys.executable} -IS\n" + Path(__file__).read_text())
    draft.chmod(0o755)
    for program in PROGRAMS:
        if shutil.which(os.path.basename(program)):
            with contextlib.suppress(FileExistsError):  # of another worker
                os.link(draft, folder / program)
    draft.unlink()
    return folder


def real(name: str, folder: str) -> str:
    """The program of this name behind the one in `folder`."""
    for place in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(place, name)
        if os.access(path, os.X_OK) and not os.path.samefile(place, folder):
            return path
    sys.exit(f"{name}: not found")


def plain(words: list[str]) -> bool:
    """True if these words compile one source of somebody's to one object."""
    sources = [word for word in words if word.endswith((".cpp", ".cu")) and ".cudafe" not in word]
    if not words.count("-c") == words.count("-o") == len(sources) == 1:
        return False
    others = _OTHERS["-MF" in words and sources[0].endswith(".cpp")]
    return not any(map(others.match, words))


def main() -> None:
    place, name = os.path.split(os.path.abspath(sys.argv[0]))
    folder = os.path.dirname(place)
    program, words = real(name, place), sys.argv[1:]
    if not plain(words):
        os.execv(program, [program, *words])
    at = words.index("-o")
    made, rest = words[at + 1], [word for word in words[:at] + words[at + 2 :] if word != "-c"]
    flag = ["-Xcompiler", "-P"] if name == "nvcc" else ["-P"]
    done = subprocess.run([program, "-E", *flag, *rest], capture_output=True, check=False)
    tests = re.compile(os.path.dirname(folder) + r"(/popen-gw\d+)?/[^/\s\"]+/")
    found = os.stat(program)
    environment = {k: v for k, v in os.environ.items() if _ENVIRONMENT.match(k) and k != "PATH"}
    facts = [program, found.st_size, found.st_mtime_ns, rest, sorted(environment.items())]
    text = tests.sub("@/", done.stdout.decode(errors="surrogateescape"))
    facts = tests.sub("@/", repr(facts))
    digest = hashlib.sha256(f"{facts}\n{text}".encode(errors="surrogateescape")).hexdigest()
    stored = os.path.join(folder, f"{digest}.o")
    lock = os.open(f"{stored}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for the object, and finds it
    if done.returncode or not os.path.exists(stored):
        run = subprocess.run(
            [program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        sys.stdout.buffer.write(run.stdout)
        if run.returncode == 0 and not tests.search(run.stdout.decode(errors="surrogateescape")):
            Path(f"{stored}.said").write_bytes(run.stdout)
            shutil.copyfile(made, f"{stored}.{os.getpid()}")
            os.rename(f"{stored}.{os.getpid()}", stored)
        sys.stdout.flush()
        if run.returncode < 0:
            os.kill(os.getpid(), -run.returncode)
        sys.exit(run.returncode)
    shutil.copyfile(stored, made)
    sys.stdout.buffer.write(Path(f"{stored}.said").read_bytes())


if __name__ == "__main__":
    main()
