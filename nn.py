"""The operators as `torch.nn.Module`s: `loader.nn.GridSample` and the like.

Arguments, results and errors are the operator's. Parameters are made as torch.nn's are: `device`,
`dtype`, `reset_parameters()`, state dict, `torch.device("meta")`.
"""

import torch
from torch import Tensor, nn

import loader
from loader.jit.operators.frame import stand_for_tensors

__all__ = [
    "LUT3D",
    "BilinearInterpolation",
    "Convolve2d",
    "GridSample",
    "HashGridEncoding",
    "TrilinearInterpolation",
]


class TrilinearInterpolation(nn.Module):
    """`loader.trilinear_interpolation`: feats (N, 8, F), points (N, 3) -> (N, F)."""

    def forward(self, feats: Tensor, points: Tensor) -> Tensor:
        """Interpolate each cell's 8 corner features at one point of the cell."""
        return loader.trilinear_interpolation(feats, points)


class BilinearInterpolation(nn.Module):
    """`loader.bilinear_interpolation`: feats (N, 4, F), points (N, 2) -> (N, F)."""

    def forward(self, feats: Tensor, points: Tensor) -> Tensor:
        """Interpolate each cell's 4 corner features at one point of the cell."""
        return loader.bilinear_interpolation(feats, points)


class GridSample(nn.Module):
    """`loader.grid_sample` with its options kept.

    Args:
        mode, padding_mode, align_corners: as `loader.grid_sample` takes them.
    """

    def __init__(
        self,
        mode: str = "bilinear",
        padding_mode: str = "zeros",
        align_corners: bool | None = None,
    ):
        super().__init__()
        self.mode, self.padding_mode, self.align_corners = mode, padding_mode, align_corners

    def forward(self, input: Tensor, grid: Tensor) -> Tensor:
        """Sample input (N, C, [D,] H, W) at grid (N, [D_out,] H_out, W_out, 2 or 3)."""
        return loader.grid_sample(input, grid, self.mode, self.padding_mode, self.align_corners)

    def extra_repr(self) -> str:
        """Return the options, for `print(module)`."""
        align = f"align_corners={self.align_corners}"
        return f"mode={self.mode!r}, padding_mode={self.padding_mode!r}, {align}"


class LUT3D(nn.Module):
    """A colour table to be learnt or used, `loader.apply_lut3d`; it begins as the identity.

    Args:
        size: entries along an axis, S, from 2 to 1024.
        interpolation: "trilinear" or "tetrahedral".

    Attributes:
        lut: the parameter (S, S, S, 3); entry [i, j, k] is what (i, j, k) / (S - 1) becomes.
    """

    def __init__(
        self,
        size: int = 33,
        interpolation: str = "trilinear",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.interpolation = interpolation
        self.lut = nn.Parameter(torch.empty(size, size, size, 3, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_table(cls, lut: Tensor, interpolation: str = "trilinear") -> "LUT3D":
        """Return a module with a table (S, S, S, 3) of its own, such as a `.cube` file holds."""
        module = cls(len(lut), interpolation, lut.device, lut.dtype)
        with torch.no_grad():
            module.lut.copy_(lut)
        return module

    def reset_parameters(self) -> None:
        """Let each colour become itself."""
        steps = torch.linspace(0, 1, len(self.lut), device=self.lut.device, dtype=self.lut.dtype)
        with torch.no_grad():
            self.lut.copy_(torch.stack(torch.meshgrid(steps, steps, steps, indexing="ij"), -1))

    def forward(self, image: Tensor) -> Tensor:
        """Send every colour of image (..., 3) through the table."""
        return loader.apply_lut3d(image, self.lut, self.interpolation)

    def extra_repr(self) -> str:
        """Return size and interpolation, for `print(module)`."""
        return f"{len(self.lut)}, interpolation={self.interpolation!r}"


class Convolve2d(nn.Module):
    """A kernel to be learnt or used, `loader.convolve2d`; it begins as the identity.

    Args:
        kernel_size: kh and kw, or one number for both.
        mode, boundary: as `loader.convolve2d` takes them.

    Attributes:
        kernel: the parameter (kh, kw), 1 in its centre (kh // 2, kw // 2) and 0 elsewhere.
    """

    def __init__(
        self,
        kernel_size: int | tuple[int, int],
        mode: str = "same",
        boundary: str = "zero",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.mode, self.boundary = mode, boundary
        size = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        self.kernel = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let each pixel become itself."""
        kh, kw = self.kernel.shape
        with torch.no_grad():
            self.kernel.zero_()[kh // 2, kw // 2] = 1

    def forward(self, image: Tensor) -> Tensor:
        """Convolve image (H, W) or (N, H, W)."""
        return loader.convolve2d(image, self.kernel, self.mode, self.boundary)

    def extra_repr(self) -> str:
        """Return size and options, for `print(module)`."""
        return f"{tuple(self.kernel.shape)}, mode={self.mode!r}, boundary={self.boundary!r}"


class HashGridEncoding(nn.Module):
    """`loader.hash_grid_encoding` of positions in the unit cube, with its table of features.

    Args:
        dims: 2 or 3.
        levels: grids from coarse to fine, L.
        features: of each corner, F.
        table_size: rows of each level, T; quickest as a power of two.
        base_resolution, per_level_scale: as `loader.hash_grid_encoding` takes them.

    Attributes:
        table: the parameter (L, T, F).
        out_features: L * F, what a network on top of it takes.

    Source: sizes and initial values are those of Mueller et al. 2022, section 4.
    """

    def __init__(
        self,
        dims: int = 3,
        levels: int = 16,
        features: int = 2,
        table_size: int = 1 << 19,
        base_resolution: int = 16,
        per_level_scale: float = 2.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if dims not in (2, 3):
            raise ValueError(f"HashGridEncoding: dims must be 2 or 3, got {dims!r}")
        self.dims, self.out_features = dims, levels * features
        self.base_resolution, self.per_level_scale = base_resolution, per_level_scale
        self.table = nn.Parameter(
            torch.empty(levels, table_size, features, device=device, dtype=dtype)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the features from [-1e-4, 1e-4], as the paper does."""
        nn.init.uniform_(self.table, -1e-4, 1e-4)

    def forward(self, points: Tensor) -> Tensor:
        """Encode points (..., dims) as (..., levels * features)."""
        known = isinstance(points, Tensor)  # and no Proxy of torch.fx, whose sizes nobody knows yet
        if known and points.shape[-1:] != (self.dims,):
            raise RuntimeError(
                f"HashGridEncoding: points must be (..., {self.dims}), got {tuple(points.shape)}"
            )
        if not stand_for_tensors((points,)) or (known and points.dim() == 2):
            return self._encode(points)  # which refuses what is no tensor
        out = self._encode(points.unflatten(-1, (1, self.dims)).flatten(0, -2))
        return out.view(points.shape[:-1] + (self.out_features,))  # noqa: RUF005 - of a Proxy, too

    def _encode(self, points: Tensor) -> Tensor:
        return loader.hash_grid_encoding(
            points,
            self.table,
            base_resolution=self.base_resolution,
            per_level_scale=self.per_level_scale,
        )

    def extra_repr(self) -> str:
        """Return the sizes, for `print(module)`."""
        levels, table_size, features = self.table.shape
        return (
            f"{self.dims}, levels={levels}, features={features}, table_size={table_size}, "
            f"base_resolution={self.base_resolution}, per_level_scale={self.per_level_scale}"
        )
