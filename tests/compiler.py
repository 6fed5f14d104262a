"""A compiler that compiles nothing twice in a session: what `c++`, `g++` and `nvcc` are to checkouts.

Hundreds of tests build the same few sources in caches of their own. Here an object is kept under
the digest of its preprocessed source, the arguments and the compiler; a test's folder in any of
these does not count, nor does a comment. A source whose place the compiler speaks of is compiled anew.

To preprocess what includes torch takes half a second, thousands of times. So it is noted which
headers a source was seen to reach and what they held; while they hold it, that is not done again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = ("bin/c++", "bin/g++", "cuda/nvcc")
# Flags of what is left alone: objects that name places, more products than an object. The list of
# the headers reached is made by the preprocessor, where it is told a file for it.
_OTHERS = {
    True: re.compile(r"@|-g\d?$|-fsanitize"),
    False: re.compile(r"@|-g\d?$|-fsanitize|-M|--\w+-dependenc"),
}
# What decides about the preprocessed source, and where lists go.
_FOR_TEXT = "-D", "-U", "-I", "-isystem", "-iquote", "-idirafter", "-include", "-MF", "-MT", "-MQ"
_NAME = re.compile(r"'-DTORCH_EXTENSION_NAME=[^']*', ")  # which a kernel has no use for, or shows
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


def behind(words: list[str]) -> list[str]:
    """The words that matter once a source is preprocessed."""
    kept, rest = [], iter(words)
    for word in rest:
        if word in _FOR_TEXT:
            next(rest, None)
        elif not word.startswith(_FOR_TEXT):
            kept.append(word)
    return kept


class Notes:
    """The headers that a source was seen to reach, in each form that these have had.

    A note has the object's name, what each header held, and what the compiler was asked to list.
    """

    def __init__(self, folder: str, tests: re.Pattern, facts: str, source: str, words: list[str]):
        self.tests, self.begun = tests, time.time()
        found = tests.match(os.path.abspath(source))
        self.here = found[0] if found else "@/"  # the folder of this test
        places = [os.path.dirname(source) or ".", *(word.removeprefix("-I") for word in words)]
        others = sorted(  # of which one may be found before another
            name
            for place in {*map(os.path.abspath, filter(os.path.isdir, places))}
            if tests.match(place + "/")
            for _, _, files in os.walk(place)
            for name in files
            if name.endswith((".h", ".cuh", ".hpp"))
        )
        with open(source, "rb") as file:
            text = f"{facts}{tests.sub('@/', os.getcwd() + '/')}{others}\n".encode() + file.read()
        self.folder = os.path.join(folder, hashlib.sha256(text).hexdigest())

    def _state(self, path: str) -> str:
        """What tells whether a file is as it was; the machine's own are not edited."""
        if not self.tests.match(path):
            found = os.stat(path)
            return f"{found.st_size} {found.st_mtime_ns}"
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()

    def find(self) -> tuple[str, str]:
        """The object's name, or none, and the list."""
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else ():
            with contextlib.suppress(OSError):
                note = json.loads(Path(self.folder, name).read_text())
                states = note["headers"].items()
                if all(
                    self._state(path.replace("@/", self.here, 1)) == was for path, was in states
                ):
                    return note["object"], note["list"].replace("@/", self.here)
        return "", ""

    @staticmethod
    def files(listed: str) -> list[str]:
        """Those in a list `object: files`."""
        names = listed.replace("\\\n", " ").partition(": ")[2].split()
        return [os.path.abspath(name) for name in names]

    def states(self, listed: str) -> dict[str, str]:
        """State of each file in a list; none where one was edited meanwhile."""
        with contextlib.suppress(OSError):
            states = {path: self._state(path) for path in self.files(listed)}
            if all(os.stat(path).st_ctime < self.begun - 0.01 for path in states):
                return states
        return {}

    def hidden(self, listed: str) -> str:
        """Code that nvcc's preprocessor leaves out, being the host's: of files with such parts."""
        texts = (Path(path).read_text() for path in self.files(listed) if self.tests.match(path))
        return "".join(re.sub(r"//.*|\s", "", text) for text in texts if "__CUDA_ARCH__" in text)

    def keep(self, stored: str, listed: str, states: dict[str, str]) -> None:
        """Note this for `find`."""
        text = json.dumps({"object": stored, "headers": states, "list": listed})
        text = text.replace(self.here, "@/")
        os.makedirs(self.folder, exist_ok=True)
        draft = f"{self.folder}.{os.getpid()}"
        Path(draft).write_text(text)
        os.rename(draft, os.path.join(self.folder, hashlib.sha256(text.encode()).hexdigest()))


def preprocessed(command: list[str], asked: str, draft: str) -> tuple[bytes, str]:
    """The text that the compiler would compile, and the files that it reached; none if it fails."""
    program, *words = command
    flags = ["-P"] if asked else ["-P", "-MD", "-MF", draft]
    flags = ["-Xcompiler", ",".join(flags)] if os.path.basename(program) == "nvcc" else flags
    done = subprocess.run([program, "-E", *flags, *words], capture_output=True, check=False)
    listed = ""
    with contextlib.suppress(FileNotFoundError):
        listed = Path(asked or draft).read_text()
        os.unlink(draft)
    return done.stdout, "" if done.returncode else listed


def main() -> None:
    place, name = os.path.split(os.path.abspath(sys.argv[0]))
    folder = os.path.dirname(place)
    program, words = real(name, place), sys.argv[1:]
    if not plain(words):
        os.execv(program, [program, *words])
    at = words.index("-o")
    made, rest = words[at + 1], [word for word in words[:at] + words[at + 2 :] if word != "-c"]
    (source,) = (word for word in rest if word.endswith((".cpp", ".cu")) and ".cudafe" not in word)
    tests = re.compile(os.path.dirname(folder) + r"(/popen-gw\d+)?/[^/\s\"]+/")
    found = os.stat(program)
    environment = {k: v for k, v in os.environ.items() if _ENVIRONMENT.match(k) and k != "PATH"}
    facts = [program, found.st_size, found.st_mtime_ns, sorted(environment.items())]
    asked_for, facts = (
        tests.sub("@/", f"{facts} {rest}"),
        tests.sub("@/", f"{facts} {behind(rest)}"),
    )
    if name == "nvcc":  # whose text is the device's alone
        facts = _NAME.sub("", asked_for)
    draft = os.path.join(folder, f"{os.getpid()}.d")
    asked = words[words.index("-MF") + 1] if "-MF" in words else ""
    notes = Notes(folder, tests, asked_for, source, rest)
    known, listed = notes.find()
    stored = known
    if known and asked:
        Path(asked).write_text(listed)
    if not known:
        text, listed = preprocessed([program, *rest], asked, draft)
        if not listed:
            os.execv(program, [program, *words])  # which says what is wrong
        text = tests.sub("@/", text.decode(errors="surrogateescape"))
        if name == "nvcc":
            hidden = notes.hidden(listed)
            text += hidden + (asked_for if "TORCH_EXTENSION_NAME" in hidden else "")
        digest = hashlib.sha256(f"{facts}\n{text}".encode(errors="surrogateescape")).hexdigest()
        stored = os.path.join(folder, f"{digest}.o")
    lock = os.open(f"{stored}.lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # who comes second waits for the object, and finds it
    if not os.path.exists(stored):
        run = subprocess.run(
            [program, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        sys.stdout.buffer.write(run.stdout)
        said = run.stdout.decode(errors="surrogateescape")
        states = notes.states(listed)
        if run.returncode == 0 and states and not tests.search(said):
            Path(f"{stored}.said").write_bytes(run.stdout)
            shutil.copyfile(made, f"{stored}.{os.getpid()}")
            os.rename(f"{stored}.{os.getpid()}", stored)
            notes.keep(stored, listed, states)
        sys.stdout.flush()
        if run.returncode < 0:
            os.kill(os.getpid(), -run.returncode)
        sys.exit(run.returncode)
    if not known and (states := notes.states(listed)):
        notes.keep(stored, listed, states)
    shutil.copyfile(stored, made)
    sys.stdout.buffer.write(Path(f"{stored}.said").read_bytes())


if __name__ == "__main__":
    main()
