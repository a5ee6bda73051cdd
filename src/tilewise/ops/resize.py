"""Up- and downsampling, and pixel shuffling.

Which inputs an output reads is computed from global positions, so every rank weighs them as one
device does (`sampling.py`). Dims are resized one after the other on the fetched slab.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import Axes, Block, Cover, Layout
from tilewise.layout.blocks import Interval, block
from tilewise.ops.gather import Taps, gather
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.sampling import Sampling

_ATEN = torch.ops.aten
_NATIVE = {
    ("nearest", 1): _ATEN.upsample_nearest1d,
    ("nearest", 2): _ATEN.upsample_nearest2d,
    ("nearest", 3): _ATEN.upsample_nearest3d,
    ("nearest-exact", 1): _ATEN._upsample_nearest_exact1d,
    ("nearest-exact", 2): _ATEN._upsample_nearest_exact2d,
    ("nearest-exact", 3): _ATEN._upsample_nearest_exact3d,
    ("linear", 1): _ATEN.upsample_linear1d,
    ("bilinear", 2): _ATEN.upsample_bilinear2d,
    ("trilinear", 3): _ATEN.upsample_trilinear3d,
    ("bicubic", 2): _ATEN.upsample_bicubic2d,
}


def resize(
    x: Layout,
    mode: str,
    *,
    size: Sequence[int] | None = None,
    scales: Sequence[float | None] | None = None,
    align_corners: bool = False,
    antialias: bool = False,
    axes: Axes | None = None,
    rank: int,
    layer: str = "resize",
) -> Operation:
    """Plan interpolation of the dims of space to `size`, or by the factors `scales`.

    Where both are given, `scales` only place the sources, as ATen's operators do. Where torch's
    kernels do not agree among themselves, its backward is followed: nearest modes compute in
    float32, and "nearest" copies or doubles where the extents say so, whatever the factor.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: the sources that lie beyond a cut, one message to each peer that holds any;
        none where only samples and channels are split.
    Adjoint: their gradients go back and are added.
    """
    size = _check(x, mode, size, scales, align_corners, antialias, layer)
    factors = [None] * len(size) if scales is None else list(scales)
    y = Layout((*x.shape[:2], *size), x.axes if axes is None else axes)
    along = [
        Sampling(mode, extent, outputs, align_corners, factor)
        for extent, outputs, factor in zip(x.shape[2:], size, factors)
    ]
    blocks = list(Cover.of(y).blocks[:2])
    for dim, sampling in enumerate(along, start=2):
        if y.degrees[dim] == 1:
            blocks.append((Block.of(0, x.shape[dim]),))
            continue
        cuts = [block(y.shape[dim], y.degrees[dim], k) for k in range(y.degrees[dim])]
        blocks.append(tuple(Block.of(*sampling.inputs(*cut)) for cut in cuts))
    need = Cover(x.shape, y.axes, tuple(blocks))

    native: Any = None
    if all(parts == 1 for parts in y.degrees[2:]):
        corners = () if mode.startswith("nearest") else (align_corners,)
        native = (_NATIVE[mode, len(size)], (list(size), *corners, *factors))
    starts = [
        need.block(rank, dim).pieces[0].start if need.block(rank, dim).size else 0
        for dim in range(2, len(x.shape))
    ]
    local = _Local(along, y.local_shape(rank), y.intervals(rank)[2:], starts, native)
    return Operation((Need(need),), local, (Cover.of(y),), (y,))


class _Local:
    """The local interpolation of one rank."""

    def __init__(
        self,
        along: list[Sampling],
        out: tuple[int, ...],
        outputs: Sequence[Interval],
        starts: list[int],
        native: Any,
    ) -> None:
        self.along, self.out, self.outputs, self.starts = along, out, outputs, starts
        self.native = native
        self.taps: dict[torch.dtype, list[Taps]] = {}

    def __call__(self, inner: list[Any], x: Tensor) -> Tensor:
        if not prod(self.out):
            return tied_zeros(self.out, x)
        if self.native is not None:
            function, arguments = self.native
            y: Tensor = function(x, *arguments)
            return y
        if x.dtype not in self.taps:
            self.taps[x.dtype] = self._taps(x.dtype)
        return gather(x, self.taps[x.dtype])

    def _taps(self, dtype: torch.dtype) -> list[Taps]:
        found = []
        for dim, (sampling, cut, start) in enumerate(
            zip(self.along, self.outputs, self.starts), start=2
        ):
            if not sampling.copies:
                index, weight = sampling.taps(*cut, dtype)
                found.append(Taps(dim, index - start, weight))
        # what shrinks goes first and leaves less to do for the others
        return sorted(found, key=lambda taps: taps.index.shape[1] / self.along[taps.dim - 2].extent)


def pixel_shuffle(
    x: Layout, factor: int, *, axes: Axes | None = None, rank: int, layer: str = "pixel_shuffle"
) -> Operation:
    """Plan the move of factor² channels each into factor × factor pixels.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: channels to whole groups of factor²; the rows of y that a cut of x between two
        rows leaves on the wrong side.
    Adjoint: the same backwards.
    """
    *lead, channels, height, width = _check_shuffle(x, factor, layer)
    if channels % factor**2:
        raise OperatorError(
            f"{layer}: channels (={channels}) must be divisible by the square of the upscale "
            f"factor (={factor})"
        )
    shape = (*lead, channels // factor**2, height * factor, width * factor)
    y = Layout(shape, x.axes if axes is None else axes)
    grouped = Layout((*lead, shape[-3], height, width), y.axes)
    need = _scaled(grouped, x.shape, {-3: factor**2})
    gives = _scaled(grouped, shape, {-2: factor, -1: factor})
    return _shuffle(F.pixel_shuffle, factor, need, gives, y, rank)


def pixel_unshuffle(
    x: Layout, factor: int, *, axes: Axes | None = None, rank: int, layer: str = "pixel_unshuffle"
) -> Operation:
    """Plan the move of factor × factor pixels each into factor² channels.

    Layout: x any → y cut as `axes` say or as x is.
    Communication: the rows of x that a cut splits off from their block of factor rows; channels
        of y from whole groups of factor² to even parts.
    Adjoint: the same backwards.
    """
    *lead, channels, height, width = _check_shuffle(x, factor, layer)
    if height % factor or width % factor:
        raise OperatorError(
            f"{layer}: height (={height}) and width (={width}) must be divisible by the downscale "
            f"factor (={factor})"
        )
    shape = (*lead, channels * factor**2, height // factor, width // factor)
    y = Layout(shape, x.axes if axes is None else axes)
    grouped = Layout((*lead, channels, *shape[-2:]), y.axes)
    need = _scaled(grouped, x.shape, {-2: factor, -1: factor})
    gives = _scaled(grouped, shape, {-3: factor**2})
    return _shuffle(F.pixel_unshuffle, factor, need, gives, y, rank)


def _shuffle(
    function: Any, factor: int, need: Cover, gives: Cover, y: Layout, rank: int
) -> Operation:
    shape = gives.local_shape(rank)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        if not prod(shape):
            return tied_zeros(shape, x)
        out: Tensor = function(x, factor)
        return out

    return Operation((Need(need),), local, (gives,), (y,))


def _scaled(layout: Layout, shape: Sequence[int], factors: dict[int, int]) -> Cover:
    """Cover a tensor by the layout's blocks, some dims stretched by a factor."""
    blocks = list(Cover.of(layout).blocks)
    for dim, factor in factors.items():
        extent, parts = layout.shape[dim], layout.degrees[dim]
        cuts = [block(extent, parts, k) for k in range(parts)]
        blocks[dim] = tuple(Block.of(start * factor, stop * factor) for start, stop in cuts)
    return Cover(tuple(shape), layout.axes, tuple(blocks))


def _check_shuffle(x: Layout, factor: int, layer: str) -> tuple[int, ...]:
    if len(x.shape) < 3:
        raise OperatorError(
            f"{layer}: input {x.shape} has {len(x.shape)} dims, it needs at least channel, height "
            "and width"
        )
    if factor < 1:
        raise OperatorError(f"{layer}: factor (={factor}) must be at least 1")
    return x.shape


def _check(
    x: Layout,
    mode: str,
    size: Sequence[int] | None,
    scales: Sequence[float | None] | None,
    align_corners: bool,
    antialias: bool,
    layer: str,
) -> tuple[int, ...]:
    """Return the extents of the result's space, or raise what one device would."""
    ndim = len(x.shape) - 2
    modes = [name for name, dims in _NATIVE if dims == ndim]
    if mode not in modes:
        known = f"must be one of {modes}" if modes else "needs 3, 4 or 5 dims"
        raise OperatorError(f"{layer}: mode (={mode!r}) for an input {x.shape} {known}")
    if antialias:
        raise OperatorError(
            f"{layer}: antialias (=True) is not supported on split tensors; blur before resizing"
        )
    if align_corners and mode.startswith("nearest"):
        raise OperatorError(
            f"{layer}: align_corners (=True) needs an interpolating mode, not {mode!r}"
        )
    if size is None:
        if scales is None or any(scale is None for scale in scales):
            raise OperatorError(f"{layer}: size (={size}) or scales (={scales}) must be given")
        size = [int(extent * (scale or 0)) for extent, scale in zip(x.shape[2:], scales)]
    if len(size) != ndim or len(scales or size) != ndim:
        raise OperatorError(
            f"{layer}: size (={tuple(size)}) and scales (={scales}) must have one entry for each "
            f"of the {ndim} dims of space of an input {x.shape}"
        )
    if min(*size, *x.shape[2:]) < 1:
        raise OperatorError(
            f"{layer}: size (={tuple(size)}) and the input's space {x.shape[2:]} must be at least "
            "1 in every dim"
        )
    return tuple(size)
