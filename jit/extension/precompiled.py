"""A precompiled header that all extensions with the same flags share, trusted by its digest alone.

It takes 20 seconds to make and 500 MB to keep. Its digest lies beside it and is compared while the
compiler works with it; what was compiled with a damaged one is thrown away.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..build.workshop import CompileError, Workshop, behind
from ..cache.lock import lock_of
from ..cache.store import file_digest
from ..machine import files

_COMPLAINT = re.compile(r"\b(?:PCH|precompiled|AST) ")
_Compiled = tuple[Path | None, str]


class Precompiled:
    """A prelude for one compiler and its flags."""

    def __init__(self, work: Path, command: list[str], facts: list, text: str):
        self._text = text
        self._command = [*command, "-x", "c++-header"]
        digest = hashlib.sha256(json.dumps([facts, self._command, text]).encode()).hexdigest()
        self._folder = work / f"inline.headers-{digest[:12]}"
        self._header, self._made = self._folder / "torch.h", self._folder / "torch.h.gch"

    def used(self, compile: Callable[[list[str]], _Compiled]) -> _Compiled | None:
        """Return what `compile` returns of the arguments that use this header.

        None where it is not there, is damaged, or the compiler refuses it: it was not made for its
        flags.
        """
        # Shared while in use, so that nobody removes it; alone while it is being made.
        with contextlib.closing(lock_of(self._folder)) as lock:
            if not _locked(lock.descriptor, fcntl.LOCK_SH) or self._recorded() is None:
                return None
            with contextlib.suppress(OSError):
                os.utime(self._folder)
            sound = behind(self._is_sound)
            done, said = compile(["-include", str(self._header)])
            if sound.result():
                return None if not done and _COMPLAINT.search(said) else (done, said)
            if done:
                done.unlink(missing_ok=True)
            fcntl.flock(lock.descriptor, fcntl.LOCK_EX)
            if not self._is_sound():  # else another process has made it meanwhile
                shutil.rmtree(self._folder, ignore_errors=True)
            return None

    def make_behind(self) -> None:
        """Have it made by a compiler that nobody waits for, for those that come after."""
        behind(self.make)

    def make(self) -> None:
        """Make it, unless it is there or another process makes it, or the compiler cannot."""
        with contextlib.closing(lock_of(self._folder)) as lock:
            if not _locked(lock.descriptor, fcntl.LOCK_EX) or self._recorded() is not None:
                return
            with (
                contextlib.suppress(OSError, CompileError),
                Workshop(self._folder, rank=lambda: (1,)) as shop,
            ):
                self._make(shop)

    def _make(self, shop: Workshop) -> None:
        for left in self._folder.glob(".*"):  # by one that was killed
            left.unlink()
        files.write(self._header, self._text)
        draft = self._folder / f".{os.getpid()}-{os.urandom(4).hex()}-{self._made.name}"
        try:
            if shop.run([*self._command, str(self._header), "-o", str(draft)]).status:
                return
            digest = file_digest(draft)
            os.replace(draft, self._made)
        finally:
            draft.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            self._header.with_name("torch.h.pch").symlink_to(self._made.name)  # clang's name
        files.write_record(self._folder / "made.json", digest)

    def _recorded(self) -> str | None:
        """The digest of the header as it was made; None where there is none."""
        with contextlib.suppress(OSError, ValueError):
            if self._header.read_text() == self._text and self._made.is_file():
                return files.read_record(self._folder / "made.json")
        return None

    def _is_sound(self) -> bool:
        with contextlib.suppress(OSError):
            return self._recorded() == file_digest(self._made)
        return False


def _locked(descriptor: int, kind: int) -> bool:
    """Take a lock unless that means to wait; True if it is held."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
