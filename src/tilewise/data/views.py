"""Other sources out of one, without rewriting files: sub-volumes, permuted dims, some samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch

from tilewise.data.region import Array, Box
from tilewise.data.source import Counts, Field, Source, Storage
from tilewise.errors import DataError
from tilewise.layout import Layout
from tilewise.ops.draws import Draws, uniform_bits

SPLIT_STREAM = 0x5B117


class _View(Source):
    """A source that reads through another one."""

    def __init__(self, base: Source) -> None:
        self.base, self.origin = base, base.origin
        self.fields = dict(base.fields)

    @property
    def counts(self) -> Counts:  # type: ignore[override]
        return self.base.counts

    def original(self, index: int, field: str, box: Box) -> tuple[int, Box]:
        """Return the base's sample and box for one of this view's."""
        return index, box

    def __len__(self) -> int:
        return len(self.base)

    def storage(self, field: str) -> Storage:
        return self.base.storage(field)

    def place(self, index: int, field: str) -> str:
        return self.base.place(self.original(index, field, ())[0], field)

    def touched(self, index: int, field: str, box: Box) -> int:
        there, stored = self.original(index, field, box)
        return self.base.touched(there, field, stored)

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        there, stored = self.original(index, field, box)
        self.base.fill(there, field, stored, out)

    def verify(self, index: int) -> None:
        self.base.verify(self.original(index, next(iter(self.fields)), ())[0])

    def close(self) -> None:
        self.base.close()


class SubVolumes(_View):
    """Each sample cut into equal boxes, each of them a sample: 512³ as 64 samples of 128³.

    Args:
        base: where the samples come from.
        sizes: for each field to cut, the extents of a sub-volume along its last dims. All cut
            fields fall into as many parts; a field that is not named comes whole with each part.
        drop_rest: leave out what an extent has beyond a multiple, instead of raising.
    """

    def __init__(
        self, base: Source, sizes: Mapping[str, Sequence[int]], *, drop_rest: bool = False
    ) -> None:
        super().__init__(base)
        self._grids: dict[str, tuple[int, ...]] = {}
        self._sizes = {name: tuple(size) for name, size in sizes.items()}
        for name, size in self._sizes.items():
            shape = _field(base, name).shape
            lead = len(shape) - len(size)
            if lead < 0 or not size or min(size) < 1:
                raise DataError(f"data: sub-volumes {size} of field {name!r} of shape {shape}")
            rest = [extent % part for extent, part in zip(shape[lead:], size)]
            grid = tuple(extent // part for extent, part in zip(shape[lead:], size))
            if not prod(grid) or (any(rest) and not drop_rest):
                raise DataError(
                    f"data: sub-volumes of field {name!r}: the extents {shape[lead:]} must be "
                    f"multiples of {size}; or say drop_rest=True to leave out the rest"
                )
            self._grids[name] = grid
            self.fields[name] = Field((*shape[:lead], *size), base.fields[name].dtype)
        if len(set(self._grids.values())) != 1:
            raise DataError(f"data: sub-volumes {self._grids} must be the same grid in all fields")
        self.parts = prod(next(iter(self._grids.values())))

    def __len__(self) -> int:
        return len(self.base) * self.parts

    def original(self, index: int, field: str, box: Box) -> tuple[int, Box]:
        sample, part = divmod(index, self.parts)
        if field not in self._grids or not box:
            return sample, box
        size = self._sizes[field]
        at = np.unravel_index(part, self._grids[field])
        shifts = [0] * (len(box) - len(size)) + [int(i) * extent for i, extent in zip(at, size)]
        return sample, tuple((lo + by, hi + by) for (lo, hi), by in zip(box, shifts))


class Permuted(_View):
    """Fields with their dims in another order, such as channels from last to first.

    `orders[field][j]` is the stored dim that becomes dim j, as for `torch.permute`.
    """

    def __init__(self, base: Source, orders: Mapping[str, Sequence[int]]) -> None:
        super().__init__(base)
        self._orders = {name: tuple(order) for name, order in orders.items()}
        for name, order in self._orders.items():
            field = _field(base, name)
            if sorted(order) != list(range(len(field.shape))):
                raise DataError(
                    f"data: field {name!r} of shape {field.shape} cannot be permuted by {order}"
                )
            self.fields[name] = Field(tuple(field.shape[dim] for dim in order), field.dtype)

    def original(self, index: int, field: str, box: Box) -> tuple[int, Box]:
        if field not in self._orders or not box:
            return index, box
        stored = sorted(zip(self._orders[field], box))
        return index, tuple(interval for _, interval in stored)

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        if field not in self._orders:
            self.base.fill(index, field, box, out)
            return
        _, stored = self.original(index, field, box)
        buffer = np.empty([stop - start for start, stop in stored], out.dtype)
        self.base.fill(index, field, stored, buffer)
        out[...] = buffer.transpose(self._orders[field])


class Subset(_View):
    """Some samples of a source, in the given order."""

    def __init__(self, base: Source, indices: Sequence[int]) -> None:
        super().__init__(base)
        self.indices = np.asarray(indices, dtype=np.int64)
        bad = self.indices[(self.indices < 0) | (self.indices >= len(base))]
        if len(bad):
            raise DataError(f"data: sample {bad[0]} of a subset; the source has {len(base)}")

    def __len__(self) -> int:
        return len(self.indices)

    def original(self, index: int, field: str, box: Box) -> tuple[int, Box]:
        return int(self.indices[index]), box


def split(source: Source, shares: Sequence[float], *, seed: int = 0) -> list[Subset]:
    """Deal the samples out at random, such as (0.8, 0.1, 0.1) for training, validation and test.

    The same seed deals the same on every rank and machine.
    """
    total = sum(shares)
    if not shares or min(shares) < 0 or not total:
        raise DataError(f"data: shares {tuple(shares)} must be positive numbers")
    order = permutation(len(source), Draws(seed), SPLIT_STREAM)
    ends = [round(len(source) * sum(shares[: i + 1]) / total) for i in range(len(shares))]
    return [
        Subset(source, order[start:stop].tolist()) for start, stop in zip([0, *ends[:-1]], ends)
    ]


def permutation(
    count: int, draws: Draws, stream: int
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers below `count` in the order of their random bits."""
    bits = uniform_bits(draws, stream, Layout((count,)), 0)
    order: np.ndarray[tuple[int], np.dtype[np.int64]] = torch.argsort(bits, stable=True).numpy()
    return order


def _field(source: Source, name: str) -> Field:
    if name not in source.fields:
        raise DataError(
            f"data: no field {name!r}; the source has {', '.join(map(repr, source.fields))}"
        )
    return source.fields[name]
