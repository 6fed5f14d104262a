"""Objects that are kept for whoever has the same compiled: the other half of compiler.py.

To preprocess what includes torch takes half a second, thousands of times. So it is noted which
headers a source was seen to reach and what they held; while they hold it, that is not done again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time

# What decides about the preprocessed source, and where lists go.
_FOR_TEXT = "-D", "-U", "-I", "-isystem", "-iquote", "-idirafter", "-include", "-MF", "-MT", "-MQ"
_NAME = re.compile(r"'-DTORCH_EXTENSION_NAME=[^']*', ")  # which a kernel has no use for, or shows
_ENVIRONMENT = re.compile(r"C?PATH|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|COMPILER_PATH|GCC_|SOURCE")
_ENVIRONMENT_OF_NVCC = re.compile(f"{_ENVIRONMENT.pattern}|NVCC_")


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


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
        text = f"{facts}{tests.sub('@/', os.getcwd() + '/')}{others}\n".encode(
            errors="surrogateescape"
        ) + read(source)
        self.folder = os.path.join(folder, hashlib.sha256(text).hexdigest())

    def _state(self, path: str) -> str:
        """What tells whether a file is as it was; the machine's own are not edited."""
        if not self.tests.match(path):
            found = os.stat(path)
            return f"{found.st_size} {found.st_mtime_ns}"
        return hashlib.sha256(read(path)).hexdigest()

    def find(self) -> tuple[str, str]:
        """The object's name, or none, and the list."""
        for name in os.listdir(self.folder) if os.path.isdir(self.folder) else ():
            with contextlib.suppress(OSError):
                note = json.loads(read(os.path.join(self.folder, name)))
                states = note["headers"].items()
                if all(
                    self._state(path.replace("@/", self.here, 1)) == was for path, was in states
                ):
                    return note["object"], note["list"].replace("@/", self.here)
        return "", ""

    @staticmethod
    def files(listed: str) -> list[str]:
        """Those in a list `object: files`."""
        listed = listed.replace("\\\n", " ").partition(": ")[2].replace("$$", "$")
        names = re.split(r"(?<!\\)\s+", listed.strip())
        return [os.path.abspath(re.sub(r"\\([ #])", r"\1", name)) for name in names]

    def states(self, listed: str) -> dict[str, str]:
        """State of each file in a list; none where one was edited meanwhile."""
        with contextlib.suppress(OSError):
            states = {path: self._state(path) for path in self.files(listed)}
            if all(os.stat(path).st_ctime < self.begun - 0.01 for path in states):
                return states
        return {}

    def hidden(self, listed: str) -> str:
        """Code that nvcc's preprocessor leaves out, being the host's: of files with such parts."""
        texts = (read(path).decode() for path in self.files(listed) if self.tests.match(path))
        return "".join(re.sub(r"//.*|\s", "", text) for text in texts if "__CUDA_ARCH__" in text)

    def keep(self, stored: str, listed: str, states: dict[str, str]) -> None:
        """Note this for `find`."""
        text = json.dumps({"object": stored, "headers": states, "list": listed})
        text = text.replace(self.here, "@/")
        os.makedirs(self.folder, exist_ok=True)
        draft = f"{self.folder}.{os.getpid()}"
        write(draft, text.encode())
        os.rename(draft, os.path.join(self.folder, hashlib.sha256(text.encode()).hexdigest()))


def preprocessed(command: list[str], asked: str, draft: str) -> tuple[bytes, str]:
    """The text that the compiler would compile, and the files that it reached; none if it fails."""
    program, *words = command
    flags = ["-P"] if asked else ["-P", "-MD", "-MF", draft]
    flags = ["-Xcompiler", ",".join(flags)] if os.path.basename(program) == "nvcc" else flags
    import subprocess  # which a hit has no use for

    done = subprocess.run([program, "-E", *flags, *words], capture_output=True, check=False)
    listed = ""
    with contextlib.suppress(FileNotFoundError):
        listed = read(asked or draft).decode(errors="surrogateescape")
        os.unlink(draft)
    return done.stdout, "" if done.returncode else listed


def compiled(program: str, sooner: list[str], words: list[str]):
    """How `program` ended, and all it said: by words that take less, if it then says nothing.

    An error is one however much is optimised.
    """
    import subprocess

    for tried in (sooner, words) if sooner != words else (words,):
        run = subprocess.run(
            [program, *tried], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if run.returncode < 0 or not (run.returncode or run.stdout):
            break
        if run.returncode and len(tried) == len(words):
            break
    return run


def facts_of(program: str, nvcc: bool) -> str:
    """What decides about an object beside words and sources: the compiler and its environment."""
    found = os.stat(program)
    concerns = _ENVIRONMENT_OF_NVCC if nvcc else _ENVIRONMENT
    environment = {k: v for k, v in os.environ.items() if concerns.match(k) and k != "PATH"}
    return str([program, found.st_size, found.st_mtime_ns, sorted(environment.items())])


def main(program: str, words: list[str], quickly: bool = False) -> None:
    """Put the object that `program` makes of these words where they want it.

    `quickly`: what is optimised at all is so only where it makes the compiler say something.
    """
    place, name = os.path.split(os.path.abspath(sys.argv[0]))
    folder = os.path.dirname(place)
    at = words.index("-o")
    made, rest = words[at + 1], [word for word in words[:at] + words[at + 2 :] if word != "-c"]
    (source,) = (word for word in rest if word.endswith((".cpp", ".cu")) and ".cudafe" not in word)
    tests = re.compile(os.path.dirname(folder) + r"(/popen-gw\d+)?/[^/\s\"]+/")
    about = facts_of(program, name == "nvcc")
    asked_for, facts = (
        tests.sub("@/", f"{about} {rest}"),
        tests.sub("@/", f"{about} {behind(rest)}"),
    )
    if name == "nvcc":  # whose text is the device's alone
        facts = _NAME.sub("", asked_for)
    draft = os.path.join(folder, f"{os.getpid()}.d")
    asked = words[words.index("-MF") + 1] if "-MF" in words else ""
    notes = Notes(folder, tests, asked_for, source, rest)
    known, listed = notes.find()
    stored = known
    if known and asked:
        write(asked, listed.encode(errors="surrogateescape"))
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
        sooner = words
        if name != "nvcc":
            import preludes

            sooner = ["-O0" if quickly and word == "-O1" else word for word in words]
            with contextlib.suppress(OSError):  # of paths that the list has with backslashes
                sooner = preludes.first(program, sooner, source, notes.files(listed), about, tests)
        run = compiled(program, sooner, words)
        if asked:
            write(asked, listed.encode(errors="surrogateescape"))  # without what the prelude has
        sys.stdout.buffer.write(run.stdout)
        said = run.stdout.decode(errors="surrogateescape")
        states = notes.states(listed)
        if run.returncode == 0 and states and not tests.search(said):
            write(f"{stored}.said", run.stdout)
            write(f"{stored}.{os.getpid()}", read(made))
            os.rename(f"{stored}.{os.getpid()}", stored)
            notes.keep(stored, listed, states)
        sys.stdout.flush()
        if run.returncode < 0:
            os.kill(os.getpid(), -run.returncode)
        sys.exit(run.returncode)
    if not known and (states := notes.states(listed)):
        notes.keep(stored, listed, states)
    write(made, read(stored))
    sys.stdout.buffer.write(read(f"{stored}.said"))
