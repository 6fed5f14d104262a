"""A line for the user."""

import sys


def say(text: str) -> None:
    """Tell the user something, on stderr, where there is one."""
    if sys.stderr is not None:
        print(f"loader: {text}", file=sys.stderr, flush=True)
