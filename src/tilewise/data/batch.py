"""What a loader hands over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """This rank's slabs of a global batch, one tensor for each field.

    Attributes:
        tensors: the slabs, in the order of the layouts; iterating gives them.
        size: the global batch, to be passed on as `batch=`; the last one may be smaller.
        samples: the numbers of the samples in it.
    """

    tensors: tuple[Tensor, ...]
    size: int
    samples: tuple[int, ...]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, number: int) -> Tensor:
        return self.tensors[number]
