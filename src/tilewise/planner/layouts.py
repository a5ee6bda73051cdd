"""Many layouts of one tensor as arrays.

Each row is a layout: for every dim its number of parts, and how many ranks stand before that axis
(`outer`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.layout import REPLICA, Axes, Axis, Cover, Layout
from tilewise.planner.candidates import LETTERS
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.traffic import coords

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Layouts:
    """Layouts of a tensor of `shape` on `ranks` ranks, one row each.

    `partial` is how many ranks use each block for different results: their gradients are summed.
    Where some dim is cut by axes that are not neighbours, `index` holds the block of every rank
    along each dim, and `axes` the layouts' own.
    """

    shape: tuple[int, ...]
    ranks: int
    parts: Ints
    outer: Ints
    partial: Ints
    index: Ints | None = None
    axes: tuple[Axes, ...] | None = None

    def __len__(self) -> int:
        return len(self.parts)

    @classmethod
    def of_degrees(
        cls, shape: Sequence[int], ranks: int, table: Ints, roles: dict[str, int]
    ) -> Layouts:
        """Cut a tensor by rows of degrees; `roles` names the dim of each letter."""
        parts = np.ones((len(table), len(shape)), np.int64)
        outer = np.ones((len(table), len(shape)), np.int64)
        partial = np.ones(len(table), np.int64)
        before = np.ones(len(table), np.int64)
        for column, letter in enumerate(LETTERS):
            sizes, dim = table[:, column], roles[letter]
            if dim >= 0:
                fresh = parts[:, dim] == 1
                outer[:, dim] = np.where(fresh, before, outer[:, dim])
                parts[:, dim] *= sizes
            elif dim != REPLICA:
                partial *= sizes
            before = before * sizes
        return cls(tuple(shape), ranks, parts, np.where(parts > 1, outer, 1), partial)

    @classmethod
    def of_layouts(cls, layouts: Sequence[Layout]) -> Layouts:
        """Take layouts one by one; a dim that several axes cut counts as its slowest one's."""
        shape = layouts[0].shape
        parts = np.array([layout.degrees for layout in layouts], np.int64)
        parts = parts.reshape(len(layouts), len(shape))
        outer = np.ones_like(parts)
        for row, layout in enumerate(layouts):
            before = 1
            for axis in layout.axes:
                if axis.dim >= 0 and outer[row, axis.dim] == 1:
                    outer[row, axis.dim] = before
                before *= axis.size
        ones = np.ones(len(layouts), np.int64)
        if not any(_scattered(layout) for layout in layouts):
            return cls(shape, layouts[0].ranks, parts, outer, ones)
        ranks = np.arange(layouts[0].ranks)
        index = np.stack([coords(Cover.of(layout), ranks) for layout in layouts])
        axes = tuple(layout.axes for layout in layouts)
        return cls(shape, layouts[0].ranks, parts, outer, ones, index, axes)

    def layout_at(self, row: int) -> Layout:
        """Return one row as a layout."""
        if self.axes is not None:
            return Layout(self.shape, self.axes[row])
        cuts = [
            (int(self.outer[row, dim]), int(self.parts[row, dim]), dim)
            for dim in range(len(self.shape))
            if self.parts[row, dim] > 1
        ]
        axes: list[Axis] = []
        before = 1
        for outer, parts, dim in sorted(cuts):
            axes += [Axis(outer // before), Axis(parts, dim)]
            before = outer * parts
        return Layout(self.shape, [*axes, Axis(self.ranks // before)])

    def take(self, rows: Ints) -> Layouts:
        """Return some rows."""
        return Layouts(
            self.shape,
            self.ranks,
            self.parts[rows],
            self.outer[rows],
            self.partial[rows],
            None if self.index is None else self.index[rows],
            None if self.axes is None else tuple(self.axes[row] for row in rows),
        )

    def distinct(self) -> tuple[Layouts, Ints]:
        """Return each layout once, and where each row's stands."""
        columns = [self.parts, self.outer, self.partial[:, None]]
        if self.index is not None:
            columns.append(self.index.reshape(len(self), -1))
        keys = np.concatenate(columns, axis=1)
        first, where = distinct_rows(keys)
        return self.take(first), where

    def cuts(self, dim: int) -> tuple[Ints, Ints]:
        """Return where each way to cut one dim stands first, and which of them each row has."""
        columns = [self.parts[:, dim, None], self.outer[:, dim, None]]
        if self.index is not None:
            columns.append(self.index[:, :, dim])
        return distinct_rows(np.concatenate(columns, axis=1))

    def of_shape(self, shape: tuple[int, ...]) -> Layouts:
        """Return the same cuts of a tensor with other extents."""
        return replace(self, shape=shape)

    @staticmethod
    def joined(several: Sequence[Layouts]) -> Layouts:
        """Return the rows of several tables, one after the other."""
        index = None
        if any(one.index is not None for one in several):
            index = np.concatenate([one.blocks() for one in several])
        return Layouts(
            several[0].shape,
            several[0].ranks,
            np.concatenate([one.parts for one in several]),
            np.concatenate([one.outer for one in several]),
            np.concatenate([one.partial for one in several]),
            index,
        )

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What tells these layouts from others."""
        index = b"" if self.index is None else self.index.tobytes()
        arrays = self.parts.tobytes(), self.outer.tobytes(), self.partial.tobytes(), index
        return self.shape, self.ranks, arrays

    def blocks(self) -> Ints:
        """Return the index of every rank's block along each dim, (layouts, ranks, dims)."""
        if self.index is not None:
            return self.index
        step = self.ranks // (self.outer * self.parts)
        rank = np.arange(self.ranks)[None, :, None]
        return rank // step[:, None, :] % self.parts[:, None, :]

    def even(self) -> bool:
        """Whether all cuts are into equal parts and nest in each other."""
        sizes = np.unique(self.parts)
        return (
            self.index is None
            and not (np.array(self.shape) % self.parts).any()
            and all(b % a == 0 for a, b in pairwise(sizes))
        )

    def local(self) -> Floats:
        """Return the elements that the fullest rank holds under each layout."""
        return np.asarray(np.ceil(np.array(self.shape) / self.parts).prod(1), np.float64)


def smallest(sources: Layouts, targets: Layouts) -> tuple[Layouts, Layouts, int]:
    """Return the same cuts of the smallest tensor of which they are alike, and a scale.

    Where all cuts of a dim fall on multiples of some length, that may be one: all that layouts of
    the larger tensor share is as many times as much. So tensors of many sizes have moves that
    differ by a factor only.
    """
    shape, scale = list(sources.shape), 1
    for dim, extent in enumerate(sources.shape):
        parts = (*np.unique(sources.parts[:, dim]), *np.unique(targets.parts[:, dim]))
        least = lcm(*(int(one) for one in parts))
        if extent and extent % least == 0:
            shape[dim], scale = least, scale * (extent // least)
    return sources.of_shape(tuple(shape)), targets.of_shape(tuple(shape)), scale


def _scattered(layout: Layout) -> bool:
    """Whether several axes that are not neighbours cut one dim."""
    dims = [axis.dim for axis in layout.axes if axis.dim >= 0]
    return len(dims) != len(set(dims))
