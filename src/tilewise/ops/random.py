"""Dropout and random tensors, the same numbers whatever the split.

Each call has a stream of its own; its numbers come from (seed, step, stream, global index), see
draws.py, and are drawn when it runs. Backward keeps the mask as bools, one byte for each element
where torch keeps one of x's dtype; drawing it again would save that byte for twice the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Cover, Layout
from tilewise.ops.draws import Draws, bernoulli, normal, uniform, uniform_bits
from tilewise.ops.operation import Need, Operation

SELU_LIMIT = 1.7580993408473766  # what SELU tends to, times −1: its scale times its alpha


def dropout(
    x: Layout,
    p: float,
    *,
    training: bool,
    draws: Draws,
    stream: int,
    rank: int,
    features: bool = False,
    alpha: bool = False,
    axes: Axes | None = None,
    layer: str = "dropout",
) -> Operation:
    """Plan x with elements dropped with probability p and the others scaled by 1/(1−p).

    With `features`, whole channels of samples are dropped, one draw for each. With `alpha`, what
    is dropped goes to SELU's lower limit, and all is scaled so that mean and variance stay.

    Layout: x any → cut as `axes` say, or as x is.
    Communication: none, or one move of x to where `axes` want it.
    Adjoint: the same elements of the gradient dropped, the others scaled.
    """
    _check_probability(p, layer)
    out = Layout(x.shape, x.axes if axes is None else axes)
    noise = _per_channel(out, layer) if features else out
    shape = noise.local_shape(rank) + (1,) * (len(x.shape) - len(noise.shape))
    apply = _keep_moments if alpha else _scale

    def local(inner: list[Any], x: Tensor) -> Tensor:
        if not training or p == 0.0:
            return x
        if p == 1.0:
            return x * 0.0
        mask = bernoulli(draws, stream, noise, rank, 1.0 - p, device=x.device)
        return apply(x, mask.view(shape), p)

    return Operation((Need.of(out),), local, (Cover.of(out),), (out,))


feature_dropout = partial(dropout, features=True)
alpha_dropout = partial(dropout, alpha=True)
feature_alpha_dropout = partial(dropout, features=True, alpha=True)


def bernoulli_like(
    x: Layout,
    p: float,
    *,
    draws: Draws,
    stream: int,
    rank: int,
    shape: Sequence[int] | None = None,
    axes: Axes | None = None,
    dtype: torch.dtype | None = None,
    layer: str = "bernoulli",
) -> Operation:
    """Plan ones with probability p, else zeros, in x's shape or another; `bernoulli_(p)` is this.

    Layout: x any → cut as `axes` say, or as x is in the dims whose extent is the same.
    Communication: none; of x only dtype and device are read.
    Adjoint: none.
    """
    _check_probability(p, layer)
    out = _like(x, shape, axes)

    def fill(dtype: torch.dtype, device: torch.device) -> Tensor:
        return bernoulli(draws, stream, out, rank, p, device=device).to(dtype)

    return _sample(x, out, dtype, fill)


def rand_like(
    x: Layout,
    *,
    draws: Draws,
    stream: int,
    rank: int,
    shape: Sequence[int] | None = None,
    axes: Axes | None = None,
    dtype: torch.dtype | None = None,
) -> Operation:
    """Plan numbers in [0, 1), in x's shape or another.

    Layout, Communication, Adjoint: those of `bernoulli_like`.
    """
    out = _like(x, shape, axes)

    def fill(dtype: torch.dtype, device: torch.device) -> Tensor:
        return uniform(draws, stream, out, rank, dtype=dtype, device=device)

    return _sample(x, out, dtype, fill)


def randn_like(
    x: Layout,
    *,
    draws: Draws,
    stream: int,
    rank: int,
    shape: Sequence[int] | None = None,
    axes: Axes | None = None,
    dtype: torch.dtype | None = None,
) -> Operation:
    """Plan numbers of mean 0 and variance 1, in x's shape or another.

    Layout, Communication, Adjoint: those of `bernoulli_like`.
    """
    out = _like(x, shape, axes)

    def fill(dtype: torch.dtype, device: torch.device) -> Tensor:
        return normal(draws, stream, out, rank, dtype=dtype, device=device)

    return _sample(x, out, dtype, fill)


def _scale(x: Tensor, mask: Tensor, p: float) -> Tensor:
    # 1/(1−p) is rounded in x's dtype, as torch does.
    return (x * mask).mul_(x.new_ones(()).div_(1.0 - p))


def _keep_moments(x: Tensor, mask: Tensor, p: float) -> Tensor:
    scale = 1.0 / sqrt((SELU_LIMIT**2 * p + 1.0) * (1.0 - p))
    shift = mask.to(x.dtype).sub_(1.0).mul_(SELU_LIMIT * scale).add_(SELU_LIMIT * scale * p)
    return (x * mask).mul_(x.new_ones(()).mul_(scale)).add_(shift)


def _per_channel(out: Layout, layer: str) -> Layout:
    """Return the layout of one number for each sample and channel."""
    if len(out.shape) < 2:
        raise OperatorError(
            f"{layer}: input {out.shape} must have samples and channels, 2 dims or more"
        )
    space = range(2, len(out.shape))
    return Layout(out.shape[:2], out.axes.relabel(dict.fromkeys(space, REPLICA)))


def _like(x: Layout, shape: Sequence[int] | None, axes: Axes | None) -> Layout:
    """Return the layout of a result in x's shape or another, cut as x is where it can be."""
    shape = x.shape if shape is None else tuple(shape)
    if axes is None:
        same = len(shape) == len(x.shape)
        cut = {d: d if same and shape[d] == e else REPLICA for d, e in enumerate(x.shape)}
        axes = x.axes.relabel(cut)
    return Layout(shape, axes)


def _sample(
    x: Layout,
    out: Layout,
    dtype: torch.dtype | None,
    fill: Callable[[torch.dtype, torch.device], Tensor],
) -> Operation:
    def local(inner: list[Any], x: Tensor) -> Tensor:
        return fill(dtype or x.dtype, x.device)

    return Operation((Need.of(x),), local, (Cover.of(out),), (out,))


def _check_probability(p: float, layer: str) -> None:
    if not 0.0 <= p <= 1.0:
        raise OperatorError(f"{layer}: probability (={p}) must be between 0 and 1")


__all__ = [
    "Draws",
    "alpha_dropout",
    "bernoulli",
    "bernoulli_like",
    "dropout",
    "feature_alpha_dropout",
    "feature_dropout",
    "normal",
    "rand_like",
    "randn_like",
    "uniform",
    "uniform_bits",
]
