"""The warm process: it has imported torch, runs nobody's code, and forks a referee a candidate.

It gets orders on its standard input, a line of JSON each, and answers with a line of JSON for each
candidate. It never wakes CUDA, so that those that it forks can.
"""

import contextlib
import functools
import gc
import glob
import importlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

from ..machine import settings
from . import cases, heap, tamper, watched
from .asked import Crowded, Lost, Misused, Options, Turn
from .confine import Limits, Prison
from .forms import Source
from .jail import Jail
from .referee import Referee
from .witness import live

_SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc", "/opt", "/proc", "/sys")
_FOLDERS = "jit", "ops", "kernels", "include", "prebuilt"
_ROOMS = *_FOLDERS, "loader.py", "__init__.py", "nn.py", "distributed.py"
# What candidates are likely to want, for all of them.
_IMPORTED = (
    *("torch._dynamo.config", "torch.fx.experimental.symbolic_shapes"),
    *("torch.utils.benchmark", "torch.utils.cpp_extension"),
)


def serve(gpu: bool) -> None:
    """Answer orders until standard input is closed; `gpu`: whether torch sees one."""
    awake = torch.cuda.is_available  # which wakes CUDA, and modules ask it when they are imported
    torch.cuda.is_available = lambda: gpu
    logging.disable()  # on a machine without a GPU they say so
    try:
        for name in _IMPORTED:
            importlib.import_module(name)
    finally:
        torch.cuda.is_available = awake
        logging.disable(logging.NOTSET)

    import loader

    loader.accelerate_extensions()  # torch's load_inline in a candidate is loader's
    os.environ.pop("LD_PRELOAD", None)  # what is started from here has no guard
    known = tamper.known()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends it
    folder = Path(tempfile.mkdtemp(prefix="octet-judge-"))
    try:
        for line in sys.stdin:
            _Session(json.loads(line), folder, known).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Session:
    """One order: candidates, so many at once."""

    def __init__(self, order: dict, folder: Path, known: dict):
        self._order, self._folder, self._known = order, folder, known
        self._waiting = [*enumerate(order["candidates"])]
        self._running: dict[int, tuple[int, int, bytes]] = {}  # pipe -> pid, number, what it said

    def run(self) -> None:
        """Judge them all."""
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < self._order["jobs"]:
                    self._start(*self._waiting.pop(0))
                ready = select.select([0, *self._running], [], [])[0]
                if 0 in ready:  # nothing comes while an order is worked on: whoever asked has ended
                    break
                for pipe in ready:
                    self._listen(pipe)
        finally:
            for pid, _, _ in self._running.values():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def _start(self, number: int, source: list) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            self._running[reading] = pid, number, b""
            return
        try:
            os.close(reading)
            try:
                answer = self._judged(Source(*source), number)
            except Exception:
                answer = {"broken": f"the judge itself failed:\n{traceback.format_exc()}"}
            with open(writing, "wb") as file:
                file.write(json.dumps(answer).encode())
        finally:
            os._exit(0)

    def _listen(self, pipe: int) -> None:
        pid, number, said = self._running[pipe]
        data = os.read(pipe, 1 << 20)
        if data:
            self._running[pipe] = pid, number, said + data
            return
        os.close(pipe)
        del self._running[pipe]
        os.waitpid(pid, 0)
        answer = json.loads(said) if said else {"broken": "the judge itself failed"}
        print(json.dumps({"number": number} | answer), flush=True)

    def _judged(self, candidate: Source, number: int) -> dict:
        """Judge one, in a process of its own.

        Anew without what ended the reference's GPU; alone, where its memory did not do for all.
        """
        options = Options(**self._order["options"])
        while True:
            try:
                return self._judged_once(candidate, number, options)
            except Lost as lost:
                if not lost.case:
                    return {"unusable": str(lost)}
                options = options._replace(without=(*options.without, *cases.alike(lost.case)))
            except Crowded:
                options = options._replace(alone=True)
            except Misused as error:
                return {"unusable": str(error)}

    def _judged_once(self, candidate: Source, number: int, options: Options) -> dict:
        reference, limits = Source(*self._order["reference"]), Limits(**self._order["limits"])
        text = None
        if candidate.path:
            try:
                text = Path(candidate.path).read_text(errors="surrogateescape")
            except OSError as error:
                return {"unusable": f"{candidate.path}: {error.strerror}"}
        folder = self._folder / str(number)
        if options.device == "cuda":  # what others do at once is to find a core too
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // (2 * self._order["jobs"])))
        jails: list[Jail] = []
        try:
            for name, source in (
                ("candidate", candidate),
                ("reference", reference),
                *([("compiled", reference)] if options.compiled else []),
            ):
                role, place = name.replace("compiled", "reference"), folder / name
                place.mkdir(parents=True)
                prison = self._prison(role, place, source, options.device)
                words = role, str(place), self._known, options.device
                jails.append(Jail(functools.partial(_life, *words), prison, limits))
            heap.keep()  # of the referee, once the others have been forked
            compiled = jails[2] if options.compiled else None
            turn = Turn(_turn(self._folder), 1 if options.alone else self._order["jobs"])
            referee = Referee(jails[0], jails[1], compiled, options, turn)
            with turn if options.alone else contextlib.nullcontext():
                data = referee.judge(list(candidate), list(reference), text)
            if options.sanitizer and data["verdict"] == "accepted":
                place = folder / "sanitized"
                place.mkdir()
                prison = self._prison("candidate", place, candidate, options.device)
                how = str(place), options.device, options.sanitizer
                jails.append(Jail(functools.partial(_watched_life, *how), prison, limits))
                data = referee.sanitize(jails[-1])
            return {"data": {"candidate": candidate.label(), "reference": reference.label()} | data}
        finally:
            for jail in jails:
                jail.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _prison(self, role: str, folder: Path, source: Source, device: str) -> Prison:
        """What one of the two may see: the reference's file is nothing for the candidate."""
        readable = [*_SYSTEM, *_interpreter(), *self._order["readable"], *self._order["caches"]]
        home = Path(__file__).parents[2]
        readable += [str(home / name) for name in _ROOMS]
        if tool := self._order["options"]["sanitizer"]:
            readable.append(str(Path(tool).resolve().parent))
        if role == "reference":
            own = str(Path(source.path).resolve().parent) if source.path else ""
            readable += [own, *sys.path, *self._order["private"]]
        gpu = tuple(glob.glob("/dev/nvidia*")) if device == "cuda" else ()
        if gpu:  # where its driver's libraries may be
            readable += os.environ.get("LD_LIBRARY_PATH", "").split(":")
        return Prison(
            str(folder),
            tuple(filter(None, readable)),
            gpu,
            ("/dev", str(home), str(home.parent)),  # Python looks for `loader` there
            unix_sockets=bool(gpu),  # CUDA's driver may want both
            files_in_memory=bool(gpu) or role == "reference",
            bounded_data=not gpu,
            drivers=bool(gpu),
        )


def _turn(folder: Path) -> str:
    """Where those wait who are to have the GPU, or the clock: a file for all who share a cache."""
    import loader

    place = Path(loader._session.caches[-1]) / "judge.turn"
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return str(place)
    return str(folder / "turn")


def _interpreter() -> list[str]:
    """Where Python and its packages are."""
    roots = {os.path.realpath(p) for p in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    found = {sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), *roots}
    for path in sys.path:
        real = os.path.realpath(path)
        inside = any(real.startswith(root + os.sep) for root in roots)
        if path and (inside or "site-packages" in real or "dist-packages" in real):
            found.add(real)
    return sorted(found)


def _life(role: str, folder: str, known: dict[str, Any], device: str, channel: Any) -> None:
    """Live as a witness."""
    _settle(folder)
    live(role, folder, known, device, channel)


def _watched_life(folder: str, device: str, tool: str, channel: Any) -> None:
    """Live as a candidate in a Python of its own, under compute-sanitizer."""
    _settle(folder)
    watched.become(tool, folder, device, channel)


def _settle(folder: str) -> None:
    """Have all that is written without a place named go to this folder."""
    import loader

    caches = [*map(str, loader._session.caches), f"{folder}/cache"]
    places = {"HOME": "", "TMPDIR": "/tmp", "XDG_CACHE_HOME": "/.cache"}
    places |= {"TORCH_EXTENSIONS_DIR": "/extensions", "TRITON_CACHE_DIR": "/triton"}
    places |= {"TORCHINDUCTOR_CACHE_DIR": "/inductor"}
    for name, below in places.items():
        os.makedirs(folder + below, exist_ok=True)
        os.environ[name] = folder + below
    settings.choose("LOADER_CACHE_DIR", ":".join(caches))
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    loader._session.caches = tuple(map(Path, caches))
    vars(loader._session).pop("store", None)  # it was made of other folders
    sys.stdin = open(os.devnull)  # noqa: SIM115
