"""Batch normalisation with the statistics of one device, of the samples' ranks, or of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewise.comm import Exchange
from tilewise.comm.chain import Later, hand_on, take, token_of
from tilewise.comm.formats import is_last
from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.constants import ordinary_tensors
from tilewise.ops.norm import channel_needs
from tilewise.ops.operation import Need, Operation, Via, tied_zeros
from tilewise.ops.summary import (
    Summary,
    combine,
    combine_by,
    moments_of,
    wide_sum,
    widened,
)

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
    known: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    def __call__(self, inner: list[Via], x: Tensor, *operands: Tensor) -> Tensor:
        rest = list(operands)
        weight, bias = (rest.pop(0), rest.pop(0)) if self.affine else (None, None)
        running = (rest.pop(0), rest.pop(0)) if self.track else None
        factor = 0.0 if self.momentum is None else self.momentum
        if rest and self.training:
            factor = 1.0 / max(float(rest[0]), 1.0)
        # torch's statistics on CPUs are poor where channels are innermost, see moments_of
        poor = self.training and x.device.type == "cpu" and is_last(x)
        if not self.plain or poor:
            return self.joint(inner[0] if inner else None, x, weight, bias, running, factor)
        if not x.numel():
            return tied_zeros(x.shape, x, *operands[: 2 * self.affine])
        mean, var = running or (None, None)
        return F.batch_norm(x, mean, var, weight, bias, self.training, factor, self.eps)

    def joint(
        self,
        via: Via | None,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: tuple[Tensor, Tensor] | None,
        factor: float,
    ) -> Tensor:
        """Normalise by statistics that ranks share, or this one has for itself."""
        chain, exchange = (None, None) if via is None else (via.chain, via.exchange)
        token = token_of(chain, x, weight, bias)
        later = None if chain is None else chain.later
        y: Tensor
        y, token = _Joint.apply(self, (exchange, later), (running, factor), x, token, weight, bias)
        hand_on(chain, token)
        return y

    def statistics(
        self, rows: Tensor, running: tuple[Tensor, Tensor] | None, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return mean and variance of each channel, and move the running ones towards them."""
        reduced = self.summary.dims
        own = rows
        for dim in reduced:
            if dim not in self.join:
                own = _block(own, dim + 1, self.coords[dim])
        found = own.unbind(0)
        if self.join:
            found = combine_by(own, *self.counts(rows.device), self.join)
        mean, m2 = torch.stack(found).to(dtype).flatten(1).unbind(0)
        if running is not None:
            every = mean, m2
            if own is not rows:
                whole = combine(rows, self.summary.counts(rows.device), reduced)
                every = whole[0].flatten(), whole[1].flatten()
            number = prod(self.summary.work.shape[dim] for dim in reduced)
            for now, batch, part in zip(running, every, (factor, factor / (number - 1.0))):
                now.mul_(1.0 - factor).add_(batch, alpha=part)
        return mean, m2 / self.count

    def counts(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return how many values entries stand for that are joined, and their shares of them."""
        if device not in self.known:
            counts = self.summary.counts(device)
            with ordinary_tensors():
                for dim in self.summary.dims:
                    if dim not in self.join:
                        counts = _block(counts, dim, self.coords[dim])
                total = counts.sum(list(self.join), keepdim=True)
                self.known[device] = counts, counts / total.clamp(min=1.0)
        return self.known[device]

    @cached_property
    def count(self) -> float:
        """How many values this rank's statistics are taken of."""
        work = self.summary.work
        sizes = (
            work.shape[dim] if dim in self.join else self.summary.block_sizes(dim)[self.coords[dim]]
            for dim in self.summary.dims
        )
        return float(max(prod(sizes), 1))


def _block(tensor: Tensor, dim: int, index: int) -> Tensor:
    """Take this rank's entry where all are at hand."""
    return tensor if tensor.shape[dim] == 1 else tensor.narrow(dim, index, 1)


class _Joint(torch.autograd.Function):
    """(x − mean)·s·weight + bias for each channel, by statistics of several ranks.

    Keeps x and nothing of its size. With s = 1/√(var + eps), and sums over all that the
    statistics are taken of, T values:

        dx = weight·s·dy − (x − mean)·s · (Σ weight·s·dweight)/T − (Σ weight·s·dbias)/T

    where dweight = Σ dy·(x − mean)·s and dbias = Σ dy on each rank. The last two terms are a batch
    norm of x by itself.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local: _Local,
        messages: tuple[Exchange | None, Later | None],
        tracked: tuple[tuple[Tensor, Tensor] | None, float],
        x: Tensor,
        token: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.local, (ctx.exchange, ctx.later) = local, messages
        rows = moments_of(x, local.summary.dims)
        if ctx.exchange is not None:
            rows = ctx.exchange.start(rows).finish()
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, var = local.statistics(rows, *tracked, dtype)
        ctx.save_for_backward(x, mean, var, weight)
        ctx.rows = rows.shape
        token = take(ctx, token, 1)
        if not x.numel():
            return x.clone(), token
        scale = None if weight is None else as_kind(weight, dtype)
        shift = None if bias is None else as_kind(bias, dtype)
        # in evaluation mode the native operator takes any mean and variance
        return F.batch_norm(x, mean, var, scale, shift, False, 0.0, local.eps), token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, token: Tensor | None) -> tuple[Any, ...]:
        local: _Local = ctx.local
        x, mean, var, weight = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else as_kind(weight, mean.dtype)
        if x.numel():
            if dy.stride() != x.stride():
                # torch 2.13 mixes up memory formats where extents of 1 make them ambiguous
                dy = torch.empty_like(x).copy_(dy)
            # fake tensors have a gradient of x here though none is asked for: let it go at once
            dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, scale, mean, var, None, None, False, local.eps, [False, True, True]
            )[1:]
            if is_last(x):  # the native sum adds one value after the other
                dbias = wide_sum(dy, local.summary.dims)
        else:  # the native operator divides by zero
            dweight, dbias = torch.zeros_like(mean), torch.zeros_like(mean)
        dx = None
        if ctx.needs_input_grad[3]:
            dx = _complete(ctx, x, dy, mean, var, scale, torch.stack((dweight, dbias)))
        if weight is None:
            return None, None, None, dx, token, None, None
        kind = weight.dtype
        return None, None, None, dx, token, as_kind(dweight, kind), as_kind(dbias, kind)


def as_kind(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of a dtype; asking torch takes longer than looking."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _complete(
    ctx: Any, x: Tensor, dy: Tensor, mean: Tensor, var: Tensor, scale: Tensor, sums: Tensor
) -> Tensor:
    """Return the gradient of x; `sums` are this rank's dweight and dbias."""
    local: _Local = ctx.local
    slope = (var + local.eps).rsqrt_().mul_(scale)
    wide = [-1, *[1] * (x.dim() - 2)]
    mine = sums * slope
    if ctx.exchange is not None:
        given = mine.double().view(2, 1, *wide).expand(ctx.rows)
        pending = ctx.exchange.start_adjoint(given)
        if ctx.later is not None:
            ctx.later.run()
        mine = pending.finish().to(mean.dtype)
    if not x.numel():
        return torch.zeros_like(x)
    weight, bias = mine.flatten(1).div_(-local.count)
    dx = F.batch_norm(widened(x), mean, var, weight, bias, False, 0.0, local.eps)
    return as_kind(dx.addcmul_(widened(dy), slope.view(wide)), x.dtype)
