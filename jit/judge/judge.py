"""`loader.judge`: says of kernels that nobody trusts whether they are right, safe and fast."""

import atexit
import contextlib
import functools
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import loader

from ..errors import BuildError
from ..live.rebuild import own_part
from ..machine import child, settings
from ..machine.forks import Lock
from ..machine.sources import HOME
from . import tolerance
from .forms import Source
from .verdict import Verdict, Verdicts

_GUARD = HOME / "jit" / "live" / "guard.cpp"
_SECRETS = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|COOKIE", re.IGNORECASE)
_lock = Lock()

Code = str | os.PathLike[str] | Callable


def judge(
    candidate: Code | Sequence[Code],
    reference: Code | None = None,
    inputs: str | Callable | Sequence | None = None,
    *,
    device: str | None = None,
    jobs: int = 1,
    timed: bool = True,
    compiled: bool = False,
    general: bool = False,
    precision: str = "own",
    seconds: float = 60.0,
    memory: int | str = "8GiB",
    readable: Sequence[str | os.PathLike[str]] = (),
    sanitizer: str | os.PathLike[str] | bool | None = None,
) -> Any:
    """Judge a candidate, or many, against a reference, in processes that can do no harm.

    Args:
        candidate: a file in KernelBench's form (`ModelNew`), `"file.py:function"`, a function of a
            file, an operator of loader or its name, a folder of files, or a list of such.
        reference: likewise (`Model`); an operator has its own.
        inputs: the name of a function of the reference's file that returns a list of arguments
            drawn at random (by default `get_inputs`), that function, or lists of arguments.
        device: "cpu" or "cuda"; by default the GPU where torch sees one.
        jobs: how many candidates are judged at once; they take turns on the GPU and at the clock.
        timed: time them too.
        compiled: time torch.compile of the reference as well.
        general: other shapes and dtypes, and the same bits twice, are asked for; without it they
            are only reported.
        precision: the format in which products may be taken: "own" (that of the arguments), "tf32",
            "float16" or "bfloat16".
        seconds: the longest that one answer (a build, a call) may take.
        memory: the most that one candidate may use, as bytes or a text such as "8GiB".
        sanitizer: the program `compute-sanitizer`, under which an accepted candidate is called once
            more; by default the one that is on PATH or beside nvcc, where it runs on a GPU; False
            for none.
        readable: files and folders that candidates may read, besides Python's and the system's.

    Returns: a Verdict for one candidate, Verdicts for several; they print as tables, `json()` gives
        all, `accepted` and `failed` say what came out.

    Raises: ValueError, TypeError or FileNotFoundError where there is nothing to judge: no such
        file, no `ModelNew`, a reference that raises, arguments that hold no tensor.
    """
    sources, many = _candidates(candidate)
    checked = _checked(jobs, seconds, precision)
    place = _device(device)
    against = _reference(reference, sources)
    name, given = _inputs(inputs)
    with contextlib.ExitStack() as stack:
        file = ""
        if given is not None:
            file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".pt")).name
            torch.save(given, file)
        order = {
            "candidates": sources,
            "reference": against,
            "jobs": checked,
            "readable": [os.path.realpath(path) for path in readable],
            "private": [file] if file else [],
            "caches": [str(path / "store") for path in loader._session.caches],
            "limits": {"seconds": seconds, "memory": _bytes(memory)},
            "options": {
                **{"inputs": name, "given": file, "precision": precision, "timed": timed},
                **{"general": general, "compiled": compiled, "device": place},
                "sanitizer": _sanitizer(sanitizer, place),
            },
        }
        begun = time.perf_counter()
        answers = _asked(order, len(sources))
    verdicts = [_verdict(a, many, s) for a, s in zip(answers, sources, strict=True)]
    return Verdicts(verdicts, time.perf_counter() - begun, jobs) if many else verdicts[0]


def _verdict(answer: dict, many: bool, source: Source) -> Verdict:
    if "broken" in answer:
        raise RuntimeError(f"judge: {source.label()}: {answer['broken']}")
    if "unusable" in answer:
        raise ValueError(f"judge: {answer['unusable']}")
    return Verdict(answer["data"])


def _checked(jobs: int, seconds: float, precision: str) -> int:
    if not isinstance(jobs, int) or jobs < 1:
        raise ValueError(f"judge: jobs must be 1 or more, got {jobs!r}")
    if not seconds > 0:
        raise ValueError(f"judge: seconds must be above 0, got {seconds!r}")
    if precision not in tolerance.PRECISIONS:
        known = ", ".join(tolerance.PRECISIONS)
        raise ValueError(f"judge: precision must be one of {known}, got {precision!r}")
    return jobs


def _sanitizer(program: str | os.PathLike[str] | bool | None, device: str) -> str:
    if program is False:
        return ""
    if isinstance(program, str | os.PathLike):
        if not os.access(program, os.X_OK):
            raise FileNotFoundError(f"judge: no such program: {os.fspath(program)}")
        return os.path.realpath(program)
    if device != "cuda":
        return ""
    home = loader._session.toolchain.cuda_home
    beside = shutil.which("compute-sanitizer", path=f"{home}/bin") if home else None
    return shutil.which("compute-sanitizer") or beside or ""


def _device(device: str | None) -> str:
    there = torch.cuda.is_available()
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f'judge: device must be "cpu" or "cuda", got {device!r}')
    if device == "cuda" and not there:
        raise ValueError('judge: device is "cuda", and torch sees no GPU; leave it out, or "cpu"')
    return device or ("cuda" if there else "cpu")


def _bytes(memory: int | str) -> int:
    return settings.size(memory, "memory") if isinstance(memory, str) else memory


def _candidates(candidate: Any) -> tuple[list[Source], bool]:
    if isinstance(candidate, list | tuple):
        return [_source(each) for each in candidate], True
    if isinstance(candidate, str | os.PathLike) and os.path.isdir(candidate):
        found = sorted(Path(candidate).glob("*.py"))
        if not found:
            raise FileNotFoundError(f"judge: no .py file in the folder {os.fspath(candidate)}")
        return [_source(path) for path in found], True
    return [_source(candidate)], False


def _reference(reference: Code | None, candidates: list[Source]) -> Source:
    if reference is not None:
        return _source(reference)
    operators = {source.operator for source in candidates}
    if len(operators) != 1 or "" in operators:
        raise TypeError("judge: reference is missing; only an operator of loader has its own")
    (name,) = operators
    return Source(operator=name, name=f"{name}_reference")


def _source(code: Any) -> Source:
    """Say where code comes from, in words that another process understands."""
    if isinstance(code, str | os.PathLike):
        text = os.fspath(code)
        if text in loader._session.public():
            return Source(operator=text)
        path, _, name = text.partition(":") if ".py:" in text else (text, "", "")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"judge: no such file: {path}")
        return Source(os.path.realpath(path), name)
    if not callable(code):
        raise TypeError(f"judge: a file, a function or an operator is due, got {type(code)!r}")
    name = getattr(code, "__name__", "")
    if getattr(loader, name, None) is code if name in loader._session.public() else False:
        return Source(operator=name)
    return _of_function(code)


def _of_function(code: Callable) -> Source:
    name = getattr(code, "__qualname__", "")
    path = ""
    with contextlib.suppress(TypeError, OSError):
        path = inspect.getsourcefile(inspect.unwrap(code)) or ""
    if not path or not os.path.isfile(path) or "<" in name or not name:
        raise TypeError(
            f"judge: {name or code!r} cannot be taken to another process: it is no function at the "
            'top of a file; write it into one and name it as "file.py:function"'
        )
    return Source(os.path.realpath(path), name)


def _inputs(inputs: Any) -> tuple[str, list | None]:
    """Return the name of the function that makes arguments, or lists of them."""
    if inputs is None:
        return "get_inputs", None
    if isinstance(inputs, str):
        return inputs, None
    if callable(inputs):
        return _of_function(inputs).name, None
    given = [*inputs] if isinstance(inputs, list | tuple) else []
    if given and all(isinstance(x, torch.Tensor) for x in given):
        given = [given]
    if not given or not all(isinstance(x, list | tuple) for x in given):
        raise TypeError(
            "judge: inputs must be a function's name, a function, or lists of arguments, got "
            f"{inputs!r}"[:200]
        )
    if not all(any(isinstance(x, torch.Tensor) for x in each) for each in given):
        raise TypeError("judge: each list of inputs must hold a tensor")
    return "", [list(each) for each in given]


class _Court:
    """The warm process of this one."""

    def __init__(self) -> None:
        variables = {k: v for k, v in os.environ.items() if not _SECRETS.search(k)}
        variables["LOADER_BUILD"] = "lazy"
        # Two processes take turns on the same cores: threads that wait are to leave them alone.
        variables.setdefault("OMP_WAIT_POLICY", "passive")
        # Otherwise the first torch.compile starts as many Pythons more.
        variables["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        descriptors = []
        with contextlib.suppress(BuildError, OSError):
            guard = os.open(own_part(loader._session, _GUARD, link=True), os.O_RDONLY)
            descriptors.append(guard)
            before = variables.get("LD_PRELOAD", "")
            variables["LD_PRELOAD"] = f"/proc/self/fd/{guard} {before}".strip()
        self.process = child.start(
            child.command("judge.court.serve", torch.cuda.is_available()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            pass_fds=descriptors,
            start_new_session=True,
        )
        for descriptor in descriptors:
            os.close(descriptor)
        atexit.register(self.end)

    def end(self) -> None:
        """Close the doors."""
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()
        self.process.wait()


@functools.cache
def _court(pid: int) -> _Court:
    return _Court()


def _asked(order: dict, count: int) -> list[dict]:
    """Have all candidates of an order judged."""
    answers: dict[int, dict] = {}
    with _lock:
        court = _court(os.getpid())
        if court.process.poll() is not None:
            _court.cache_clear()
            court = _court(os.getpid())
        assert court.process.stdin and court.process.stdout
        try:
            court.process.stdin.write(json.dumps(order).encode() + b"\n")
            court.process.stdin.flush()
            while len(answers) < count:
                line = court.process.stdout.readline()
                if not line:
                    raise RuntimeError("judge: the process that judges ended early; see above")
                answer = json.loads(line)
                answers[answer.pop("number")] = answer
        except BaseException:
            court.end()
            _court.cache_clear()
            raise
    return [answers[number] for number in range(count)]


def main(words: Any) -> int:
    """Do what `python -m loader judge` is asked to; the exit status."""
    candidates = words.candidates[0] if len(words.candidates) == 1 else words.candidates
    try:
        if words.json:
            with open(words.json, "a"):
                pass
        found = judge(
            candidates,
            words.reference,
            words.inputs,
            jobs=words.jobs,
            device=words.device,
            timed=not words.untimed,
            compiled=words.compiled,
            general=words.general,
            precision=words.precision,
            seconds=words.seconds,
            memory=words.memory,
            readable=words.readable or (),
        )
        if words.json:
            Path(words.json).write_text(found.json() + "\n")
    except OSError as error:
        about = f": {error.filename}" if error.filename else ""
        print(f"loader: judge: {error.strerror or error}{about}", file=sys.stderr)
        return 2
    except (ValueError, TypeError) as error:
        print(f"loader: {error}", file=sys.stderr)
        return 2
    print(found)
    verdicts = [found] if isinstance(found, Verdict) else found
    return 0 if all(verdict.accepted for verdict in verdicts) else 1
