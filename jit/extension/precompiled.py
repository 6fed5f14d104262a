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
import threading
from collections.abc import Callable

from ..build.workshop import Workshop
from ..cache.lock import lock_of
from ..cache.store import file_digest
from ..machine import files

_COMPLAINT = re.compile(r"\b(?:PCH|precompiled|AST) ")


class Precompiled:
    """A prelude for one compiler and its flags.

    Attributes:
        use: the arguments that have a compiler use it, once it is `made`.
    """

    def __init__(self, shop: Workshop, command: list[str], facts: list, text: str):
        self._shop, self._text = shop, text
        self._command = [*command, "-x", "c++-header"]
        digest = hashlib.sha256(json.dumps([facts, self._command, text]).encode()).hexdigest()
        self._folder = shop.folder.parent / f"inline.headers-{digest[:12]}"
        clang = self._is_clang(command)
        header = self._folder / "torch.h"
        self._made = self._folder / ("torch.h.pch" if clang else "torch.h.gch")
        self.use = ["-include-pch", str(self._made)] if clang else ["-include", str(header)]
        # Shared while in use, so that nobody removes it; alone while it is being made.
        self._lock = lock_of(self._folder)

    def made(self) -> bool:
        """Make it, or wait for the process that does; False where the compiler cannot."""
        fcntl.flock(self._lock.descriptor, fcntl.LOCK_SH)
        if self._recorded() is None:
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX)
            if self._recorded() is None and not self._make():
                return False
            fcntl.flock(self._lock.descriptor, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.utime(self._folder)
        return True

    def checked(self, compile: Callable[[], tuple]) -> tuple:
        """Return what `compile` returns, and whether the header was whole meanwhile."""
        sound: list[bool] = []
        check = threading.Thread(target=lambda: sound.append(self._is_sound()), daemon=True)
        check.start()
        result = compile()
        check.join()
        return (*result, sound == [True])

    def complains(self, said: str) -> bool:
        """True if a compiler refused the header, not the source."""
        return bool(_COMPLAINT.search(said))

    def discard(self) -> None:
        """Remove it, so that it is made anew."""
        fcntl.flock(self._lock.descriptor, fcntl.LOCK_EX)
        if not self._is_sound():  # else another process has made it meanwhile
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        """Let others remove it."""
        self._lock.close()

    def _make(self) -> bool:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        header = self._folder / "torch.h"
        files.write(header, self._text)
        draft = self._folder / f".{os.getpid()}-{os.urandom(4).hex()}-{self._made.name}"
        try:
            status, _ = self._shop.run([*self._command, str(header), "-o", str(draft)])
            if status:
                return False
            digest = file_digest(draft)
            os.replace(draft, self._made)
        finally:
            draft.unlink(missing_ok=True)
        files.write_record(self._folder / "made.json", digest)
        return True

    def _recorded(self) -> str | None:
        """The digest of the header as it was made; None where there is none."""
        digest = files.read_record(self._folder / "made.json")
        try:
            whole = (self._folder / "torch.h").read_text() == self._text
        except (OSError, ValueError):
            whole = False
        return digest if whole and self._made.is_file() else None

    def _is_sound(self) -> bool:
        try:
            return self._recorded() == file_digest(self._made)
        except OSError:
            return False

    def _is_clang(self, command: list[str]) -> bool:
        probe = self._shop.folder / "clang.cpp"
        files.write(probe, "__clang__\n")
        status, said = self._shop.run([*command, "-E", "-P", probe.name], note=False)
        return status == 0 and "__clang__" not in said
