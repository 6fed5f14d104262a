"""Colour tables: `.cube` files, and a few that are made here."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

METHODS = ("tetrahedral", "trilinear")
_ENTRIES = 33
_LARGEST = 256  # entries along an axis
# Inferno of matplotlib at equal steps, in sRGB.
_INFERNO = (
    *((0.001, 0.000, 0.014), (0.087, 0.045, 0.225), (0.258, 0.039, 0.406)),
    *((0.416, 0.090, 0.433), (0.578, 0.148, 0.404), (0.736, 0.216, 0.330)),
    *((0.865, 0.317, 0.226), (0.955, 0.469, 0.100), (0.988, 0.645, 0.040)),
    *((0.965, 0.844, 0.274), (0.988, 0.998, 0.645)),
)


@dataclass(frozen=True, eq=False)
class Table:
    """A colour table; `entries` (S, S, S, 3) indexed [r, g, b], as `apply_lut3d` takes it."""

    title: str
    entries: Tensor


class CannotRead(ValueError):
    """A `.cube` file that is not one, and why, in one sentence."""


def read_cube(path: Path) -> Table:
    """Read a `.cube` file with a 3-D table.

    Raises: CannotRead, with one sentence on what is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise CannotRead(f"{path.name}: {error.strerror or error}") from None
    size, title, domain, rows = 0, path.stem, {"DOMAIN_MIN": 0.0, "DOMAIN_MAX": 1.0}, []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            if words[0] == "TITLE":
                title = line.partition('"')[2].rpartition('"')[0] or title
            elif words[0] == "LUT_3D_SIZE":
                size = int(words[1])
            elif words[0] == "LUT_1D_SIZE":
                raise CannotRead(f"{path.name}: it holds curves (1-D); a 3-D table is needed")
            elif words[0] in domain:
                if {float(word) for word in words[1:]} != {domain[words[0]]}:
                    raise CannotRead(f"{path.name}:{number}: the domain must be 0 to 1: {line}")
            elif words[0] != "LUT_3D_INPUT_RANGE":
                r, g, b = map(float, words)
                rows.append((r, g, b))
        except (ValueError, IndexError) as error:
            if isinstance(error, CannotRead):
                raise
            raise CannotRead(
                f"{path.name}:{number}: expected three numbers or a keyword of .cube, "
                f"got {line.strip()[:40]!r}"
            ) from None
    if not 2 <= size <= _LARGEST or len(rows) != size**3:
        raise CannotRead(
            f"{path.name}: LUT_3D_SIZE {size} takes {size**3} lines of three numbers, "
            f"got {len(rows)}"
        )
    # Red is the fastest in the file.
    entries = torch.tensor(rows).view(size, size, size, 3).permute(2, 1, 0, 3).contiguous()
    return Table(title, entries)


def ready_made() -> dict[str, Table]:
    """Return the tables that need no file, by title."""
    axis = torch.linspace(0, 1, _ENTRIES)
    colours = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1)
    grey = (colours * torch.tensor([0.2126, 0.7152, 0.0722])).sum(-1, keepdim=True)
    curve = colours * colours * (3 - 2 * colours)
    film = 0.65 * curve + 0.35 * colours
    film = 0.03 + 0.94 * (
        film @ torch.tensor([[1.0, 0.02, 0.0], [0.03, 0.95, 0.02], [0, 0.03, 0.9]])
    )
    teal, orange = torch.tensor([-0.06, 0.03, 0.08]), torch.tensor([0.08, 0.02, -0.07])
    split = colours + (1 - grey) * teal + grey * orange
    tables = {
        "Film": film,
        "Teal and orange": 0.5 * split + 0.5 * (split * split * (3 - 2 * split)),
        "Grey": grey.expand_as(colours),
        "Inferno": inferno(grey[..., 0]),
    }
    return {name: Table(name, x.clamp(0, 1).contiguous()) for name, x in tables.items()}


def inferno(share: Tensor) -> Tensor:
    """Return a colour (..., 3) for each share in [0, 1], from black over red to pale yellow."""
    stops = torch.tensor(_INFERNO, device=share.device, dtype=share.dtype)
    place = share.nan_to_num(1.0).clamp(0, 1) * (len(stops) - 1)
    at = place.long().clamp(max=len(stops) - 2)
    return torch.lerp(stops[at], stops[at + 1], (place - at)[..., None])
