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

from ..build.workshop import Workshop, behind
from ..cache.lock import lock_of
from ..cache.store import file_digest
from ..machine import files

_COMPLAINT = re.compile(r"\b(?:PCH|precompiled|AST) ")
_Compiled = tuple[Path | None, str]


class Precompiled:
    """A prelude for one compiler and its flags."""

    def __init__(self, shop: Workshop, command: list[str], facts: list, text: str):
        self._shop, self._text = shop, text
        self._command = [*command, "-x", "c++-header"]
        digest = hashlib.sha256(json.dumps([facts, self._command, text]).encode()).hexdigest()
        self._folder = shop.folder.parent / f"inline.headers-{digest[:12]}"
        self._header, self._made = self._folder / "torch.h", self._folder / "torch.h.gch"

    def used(self, compile: Callable[[list[str]], _Compiled]) -> _Compiled | None:
        """Return what `compile` returns of the arguments that use this header.

        None where the compiler cannot make it, or refuses it: it was not made for its flags.
        """
        # Shared while in use, so that nobody removes it; alone while it is being made.
        with contextlib.closing(lock_of(self._folder)) as lock:
            for _ in range(2):  # once more with a header made anew, where it proves damaged
                if not self._is_made(lock.descriptor):
                    return None
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

    def _is_made(self, lock: int) -> bool:
        """Make it, or wait for the process that does; False where the compiler cannot."""
        fcntl.flock(lock, fcntl.LOCK_SH)
        if self._recorded() is None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._recorded() is None and not self._make():
                return False
            fcntl.flock(lock, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        return True

    def _make(self) -> bool:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        files.write(self._header, self._text)
        draft = self._folder / f".{os.getpid()}-{os.urandom(4).hex()}-{self._made.name}"
        try:
            status, _ = self._shop.run([*self._command, str(self._header), "-o", str(draft)])
            if status:
                return False
            digest = file_digest(draft)
            os.replace(draft, self._made)
        finally:
            draft.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            self._header.with_name("torch.h.pch").symlink_to(self._made.name)  # clang's name
        files.write_record(self._folder / "made.json", digest)
        return True

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
