"""Adaptive pooling: the result's extents are given, the windows follow.

    in 7, out 3        0 1 2 3 4 5 6
                       └─0─┘
                           └─1─┘
                               └─2─┘

Output i reads inputs [⌊i·in/out⌋, ⌈(i+1)·in/out⌉). A dim of which one output is left (global
pooling) is reduced where it lies: each rank pools its own slab and only these results travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewise.comm.formats import memory_format
from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Block, Cover, Layout
from tilewise.layout.blocks import Interval
from tilewise.ops.operation import Need, Operation, tied_zeros

_AVERAGE: dict[int, Any] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
_MAXIMUM: dict[int, Any] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}
_LAST = torch.iinfo(torch.int64).max


def adaptive_pool(
    x: Layout,
    kind: str,
    size: Sequence[int | None],
    *,
    return_indices: bool = False,
    axes: Axes | None = None,
    rank: int,
    layer: str = "adaptive_pool",
) -> Operation:
    """Plan adaptive pooling ("avg" or "max") of the last dims to `size`; None keeps an extent.

    With `return_indices` the second result holds flat positions in the global spatial plane.

    Layout: x any → y cut as `axes` say or as x is; by default the ranks along a split dim that
        is reduced to one output hold replicas of y.
    Communication: windows that cross a cut fetch what they lack. Dims reduced to one output move
        no input: averages end in one all-reduce of y, maxima in a gather of one y from each
        rank. The work is done where x lies and y moves to `axes`, unless y is the larger one or
        ranks would hold less of x if it were cut by `axes`.
    Adjoint: the same backwards; the sum's is free.
    """
    out_shape = _check(x, kind, size, return_indices, layer)
    lead = len(x.shape) - len(size)
    space = range(lead, len(x.shape))
    work = Layout(x.shape, _work_axes(x, out_shape, axes))
    reduced = [dim for dim in space if out_shape[dim] == 1 and work.degrees[dim] > 1]
    given = Layout(out_shape, work.axes)
    out = Layout(out_shape, work.uncut(*reduced).axes if axes is None else axes)

    blocks = list(Cover.of(work).blocks)
    for dim in space:
        if dim not in reduced:
            cuts = Cover.of(given).blocks[dim]
            blocks[dim] = tuple(_inputs(cut, x.shape[dim], out_shape[dim]) for cut in cuts)
    need = Cover(x.shape, work.axes, tuple(blocks))
    role = PARTIAL if kind == "avg" else REPLICA
    gives = Cover.of(Layout(out_shape, work.axes.relabel(dict.fromkeys(reduced, role))))

    windows, starts = [], []
    for dim in space:
        pieces = need.block(rank, dim).pieces
        start, stop = pieces[0][:2] if pieces else (0, 0)
        outputs = range(*given.intervals(rank)[dim])
        reads = [_window(i, x.shape[dim], out_shape[dim]) for i in outputs]
        own = [(start, stop)] if dim in reduced else reads
        windows.append([(first - start, last - start) for first, last in own])
        starts.append(start)
    shape = gives.local_shape(rank)
    if kind == "avg":
        share = prod(need.local_shape(rank)[dim] / x.shape[dim] for dim in reduced)
        return Operation((Need(need),), _Average(windows, shape, share), (gives,), (out,))
    inner = (_gather_parts(given, reduced),) * 2 if reduced else ()
    local = _Maximum(windows, shape, starts, x.shape[lead:], bool(reduced), return_indices)
    count = 1 + return_indices
    return Operation((Need(need),), local, (gives,) * count, (out,) * count, inner)


def _work_axes(x: Layout, out_shape: Sequence[int], axes: Axes | None) -> Axes:
    """Move the smaller tensor, and leave no rank more of the larger one than need be."""
    if axes is None:
        return x.axes
    there = Layout(x.shape, axes)
    if prod(out_shape) > prod(x.shape) or _largest(there) < _largest(x):
        return axes
    return x.axes


def _largest(layout: Layout) -> int:
    return prod(-(-extent // parts) for extent, parts in zip(layout.shape, layout.degrees))


def _window(output: int, extent: int, outputs: int) -> Interval:
    return output * extent // outputs, -(-(output + 1) * extent // outputs)


def _inputs(cut: Block, extent: int, outputs: int) -> Block:
    """Return what the outputs of a balanced block read."""
    if not cut.size:
        return Block.of(0, 0)
    piece = cut.pieces[0]
    first, _ = _window(piece.start, extent, outputs)
    _, last = _window(piece.stop - 1, extent, outputs)
    return Block.of(first, last)


def _gather_parts(given: Layout, reduced: Sequence[int]) -> tuple[Cover, Cover]:
    """Return the move that gives every rank the results of all ranks along the reduced dims.

    Each brings one row of a tensor with a leading dim for the ranks.
    """
    parts = prod(given.degrees[dim] for dim in reduced)
    shape = (parts, *given.shape)
    dims = {dim: 0 if dim in reduced else dim + 1 for dim in range(len(given.shape))}
    rows = Layout(shape, given.axes.relabel(dims))
    return Cover.of(rows), Cover.of(rows.uncut(0))


class _Average:
    """The local averages of one rank, weighted by its share of what is reduced over ranks."""

    def __init__(self, windows: list[list[Interval]], shape: tuple[int, ...], share: float) -> None:
        self.windows, self.shape, self.share = windows, shape, share
        self.regular = _regular(windows)

    def __call__(self, inner: list[Any], x: Tensor) -> Tensor:
        if not prod(self.shape) or not x.numel():
            return tied_zeros(self.shape, x)
        if self.regular:
            y: Tensor = _AVERAGE[len(self.windows)](x, [len(cuts) for cuts in self.windows])
        else:
            y = _WindowMeans.apply(x, self.windows)
        return y if self.share == 1 else y * self.share


class _Maximum:
    """The local maxima of one rank, and the choice among ranks where dims are reduced."""

    def __init__(
        self,
        windows: list[list[Interval]],
        shape: tuple[int, ...],
        starts: list[int],
        extents: Sequence[int],
        reduced: bool,
        return_indices: bool,
    ) -> None:
        self.windows, self.shape, self.starts, self.extents = windows, shape, starts, extents
        self.reduced, self.return_indices = reduced, return_indices
        self.regular = _regular(windows)

    def __call__(self, inner: list[Any], x: Tensor) -> Any:
        y, indices = self._own(x)
        if self.reduced:
            y, indices = _choose(inner[0](y.unsqueeze(0)), inner[1](indices.unsqueeze(0)))
        return (y, indices) if self.return_indices else y

    def _own(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not prod(self.shape) or not x.numel():
            nowhere = torch.full(self.shape, _LAST, dtype=torch.int64, device=x.device)
            return tied_zeros(self.shape, x) - inf, nowhere
        if self.regular:
            sizes = [len(cuts) for cuts in self.windows]
            y, indices = _MAXIMUM[len(sizes)](x, sizes, return_indices=True)
        else:
            y, indices = _WindowMaxima.apply(x, self.windows)
        if not self.reduced and not self.return_indices:
            return y, indices
        slab = x.shape[-len(self.windows) :]
        return y, relocate(indices, slab, self.starts, self.extents)


def _choose(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Take the largest value of all rows; of equal ones the first in the whole plane."""
    with torch.no_grad():
        best = (values == values.amax(0)) | values.isnan()
        winner = indices.masked_fill(~best, _LAST).argmin(0, keepdim=True)
    return values.gather(0, winner).squeeze(0), indices.gather(0, winner).squeeze(0)


def relocate(
    indices: Tensor, slab: Sequence[int], starts: Sequence[int], extents: Sequence[int]
) -> Tensor:
    """Turn flat positions in a slab that begins at `starts` into positions in the whole plane."""
    if tuple(slab) == tuple(extents) and not any(starts):
        return indices
    out = torch.zeros_like(indices)
    step = 1
    for length, start, extent in reversed(list(zip(slab, starts, extents))):
        out += (indices % length + start) * step
        indices = indices // length
        step *= extent
    return out


def _regular(windows: list[list[Interval]]) -> bool:
    """Whether torch's own rule gives these windows on the slab alone."""
    return all(
        cuts == [_window(i, cuts[-1][1], len(cuts)) for i in range(len(cuts))]
        for cuts in windows
        if cuts
    )


class _WindowMeans(torch.autograd.Function):
    """Average over given windows, one dim after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: list[list[Interval]]) -> Tensor:
        ctx.steps = []
        format = memory_format(x)
        for dim, cuts in reversed(list(enumerate(windows, start=x.dim() - len(windows)))):
            ctx.steps.append((dim, cuts, x.shape))
            x = torch.stack([x.narrow(dim, a, b - a).mean(dim) for a, b in cuts], dim)
        return x.contiguous(memory_format=format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for dim, cuts, shape in reversed(ctx.steps):
            spread = grad.new_zeros(shape)
            for index, (a, b) in enumerate(cuts):
                spread.narrow(dim, a, b - a).add_(grad.narrow(dim, index, 1) / (b - a))
            grad = spread
        return grad, None


class _WindowMaxima(torch.autograd.Function):
    """Take the first maximum of given windows, and its flat position in the slab.

    The last dim goes first, so that of equal values the first in row-major order is found.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, windows: list[list[Interval]]) -> tuple[Tensor, Tensor]:
        ctx.shape, ctx.lead = x.shape, x.dim() - len(windows)
        format = memory_format(x)
        flat: Tensor | None = None
        step = 1
        for dim, cuts in reversed(list(enumerate(windows, start=x.dim() - len(windows)))):
            extent = x.shape[dim]
            found = [x.narrow(dim, a, b - a).max(dim) for a, b in cuts]
            at = torch.stack([one.indices + a for one, (a, _) in zip(found, cuts)], dim)
            x = torch.stack([one.values for one in found], dim)
            flat = at * step if flat is None else at * step + flat.gather(dim, at)
            step *= extent
        assert flat is not None
        ctx.save_for_backward(flat)
        ctx.mark_non_differentiable(flat)
        return x.contiguous(memory_format=format), flat

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (flat,) = ctx.saved_tensors
        lead, size = ctx.lead, prod(ctx.shape[ctx.lead :])
        spread = grad.new_zeros((*ctx.shape[:lead], size))
        spread.scatter_add_(-1, flat.flatten(lead), grad.flatten(lead))
        return spread.view(ctx.shape), None


def _check(
    x: Layout, kind: str, size: Sequence[int | None], return_indices: bool, layer: str
) -> tuple[int, ...]:
    """Return the result's shape, or raise what one device would."""
    if kind not in ("max", "avg"):
        raise OperatorError(f"{layer}: kind (={kind!r}) must be 'max' or 'avg'")
    if kind == "avg" and return_indices:
        raise OperatorError(f"{layer}: return_indices needs max pooling, this is average pooling")
    if len(size) not in (1, 2, 3) or len(x.shape) - len(size) not in (1, 2):
        raise OperatorError(
            f"{layer}: size {tuple(size)} names {len(size)} dims of an input {x.shape}; it must "
            "name its 1, 2 or 3 dims of space, all but channel and sample"
        )
    lead = len(x.shape) - len(size)
    if not all(x.shape[lead:]):
        raise OperatorError(f"{layer}: input {x.shape} must not be empty in space")
    if any(extent is not None and extent < 1 for extent in size):
        raise OperatorError(f"{layer}: size (={tuple(size)}) must be at least 1")
    kept = [old if new is None else new for old, new in zip(x.shape[lead:], size)]
    return (*x.shape[:lead], *kept)
