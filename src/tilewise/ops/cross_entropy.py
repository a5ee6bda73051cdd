"""Cross entropy and negative log likelihood; the classes may be cut, and are never gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, Axes, Cover, Layout
from tilewise.ops.loss import check_reduction, class_indices, total_of
from tilewise.ops.norm import channel_needs
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.softmax import Along
from tilewise.ops.summary import wide_sum, widened

_IGNORED = -100


def cross_entropy(
    logits: Layout,
    target: Sequence[int],
    *,
    weight: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    axes: Axes | None = None,
    rank: int,
    layer: str = "cross_entropy",
) -> Operation:
    """Plan a cross entropy along dim 1; operands are logits, target[, weight of each class].

    The target is given by its shape: that of the logits holds class probabilities, that without
    dim 1 class indices.

    Layout: logits and target any, brought to `axes` or the logits' → a scalar on every rank, or
        with reduction "none" a value for each position, cut as those are.
    Communication: one all-reduce of three numbers, among them how many class indices are wrong
        (with "none", of that alone, and of the result over the ranks that share its classes).
        Where classes are cut, the two of a softmax before it.
    Adjoint: none, or that of the softmax.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        raise OperatorError(
            f"{layer}: label_smoothing (={label_smoothing}) must lie between 0 and 1"
        )
    spec = _Spec(weight, ignore_index, reduction, label_smoothing, True, layer)
    return _plan(logits, target, spec, axes, rank)


def nll_loss(
    log_probabilities: Layout,
    target: Sequence[int],
    *,
    weight: bool = False,
    ignore_index: int = -100,
    reduction: str = "mean",
    axes: Axes | None = None,
    rank: int,
    layer: str = "nll_loss",
) -> Operation:
    """Plan a negative log likelihood: `cross_entropy` of what has been through a log softmax.

    Layout: as of cross entropy; the target holds class indices.
    Communication: as of cross entropy, without the softmax.
    Adjoint: none.
    """
    spec = _Spec(weight, ignore_index, reduction, 0.0, False, layer)
    return _plan(log_probabilities, target, spec, axes, rank)


@dataclass(frozen=True)
class _Spec:
    weight: bool
    ignore_index: int
    reduction: str
    smoothing: float
    softmax: bool
    layer: str


def _plan(x: Layout, target: Sequence[int], spec: _Spec, axes: Axes | None, rank: int) -> Operation:
    check_reduction(spec.reduction, spec.layer)
    shares = spec.softmax and tuple(target) == x.shape
    _check_target(x, target, shares, spec)
    work = Layout(x.shape, x.axes if axes is None else axes)
    along = Along(work, 1) if spec.softmax else None
    local = _Local(work, along, work.intervals(rank)[1], shares, spec)
    brought = work if shares else class_indices(work)
    needs = [Need.of(work), Need.of(brought)]
    if spec.weight:
        differentiable, constant = channel_needs(work)
        needs.append(differentiable if shares else constant)
    inner = () if along is None else along.inner
    if spec.reduction != "none":
        out = Layout.replicated((), ranks=work.ranks)
        ends = (*inner, total_of((3,), work))
        return Operation(tuple(needs), local, (Cover.of(out),), (out,), ends)
    out = class_indices(work)
    places = {dim: dim - 1 for dim in range(2, len(work.shape))}
    partial = Layout(out.shape, work.axes.relabel({1: PARTIAL, **places}))
    ends = inner if shares else (*inner, total_of((), work))
    return Operation(tuple(needs), local, (Cover.of(partial),), (out,), ends)


@dataclass(frozen=True)
class _Local:
    work: Layout
    along: Along | None
    classes: tuple[int, int]
    shares: bool
    spec: _Spec

    def __call__(self, inner: list[Any], x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        weight = weights[0] if weights else None
        logs = x if self.along is None else self.along(inner, x, log=True)
        if self.shares:
            losses, share = self._of_shares(logs, target, weight)
            wrong = torch.zeros_like(share)
        else:
            losses, share = self._of_indices(logs, target, weight)
            wrong = self._outside(target)
        if self.spec.reduction == "none":
            if not self.shares:
                self._check(inner[-1](wrong))
            return losses.to(x.dtype)
        totals: Tensor = inner[-1](torch.stack([losses, *(t.to(losses) for t in (share, wrong))]))
        self._check(totals[2])
        return (totals[0] / totals[1] if self.spec.reduction == "mean" else totals[0]).to(x.dtype)

    def _of_shares(
        self, logs: Tensor, target: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of class probabilities and the number of positions (among classes)."""
        if self.spec.smoothing:
            target = target * (1.0 - self.spec.smoothing) + self.spec.smoothing / self.work.shape[1]
        product = logs * target
        if weight is not None:
            product = product * _column(weight, logs)
        number = product.numel() / self.work.shape[1]
        positions = torch.full((), number, dtype=torch.float64, device=logs.device)
        return self._reduced(-wide_sum(product, [1])), positions

    def _of_indices(
        self, logs: Tensor, target: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of class indices and the weight of the targets that are classes here."""
        known = target != self.spec.ignore_index
        here, place = self._places(target, known)
        share = here.sum()
        if weight is not None and weight.numel():
            share = torch.where(here, widened(weight)[place.clamp(min=0)], 0.0).sum()
        if not logs.numel():
            return self._reduced(widened(tied_zeros(target.shape, logs))), share
        losses = widened(F.nll_loss(logs, place, weight, ignore_index=_IGNORED, reduction="none"))
        if self.spec.smoothing:
            weighted = logs if weight is None else logs * _column(weight, logs)
            spread = -wide_sum(weighted, [1]).masked_fill(~known, 0)
            losses = losses * (1.0 - self.spec.smoothing)
            losses = losses + spread * (self.spec.smoothing / self.work.shape[1])
        return self._reduced(losses), share

    def _reduced(self, losses: Tensor) -> Tensor:
        return losses if self.spec.reduction == "none" else losses.sum()

    def _places(self, target: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Return which targets are classes of this rank, and their place among them."""
        start, stop = self.classes
        here = known & (target >= start) & (target < stop)
        return here, torch.where(here, target.long() - start, _IGNORED)

    def _outside(self, target: Tensor) -> Tensor:
        """Count the targets that are no class at all."""
        known = target != self.spec.ignore_index
        return (known & ((target < 0) | (target >= self.work.shape[1]))).sum().double()

    def _check(self, outside: Tensor) -> None:
        """Raise on all ranks what is wrong on one; a device is told, not waited for."""
        if self.shares:
            return
        if outside.device.type != "cpu":
            torch._assert_async(outside == 0)
        elif outside.item():
            raise OperatorError(
                f"{self.spec.layer}: a target is neither a class 0 … {self.work.shape[1] - 1} nor "
                f"ignore_index (={self.spec.ignore_index}); correct it or name it as ignore_index"
            )


def _column(weight: Tensor, like: Tensor) -> Tensor:
    return weight.view(-1, *[1] * (like.dim() - 2))


def _check_target(x: Layout, target: Sequence[int], shares: bool, spec: _Spec) -> None:
    if len(x.shape) < 2:
        raise OperatorError(
            f"{spec.layer}: the input {x.shape} must have a sample and a class dim; add a batch "
            "dim of 1"
        )
    if not shares and tuple(target) != (x.shape[0], *x.shape[2:]):
        other = " or, with class probabilities, the same shape" if spec.softmax else ""
        raise OperatorError(
            f"{spec.layer}: the target {tuple(target)} must have the shape of the input {x.shape} "
            f"without its class dim 1{other}"
        )
    if shares and spec.ignore_index >= 0:
        raise OperatorError(
            f"{spec.layer}: ignore_index (={spec.ignore_index}) goes with class indices, the "
            f"target {tuple(target)} holds probabilities; leave it out"
        )
