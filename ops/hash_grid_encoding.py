"""Multiresolution hash encoding of points: trainable features at the corners of many grids."""

import math
import sys

import torch
from torch import Tensor

from loader.jit.operators.frame import vmap
from loader.jit.operators.shapes import Sizes, shown

from .linear import Linear, in_turns, rank

_NAME = "hash_grid_encoding"
_PRIMES = 1, 2654435761, 805459861
_MOST_FEATURES = 1 << 20
_PLAIN = Tensor, torch.nn.Parameter


def hash_grid_encoding(
    points: Tensor, table: Tensor, *, base_resolution: int = 16, per_level_scale: float = 2.0
) -> Tensor:
    """Interpolate features of L grids, kept in hash tables, at each point.

    Level l has scale s = base_resolution * per_level_scale**l - 1, rounded to float32, and
    resolution r = ceil(s) + 1. A coordinate x lies at x * s + 0.5 in it; corners are that rounded
    down, c, and c + 1, weighted linearly. A level with r**D <= T is dense: corner (x, y, z) has row
    x + y * r + z * r**2, modulo R = min(r**D rounded up to a multiple of 8, T), beyond which only
    corners at the far end or outside would lie; further rows are not used. Otherwise the row is
    (x ^ y * 2654435761 ^ z * 805459861) % T. Integers are unsigned and of 32 bits.

    These are tiny-cuda-nn's conventions (HashGrid, linear interpolation), whose levels have R rows
    one after the other: its parameters fit, each level filled up to T rows.

    Args:
        points: (N, 2) or (N, 3) float32, float64, float16 or bfloat16, on the CPU or a CUDA device,
            any strides; in [0, 1]. Positions are computed in float64 for float64, else in float32.
            Outside, grids go on: negative corners wrap around 2**32. A NaN or infinite coordinate
            gives NaN, and NaN in the gradient of the rows it has: of corner 0, or of the last
            corner of 31 bits.
        table: (L, T, F) of any of these dtypes, on the same device, any strides; L up to 128, any T
            and F; quickest with F = 1, 2, 4 or 8 elements next to each other and aligned, and with
            T a power of two.
        base_resolution: corners along an axis of level 0.
        per_level_scale: growth from level to level, the paper's b. The defaults are tiny-cuda-nn's.

    Returns:
        (N, L * F), level by level, dtype and device of `table`; accumulated in float32 (float64 for
        float64). Differentiable in both arguments, to any order; kernels compute the second
        derivatives too (as losses on normals and eikonal terms need), of a gradient, and plain
        PyTorch third ones and forward mode over forward mode.

        On CUDA devices the gradient to `table` adds up in no fixed order, unless
        `torch.use_deterministic_algorithms(True)`: then in fixed point, with the same bits in every
        run, which takes longer. All else is the same in every run.

    Raises:
        TypeError: an argument is no tensor, or no number.
        ValueError: `base_resolution` or `per_level_scale` is out of its range.
        RuntimeError: a shape, a dtype, a layout or a device does not fit; the message says which.
        loader.BuildError: the operator could not be compiled.

    Source: Mueller, Evans, Schied, Keller: Instant Neural Graphics Primitives with a
    Multiresolution Hash Encoding, SIGGRAPH 2022, eq. 1-5; `hash_grid_encoding_reference`.
    """
    if type(table) not in _PLAIN and (of := in_levels(points, table)):
        return of(*options_of(points, table, base_resolution, per_level_scale))
    return _run(_operator.call, points, table, base_resolution, per_level_scale)


def hash_grid_encoding_reference(
    points: Tensor, table: Tensor, *, base_resolution: int = 16, per_level_scale: float = 2.0
) -> Tensor:
    """The same in plain PyTorch; 16-bit dtypes are computed in float32."""
    return _reference(points, table, base_resolution, per_level_scale, 0)


def _reference(points, table, base_resolution, per_level_scale, first):
    """The same of levels from the `first` on."""
    work = torch.promote_types(table.dtype, torch.float32)
    x = points.to(torch.promote_types(points.dtype, torch.float32))
    (L, T, _), D = table.shape, points.shape[1]
    out = []
    for l in range(L):
        scale = _float32(base_resolution * per_level_scale ** (first + l) - 1)
        resolution = math.ceil(scale) + 1
        position = x * scale + 0.5
        below = position.detach().floor()
        place = (position - below).to(work)
        cell = below.nan_to_num(0.0, math.inf, -math.inf).clamp(-(2**31), 2**31 - 128).long()
        dense = resolution**D <= T
        rows = min(-(-(resolution**D) // 8) * 8, T) if dense else T
        sum_ = 0
        for k in range(2**D):
            number, weight = 0, 1
            for d in range(D):
                corner = (cell[:, d] + (k >> d & 1)) & 0xFFFFFFFF
                number = number + corner * resolution**d if dense else number ^ corner * _PRIMES[d]
                weight = weight * (place[:, d] if k >> d & 1 else 1 - place[:, d])
            feats = table[l].to(work).index_select(0, (number & 0xFFFFFFFF) % rows)
            sum_ = sum_ + weight[:, None] * feats
        out.append(sum_)
    return torch.cat(out, 1).to(table.dtype)


def _float32(x: float) -> float:
    """Rounded to 24 bits, in arithmetic that torch.compile can see through."""
    mantissa, exponent = math.frexp(x)
    return round(mantissa * 2**24) * 2.0 ** (exponent - 24)


def samples(device):
    """Small arguments of `hash_grid_encoding`, for comparisons with the reference after an edit."""
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}

    def pair(N, D, table, dtype=torch.float32, points_dtype=torch.float32):
        points = torch.rand(N, D, **make).to(points_dtype)
        return points, torch.randn(*table, **make).to(dtype)

    yield pair(300, 3, (4, 1 << 13, 2))
    yield pair(150, 2, (3, 1000, 4))
    yield pair(129, 3, (3, 4096, 1), torch.float64, torch.float64)
    yield pair(65, 2, (9, 256, 2), torch.float16, torch.float16)
    yield pair(65, 3, (3, 512, 8), torch.bfloat16, torch.bfloat16)
    yield pair(99, 3, (3, 500, 11))


def benchmark(device):
    """Arguments of a size worth timing."""
    N, T = (1 << 20, 1 << 19) if torch.device(device).type == "cuda" else (1 << 16, 1 << 16)
    make = {"device": device, "generator": torch.Generator(device).manual_seed(0)}
    return torch.rand(N, 3, **make), torch.randn(16, T, 2, **make)


def in_levels(points, table):
    """What encodes DTensors by a table that is cut along its levels; None for all others."""
    if torch.compiler.is_compiling():
        return None
    torchs = sys.modules.get("torch.distributed.tensor")
    if torchs is None or not isinstance(table, torchs.DTensor):
        return None
    from .hash_grid_encoding_levels import encoder

    return encoder(points, table)


def _run(function, *arguments):
    """ValueError for an option out of its range, of which torch 2.15 makes a RuntimeError."""
    try:
        return function(*arguments)
    except RuntimeError as error:
        if str(error).startswith((f"{_NAME}: base_resolution", f"{_NAME}: per_level_scale")):
            raise ValueError(str(error)) from None
        raise


def options_of(points, table, base_resolution, per_level_scale) -> tuple[None, int, float]:
    """Return the options as the registered operator takes them, `along` first."""
    if isinstance(base_resolution, bool) or not isinstance(base_resolution, int):
        got = type(base_resolution).__name__
        raise TypeError(f"{_NAME}: base_resolution must be an integer, got {got}")
    if isinstance(per_level_scale, bool) or not isinstance(per_level_scale, (int, float)):
        got = type(per_level_scale).__name__
        raise TypeError(f"{_NAME}: per_level_scale must be a number, got {got}")
    return None, base_resolution, float(per_level_scale)


def output_like(points, table, along, base_resolution, per_level_scale):
    """Return the output for tensors without data. Raises: where shapes or options do not fit."""
    torch._check(
        points.dim() == 2 and points.shape[1] in (2, 3),
        lambda: (
            f"{_NAME}: points must be (N, 2) or (N, 3), got {shown(points)}; "
            "join leading dimensions with .flatten(0, -2)"
        ),
    )
    sizes = Sizes(_NAME)
    sizes.match("table", table, "(L, T, F)")
    torch._check(
        1 <= sizes["F"] <= _MOST_FEATURES,
        lambda: (
            f"{_NAME}: table (L, T, F) must have 1 to {_MOST_FEATURES} features, got {shown(table)}"
        ),
    )
    L, T, F = table.shape
    for fits, message in (
        (1 <= L <= 128, "1 to 128 levels"),
        (T >= 1, "1 to 2^31 rows to a level"),
    ):
        torch._check(
            fits,
            lambda message=message: (
                f"{_NAME}: table (L, T, F) must have {message}, got {shown(table)}"
            ),
        )
    _check_ranges(L, base_resolution, per_level_scale)
    return table.new_empty((points.shape[0], L * F))


def _check_ranges(levels: int, base: int, scale: float) -> None:
    if base < 1:
        raise ValueError(f"{_NAME}: base_resolution must be 1 or more, got {base}")
    if not 0 < scale < math.inf:
        raise ValueError(f"{_NAME}: per_level_scale must be a positive number, got {scale:f}")
    for l in range(levels):
        if base * scale**l - 1 >= 2**31:
            raise ValueError(
                f"{_NAME}: base_resolution * per_level_scale^l must stay below 2^31, got "
                f"{base} * {scale:f}^{l}; use fewer levels or a smaller per_level_scale"
            )


class Encoding(Linear):
    """With a third tensor, `along`: the derivative along it is linear in it too."""

    def __init__(self, function, fake, **how):
        super().__init__(
            function,
            ("points", "table"),
            linear=(1,),
            fake=fake,
            shapes="(N, _), (_, _, _), (N, _) -> (N, _)",
            along=self._slopes,
            extra=1,
            mask=(False, True),
            flag="deterministic",
            **how,
        )

    def _slopes(self, to, grad_out, points, table, along, *options_and_need):
        """The derivative of F along `to` has the slopes of F's weights as its weights."""
        *options, need = options_and_need
        tensors = points, table, to
        to_grad_out = self.forward(*tensors, *options) if need[0] else None
        both = (None, None)
        if any(need[1:]):
            both = self.gradients(grad_out, tensors, options, need[1:3])
        return to_grad_out, *both

    def gradients(self, *arguments):
        """See Linear; with this operator's errors."""
        return _run(super().gradients, *arguments)

    def _gradient(self, ctx, grad_out):
        points, table, *_ = tensors = ctx.saved_tensors
        to_points, to_table, _, *rest = super()._gradient(ctx, grad_out, tensors)
        for_along = None
        if ctx.needs_input_grad[2]:
            need = True, False
            for_along, _ = self.gradients(grad_out, (points, table, None), ctx.options, need)
        return to_points, to_table, for_along, *rest

    def second(self, arriving, grad_out, tensors, options, need):
        """In plain PyTorch where the operator is a derivative itself, which is rare."""
        if tensors[2] is None:
            return super().second(arriving, grad_out, tensors, options, need)
        places = [i for i, to in enumerate(arriving) if to is not None]

        def gradients(grad_out, *tensors):
            _, pull = torch.func.vjp(lambda *x: _derivative(*x, *options), *tensors)
            found = pull(grad_out)
            return tuple(found[i] for i in places)

        _, pull = torch.func.vjp(gradients, grad_out, *tensors)
        return pull(tuple(arriving[i] for i in places))


def _derivative(points, table, along, base_resolution, per_level_scale, first=0):
    """How the reference's encoding changes with points that move `along`."""

    def encoding(points):
        return _reference(points, table, base_resolution, per_level_scale, first)

    return torch.func.jvp(encoding, (points,), (along,))[1]


def _whole(x, dim, B):
    """A batch, in front."""
    return x.expand(B, *x.shape) if dim is None else x.movedim(dim, 0)


def _joined(x, dim, B):
    """Points of all members, one after the other."""
    return None if x is None else _whole(x, dim, B).flatten(0, 1)


def _members(x, B):
    """The same, apart again."""
    return x.unflatten(0, (B, len(x) // B))


def _batched(op) -> None:
    """Let torch.vmap run X once: of members with one table on all their points, of tables at the
    same points on a table with the features of all, if that is less to copy than to gather. Other
    members take turns: each has as many gathers as a call of its own.
    """

    def rule(info, in_dims, points, table, along, *options):
        B, (of_points, of_table, of_along) = info.batch_size, in_dims[:3]
        if of_table is None:
            whole = _joined(points, of_points, B), table, _joined(along, of_along, B)
            return _members(op(*whole, *options), B), 0
        if rank(table, of_table) != 3:
            return in_turns(op, info, in_dims, (points, table, along, *options))
        wide = table.movedim(of_table, 2)  # (L, T, B, F)
        L, T, _, F = wide.shape
        gathers = points.shape[0] << points.shape[-1]
        if of_points is None and of_along is None and B * F <= _MOST_FEATURES and gathers >= T:
            out = op(points, wide.flatten(2), along, *options)
            return out.unflatten(1, (L, B, F)).movedim(2, 0).flatten(2), 0
        return in_turns(op, info, in_dims, (points, table, along, *options))

    vmap(op, rule)


def _batched_backward(op) -> None:
    """The same of the gradients: to the points with one table, to tables at the same points."""

    def rule(info, in_dims, *args):
        grad_out, points, table, along, base, scale, need_points, need_table, fixed = args
        B, (of_grad, of_points, of_table, of_along) = info.batch_size, in_dims[:4]
        if of_table is not None:
            table = table.movedim(of_table, 0)
        L, T, F = table.shape[-3:]
        apart_points = of_table is not None
        apart_table = of_points is not None or of_along is not None or B * F > _MOST_FEATURES
        need = need_points and apart_points, need_table and apart_table
        to_points = to_table = points.new_empty(B, 0)
        table_dim = 0
        if any(need):
            turns, _ = in_turns(op, info, in_dims, (*args[:6], *need, fixed))
            to_points, to_table = turns
        if need_points and not apart_points:
            grad, at = _joined(grad_out, of_grad, B), _joined(points, of_points, B)
            both = op(grad, at, table, _joined(along, of_along, B), base, scale, True, False, fixed)
            to_points = _members(both[0], B)
        if need_table and not apart_table:
            grad = _whole(grad_out, of_grad, B).unflatten(2, (L, F)).movedim(0, 2)  # (N, L, B, F)
            shape = table[(0,) * table.dim()].expand(L, T, B * F)  # its numbers are not read
            both = op(grad.flatten(1), points, shape, along, base, scale, False, True, fixed)
            to_table, table_dim = both[1].unflatten(2, (B, F)), 2
        return (to_points, to_table), (0, table_dim)

    vmap(op, rule)


_operator = Encoding(hash_grid_encoding, output_like, options=options_of)
_batched(_operator.op)
_batched_backward(_operator.backward_op)
hash_grid_encoding_fw, hash_grid_encoding_bw = _operator.fw, _operator.bw
