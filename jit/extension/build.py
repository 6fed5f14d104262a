"""Building one extension: who builds and who waits, compilers run by their arguments, one publish.

Each extension has a folder in `work/`, whose lock its builder holds: the system frees it when the
builder dies. Objects are kept there under a digest of all that went into them and appear in one
step, so compilers that outlive a kill write where nobody looks. No shell reads a flag or a path.
"""

import contextlib
import difflib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import loader

from ..build.flags import cuda_runtime
from ..build.flags import of as flags_of
from ..cache.key import key
from ..cache.lock import FileLock
from ..cache.prune import prune
from ..cache.store import Store, cannot_write, check_writable, make_private
from ..errors import BuildError
from ..errors.diagnose import explain_failure
from ..machine import settings
from ..machine.toolchain import Toolchain
from . import text as text_of
from .load import Extension, Source, headers, manifest
from .places import Places

# What torch gives nvcc.
_NVCC = ["-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__"]
_NVCC += ["-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__"]
_NVCC += ["--expt-relaxed-constexpr"]
# The families that TORCH_CUDA_ARCH_LIST may name.
_FAMILIES = {
    "Turing": "7.5+PTX",
    "Ampere+Tegra": "8.7",
    "Ampere": "8.0;8.6+PTX",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell+Tegra": "11.0",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
    "Volta": "7.0+PTX",
}
# Options that take the next word as their value.
_WITH_VALUE = {"-I", "-L", "-l", "-D", "-U", "-isystem", "-iquote", "-idirafter", "-include"}
_WITH_VALUE |= {"-Xcompiler", "-Xlinker", "-Xptxas", "-Xcudafe", "-gencode", "-arch", "-code"}
_WITH_VALUE |= {"-x", "-T", "-u", "-z", "--compiler-options", "--generate-code", "-rpath", "-std"}
_WITH_VALUE |= {"--gpu-architecture", "--ptxas-options", "-maxrregcount", "--maxrregcount", "-O"}
# Options of nvcc that matter to the code of the GPU alone, and those that a host half needs too.
_DEVICE_ONLY = re.compile(
    r"-?-(?:use_fast_math|lineinfo|generate-line-info|expt-\w[\w-]*|extended-lambda|fmad=.*|ftz=.*"
    r"|prec-\w+=.*|maxrregcount=.*|res-usage|resource-usage|threads=.*|t=?\d+|split-compile=.*"
    r"|ptxas-options=.*|diag-suppress=.*|gencode=.*|generate-code=.*|arch=.*|gpu-architecture=.*)"
)
_DEVICE_ONLY_WITH_VALUE = {"-Xptxas", "--ptxas-options", "-gencode", "--generate-code", "-arch"}
_DEVICE_ONLY_WITH_VALUE |= {"-maxrregcount", "--maxrregcount", "-Xcudafe", "-code"}
# What a compiler says where more headers might help, and with other words where they cannot.
_MISSING = re.compile(
    r"was not declared|has not been declared|not declared in this scope|is not a member of"
    r"|does not name a|incomplete type|has no member|no member named|no matching function"
    r"|no match for|undeclared identifier|unknown type name|is undefined|no instance of|has no|"
    r"no operator|not a type|is not a template|no such file|No such file|no type named|"
    r"is not a class|redefinition|octet::Convert lacks|expected constructor|no suitable|no viable|"
    r"forward declaration|not a class or namespace|invalid operands|does not exist|must be declared"
)
# The name that is missing.
_NAMED = re.compile(
    r"(?:[‘'](?:\w+::)*(?P<name>[A-Za-z_]\w*)[’'] (?:was not declared|has not been declared|"
    r"does not name|is not a member)|(?:undeclared identifier|unknown type name) '(?P<clang>\w+)'"
    r"|identifier \"(?P<nvcc>\w+)\" is undefined)"
)
_WAIT = 0.1  # seconds between two looks at what another process builds


class _Failed(Exception):
    """A compiler's output."""


def build(
    extension: Extension,
    toolchain: Toolchain,
    store: Store,
    inputs: dict,
    verbose: bool,
    narrow: bool = True,
) -> Path:
    """Build an extension and publish it, or wait for the process that does; the library.

    Raises: BuildError with what the compilers said.
    """
    if settings.value("LOADER_BUILD") == "never":
        raise BuildError(
            f"{extension.name}: there is no build of these sources in {store.path.parent}, and "
            "LOADER_BUILD=never forbids to compile it; unset that",
            extension.name,
        )
    _check_machine(extension, toolchain)
    work = store.path.parent / "work"
    try:
        for folder in (store.path, work):
            make_private(folder)
        folder = _folder(extension, work, inputs)
        with _locked(extension, folder, key(inputs)) as lock:
            library = store.verified(extension.unit, key(inputs))
            if library and narrow:
                return library
            check_writable(work)
            folder.mkdir(mode=0o700, exist_ok=True)
            builder = _Builder(extension, toolchain, store, folder, verbose)
            try:
                return builder.run(inputs, narrow)
            except BuildError as error:
                lock.note(pid=os.getpid(), key=key(inputs), failed=[str(error), error.log])
                raise
    except OSError as error:
        raise cannot_write(store.path.parent, error) from error


def forget_objects(extension: Extension, store: Store, inputs: dict) -> None:
    """Remove what only makes the next edit quicker."""
    shutil.rmtree(_folder(extension, store.path.parent / "work", inputs), ignore_errors=True)


def does_not_load(extension: Extension, failure: str) -> BuildError:
    """What to say of a library that was built and cannot be loaded."""
    names = tuple(source.name for source in extension.sources)
    cause = explain_failure(failure, Path("/"), names)
    hint = ""
    if extension.is_python_module and "init function" in failure.replace("export", "init"):
        hint = "\nName the functions to bind in `functions`, or " if extension.callers else "\n"
        hint = hint.replace("or ", "or write PYBIND11_MODULE(TORCH_EXTENSION_NAME, m)")
    return BuildError(
        f"{extension.name}: it compiles, but does not load:\n{cause}{hint}", extension.name
    )


def _folder(extension: Extension, work: Path, inputs: dict) -> Path:
    """The work folder: it changes with the toolchain, not with an edit."""
    maker = {"toolchain": inputs["toolchain"], "python": inputs["python"]}
    return work / f"{extension.unit}-{key(maker)[:12]}"


def _check_machine(extension: Extension, toolchain: Toolchain) -> None:
    if toolchain.cxx is None:
        command = os.environ.get("CXX") or "c++"
        raise BuildError(
            f"no C++ compiler: `{command}` is not on PATH; install one "
            "(Debian, Ubuntu: apt install g++) or set CXX to one that supports C++17"
        )
    if extension.with_cuda and toolchain.nvcc is None:
        version = torch.version.cuda
        cure = (
            f"install the CUDA toolkit {version} or pip install 'nvidia-cuda-nvcc=={version}.*', "
            "or set CUDA_HOME to where it is"
            if version
            else "this torch is for the CPU only"
        )
        raise BuildError(f"{extension.name}: CUDA sources need nvcc: {cure}", extension.name)


@contextlib.contextmanager
def _locked(extension: Extension, folder: Path, digest: str):
    """The lock of a work folder; BuildError where the one waited for failed on the same sources."""
    lock, since, said = FileLock(Path(f"{folder}.lock")), time.time(), False
    try:
        while not lock.take():
            if not said and time.time() - since > 1 and sys.stderr is not None:
                holder = lock.read().get("pid", "?")
                print(
                    f"loader: waiting for process {holder}, which is building {extension.name}",
                    file=sys.stderr,
                )
                said = True
            time.sleep(_WAIT)
        noted = lock.read()
        if noted.get("key") == digest and noted.get("since", 0) > since and "failed" in noted:
            raise BuildError(noted["failed"][0], extension.name, noted["failed"][1])
        lock.note(pid=os.getpid())
        yield lock
    finally:
        lock.close()


def argv(flags: tuple[str, ...]) -> list[str]:
    """Flags as arguments: torch's load() writes them into a shell's command line.

    So one string may hold several, and quotation marks keep words together. What is special to a
    shell otherwise is taken as it is, and a path with spaces in it need not be quoted.
    """
    words: list[str] = []
    for flag in map(str.strip, flags):
        try:
            split = shlex.split(flag)
        except ValueError:
            split = [flag]
        several = len(split) > 1 and (
            split[0] in _WITH_VALUE or any(word.startswith("-") for word in split[1:])
        )
        quoted = any(mark in flag for mark in "'\"\\")
        words += split if several or quoted else [flag] if flag else []
    return words


def architecture_flags(architectures: str, given: list[str]) -> list[str]:
    """Nvcc's flags for a list such as "8.0;9.0+PTX", unless the user's own name an architecture."""
    if any("arch" in flag for flag in given) or not architectures:
        return []  # without both nvcc takes its oldest, and PTX for all later ones
    flags = set()
    for name in architectures.split(";"):
        for one in _FAMILIES.get(name, name).split(";"):
            found = re.fullmatch(r"(\d+)\.(\d+[af]?)(\+PTX)?", one)
            if not found:
                raise ValueError(
                    f"TORCH_CUDA_ARCH_LIST must hold architectures such as 9.0 or 8.6+PTX, "
                    f"got {one!r}"
                )
            number = found[1] + found[2]
            flags.add(f"-gencode=arch=compute_{number},code=sm_{number}")
            if found[3]:
                flags.add(f"-gencode=arch=compute_{number},code=compute_{number}")
    return sorted(flags)


def host_flags(cuda_flags: list[str]) -> list[str] | None:
    """What nvcc would hand to the host's compiler; None where that is not certain."""
    found, words = [], iter(cuda_flags)
    for word in words:
        if word in ("-Xcompiler", "--compiler-options"):
            found += next(words, "").split(",")
        elif word.startswith(("-Xcompiler=", "--compiler-options=")):
            found += word.partition("=")[2].split(",")
        elif word in _DEVICE_ONLY_WITH_VALUE:
            next(words, None)
        elif word in ("-I", "-D", "-U", "-isystem", "-O", "-std"):
            value = next(words, "")
            found += [f"{word}{'=' if word == '-std' else ''}{value}"]
        elif re.fullmatch(r"-[IDU].+|-O[0-3]|-std=.+|-g", word):
            found.append(word)
        elif not _DEVICE_ONLY.fullmatch(word):
            return None
    return found


class _Builder:
    """One build, in a folder whose lock is held."""

    def __init__(
        self,
        extension: Extension,
        toolchain: Toolchain,
        store: Store,
        folder: Path,
        verbose: bool,
    ):
        self.extension, self.toolchain, self.store = extension, toolchain, store
        self.folder, self.verbose = folder, verbose
        self.cxx = _command(os.environ.get("CXX") or "c++")
        self.torch_include = text_of.torch_include()
        self.running: set[subprocess.Popen] = set()
        self.output: list[str] = []
        self.given_up = False
        self.opened: list[FileLock] = []  # of precompiled headers in use
        self.levels: list[str] = []  # at which each part was compiled
        self._guard = threading.Lock()
        self._naming = threading.Lock()

    def run(self, inputs: dict, narrow: bool) -> Path:
        """Compile, link and publish; the library."""
        began = time.perf_counter()
        for _ in range(5):
            try:
                library = self._library(narrow)
            except _Failed as failure:
                raise self._error(str(failure)) from None
            except BaseException:
                self._end_all()
                raise
            finally:
                for lock in self.opened:
                    lock.close()
                self.opened.clear()
            if manifest(self.extension, self.toolchain) == inputs:
                break
            inputs = manifest(self.extension, self.toolchain)  # a header was edited meanwhile
        seconds = {"compile": time.perf_counter() - began}
        entry = self.store.publish(library, inputs, why=[], seconds=seconds, levels=self.levels)
        prune(self.store, settings.cache_limit(), keep=[key(inputs)])
        return entry / "library.so"

    def _library(self, narrow: bool) -> Path:
        jobs = []
        for i, source in enumerate(self.extension.sources):
            if not source.folder:  # so that compilers can quote its lines
                (self.folder / source.name).write_bytes(source.content)
            functions = self.extension.functions if i == 0 else None
            if source.cuda and self.extension.with_cuda:
                jobs.append((self._cuda, source, narrow))
            else:
                jobs.append((self._cpp, source, functions, narrow))
        self.levels = []
        with ThreadPoolExecutor(2 * len(jobs)) as self.pool:
            self._slots = threading.BoundedSemaphore(_jobs())
            self._link_flags = self.pool.submit(self._linker)
            futures = [self.pool.submit(*job) for job in jobs]
            objects, failures = [], []
            for future in futures:
                try:
                    objects += future.result()
                except _Failed as failure:
                    failures.append(str(failure))
                except BaseException:
                    self._end_all()
                    raise
        if failures:
            raise _Failed("\n".join(failures))
        return self._link(objects)

    def _linker(self) -> list[str]:
        return [*flags_of(self.toolchain, self.folder.parent).linker]

    def _cpp(
        self, source: Source, functions: dict[str, str] | None, narrow: bool
    ) -> list[tuple[Path, str]]:
        """The object of a C++ source."""
        ways = text_of.levels(
            source.text,
            functions is not None,
            self.extension.implicit_headers,
            self.torch_include,
        )
        if not self.extension.error_handling or self.extension.is_standalone:
            ways = [way for way in ways if not way.own_binding]
        body = f'#line 1 "{source.name}"\n{source.text}\n'
        flags = argv(self.extension.cflags)
        for way in ways if narrow else ways[-1:]:
            text = body
            if functions is not None:
                binding = text_of.spoken(
                    functions, self.extension.name, way, self.extension.error_handling
                )
                text += f'#line 1 "functions.cpp"\n{binding}'
            done, said = self._compile_cpp(source, way, text, flags)
            if done:
                return [(done, way.name)]
            if way is ways[-1] or not self._may_need_more(said):
                break
        raise _Failed(said)

    def _cuda(self, source: Source, narrow: bool) -> list[tuple[Path, str]]:
        """The objects of a CUDA source: of its two halves, or of the whole."""
        if narrow and (objects := self._halves(source)):
            return objects
        ways = text_of.levels(
            source.text, False, self.extension.implicit_headers, self.torch_include, cuda=True
        )
        text = f'#line 1 "{source.name}"\n{source.text}\n'
        for way in ways if narrow else ways[-1:]:
            done, said = self._compile_cuda(source, way, text)
            if done:
                return [(done, f"cuda {way.name}")]
            if way is ways[-1] or not self._may_need_more(said):
                break
        raise _Failed(said)

    def _halves(self, source: Source) -> list[tuple[Path, str]] | None:
        flags = host_flags(argv(self.extension.cuda_cflags))
        split = text_of.halves(source.text, source.name)
        if flags is None or split is None:
            return None
        flags = [flag for flag in _NVCC if flag.startswith("-D")] + flags
        ways = text_of.levels(
            source.text, False, self.extension.implicit_headers, self.torch_include
        )
        nvcc_only = text_of.Level("kernels", text_of.LAUNCHES.partition(text_of.PUSH)[0])
        device = self.pool.submit(self._compile_cuda, source, nvcc_only, split.device)
        host, said = None, ""
        for way in ways:
            host, said = self._compile_cpp(source, way, text_of.LAUNCHES + split.host, flags)
            if host or not self._may_need_more(said):
                break
        kernels, wrong = device.result()
        if host and kernels:
            return [(kernels, "kernels"), (host, f"host {way.name}")]
        hopeless = [out for out, half in ((wrong, kernels), (said, host)) if not half]
        if any(not self._may_need_more(out) for out in hopeless):
            raise _Failed("\n".join(hopeless))
        return None

    def _compile_cpp(
        self, source: Source, way: text_of.Level, text: str, flags: list[str]
    ) -> tuple[Path | None, str]:
        shared = ["-fPIC", *([] if any(f.startswith("-std=") for f in flags) else ["-std=c++17"])]
        command = [*self.cxx, *self._defines(), *self._includes(source, way), *shared, *flags]
        name = f"{_stem(source)}.{way.name}.cpp"
        if way.shared and (include := self._precompiled(way, [*shared, *flags])):
            done, said = self._compile([*command, *include], text, name)
            if done or not re.search(r"\b(?:PCH|precompiled|AST) ", said):
                return done, said
            self.output.clear()  # flags that it was not made for: without it, then
        return self._compile([*command, *self._prelude(way)], text, name)

    def _compile_cuda(
        self, source: Source, way: text_of.Level, text: str
    ) -> tuple[Path | None, str]:
        given = argv(self.extension.cuda_cflags)
        nvcc = os.environ.get("PYTORCH_NVCC")
        command = _command(nvcc or os.path.join(self.toolchain.cuda_home, "bin", "nvcc"))
        if host := os.environ.get("CC"):
            command += ["-ccbin", host]
        command += [
            *self._defines(),
            *self._includes(source, way),
            *_NVCC,
            *architecture_flags(self.toolchain.architectures, given),
            "--compiler-options",
            "-fPIC",
            *given,
            *([] if any(flag.startswith("-std=") for flag in given) else ["-std=c++17"]),
            *self._prelude(way),
        ]
        return self._compile(command, text, f"{_stem(source)}.{way.name}.cu")

    def _compile(self, command: list[str], text: str, name: str) -> tuple[Path | None, str]:
        """Run a compiler on a text, unless its object is there; the object, what was printed."""
        digest = hashlib.sha256(
            f"{json.dumps(command)}\0{self._header_digests()}\0".encode()
            + text.encode(errors="surrogateescape")
        ).hexdigest()[:24]
        final = self.folder / f"{digest}.o"
        if final.exists():
            return final, ""
        stem, _, suffix = name.rpartition(".")
        source = self.folder / f"{stem}.{digest[:8]}.{suffix}"
        source.write_text(text, errors="surrogateescape")
        draft = self.folder / f".{digest}-{os.getpid()}-{os.urandom(4).hex()}.o"
        with self._slots:
            code, said = self._run([*command, "-c", source.name, "-o", draft.name])
        if code == 0:
            os.replace(draft, final)
            return final, said
        draft.unlink(missing_ok=True)
        return None, said or f"{command[0]} ended with status {code}"

    def _header_digests(self) -> str:
        files = headers(self.extension, self.toolchain)
        own = {os.path.join("/", source.name) for source in self.extension.sources}
        return json.dumps({path: value for path, value in files.items() if path not in own})

    def _link(self, objects: list[tuple[Path, str]]) -> Path:
        """Link in the work folder; the library or program."""
        self.levels = [level for _, level in objects]
        standalone = self.extension.is_standalone
        libraries = self.torch_include.parent / "lib"
        linker = [flag for flag in self._link_flags.result() if not flag.startswith("-Wl,--as")]
        command = [*self.cxx, *(str(path.name) for path, _ in objects)]
        command += [*linker, *([] if standalone else ["-shared"])]
        command += argv(self.extension.ldflags)
        names = ["c10", *(["c10_cuda"] if self.extension.with_cuda else []), "torch_cpu"]
        names += [*(["torch_cuda"] if self.extension.with_cuda else []), "torch"]
        names += [] if standalone else ["torch_python"]
        if not {*self.levels} <= {"plain", "kernels"}:
            needed = [] if self.extension.ldflags or standalone else ["-Wl,--as-needed"]
            command += [*needed, f"-L{libraries}", *(f"-l{name}" for name in names)]
            command += [f"-Wl,-rpath,{libraries}"] if standalone else []
        if self.extension.with_cuda:
            home = Path(self.toolchain.cuda_home)
            lib = home / ("lib64" if (home / "lib64").exists() else "lib")
            command += [*cuda_runtime(self.folder, self.toolchain), f"-L{lib}", "-lcudart"]
        draft = self.folder / f".library-{os.getpid()}-{os.urandom(4).hex()}.so"
        code, said = self._run([*command, "-o", draft.name])
        if code:
            raise _Failed(said or f"the linker ended with status {code}")
        final = self.folder / "library.so"
        os.replace(draft, final)
        return final

    def _defines(self) -> list[str]:
        if self.extension.is_standalone:
            return []
        return [f"-DTORCH_EXTENSION_NAME={self.extension.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]

    def _includes(self, source: Source, way: text_of.Level) -> list[str]:
        found = [f"-I{self._hidden(way)}"] if way.hidden else []
        found += ["-iquote", source.folder] if source.folder and not source.cuda else []
        found += [f"-I{source.folder}"] if source.folder and source.cuda else []
        found += [f"-I{folder}" for folder in self.extension.include_paths]
        system = [self.torch_include, self.torch_include / "torch/csrc/api/include"]
        if self.extension.with_cuda:
            system += [os.path.join(self.toolchain.cuda_home, "include")]
        if more := os.environ.get("CUDA_INC_PATH"):
            system += [more] if self.extension.with_cuda else []
        system += [sysconfig.get_path("include")]
        return [*found, *(word for path in system for word in ("-isystem", str(path)))]

    def _hidden(self, way: text_of.Level) -> Path:
        """A folder in which the headers to be left out are empty."""
        digest = hashlib.sha256("".join(way.hidden).encode()).hexdigest()[:8]
        folder = self.folder / f"hidden-{digest}"
        with self._guard:
            for name in way.hidden:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.write_text("#pragma once\n")
        return folder

    def _prelude(self, way: text_of.Level) -> list[str]:
        if not way.prelude:
            return []
        text = way.prelude.replace(
            '"inline_binding.h"', f'"{Path(loader.__path__[0]) / "include" / "inline_binding.h"}"'
        )
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        path = self.folder / f"{way.name}-{digest}.h"
        with self._guard:
            path.write_text(text)
        return ["-include", path.name]

    def _precompiled(self, way: text_of.Level, flags: list[str]) -> list[str] | None:
        """The prelude that all extensions share, precompiled once; None where that fails."""
        kept = [flag for flag in flags if not re.match(r"-[DUIWl]", flag)]
        clang = self._is_clang()
        system = [
            word
            for path in (
                self.torch_include,
                self.torch_include / "torch/csrc/api/include",
                sysconfig.get_path("include"),
            )
            for word in ("-isystem", str(path))
        ]
        define = ["-DTORCH_API_INCLUDE_EXTENSION_H"]
        command = [*self.cxx, *define, *system, *kept, "-x", "c++-header"]
        made_of = [self.toolchain.cxx, self.toolchain.torch, command, way.prelude]
        digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
        folder = self.folder.parent / f"inline.headers-{digest}"
        header = folder / "torch.h"
        made = folder / ("torch.h.pch" if clang else "torch.h.gch")
        use = ["-include-pch", str(made)] if clang else ["-include", str(header)]
        lock = FileLock(Path(f"{folder}.lock"))
        self.opened.append(lock)  # shared until this build has ended: nobody removes it
        fcntl.flock(lock.descriptor, fcntl.LOCK_SH)
        if not made.exists():
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
            folder.mkdir(mode=0o700, exist_ok=True)
            if not made.exists():
                header.write_text(way.prelude)
                draft = folder / f".{made.name}-{os.getpid()}"
                code, _ = self._run([*command, str(header), "-o", str(draft)])
                if code:
                    return None
                os.replace(draft, made)
            fcntl.flock(lock.descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.utime(folder)
        return use

    def _is_clang(self) -> bool:
        probe = subprocess.run(
            [*self.cxx, "-x", "c++", "-E", "-P", "-"],
            input="__clang__",
            capture_output=True,
            text=True,
            check=False,
        )
        return "__clang__" not in probe.stdout

    def _run(self, command: list[str], show: bool = True) -> tuple[int, str]:
        """Run a tool in the work folder; its status and all that it printed."""
        verbose = self.verbose and show
        if self.given_up:
            raise _Failed("interrupted")
        if verbose:
            print(shlex.join(command), flush=True)
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        with self._guard:
            self.running.add(process)
        out = process.communicate()[0].decode(errors="replace")
        with self._guard:
            self.running.discard(process)
            if show:
                self.output.append(f"{shlex.join(command)}\n{out}")
        if verbose and out:
            print(out, end="", flush=True)
        return process.returncode, out

    def _may_need_more(self, said: str) -> bool:
        """Whether an error may come from a header that was left out.

        It cannot where each name that is missing appears nowhere in all of torch's headers.
        """
        errors = [line for line in said.splitlines() if re.search(r"\berror\b", line)]
        if errors and not any(map(_MISSING.search, errors)):
            return False
        missing = [_NAMED.search(line) for line in errors if _MISSING.search(line)]
        if not errors or not all(missing):
            return True
        return any(found[found.lastgroup] in self._words() for found in missing)

    def _words(self) -> frozenset[str]:
        """Every identifier and macro that torch/extension.h brings, noted when first asked for."""
        with self._naming:
            made_of = [self.toolchain.cxx, self.toolchain.torch, self.toolchain.cuda_home]
            digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()[:12]
            path = self.folder.parent / f"inline.words-{digest}" / "words"
            with contextlib.suppress(OSError):
                return frozenset(path.read_text().split())
            system = [
                word
                for folder in (
                    self.torch_include,
                    self.torch_include / "torch/csrc/api/include",
                    sysconfig.get_path("include"),
                )
                for word in ("-isystem", str(folder))
            ]
            source = self.folder / "words.cpp"
            source.write_text("#include <torch/extension.h>\n#include <math.h>\n")
            command = [*self.cxx, "-std=c++17", *system, "-E", "-P", "-dD", source.name]
            code, said = self._run(command, show=False)
            words = frozenset(re.findall(r"[A-Za-z_]\w+", said))
            if code == 0:
                path.parent.mkdir(mode=0o700, exist_ok=True)
                draft = path.with_name(f".words-{os.getpid()}-{os.urandom(4).hex()}")
                draft.write_text("\n".join(words))
                os.replace(draft, path)
            return words

    def _end_all(self) -> None:
        """End the compilers that are running, and what they started."""
        self.given_up = True
        with self._guard:
            for process in self.running:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _unknown_functions(self) -> str:
        """What to say of names in `functions` that the C++ source does not have."""
        source, *cuda = [text_of.code_of(source.text) for source in self.extension.sources]
        if "##" in source:
            return ""  # a macro may make any name
        there, said = {*re.findall(r"\w+", source)}, []
        for name in self.extension.functions or ():
            if name.rpartition("::")[2] in there:
                continue
            declared = re.search(rf"^[^\n;{{}}#]*\b{name}\s*\([^)]*\)", "\n".join(cuda), re.M)
            close = difflib.get_close_matches(name, re.findall(r"(\w+)\s*\(", source), 1)
            cure = f"; did you mean {close[0]!r}?" if close else ""
            if declared:
                cure = f": declare it there: {' '.join(declared[0].split())};"
            said.append(f"functions: {name!r} is not in cpp_sources{cure}")
        return "\n".join(said)

    def _error(self, said: str) -> BuildError:
        """What a person wants to read of a failed build."""
        names = tuple(source.name for source in self.extension.sources)
        causes = self._unknown_functions() or explain_failure(said, self.folder, names)
        causes = Places(self.extension).in_callers_words(causes)
        log: Path | None = self.folder.parent / f"{self.extension.unit}.log"
        try:
            log.write_text("\n".join(self.output))
        except OSError:
            log = None
        where = f"\nThe whole output is in {log}" if log else ""
        name = self.extension.name
        return BuildError(
            f"{name} could not be built:\n{causes}{where}", name, str(log) if log else None
        )


def _command(text: str) -> list[str]:
    """A program and its arguments, of a command such as `ccache g++`."""
    return [text] if os.path.isfile(text) else shlex.split(text)


def _stem(source: Source) -> str:
    return Path(source.name).stem


def _jobs() -> int:
    cores = len(os.sched_getaffinity(0))
    most = os.environ.get("MAX_JOBS", "")
    return min(cores, int(most)) if most.isdigit() and int(most) > 0 else cores
