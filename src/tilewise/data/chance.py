"""Random numbers of one sample in one epoch: the same on every rank, under every plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.data.region import Box
from tilewise.layout import Layout
from tilewise.layout.blocks import Interval
from tilewise.ops.draws import Draws, normal

# Keeps these numbers apart from those that a model of the same seed draws.
STREAM = 0xA26


@dataclass(frozen=True, slots=True)
class Chance:
    """What (seed, epoch, sample, number of the augmentation) decides."""

    seed: int
    epoch: int
    sample: int
    number: int

    def draws(self) -> Draws:
        seed = Draws(self.seed, self.epoch).key(STREAM)
        return Draws(Draws(seed, self.sample).key(self.number))

    def uniform(self, which: int = 0) -> float:
        """Return a number in [0, 1)."""
        return (self.draws().key(which) >> 11) * 2.0**-53

    def below(self, bound: int, which: int = 0) -> int:
        """Return a whole number from 0 up to, not including, `bound`."""
        return min(int(self.uniform(which) * bound), bound - 1)

    def normal(self, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> Tensor:
        """Return normal numbers for a box of a sample of this shape."""
        return normal(self.draws(), 0, _Window(shape, box), 0, dtype=dtype)


class _Window(Layout):
    """A layout of one rank that holds some box, whatever the balanced cuts are."""

    def __init__(self, shape: tuple[int, ...], box: Box) -> None:
        super().__init__(shape)
        object.__setattr__(self, "box", box)

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        found: Box = self.__dict__["box"]
        return found
