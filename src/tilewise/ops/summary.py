"""Small tensors that stand for slabs: what ranks tell each other of a split reduction.

A summary has one entry for each block of a reduced dim and all entries of a kept dim, so the
local reduction with its dims kept is this rank's slab of it:

    x  (6, C, 9) cut 2 · 1 · 3      summary over dims 0, 2   (2, C, 3), each rank one (1, C, 1)

Every rank gets the entries of all blocks and combines them in the same order, so replicas stay
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.layout import PARTIAL, Axes, Cover, Layout, block
from tilewise.ops.constants import ordinary_tensors

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Summary:
    """The summaries of slabs of `work`, reduced over `dims`."""

    work: Layout
    dims: tuple[int, ...]

    @property
    def split(self) -> bool:
        """Whether any reduced dim is cut."""
        return any(self.work.degrees[dim] > 1 for dim in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(
            parts if dim in self.dims else extent
            for dim, (extent, parts) in enumerate(zip(self.work.shape, self.work.degrees))
        )

    def ends(self, *, roles: Mapping[int, int] | None = None) -> tuple[Cover, Cover]:
        """Return source and target of the exchange of two summaries stacked in front.

        `roles` says what becomes of the axes of each dim: PARTIAL gives every rank all entries
        and sums their gradients; REPLICA gives all entries too, but a rank's gradients of other
        ranks' entries go nowhere; a dim left out stays cut. By default reduced dims are PARTIAL.
        """
        given = dict.fromkeys(self.dims, PARTIAL) if roles is None else roles
        source = Layout((2, *self.shape), shifted(self.work.axes, len(self.shape)))
        axes = source.axes.relabel({dim + 1: role for dim, role in given.items()})
        return Cover.of(source), Cover.of(Layout(source.shape, axes))

    def counts(self, device: torch.device) -> Tensor:
        """Return how many elements each entry stands for, of a shape that broadcasts to it."""
        return _counts(self, device)

    def block_sizes(self, dim: int) -> list[int]:
        """List the extents of the blocks along `dim`."""
        extent, parts = self.work.shape[dim], self.work.degrees[dim]
        cuts = [block(extent, parts, index) for index in range(parts)]
        return [stop - start for start, stop in cuts]


@lru_cache(maxsize=4096)
def _counts(summary: Summary, device: torch.device) -> Tensor:
    ndim = len(summary.shape)
    with ordinary_tensors():
        out = torch.ones([1] * ndim, dtype=torch.float64, device=device)
        for dim in summary.dims:
            sizes = out.new_tensor(summary.block_sizes(dim))
            out = out * sizes.view([-1 if d == dim else 1 for d in range(ndim)])
    return out


def shifted(axes: Axes, ndim: int, by: int = 1) -> Axes:
    """Return the axes of a tensor that has `by` more dims in front."""
    return axes.relabel({dim: dim + by for dim in range(ndim)})


def moments(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and sum of squared deviations over `dims`, stacked in float64, and x again.

    The second result is for whatever else reads x: its gradient is then completed in place, and
    nothing of the size of x is kept besides x. An empty slab has moments zero.
    """
    out: tuple[Tensor, Tensor] = _Moments.apply(x, tuple(dims))
    return out


class _Moments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.count = prod(x.shape[dim] for dim in dims)
        found = moments_of(x, dims)
        ctx.save_for_backward(x, found[0])
        return found, x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, None]:
        x, mean = ctx.saved_tensors
        if grad is None or not x.numel():
            return torch.zeros_like(x) if dx is None else dx, None
        wide = widened(x)
        dmean, dm2 = grad.unbind(0)
        slope = wide - mean.to(wide.dtype)
        slope.mul_((2 * dm2).to(wide.dtype)).add_((dmean / ctx.count).to(wide.dtype))
        return slope.to(x.dtype) if dx is None else dx.add_(slope), None


def moments_of(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return mean and sum of squared deviations over `dims`, stacked in float64.

    They are found about a rough mean, then corrected for its rounding. torch's own statistics of
    batch norm add one value after the other where channels are innermost in memory: for a million
    values around 1000 they are nowhere near.
    """
    if not x.numel():
        shape = [1 if dim in dims else extent for dim, extent in enumerate(x.shape)]
        return torch.zeros([2, *shape], dtype=torch.float64, device=x.device)
    x, dims = widened(x), tuple(dims)
    if not dims:
        return torch.stack((x.double(), torch.zeros_like(x, dtype=torch.float64)))
    rough = x.mean(dims, keepdim=True)
    deviation = x - rough
    shift = deviation.mean(dims, keepdim=True)
    squares = deviation.square_().sum(dims, keepdim=True)
    found = torch.stack((rough, squares, shift)).double()
    mean, m2, off = found.unbind(0)
    mean.add_(off)
    m2.addcmul_(off, off, value=-prod(x.shape[dim] for dim in dims)).clamp_(min=0.0)
    return found[:2]


def combine(found: Tensor, counts: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Join the moments of blocks over `dims`, kept, by Chan's formula: never as a difference.

    `counts` is what each entry stands for; entries of empty blocks do not matter.
    """
    if not dims:
        return found[0], found[1]
    share = counts / counts.sum(list(dims), keepdim=True).clamp(min=1.0)
    return combine_by(found, counts, share, dims)


def combine_by(
    found: Tensor, counts: Tensor, share: Tensor, dims: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Join moments whose shares of all that is counted are known."""
    mean, m2 = found.unbind(0)
    joint = (mean * share).sum(list(dims), keepdim=True)
    spread = torch.addcmul(m2, counts, (mean - joint).square_())
    return joint, spread.sum(list(dims), keepdim=True)


def combine_into(found: Tensor, counts: Tensor, index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Join moments along dim 1 (of mean and m2) into `size` of them: entry i goes to index[i]."""
    mean, m2 = found.unbind(0)
    shape = list(mean.shape)
    shape[1] = size
    total = counts.new_zeros([*counts.shape[:1], size, *counts.shape[2:]])
    total = total.index_add(1, index, counts).clamp(min=1.0)
    joint = mean.new_zeros(shape).index_add(1, index, mean * counts) / total
    deviation = mean - joint.index_select(1, index)
    return joint, m2.new_zeros(shape).index_add(1, index, m2 + counts * deviation**2)


def widened(x: Tensor) -> Tensor:
    """Return x in the precision to sum in: float32 for the half types."""
    return x.float() if x.dtype in HALVES else x


def wide_sum(x: Tensor, dims: Sequence[int], *, keepdim: bool = False) -> Tensor:
    """Sum over `dims`, which may be none; half types in float32 and to it."""
    if not dims:
        return widened(x)
    return x.sum(tuple(dims), keepdim, dtype=torch.float32 if x.dtype in HALVES else None)
