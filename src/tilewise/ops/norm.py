"""Layer and instance normalisation: statistics of each sample, however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.operation import Need, Operation, shared, tied_zeros
from tilewise.ops.pointwise import broadcast_cover
from tilewise.ops.summary import Summary, combine, moments, widened


def layer_norm(
    x: Layout,
    normalized_shape: Sequence[int],
    *,
    weight: bool = True,
    bias: bool = True,
    eps: float = 1e-5,
    axes: Axes | None = None,
    rank: int,
    layer: str = "layer_norm",
) -> Operation:
    """Plan a layer norm over the last dims; operands are x[, weight][, bias].

    Layout: x any → y cut as `axes` say or as x is; weights cut as the normalised dims are.
    Communication: none where the normalised dims are not cut; otherwise mean and squared
        deviations for each position of the others, one message to each rank that shares it.
    Adjoint: their gradients, one message back. The gradients of weight and bias are partial over
        the dims that are not normalised.
    """
    normal = tuple(normalized_shape)
    if not normal or tuple(x.shape[-len(normal) :]) != normal:
        raise OperatorError(
            f"{layer}: normalized_shape (={normal}) must be the last dims of the input {x.shape}"
        )
    work = Layout(x.shape, x.axes if axes is None else axes)
    first = len(x.shape) - len(normal)
    summary = Summary(work, tuple(range(first, len(x.shape))))
    count = float(prod(normal))

    def local(inner: list[Any], x: Tensor, *operands: Tensor) -> Tensor:
        given = list(operands)
        w = given.pop(0) if weight else None
        b = given.pop(0) if bias else None
        if not summary.split:
            if not x.numel():
                return tied_zeros(x.shape, x, *operands)
            return F.layer_norm(x, normal, w, b, eps)
        found, x = moments(x, summary.dims)
        rows = inner[0](found)
        mean, m2 = combine(rows, summary.counts(rows.device), summary.dims)
        return scale(x, mean, m2 / count, w, b, eps)

    cover = Need(broadcast_cover(normal, work))
    needs = (Need.of(work), *[cover] * weight, *[cover] * bias)
    inner = (summary.ends(),) if summary.split else ()
    return Operation(needs, local, (Cover.of(work),), (work,), inner)


def instance_norm(
    x: Layout,
    *,
    affine: bool = False,
    track: bool = False,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    axes: Axes | None = None,
    rank: int,
    layer: str = "instance_norm",
) -> Operation:
    """Plan an instance norm; operands are x[, weight, bias][, running mean and variance].

    Running statistics are changed in place, so they must lie as x's channels do.

    Layout: x any → y cut as `axes` say or as x is; weights and buffers cut as the channels are.
    Communication: none where space is not cut; otherwise mean and squared deviations of each
        sample and channel, one message to each rank that shares it. With running statistics the
        samples count as space.
    Adjoint: their gradients, one message back. The gradients of weight and bias are partial over
        all that does not cut channels.
    """
    _check_space(x, use_input_stats, layer)
    if not use_input_stats and not track:
        raise OperatorError(
            f"{layer}: without input statistics it needs running statistics; pass them"
        )
    work = Layout(x.shape, x.axes if axes is None else axes)
    space = tuple(range(2, len(x.shape)))
    seen = (0, *space) if track else space
    plain = not use_input_stats or not any(work.degrees[dim] > 1 for dim in seen)
    summary = Summary(work, space)
    count = float(prod(x.shape[2:]))
    start, stop = work.intervals(rank)[0]

    def local(inner: list[Any], x: Tensor, *operands: Tensor) -> Tensor:
        given = list(operands)
        w, b = (given.pop(0), given.pop(0)) if affine else (None, None)
        mean, var = given or (None, None)
        if plain:
            if not x.numel():
                return tied_zeros(x.shape, x, *operands[: 2 * affine])
            return F.instance_norm(x, mean, var, w, b, use_input_stats, momentum, eps)
        found, x = moments(x, space)
        rows = inner[0](found)
        all_means, all_m2 = combine(rows, summary.counts(rows.device), space)
        if mean is not None and var is not None:
            with torch.no_grad():
                towards(mean, all_means.mean(0), momentum)
                towards(var, all_m2.mean(0) / (count - 1.0), momentum)
            all_means, all_m2 = all_means[start:stop], all_m2[start:stop]
        w, b = per_channel(w, x), per_channel(b, x)
        return scale(x, all_means, all_m2 / count, w, b, eps)

    roles = dict.fromkeys(space, PARTIAL) | ({0: REPLICA} if track else {})
    inner = () if plain else (summary.ends(roles=roles),)
    weights, buffers = channel_needs(work)
    needs = (Need.of(work), *[weights] * 2 * affine, *[buffers] * 2 * track)
    return Operation(needs, local, (Cover.of(work),), (work,), inner)


def channel_needs(work: Layout) -> tuple[Need, Need]:
    """Return what is needed of weights, whose gradients are summed, and of buffers."""
    channels = (work.shape[1],)
    others = {dim: REPLICA for dim in range(len(work.shape)) if dim != 1}
    return (
        Need.of(Layout(channels, shared(work.axes, {1: 0}))),
        Need.of(Layout(channels, work.axes.relabel({**others, 1: 0}))),
    )


def _check_space(x: Layout, use_input_stats: bool, layer: str) -> None:
    if len(x.shape) < 3:
        raise OperatorError(
            f"{layer}: input {x.shape} must have a sample, a channel and a spatial dim; add dims "
            "of 1"
        )
    if use_input_stats and prod(x.shape[2:]) == 1:
        raise OperatorError(
            f"{layer}: needs more than 1 spatial value to normalise, the input {x.shape} has one; "
            "use a larger input or running statistics"
        )


def per_channel(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """View a weight of each channel so that it broadcasts to x."""
    return None if weight is None else weight.view(-1, *[1] * (x.dim() - 2))


def towards(running: Tensor, found: Tensor, momentum: float) -> None:
    """Move a running statistic towards the batch's, in place."""
    batch = found.reshape(running.shape).to(running.dtype)
    running.mul_(1.0 - momentum).add_(batch, alpha=momentum)


def scale(
    x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Normalise x by statistics and weights that broadcast to it."""
    out: Tensor = _Scale.apply(x, mean, (var + eps).rsqrt(), weight, bias)
    return out


class _Scale(torch.autograd.Function):
    """(x − mean) · rstd · weight + bias, all broadcast to x; keeps x and nothing of its size."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        wide = widened(x)
        mean, rstd = mean.to(wide.dtype), rstd.to(wide.dtype)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        y = (wide - mean).mul_(rstd)
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        dy = widened(grad)
        product = (widened(x) - mean).mul_(rstd).mul_(dy)
        dbias = None if bias is None else dy.sum_to_size(bias.shape).to(bias.dtype)
        dx = dy * rstd
        dweight = None
        if weight is not None:
            dweight = product.sum_to_size(weight.shape).to(weight.dtype)
            product = product * weight  # dweight may be the same tensor
            dx.mul_(weight)
        drstd = product.sum_to_size(rstd.shape) / rstd
        dmean = -dx.sum_to_size(mean.shape)
        return dx.to(x.dtype), dmean.double(), drstd.double(), dweight, dbias
