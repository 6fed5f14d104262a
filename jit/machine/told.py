"""Errors as they are printed on stderr: for people, or with LOADER_ERRORS=json for programs.

In JSON each is one line that begins with `{"error":`; what else goes there is plain text.
"""

import json
import sys
import threading
import traceback
from collections.abc import Iterable
from types import TracebackType

from ..errors import BuildError
from . import settings
from .sources import OURS

_BETWEEN = "torch/utils/cpp_extension.py"  # where its functions are loader's for a while


def tell_each(errors: Iterable[BuildError]) -> None:
    """Print errors, those that say the same once."""
    for error in {str(error): error for error in errors}.values():
        tell(error)


def tell(error: BaseException) -> None:
    """Print an error that is not raised any further."""
    text = f"loader: {error}"
    try:
        if settings.value("LOADER_ERRORS") == "json":
            text = _line(error)
    except ValueError:  # a wrong setting, which is what `error` may be about
        pass
    print(text, file=sys.stderr, flush=True)


def print_as_json() -> None:
    """Have every BuildError that ends this process, or a thread of it, printed as JSON."""
    former, former_of_thread = sys.excepthook, threading.excepthook

    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, BuildError):
            print(_line(error, trace), file=sys.stderr, flush=True)
        else:
            former(kind, error, trace)

    def hook_of_thread(given: threading.ExceptHookArgs) -> None:
        if isinstance(given.exc_value, BuildError):
            print(_line(given.exc_value, given.exc_traceback), file=sys.stderr, flush=True)
        else:
            former_of_thread(given)

    sys.excepthook, threading.excepthook = hook, hook_of_thread


def is_ours(file: str) -> bool:
    """Return True for the files between a user's call and its work: loader's, and torch's."""
    return file.startswith(("<frozen", *OURS)) or file.endswith(_BETWEEN)


def _line(error: BaseException, trace: TracebackType | None = None) -> str:
    """Return an error as one line of JSON; `at` is the last line of a file that is not ours."""
    told = error if isinstance(error, BuildError) else BuildError(str(error))
    frames = [f for f in traceback.extract_tb(trace) if not is_ours(f.filename)]
    at = {"file": frames[-1].filename, "line": frames[-1].lineno} if frames else None
    return json.dumps({**told.as_dict(), "error": type(error).__name__, "at": at})
