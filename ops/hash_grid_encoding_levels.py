"""`hash_grid_encoding` of DTensors by a table that is cut along its levels, where it lies."""

import functools

from torch import Tensor
from torch.distributed.tensor import DTensor

from loader.jit.operators.locally import locally

from .hash_grid_encoding import Encoding, output_like


def hash_grid_encoding_levels(
    points: Tensor,
    table: Tensor,
    *,
    base_resolution: int = 16,
    per_level_scale: float = 2.0,
    first: int = 0,
) -> Tensor:
    """Encode points by some levels of a hash grid, those from the `first` on."""
    return _levels.forward(points, table, None, base_resolution, per_level_scale, first)


def _fake(points, table, along, base_resolution, per_level_scale, first):
    return output_like(points, table, along, base_resolution, per_level_scale)


_levels = Encoding(hash_grid_encoding_levels, _fake)


def encoder(points: DTensor, table: DTensor):
    """Return what encodes by the levels of each rank, given options; None where parts differ.

    Features, which are cut as the table is, would be cut elsewhere then.
    """
    mesh = table.device_mesh
    cut = [d for d, placement in enumerate(table.placements) if placement.is_shard(0)]
    if len(cut) != 1 or not isinstance(points, DTensor) or points.device_mesh != mesh:
        return None
    ((d,), L) = cut, len(table)
    if L % mesh.size(d):
        return None
    names = ("N", "_"), ("L", "_", "_")
    cuts = ["N" if placement.is_shard(0) else "" for placement in points.placements]
    cuts[d], first = "L", mesh.get_local_rank(d) * L // mesh.size(d)
    out = (len(points), L * table.shape[2]), ("N", "L")

    def encode(along: None, base: int, scale: float) -> Tensor:
        one = functools.partial(_encoded, base, scale, first)
        return locally(names, one, (points, table), [out], cuts)[0]

    return encode


def _encoded(base, scale, first, points, table):
    options = {"base_resolution": base, "per_level_scale": scale, "first": first}
    return (hash_grid_encoding_levels(points, table, **options),)
