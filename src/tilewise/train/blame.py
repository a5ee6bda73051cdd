"""Find the layer in which numbers stop being finite, and the replica that drifts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.data import Batch
from tilewise.graph import ParallelModel
from tilewise.layout import REPLICA, Axis, Layout
from tilewise.train.precision import Precision

NOWHERE = 2**40
BLOCK = 1 << 20


class FirstBad:
    """Notes the first step of a pass whose results are not finite on this rank."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.first: int | None = None

    def before(self, layer: str) -> None:
        self.layers.append(layer)

    def after(self, layer: str, results: Sequence[Tensor]) -> None:
        if self.first is None and not all(_finite(result) for result in results):
            self.first = len(self.layers) - 1


@torch.no_grad()
def first_bad_layer(
    model: ParallelModel, batch: Batch, precision: Precision
) -> tuple[str, list[int]] | None:
    """Return the first layer whose results are not finite for a batch, and the ranks that say so.

    The pass before this one is run again: random layers draw as they did. Buffers are left as they
    are. `input` is named where the batch itself is not finite. None is for a pass that is finite.
    """
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    watch = FirstBad()
    model.draws.step -= 1
    with model.watched(watch), precision.autocast():
        model.loss(*batch, batch=batch.size)
    for buffer, value in kept:
        buffer.copy_(value)
    mine = -1 if not all(map(_finite, batch)) else watch.first
    found = everyone(model, [NOWHERE if mine is None else mine]).flatten().tolist()
    first = min(found)
    if first == NOWHERE:
        return None
    name = "the input" if first < 0 else watch.layers[first]
    return name, [rank for rank, one in enumerate(found) if one == first]


def bad_gradients(model: ParallelModel) -> tuple[str, list[int]] | None:
    """Return the last parameter whose gradient is not finite, and the ranks that hold it.

    Backward goes from the last layer to the first, so the last is where it began.
    """
    names = [name for name, _ in model.named_parameters()]
    flags = [0 if p.grad is None or _finite(p.grad) else 1 for p in model.parameters()]
    table = everyone(model, flags)
    for index in reversed(range(len(names))):
        ranks = table[:, index].nonzero().flatten().tolist()
        if ranks:
            return names[index], ranks
    return None


def drifted(model: ParallelModel) -> tuple[str, list[int]] | None:
    """Return the first tensor of which replicas differ, and the ranks that differ from the first.

    Compared are checksums of the bits, of every parameter and buffer.

    Communication: eight bytes for each tensor from every rank.
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    table = everyone(model, [checksum(tensor) for tensor in held.values()])
    for index, name in enumerate(held):
        cover = model.cover(name)
        for rank in range(model.mesh.size):
            sharers = cover.sharers(rank, REPLICA)
            first = table[sharers[0], index]
            others = [other for other in sharers if table[other, index] != first]
            if others:
                return name, others
    return None


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Return a number that depends on every bit of a tensor and on its place."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    width = next(size for size in (8, 4, 2, 1) if bits.numel() % size == 0)
    kinds = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    words = bits.view(kinds[width])
    total = 0
    for start in range(0, words.numel(), BLOCK):
        part = words[start : start + BLOCK].to(torch.int64)
        place = torch.arange(start, start + part.numel(), dtype=torch.int64)
        mixed = (part ^ (part >> 29)) * 0x3C79AC492BA7B653 + place * 0x1C69B3F74AC4AE35
        mixed = (mixed ^ (mixed >> 32)) * 0x1D8E4E27C47D124F
        total = (total + int(mixed.sum())) % 2**64
    return total - 2**63


def everyone(model: ParallelModel, numbers: Sequence[int]) -> Tensor:
    """Return whole numbers of all ranks, a row for each."""
    mesh = model.mesh
    mine = torch.tensor([list(numbers)], dtype=torch.int64)
    split = Layout((mesh.size, len(numbers)), [Axis(mesh.size, 0)])
    whole = Layout.replicated((mesh.size, len(numbers)), ranks=mesh.size)
    return model.runs.exchange(split, whole, layer="training").start(mine).finish()


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
