"""Where a line of an inline source stands: in the caller's file, or in a cell of the notebook."""

import linecache
import re
from itertools import takewhile

from ..errors.literal import label
from .arguments import Extension

_SHOWN = re.compile(r"^(?P<file>(?:cpp|cuda)_sources\.(?:cpp|cu)):(?P<line>\d+)")
_GUTTER = re.compile(r"^ *(?P<line>\d+) \|")


class Places:
    """The caller's names for the lines of an extension's strings."""

    def __init__(self, extension: Extension):
        self._sources = {s.name: s.text.split("\n") for s in extension.sources if not s.folder}
        self._callers = extension.callers

    def in_callers_words(self, text: str) -> str:
        """A message with the places of the caller instead of those in the strings."""
        shown, shift = [], 0
        for printed in text.split("\n"):
            line = printed
            if place := _SHOWN.match(line):
                name, number = place["file"], int(place["line"])
                found = self._find(name, number)
                shift = found[1] - number if found else 0
                label = found[0] if found else name.split(".")[0]
                line = f"{label}:{number + shift}{line[place.end() :]}"
            elif shift and (quoted := _GUTTER.match(line)):
                line = f"{int(quoted['line']) + shift:>5}{line[quoted.end('line') :]}"
            elif not line.startswith(" "):
                shift = 0
            shown.append(re.sub(r"^functions\.cpp:\d+(?::\d+)?:", "functions:", line))
        return "\n".join(shown)

    def _find(self, name: str, number: int) -> tuple[str, int] | None:
        """The file or cell that has a line of a string, and its number there."""
        lines = [line.strip() for line in self._sources[name]]
        if not 0 < number <= len(lines) or not lines[number - 1]:
            return None
        *before, wanted = lines[:number]
        at_an_end = number in (1, len(lines))  # may stand beside quotation marks
        for caller in self._callers:
            there = [line.strip() for line in linecache.getlines(caller)]

            def agreeing(at: int, there: list[str] = there) -> int:
                pairs = zip(reversed(there[:at]), reversed(before), strict=False)
                return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

            places = [
                at
                for at, line in enumerate(there)
                if line == wanted or (at_an_end and wanted in line)
            ]
            if places:
                return label(caller), max(places, key=agreeing) + 1
        return None
