"""Which samples make up which batch of an epoch: the same whatever the plan and the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.data.views import permutation
from tilewise.errors import DataError
from tilewise.ops.draws import Draws

STREAM = 0x0D3E


@dataclass(frozen=True, slots=True)
class Order:
    """Samples dealt out in batches.

    Args:
        samples: how many there are.
        batch: how many make a batch; the last one of an epoch may be smaller.
        shuffle: draw another order for each epoch from (seed, epoch).
        drop_last: leave out a smaller last batch.
    """

    samples: int
    batch: int
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise DataError(f"data: batch (={self.batch}) must be at least 1")
        if not len(self):
            raise DataError(
                f"data: {self.samples} samples make no batch of {self.batch}"
                + (" when a smaller last batch is dropped" if self.drop_last else "")
            )

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        full, rest = divmod(self.samples, self.batch)
        return full + (rest > 0 and not self.drop_last)

    def size(self, number: int) -> int:
        """Return how many samples a batch has."""
        return min(self.batch, self.samples - number * self.batch)

    def epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the samples in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return permutation(self.samples, Draws(self.seed, epoch), STREAM)

    def of(self, order: NDArray[np.int64], number: int) -> list[int]:
        """Return the samples of one batch of an epoch's order."""
        start = number * self.batch
        found: list[int] = order[start : start + self.size(number)].tolist()
        return found
