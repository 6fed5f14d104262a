"""The objects of a setup.py with torch's BuildExtension: each one an artifact of the store.

Sources, flags and places are torch's and setuptools'. An object that was made of the same content
is copied from the store; the others are compiled side by side by the very commands that torch has
ninja run.
"""

import json
import os
import re
import shlex
import sysconfig
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..build import engine, flags
from ..build.batch import Batch
from ..build.progress import Quiet, say
from ..build.workshop import CompileError, Workshop
from ..cache.key import FORMAT
from ..cache.store import Store
from ..errors import BuildError, cxx, joined
from ..errors.diagnose import find_problems
from ..errors.problem import as_text
from ..machine import files, reads
from ..machine import toolchain as tools
from ..machine.sources import Sources
from .arguments import Extension, Source
from .flags import argv, beside
from .inputs import by_version
from .load import caches
from .mending import Mending, left_after, mends_wanted, warn

# Words that have a compiler read a file whose content no digest would see.
_UNSEEN = re.compile(
    r"@|-specs=|-fplugin|-f(?:profile-use|auto-profile)|-fsanitize-\w+list=|-include-pch|-optf"
    r"|--(?:options-file|pre-include|include-path|system-include)|.*[=,]-(?:I|i[sqnd])"
)
_NAMES = {"sources", "objects", "build_directory", "with_cuda"}
_NAMES |= {"cflags", "post_cflags", "cuda_cflags", "cuda_post_cflags"}
_LEFT = {
    "with_sycl": "SYCL",
    "sycl_dlink_post_cflags": "SYCL",
    "cuda_dlink_post_cflags": "device linking (dlink)",
}


class Command(NamedTuple):
    """A compiler's command line, without the output."""

    compiler: list[str]
    before: list[str]
    source: str
    after: list[str]

    @property
    def words(self) -> list[str]:
        """All of it, as torch has it."""
        return [*self.compiler, *self.before, "-c", self.source, *self.after]

    @property
    def cuda(self) -> bool:
        """True for nvcc's."""
        return self.source.endswith((".cu", ".cuh"))


class Order(NamedTuple):
    """What a setup.py wants: a command for each object."""

    name: str
    commands: dict[str, Command]


def order(asked: dict[str, Any]) -> Order:
    """Return what torch's function for the objects is asked for, by its arguments.

    Raises: ValueError with the reason where loader would not do quite what torch does.
    """
    if unknown := _NAMES - asked.keys():
        raise ValueError(f"this torch has other names for {', '.join(sorted(unknown))}")
    for argument, what in _LEFT.items():
        if asked.get(argument):
            raise ValueError(f"{what} is not built by loader")
    place, words = os.path.abspath(asked["build_directory"]), {}
    for argument in ("cflags", "post_cflags", "cuda_cflags", "cuda_post_cflags"):
        split = shlex.split(" ".join(flag.strip() for flag in asked[argument] or []))
        if unseen := next(filter(_UNSEEN.match, split), None):
            raise ValueError(f"{unseen} has the compiler read a file that loader does not look at")
        words[argument] = _absolute(split, place)
    toolchain = tools.current.__wrapped__(caches()[-1])
    commands = {}
    for source, made in zip(map(os.path.abspath, asked["sources"]), asked["objects"], strict=True):
        cuda = "cuda_" if source.endswith((".cu", ".cuh")) and asked["with_cuda"] else ""
        if cuda and toolchain.nvcc is None:
            raise ValueError("there is no nvcc")
        compiler = toolchain.command("PYTORCH_NVCC" if cuda else "CXX")
        before, after = words[f"{cuda}cflags"], words[f"{cuda}post_cflags"]
        commands[os.path.join(place, made)] = Command(compiler, before, source, after)
    named = (re.match(r"-DTORCH_EXTENSION_NAME=(.+)", word) for word in words["post_cflags"])
    return Order(next((match[1] for match in named if match), "objects"), commands)


def make(wanted: Order) -> None:
    """Put the objects where they are wanted, from the store or from the compiler.

    Raises: BuildError with the compile errors of all that failed.
    """
    folders = caches()
    toolchain, store = tools.current.__wrapped__(folders[-1]), Store(folders)
    sources: dict[tuple[str, ...], Sources] = {}
    recipes = {
        made: ObjectRecipe(wanted.name, command, toolchain, sources)
        for made, command in wanted.commands.items()
    }
    found = {made: engine.find(each, store, each.inputs()) for made, each in recipes.items()}
    if missing := {made: recipes[made] for made, library in found.items() if library is None}:
        engine.refuse_if_never(wanted.name, store, wanted.name, cure="")
        jobs = {made: engine.Job(recipe, store) for made, recipe in missing.items()}
        Batch(jobs.values(), store, Quiet()).start().wait()
        if failed := [job.error for job in jobs.values() if job.error]:
            raise joined(failed)
        for made, job in jobs.items():
            found[made] = engine.find(missing[made], store, job.inputs)
    for made, library in found.items():
        if library is None:
            text = f"{wanted.name}: its build was removed at once; try again"
            raise BuildError(text, wanted.name, kind="damaged")
        store.hold(library)
        unit, _, digest = library.parent.name.rpartition("-")
        if mended := (store.manifest(unit, digest) or {}).get("mends"):
            warn(recipes[made].label, mended)
        Path(made).parent.mkdir(parents=True, exist_ok=True)
        files.write(Path(made), library.read_bytes())
    count = len(found) - len(missing)
    say(f"{wanted.name}: {count} of {len(found)} objects were in {store.path.parent}")


class ObjectRecipe:
    """One object of an extension; see engine.Recipe. `known` has what was read a moment ago."""

    def __init__(
        self,
        name: str,
        command: Command,
        toolchain: tools.Toolchain,
        known: dict[tuple[str, ...], Sources],
    ):
        file = os.path.basename(command.source)
        self.unit = self.folder = re.sub(r"[^\w.]", "_", f"setup.{name}.{file}", flags=re.ASCII)
        self.label = f"{name}: {file}"
        self._command, self._words, self._toolchain = command, command.words, toolchain
        self._source, self._mends = command.source, list[dict]()
        self._known: dict[tuple[str, ...], Sources] | None = known
        self._nonce = uuid.uuid4().hex

    def inputs(self) -> dict:
        """Return the manifest of source, headers, command and tools as they are now."""
        toolchain = self._toolchain
        own = {"cflags", "ldflags", "cuda_flags", "nvcc", "architectures"}
        made_by = {fact: value for fact, value in toolchain.identity.items() if fact not in own}
        native = any("native" in word for word in self._words)
        made_by |= {"cpu": tools.cpu_features() if native else "", "architectures": ""}
        if self._command.cuda:
            made_by["nvcc"] = toolchain.nvcc
        found, all_seen = self._files()
        facts = mends_wanted() | {
            "format": FORMAT,
            "unit": self.unit,
            "files": found,
            "toolchain": made_by,
            "python": [sysconfig.get_config_var("SOABI"), sysconfig.get_path("include")],
            "command": self._words,
        }
        # A name that a macro includes can be any file's: such an object is never taken again.
        return json.loads(json.dumps(facts | ({} if all_seen else {"once": self._nonce})))

    def maker(self, inputs: dict) -> dict:
        """Return what tells the work folder from others of the name."""
        return {"source": self._source, "toolchain": inputs["toolchain"]}

    def check_machine(self) -> None:
        """Raise BuildError without the compiler."""
        flags.check_compiler(self._toolchain)

    def make(self, workshop: Workshop, inputs: dict) -> tuple[dict[int, Path], dict]:
        """Compile the source; mended, where it is for an older torch or CUDA."""
        mending, words = Mending(self._extension(), self._toolchain, workshop.folder), self._words
        try:
            while True:
                try:
                    product = workshop.link(words, "object.o", "compile")
                    return {1: product}, {"why": [], "mends": mending.rows()}
                except CompileError as error:
                    if workshop.ended or not mending.take(str(error)):
                        raise
                words = self._mended(mending.extension, workshop.folder)
        finally:
            self._mends = mending.rows()
            print("".join(workshop.said), end="", flush=True)

    def explain(self, output: str, workshop: Workshop) -> BuildError:
        """Return the first errors, and where the whole output lies."""
        problems, total = find_problems(output, Path("/"), (self._source,))
        causes, log = as_text(problems, total) + left_after(self._mends), f"{self.unit}.log"
        return workshop.failure(self.label, causes, log, problems=problems, mends=self._mends)

    def _extension(self) -> Extension:
        """The source alone, with all flags, as far as mends look at it."""
        command = self._command
        own = tuple(map(shlex.quote, [*command.before, *command.after]))
        source = Source.of_file(self._source, Path(self._source).read_bytes(), command.cuda)
        cflags, cuda_cflags = ((), own) if command.cuda else (own, ())
        return Extension(
            *(self.label, (source,), None, cflags, cuda_cflags, (), ()),
            with_cuda=command.cuda,
            is_python_module=False,
            is_standalone=False,
        )

    def _mended(self, extension: Extension, folder: Path) -> list[str]:
        """The command for a source as it was mended, which sees what the file sees."""
        (source,), cuda = extension.sources, self._command.cuda
        file = folder / f"mended{Path(self._source).suffix}"
        files.write(file, f"#line 1 {cxx.literal(self._source)}\n{source.text}")
        own = argv(extension.cuda_cflags if cuda else extension.cflags)
        return [*self._command.compiler, *beside(source.folder, cuda), *own, "-c", str(file)]

    def _files(self) -> tuple[dict[str, str], bool]:
        """Return SHA-256 of all that is read and not the toolchain's; False if some is unknown."""
        known, self._known = self._known, None  # the next time it is to be read anew
        folders, forced = reads.headers(self._words)
        folders = [f for f in folders if not by_version(f, self._toolchain)]
        given = (*folders, *self._toolchain.header_folders)
        sources = (known or {}).get(given) or Sources(Path("/"), given)
        if known is not None:
            known[given] = sources
        found: dict[str, str] = {}
        all_seen = True
        for path in (self._source, *forced):
            found |= sources.closure(path)
            all_seen = all_seen and None not in sources.foreign(path)
        return dict(sorted(found.items())), all_seen


def _absolute(words: Sequence[str], place: str) -> list[str]:
    """Return a compiler's words with paths made absolute that count from `place`."""
    found, is_path = [], False
    for word in words:
        option = re.fullmatch(reads.PATH, word)
        if is_path:
            found.append(_there(word, place))
        elif option and option[3]:
            found.append(f"{option[1]}{option[2]}{_there(option[3], place)}")
        else:
            found.append(word)
        is_path = not is_path and option is not None and not option[3]
    return found


def _there(path: str, place: str) -> str:
    """A path as seen from `place`; a name alone is looked for among the headers too."""
    there = os.path.normpath(os.path.join(place, path))
    return there if os.path.exists(there) else path
