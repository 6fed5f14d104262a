"""A line for the user."""

import contextlib
import sys


def say(text: str) -> None:
    """Tell the user something, on stderr, where there is one that still takes it."""
    with contextlib.suppress(Exception):  # a notebook's kernel that is shutting down, say
        print(f"loader: {text}", file=sys.stderr, flush=True)
