"""Losses of elements and of overlaps: each rank its slab, then one small sum over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, REPLICA, Axes, Cover, Layout
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.pointwise import broadcast
from tilewise.ops.summary import wide_sum, widened

REDUCTIONS = ("mean", "sum", "none")
KINDS: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce": F.binary_cross_entropy,
    "bce_with_logits": F.binary_cross_entropy_with_logits,
}
_KNEES = {"smooth_l1": "beta", "huber": "delta"}


def elementwise_loss(
    prediction: Layout,
    target: Sequence[int],
    kind: str,
    *,
    reduction: str = "mean",
    knee: float = 1.0,
    weight: Sequence[int] | None = None,
    pos_weight: Sequence[int] | None = None,
    axes: Axes | None = None,
    rank: int,
    layer: str = "loss",
) -> Operation:
    """Plan a loss of KINDS; operands are prediction, target[, weight][, pos_weight].

    Targets and weights are given by their shapes. `knee` is smooth L1's beta and Huber's delta.

    Layout: prediction and target any, brought to `axes` or the prediction's → a scalar on every
        rank, or with reduction "none" what they were brought to.
    Communication: one all-reduce of a number; none with "none".
    Adjoint: none. Weights have no gradient.
    """
    check_reduction(reduction, layer)
    if kind not in KINDS:
        raise OperatorError(f"{layer}: kind (={kind!r}) must be one of {', '.join(KINDS)}")
    if tuple(target) != prediction.shape:
        raise OperatorError(
            f"{layer}: the target {tuple(target)} must have the shape of the prediction "
            f"{prediction.shape}; expand or reshape it"
        )
    work = Layout(prediction.shape, prediction.axes if axes is None else axes)
    given = {"weight": weight, "pos_weight": pos_weight}
    names = [name for name, shape in given.items() if shape is not None]
    _check_weights(work, kind, given, layer)
    options = {_KNEES[kind]: knee} if kind in _KNEES else {}
    count = prod(work.shape)

    def local(inner: list[Any], found: Tensor, wanted: Tensor, *weights: Tensor) -> Tensor:
        extra = options | dict(zip(names, weights))
        if reduction == "none":
            return KINDS[kind](found, wanted, reduction="none", **extra)
        if found.numel():
            mean = KINDS[kind](found, wanted, reduction="mean", **extra)
        else:
            mean = tied_zeros((), found, wanted).to(torch.result_type(found, wanted))
        total: Tensor = inner[0](widened(mean) * found.numel())
        return (total / count if reduction == "mean" else total).to(mean.dtype)

    needs = [Need.of(work), Need.of(work)]
    needs += [Need.of(held(given[name] or (), work)) for name in names]
    if reduction == "none":
        return Operation(tuple(needs), local, (Cover.of(work),), (work,))
    out = Layout.replicated((), ranks=work.ranks)
    return Operation(tuple(needs), local, (Cover.of(out),), (out,), (total_of((), work),))


def soft_dice(
    prediction: Layout,
    target: Sequence[int],
    *,
    smooth: float = 1.0,
    samples: bool = True,
    axes: Axes | None = None,
    rank: int,
    layer: str = "soft_dice",
) -> Operation:
    """Plan the soft Dice loss of class probabilities (sample, class, space…).

        1 − mean over classes of (2 Σ p·t + smooth) / (Σ p + Σ t + smooth)

    The sums run over space and samples; without `samples` over space alone, and the mean over
    samples as well. The target is of the prediction's shape (one-hot, or any shares of classes),
    or holds class indices (sample, space…); an index that is no class belongs to none.

    Layout: prediction and target any, brought to `axes` or the prediction's → a scalar on every
        rank.
    Communication: one all-reduce of two numbers for each class (and sample).
    Adjoint: none.
    """
    shape = prediction.shape
    indices = len(target) == len(shape) - 1
    expected = (*shape[:1], *shape[2:]) if indices else shape
    if len(shape) < 2 or tuple(target) != expected:
        raise OperatorError(
            f"{layer}: the target {tuple(target)} must have the shape of the prediction {shape}, "
            "or that without the class dim where it holds class indices"
        )
    work = Layout(shape, prediction.axes if axes is None else axes)
    start, stop = work.intervals(rank)[1]
    first, last = work.intervals(rank)[0]
    dims = [*([0] if samples else []), *range(2, len(shape))]
    pad = [start, shape[1] - stop, *([0, 0] if samples else [first, shape[0] - last])]

    def local(inner: list[Any], found: Tensor, wanted: Tensor) -> Tensor:
        if indices:
            classes = torch.arange(start, stop, device=wanted.device)
            wanted = wanted.unsqueeze(1) == classes.view(-1, *[1] * (found.dim() - 2))
        both = wide_sum(found * wanted, dims)
        each = wide_sum(found, dims) + wide_sum(wanted, dims)
        sums = torch.stack([both, each.to(both.dtype)])
        sums = sums.reshape(2, 1 if samples else last - first, stop - start)
        both, each = inner[0](F.pad(sums, pad)).unbind(0)
        dice: Tensor = ((2.0 * both + smooth) / (each + smooth)).mean()
        return (1.0 - dice).to(found.dtype)

    brought = class_indices(work) if indices else work
    out = Layout.replicated((), ranks=work.ranks)
    ends = total_of((2, 1 if samples else shape[0], shape[1]), work)
    return Operation((Need.of(work), Need.of(brought)), local, (Cover.of(out),), (out,), (ends,))


def check_reduction(reduction: str, layer: str) -> None:
    """Refuse a reduction that torch does not have."""
    if reduction not in REDUCTIONS:
        raise OperatorError(
            f"{layer}: reduction (={reduction!r}) must be one of {', '.join(REDUCTIONS)}"
        )


def total_of(shape: Sequence[int], work: Layout) -> tuple[Cover, Cover]:
    """Return the ends of a sum over all that cuts the work."""
    every = dict.fromkeys(range(len(work.shape)), PARTIAL)
    partial = Layout(shape, work.axes.relabel(every))
    return Cover.of(partial), Cover.of(Layout.replicated(shape, ranks=work.ranks))


def held(shape: Sequence[int], work: Layout) -> Layout:
    """Return how a constant that broadcasts to the work is cut with it."""
    lead = len(work.shape) - len(shape)
    cut = {dim + lead: dim for dim, extent in enumerate(shape) if extent == work.shape[dim + lead]}
    axes = work.axes.relabel({dim: cut.get(dim, REPLICA) for dim in range(len(work.shape))})
    return Layout(shape, axes)


def class_indices(work: Layout) -> Layout:
    """Return how class indices are cut with predictions that have a class dim 1."""
    places = {dim: dim - 1 for dim in range(2, len(work.shape))}
    axes = work.axes.relabel({1: REPLICA, **places})
    return Layout((work.shape[0], *work.shape[2:]), axes)


def _check_weights(
    work: Layout, kind: str, given: dict[str, Sequence[int] | None], layer: str
) -> None:
    allowed = {"bce": ("weight",), "bce_with_logits": ("weight", "pos_weight")}.get(kind, ())
    for name, shape in given.items():
        if shape is None:
            continue
        if name not in allowed:
            raise OperatorError(f"{layer}: {kind} takes no {name}; leave it out")
        if broadcast([shape, work.shape], layer) != work.shape:
            raise OperatorError(
                f"{layer}: {name} {tuple(shape)} must broadcast to the prediction {work.shape}"
            )
