"""Metrics of split outputs, equal to those of one device.

A metric turns a slab of outputs and targets into sums that add up over slabs and batches; what is
reported is a function of the totals. Counts are whole numbers in float64, so they are exact, and
a slab that several ranks hold counts once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.comm import Exchange, Mesh
from tilewise.errors import RecipeError
from tilewise.layout import PARTIAL, REPLICA, Axis, Layout
from tilewise.ops.loss import class_indices

BINS = 4096
SMALLER_IS_BETTER = ("loss", "mse", "mae")


class Metric(ABC):
    """Sums over slabs, and what is reported of them."""

    name: str
    indices = False
    """Whether targets are class indices, without a class dim."""

    @abstractmethod
    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Return this slab's share of the sums, in float64."""

    @abstractmethod
    def report(self, totals: Tensor) -> dict[str, float]:
        """Return the values by name."""


class Mean(Metric):
    """The mean of an element-wise error."""

    def __init__(self, name: str, error: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.name, self.error = name, error

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        errors = self.error(output.double(), target.double())
        return torch.stack([errors.sum(), torch.tensor(float(errors.numel()), dtype=torch.float64)])

    def report(self, totals: Tensor) -> dict[str, float]:
        return {self.name: float(totals[0] / totals[1])}


class MeanLoss(Metric):
    """The loss over all samples, from shares and weights that add up."""

    name = "loss"

    def __init__(
        self, shares: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], *, indices: bool
    ) -> None:
        self.shares, self.indices = shares, indices

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        if not output.numel():
            return torch.zeros(2, dtype=torch.float64)
        return torch.stack([part.double() for part in self.shares(output, target)])

    def report(self, totals: Tensor) -> dict[str, float]:
        return {"loss": float(totals[0] / totals[1])}


class TopK(Metric):
    """The share of elements whose class is among the k likeliest; ties go to the lower class."""

    indices = True

    def __init__(self, name: str, k: int) -> None:
        self.name, self.k = name, k

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        known = _known(target, output.shape[1])
        index = target.where(known, 0).unsqueeze(1)
        own = output.gather(1, index)
        classes = torch.arange(output.shape[1]).view(-1, *[1] * (output.dim() - 2))
        behind = (own > output) | ((own == output) & (classes >= index))  # neither, with NaN
        right = ((output.shape[1] - behind.sum(1) < self.k) & known).sum()
        return torch.tensor([float(right), float(known.sum())], dtype=torch.float64)

    def report(self, totals: Tensor) -> dict[str, float]:
        return {self.name: float(totals[0] / totals[1])}


class Overlap(Metric):
    """Dice or IoU of each class over all elements, and their mean over the classes but the first.

    The first class is the background. A class that neither has counts as 1.
    """

    indices = True

    def __init__(self, name: str, classes: Sequence[str]) -> None:
        self.name, self.classes = name, classes

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        count = output.shape[1]
        known = _known(target, count)
        found, wanted = output.argmax(1)[known], target[known]
        pairs = torch.bincount(wanted * count + found, minlength=count * count)
        return pairs.to(torch.float64)

    def report(self, totals: Tensor) -> dict[str, float]:
        count = round(len(totals) ** 0.5)
        table = totals.view(count, count)
        both, wanted, found = table.diagonal(), table.sum(1), table.sum(0)
        if self.name == "dice":
            top, bottom = 2.0 * both, wanted + found
        else:
            top, bottom = both, wanted + found - both
        values = torch.where(bottom > 0, top / bottom.clamp(min=1.0), torch.ones_like(top))
        names = list(self.classes) if len(self.classes) == count else list(map(str, range(count)))
        each = {f"{self.name}/{name}": float(value) for name, value in zip(names, values)}
        return {self.name: float(values[1:].mean() if count > 1 else values.mean()), **each}


class BinaryScores(Metric):
    """F1 at a probability of one half and the area under the ROC curve, of logits.

    The area is that of probabilities rounded to 1/4096, ties counting half.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        bins = (output.double().sigmoid() * BINS).long().clamp(max=BINS - 1).flatten()
        wanted = (target > 0.5).flatten()
        counts = [torch.bincount(bins[wanted == kind], minlength=BINS) for kind in (False, True)]
        return torch.cat(counts).to(torch.float64)

    def report(self, totals: Tensor) -> dict[str, float]:
        no, yes = totals.view(2, BINS)
        if self.name == "f1":
            right, wrong = yes[BINS // 2 :].sum(), no[BINS // 2 :].sum()
            missed = yes.sum() - right
            bottom = float(2.0 * right + wrong + missed)
            return {"f1": float(2.0 * right) / bottom if bottom else 1.0}
        pairs = float(no.sum() * yes.sum())
        below = no.cumsum(0) - no
        return {"auc": float((yes * (below + no / 2.0)).sum()) / pairs if pairs else 0.5}


def make_metric(name: str, classes: Sequence[str] = ()) -> Metric:
    """Return a metric by its name in a recipe."""
    if name in ("mse", "mae"):
        distance = torch.square if name == "mse" else torch.abs
        return Mean(name, lambda found, wanted: distance(found - wanted))
    if name in ("accuracy", "top5"):
        return TopK(name, 1 if name == "accuracy" else 5)
    if name in ("dice", "iou"):
        return Overlap(name, classes)
    return BinaryScores(name)


class Tally:
    """The sums of some metrics over the batches of an evaluation, on this rank."""

    def __init__(self, mesh: Mesh, metrics: Sequence[Metric]) -> None:
        self.mesh, self.metrics = mesh, metrics
        self.totals: list[Tensor | None] = [None] * len(metrics)
        self._moves: dict[Any, Exchange] = {}

    def add(self, output: Tensor, target: Tensor, cut: Layout, target_cut: Layout) -> None:
        """Count a batch: this rank's slabs of outputs and targets, and how they are cut."""
        output = output.float() if output.dtype in (torch.bfloat16, torch.float16) else output
        if cut.degrees[1:2] != (1,) and len(cut.shape) > 1:
            raise RecipeError("metrics: outputs must not be cut along channels (io_channels)")
        first = holders(cut, self.mesh.rank)[0] == self.mesh.rank
        for index, metric in enumerate(self.metrics):
            wanted = class_indices(cut) if metric.indices else cut
            if wanted.shape != target_cut.shape:
                raise RecipeError(
                    f"metrics: {metric.name} of outputs {cut.shape} needs targets of shape "
                    f"{wanted.shape}, they have {target_cut.shape}"
                )
            beside = self._brought(target, target_cut, wanted)
            sums = metric.sums(output, beside)
            if not first:
                sums.zero_()
            before = self.totals[index]
            self.totals[index] = sums if before is None else before + sums

    def _brought(self, target: Tensor, source: Layout, wanted: Layout) -> Tensor:
        if source == wanted:
            return target
        key = (source, wanted)
        if key not in self._moves:
            self._moves[key] = Exchange(self.mesh, source, wanted, layer="metrics")
        return self._moves[key].start(target).finish()

    def report(self) -> dict[str, float]:
        """Return all values, the same on every rank; all ranks ask together."""
        sums = [one for one in self.totals if one is not None]
        if not sums:
            return {}
        flat = torch.cat(sums)
        size = self.mesh.size
        parts = Layout(flat.shape, [Axis(size, PARTIAL)])
        whole = Layout(flat.shape, [Axis(size, REPLICA)])
        totals = Exchange(self.mesh, parts, whole, layer="metrics").start(flat).finish()
        found: dict[str, float] = {}
        for metric, part in zip(self.metrics, totals.split([len(one) for one in sums])):
            found |= metric.report(part)
        return found


def _known(target: Tensor, classes: int) -> Tensor:
    """Tell which elements have a class; what is to be ignored has an index that is none."""
    return (target >= 0) & (target < classes)


def holders(layout: Layout, rank: int) -> list[int]:
    """List the ranks that hold the same slab, in order."""
    mine = layout.coords(rank)
    return [other for other in range(layout.ranks) if layout.coords(other) == mine]
