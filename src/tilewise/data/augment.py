"""Augmentation that is the same whatever the plan.

What happens to a sample is drawn from (seed, epoch, sample). Geometric changes are index maps:
they say which stored positions a slab shows, so a flip across a split dim reads the mirrored slab.
Changes of intensity are element-wise and know the place of each element.

Dims are named by letter, counted from the last: `w`, `h`, `d`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewise.data.chance import Chance
from tilewise.data.region import Box, Index
from tilewise.data.transform import as_float
from tilewise.errors import DataError

LETTERS = "whd"


@dataclass(frozen=True)
class View:
    """How spatial dims are seen: seen dim j shows the stored dim perm[j] by index[j]."""

    perm: tuple[int, ...]
    index: tuple[Index, ...]

    @classmethod
    def plain(cls, extents: Sequence[int]) -> View:
        """See the sample as it is stored."""
        return cls(tuple(range(len(extents))), tuple(np.arange(extent) for extent in extents))

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(len(index) for index in self.index)

    def through(self, dim: int, positions: Index) -> View:
        """Show only these positions of a dim, in this order."""
        index = list(self.index)
        index[dim] = index[dim][positions]
        return View(self.perm, tuple(index))


class Geometric(ABC):
    """A change of where things are."""

    @abstractmethod
    def see(self, view: View, chance: Chance) -> View:
        """Return the view after the change."""

    @abstractmethod
    def extents(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        """Return the spatial extents after the change; raise where it is not possible."""


class Intensity(ABC):
    """A change of values, of the first field only."""

    @abstractmethod
    def change(self, tensor: Tensor, shape: tuple[int, ...], box: Box, chance: Chance) -> Tensor:
        """Return changed values of a box of a sample; the tensor may be changed in place."""


@dataclass(frozen=True)
class Flip(Geometric):
    """Mirror each of these dims with probability p."""

    dims: str = "w"
    p: float = 0.5

    def see(self, view: View, chance: Chance) -> View:
        for which, dim in enumerate(dims_of(self.dims, len(view.index))):
            if chance.uniform(which) < self.p:
                view = view.through(dim, np.arange(view.extents[dim])[::-1])
        return view

    def extents(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        dims_of(self.dims, len(extents))
        return extents


@dataclass(frozen=True)
class Roll(Geometric):
    """Shift each of these dims around its ends by any distance: for periodic samples."""

    dims: str = "w"

    def see(self, view: View, chance: Chance) -> View:
        for which, dim in enumerate(dims_of(self.dims, len(view.index))):
            extent = view.extents[dim]
            by = chance.below(extent, which)
            view = view.through(dim, np.roll(np.arange(extent), by))
        return view

    def extents(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        dims_of(self.dims, len(extents))
        return extents


@dataclass(frozen=True)
class Transpose(Geometric):
    """Permute these dims at random, those of equal extents among themselves."""

    dims: str = "h w"

    def see(self, view: View, chance: Chance) -> View:
        order = list(range(len(view.index)))
        for group in self._groups(view.extents):
            shuffled = sorted(group, key=lambda dim: chance.uniform(dim))
            for dim, other in zip(group, shuffled):
                order[dim] = other
        return View(tuple(view.perm[dim] for dim in order), tuple(view.index[dim] for dim in order))

    def extents(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        if not self._groups(extents):
            raise DataError(
                f"augment: transpose of {self.dims!r}: no two of its dims have equal extents "
                f"(spatial extents {extents})"
            )
        return extents

    def _groups(self, extents: tuple[int, ...]) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for dim in sorted(dims_of(self.dims, len(extents))):
            groups.setdefault(extents[dim], []).append(dim)
        return [group for group in groups.values() if len(group) > 1]


@dataclass(frozen=True)
class Crop(Geometric):
    """Show a window of these extents (of the last dims) at a random place, or in the middle."""

    size: tuple[int, ...]
    centre: bool = False

    def see(self, view: View, chance: Chance) -> View:
        first = len(view.index) - len(self.size)
        for which, size in enumerate(self.size):
            room = view.extents[first + which] - size
            start = room // 2 if self.centre else chance.below(room + 1, which)
            view = view.through(first + which, np.arange(start, start + size))
        return view

    def extents(self, extents: tuple[int, ...]) -> tuple[int, ...]:
        first = len(extents) - len(self.size)
        fits = first >= 0 and all(
            1 <= size <= extent for size, extent in zip(self.size, extents[first:])
        )
        if not fits:
            raise DataError(f"augment: crop {self.size} does not fit the extents {extents}")
        return (*extents[:first], *self.size)


@dataclass(frozen=True)
class Scale(Intensity):
    """Multiply a sample by a number between low and high."""

    low: float = 0.9
    high: float = 1.1

    def change(self, tensor: Tensor, shape: tuple[int, ...], box: Box, chance: Chance) -> Tensor:
        return as_float(tensor).mul_(self.low + (self.high - self.low) * chance.uniform())


@dataclass(frozen=True)
class Shift(Intensity):
    """Add a number between low and high to a sample."""

    low: float = -0.1
    high: float = 0.1

    def change(self, tensor: Tensor, shape: tuple[int, ...], box: Box, chance: Chance) -> Tensor:
        return as_float(tensor).add_(self.low + (self.high - self.low) * chance.uniform())


@dataclass(frozen=True)
class Noise(Intensity):
    """Add normal noise of a standard deviation, drawn for each element by its place."""

    std: float = 0.1

    def change(self, tensor: Tensor, shape: tuple[int, ...], box: Box, chance: Chance) -> Tensor:
        tensor = as_float(tensor)
        dtype = tensor.dtype if tensor.dtype == torch.float64 else torch.float32
        noise = chance.normal(shape, box, dtype).mul_(self.std)
        return tensor.add_(noise.to(tensor.dtype))


def dims_of(names: str, count: int) -> list[int]:
    """Return the positions of dims named by letter among `count` spatial dims."""
    letters = names.replace(" ", "")
    if not letters or len(set(letters)) != len(letters) or not set(letters) <= set(LETTERS):
        raise DataError(f"augment: dims {names!r} must be some of d, h and w, each once")
    for letter in letters:
        if LETTERS.index(letter) >= count:
            raise DataError(f"augment: dim {letter!r} of samples with {count} spatial dims")
    return [count - 1 - LETTERS.index(letter) for letter in letters]
