"""A line for the user, and those who hear of builds and say nothing."""

import contextlib
import sys
from typing import Any


def say(text: str) -> None:
    """Tell the user something, on stderr, where there is one that still takes it."""
    with contextlib.suppress(Exception):  # a notebook's kernel that is shutting down, say
        print(f"loader: {text}", file=sys.stderr, flush=True)


class Silent:
    """Hears of builds, and says nothing."""

    def show(self, event: dict) -> None:
        """Take in a unit's new state."""

    def end(self, jobs: list[Any], seconds: float, removed: tuple) -> None:
        """Take in the end of all."""
