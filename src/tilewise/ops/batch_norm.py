"""Batch normalisation with the statistics of one device, of the samples' ranks, or of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.norm import channel_needs, towards
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.summary import Summary, combine, moments

Statistics = Literal["global", "local", "spatial"]


def batch_norm(
    x: Layout,
    *,
    affine: bool = True,
    track: bool = True,
    training: bool = True,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
    statistics: Statistics = "global",
    axes: Axes | None = None,
    rank: int,
    layer: str = "batch_norm",
) -> Operation:
    """Plan a batch norm; operands are x[, weight, bias][, running mean and variance][, batches].

    `statistics` are taken over all slabs ("global"), over those that share samples ("spatial"),
    or over each slab alone ("local"). The running statistics are those of the whole batch in all
    three and equal on all ranks; training changes them in place, so they must lie as x's channels
    do. `batches` comes with them when momentum is None: how many there were, this one included.

    Layout: x any → y cut as `axes` say or as x is; weights and buffers cut as the channels are.
    Communication: mean and squared deviations of each slab, one message to each rank that shares
        channels; none in evaluation.
    Adjoint: their gradients, one message back to each rank that shares statistics. The gradients
        of weight and bias are partial over all that does not cut channels.
    """
    if len(x.shape) < 2:
        raise OperatorError(
            f"{layer}: input {x.shape} must have a sample and a channel dim; add a dim of 1"
        )
    if not training and not track:
        raise OperatorError(
            f"{layer}: evaluation needs running statistics; pass them or use training statistics"
        )
    work = Layout(x.shape, x.axes if axes is None else axes)
    reduced = (0, *range(2, len(x.shape)))
    joins = {"global": reduced, "spatial": reduced[1:], "local": ()}
    if statistics not in joins:
        raise OperatorError(
            f"{layer}: statistics (={statistics!r}) must be one of {', '.join(joins)}"
        )
    join = joins[statistics]
    if training:
        _check_counts(work, join, reduced, layer)
    seen = reduced if track else join
    plain = not training or not Summary(work, seen).split
    summary = Summary(work, reduced)
    roles = {dim: PARTIAL if dim in join else REPLICA for dim in seen}
    local = _Local(
        summary, join, work.coords(rank), affine, track, training, momentum, eps, plain=plain
    )
    ends = () if plain else (summary.ends(roles=roles),)
    out = Cover.of(work)
    return Operation(_needs(work, affine, track, momentum), local, (out,), (work,), ends)


def _needs(work: Layout, affine: bool, track: bool, momentum: float | None) -> tuple[Need, ...]:
    weight, buffer = channel_needs(work)
    number = Need.of(Layout.replicated((), ranks=work.ranks))
    return (
        Need.of(work),
        *[weight] * 2 * affine,
        *[buffer] * 2 * track,
        *[number] * (track and momentum is None),
    )


def _check_counts(
    work: Layout, join: tuple[int, ...], reduced: tuple[int, ...], layer: str
) -> None:
    """Refuse statistics of a single value, wherever in the mesh they would be taken."""
    alone = Summary(work, reduced)
    if all(work.shape[dim] == 1 if dim in join else 1 in alone.block_sizes(dim) for dim in reduced):
        raise OperatorError(
            f"{layer}: training needs more than 1 value per channel, the input "
            f"{work} leaves some statistics a single one; use a larger batch, global statistics "
            "or evaluation mode"
        )


@dataclass(frozen=True)
class _Local:
    summary: Summary
    join: tuple[int, ...]
    coords: tuple[int, ...]
    affine: bool
    track: bool
    training: bool
    momentum: float | None
    eps: float
    plain: bool

    def __call__(self, inner: list[Any], x: Tensor, *operands: Tensor) -> Tensor:
        rest = list(operands)
        weight, bias = (rest.pop(0), rest.pop(0)) if self.affine else (None, None)
        running = (rest.pop(0), rest.pop(0)) if self.track else None
        factor = 0.0 if self.momentum is None else self.momentum
        if rest and self.training:
            factor = 1.0 / float(rest[0])
        if not self.plain:
            return self.joint(inner, x, weight, bias, running, factor)
        if not x.numel():
            return tied_zeros(x.shape, x, *operands[: 2 * self.affine])
        mean, var = running or (None, None)
        return F.batch_norm(x, mean, var, weight, bias, self.training, factor, self.eps)

    def joint(
        self,
        inner: list[Any],
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        factor: float,
    ) -> Tensor:
        """Normalise by statistics that ranks share."""
        reduced = self.summary.dims
        found, x = moments(x, reduced)
        rows = inner[0](found)
        counts = self.summary.counts(rows.device)
        own, own_counts = rows, counts
        for dim in reduced:
            if dim not in self.join:
                own = _block(own, dim + 1, self.coords[dim])
                own_counts = _block(own_counts, dim, self.coords[dim])
        mean, m2 = combine(own, own_counts, self.join)
        if running is not None:
            with torch.no_grad():
                every = (mean, m2) if own is rows else combine(rows, counts, reduced)
                towards(running[0], every[0], factor)
                towards(running[1], every[1] / (counts.sum() - 1.0), factor)
        var = m2 / own_counts.sum().clamp(min=1.0)
        y: Tensor = _Normalise.apply(x, mean.flatten(), var.flatten(), weight, bias, self.eps)
        return y


def _block(tensor: Tensor, dim: int, index: int) -> Tensor:
    """Take this rank's entry where all are at hand."""
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, index, 1)


class _Normalise(torch.autograd.Function):
    """(x − mean) / √(var + eps) · weight + bias for each channel; keeps x and nothing of its size.

    The native operator in evaluation mode takes any mean and variance; their gradients follow
    from those of weight and bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, var = mean.to(dtype), var.to(dtype)
        ctx.save_for_backward(x, mean, var, weight)
        ctx.eps = eps
        if not x.numel():
            return x.clone()
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        return F.batch_norm(x, mean, var, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, var, weight = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        if x.numel():
            if grad.stride() != x.stride():
                # torch 2.13 mixes up memory formats where extents of 1 make them ambiguous
                grad = torch.empty_like(x).copy_(grad)
            dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                grad, x, scale, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        else:  # the native operator divides by zero
            dx, dweight, dbias = (torch.zeros_like(t) for t in (x, mean, mean))
        spread = (var + ctx.eps).rsqrt()
        dmean = -(dbias * scale * spread)
        dvar = -0.5 * dweight * scale * spread**2
        if weight is None:
            return dx, dmean.double(), dvar.double(), None, None, None
        kind = weight.dtype
        return dx, dmean.double(), dvar.double(), dweight.to(kind), dbias.to(kind), None
