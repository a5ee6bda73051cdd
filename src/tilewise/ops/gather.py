"""Weighted gathers along dims: what resizing and padding do with a slab once it is there.

taps of a linear map along one dim:   out[i] = Σ_t weight[t, i] · x[index[t, i]]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm.formats import memory_format
from tilewise.ops.constants import there

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


@dataclass(frozen=True)
class Taps:
    """For each output along `dim`, the inputs that it reads (tap × output), and their weights.

    No weights stand for ones.
    """

    dim: int
    index: Tensor
    weight: Tensor | None = None


def gather(x: Tensor, taps: Sequence[Taps]) -> Tensor:
    """Apply one gather after the other, copy without any; keeps nothing of x for backward.

    Half-precision sums are carried in float32, as torch's own kernels do.
    """
    wide = _WIDE.get(x.dtype, x.dtype)
    taps = [
        Taps(
            tap.dim,
            there(tap.index, x.device),
            None if tap.weight is None else there(tap.weight, x.device, wide),
        )
        for tap in taps
    ]
    if not taps:
        return x.clone()
    if memory_format(x) is torch.contiguous_format:
        out: Tensor = _Gather.apply(x, taps)
        return out
    # channels_last is contiguous with channels at the end
    moved = [Taps(_place(tap.dim, x.dim()), tap.index, tap.weight) for tap in taps]
    out = _Gather.apply(x.movedim(1, -1), moved)
    return out.movedim(-1, 1)


def _place(dim: int, ndim: int) -> int:
    """Return where a dim stands once channels are moved to the end."""
    if dim == 0:
        return dim
    return ndim - 1 if dim == 1 else dim - 1


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: list[Taps]) -> Tensor:
        ctx.dtype, ctx.taps, ctx.extents = x.dtype, taps, [x.shape[tap.dim] for tap in taps]
        weighted = any(tap.weight is not None for tap in taps)
        out = x.to(_WIDE.get(x.dtype, x.dtype)) if weighted else x
        for tap in taps:
            out = _forth(out, tap)
        return out.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.to(_WIDE.get(ctx.dtype, ctx.dtype))
        for tap, extent in reversed(list(zip(ctx.taps, ctx.extents))):
            out = _back(out, tap, extent)
        return out.to(ctx.dtype), None


def _forth(x: Tensor, tap: Taps) -> Tensor:
    out: Tensor | None = None
    for row, index in enumerate(tap.index):
        part = x.index_select(tap.dim, index)
        if tap.weight is not None:
            part = part.mul_(_along(tap.weight[row], tap.dim, x.dim()))
        out = part if out is None else out.add_(part)
    assert out is not None
    return out


def _back(grad: Tensor, tap: Taps, extent: int) -> Tensor:
    shape = list(grad.shape)
    shape[tap.dim] = extent
    out = grad.new_zeros(shape)
    for row, index in enumerate(tap.index):
        part = grad
        if tap.weight is not None:
            part = grad * _along(tap.weight[row], tap.dim, grad.dim())
        out.index_add_(tap.dim, index, part)
    return out


def _along(weight: Tensor, dim: int, ndim: int) -> Tensor:
    return weight.view(-1, *[1] * (ndim - dim - 1))
