"""Files that many processes share: written in one step, and told apart from damaged ones."""

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Any


def make_folder(folder: Path) -> None:
    """Create a folder, and those above it, where nobody else can write, whatever the umask.

    Raises: OSError.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)


def write(path: Path, content: str | bytes, mode: int | None = None) -> None:
    """Give a file its content in one step: a reader sees the old content or the new, whole.

    A crash inside leaves a draft beside it, whose name begins with a dot. Raises: OSError.
    """
    data = content if isinstance(content, bytes) else content.encode(errors="surrogateescape")
    draft = path.with_name(f".draft-{os.getpid()}-{os.urandom(4).hex()}-{path.name}")
    try:
        with open(draft, "xb") as file:
            file.write(data)
        if mode is not None:
            draft.chmod(mode)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_record(path: Path, value: Any) -> None:
    """Write plain data with its digest, for `read_record`; nothing where the folder cannot be
    written: what is recorded is found out anew then.
    """
    text = json.dumps(value, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    with contextlib.suppress(OSError):
        write(path, json.dumps({"sha256": digest, "value": value}))


def read_record(path: Path) -> Any:
    """Return what `write_record` wrote; None where that is missing or was damaged since."""
    try:
        record = json.loads(path.read_text())
        text = json.dumps(record["value"], sort_keys=True)
        if record["sha256"] == hashlib.sha256(text.encode()).hexdigest():
            return record["value"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
