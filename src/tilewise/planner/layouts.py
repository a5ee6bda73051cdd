"""Many layouts of one tensor as arrays, and what moving between any two of them costs a rank.

Each row is a layout: for every dim its number of parts, and how many ranks stand before that axis
(`outer`). Ranks along the same axis at the same place hold nested blocks under both layouts; where
the axes stand at different places, some rank has nothing of what it needs. So what the worst rank
keeps is

    Π_dims  extent / max(parts)     where all dims that both cut stand alike, else 0

which is exact for divisible extents and degrees, and rounded up to whole rows otherwise. Where
that is not exact and there are few layouts and ranks, all ranks are looked at instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.layout import REPLICA, Axes, Axis, Cover, Layout
from tilewise.planner.candidates import LETTERS
from tilewise.planner.traffic import coords

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AT_ONCE = 1 << 17
"""How many (pair of layouts, rank)s to look at together."""


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
        _, first, where = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        return self.take(first), where.reshape(-1)

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


@dataclass(frozen=True)
class Bill:
    """What the worst rank of a move receives, for each pair of layouts; elements and messages.

    `summed` elements take part in a sum over `sharers` ranks instead, which reach over `span`
    devices.
    """

    near: Floats
    far: Floats
    near_messages: Floats
    far_messages: Floats
    summed: Floats
    sharers: Floats
    span: Floats


def moved(
    source: Layouts, target: Layouts, node: int, *, by_rank: bool = False, paired: bool = False
) -> Bill:
    """Bill the move from each source (rows) to each target (columns).

    With `paired`, from each source to the target beside it: one column.
    """
    if by_rank:
        return _moved_by_rank(source, target, node, paired)
    outside = _outside(source, node)
    columns = (len(source), 1 if paired else len(target))
    wanted = np.broadcast_to(_columns(target.local(), paired), columns).copy()
    own, held = np.ones(columns), np.ones(columns)
    blocks, near_blocks = np.ones(columns), np.ones(columns)
    for dim, extent in enumerate(source.shape):
        mine = np.stack([source.parts[:, dim], source.outer[:, dim], outside[:, dim]], 1)
        theirs = np.stack([target.parts[:, dim], target.outer[:, dim]], 1)
        some, here = np.unique(mine, axis=0, return_inverse=True)
        others, there = np.unique(theirs, axis=0, return_inverse=True)
        at = (here.reshape(-1, 1), _columns(there.reshape(-1), paired))
        parts, place, coarse = (column[:, None] for column in some.T)
        wants, elsewhere = others[None, :, 0], place != others[None, :, 1]
        own *= _kept(parts, wants, elsewhere, extent)[at]
        held *= _kept(coarse, wants, elsewhere, extent)[at]
        blocks *= np.maximum(parts // wants, 1)[at]
        near_blocks *= np.maximum(parts // np.maximum(coarse, wants), 1)[at]
    own_blocks = (own > 0).astype(np.float64)
    near_blocks = np.minimum(near_blocks * (held > 0), blocks)
    ones = np.ones_like(wanted)
    return Bill(
        np.maximum(held - own, 0.0),
        np.maximum(wanted - np.maximum(held, own), 0.0),
        np.maximum(near_blocks - own_blocks, 0.0),
        np.maximum(blocks - np.maximum(near_blocks, own_blocks), 0.0),
        0.0 * ones,
        ones,
        ones,
    )


def summed_back(
    source: Layouts, target: Layouts, node: int, *, by_rank: bool = False, paired: bool = False
) -> Bill:
    """Bill the way back of `moved`: gradients of the targets (columns) to the sources (rows).

    Where ranks used a block for different results, each of them has a partial sum of its
    gradient: a rank gets all of them, or where blocks stay where they are, they are summed.
    """
    there = moved(target, source, node, by_rank=by_rank, paired=paired)
    names = Bill.__dataclass_fields__
    bill = there if paired else Bill(*(getattr(there, name).T for name in names))
    if (target.partial == 1).all():
        return bill
    zero = np.zeros_like(bill.near)
    partial = _columns(target.partial, paired) + zero
    mine = source.local()[:, None] + zero
    sums = partial > 1
    for dim in range(len(source.shape)):
        parts, outer = source.parts[:, dim, None], source.outer[:, dim, None]
        sums &= parts == _columns(target.parts[:, dim], paired)
        sums &= (parts == 1) | (outer == _columns(target.outer[:, dim], paired))
    own = mine - bill.near - bill.far
    spread = partial * mine - own
    # of the ranks with partial sums, those that stand next to each other share a node
    after = _columns(_after(target), paired) + zero
    close = np.minimum(partial, np.maximum(node // after, 1))
    near = np.where(partial > 1, np.minimum(spread, (close - 1) * mine + bill.near), bill.near)
    return Bill(
        np.where(sums, 0.0, near),
        np.where(sums, 0.0, np.maximum(spread - near, 0.0)),
        np.where(sums, 0.0, bill.near_messages + close - 1),
        np.where(sums, 0.0, bill.far_messages + partial - close),
        np.where(sums, mine, 0.0),
        np.where(sums, partial, 1.0),
        np.where(sums, partial * after, 1.0),
    )


def _columns(values: NDArray[Any], paired: bool) -> NDArray[Any]:
    """Stand the targets' values against the sources': across all of them, or beside each."""
    return values[:, None] if paired else values[None]


def _moved_by_rank(source: Layouts, target: Layouts, node: int, paired: bool) -> Bill:
    """Look at every rank's blocks under both layouts.

    Along one dim few layouts differ, so overlaps are found once for those; the rest is products.
    """
    coarse = _outside(source, node)
    nested = source.blocks() // (source.parts // coarse)[:, None, :]
    there = _intervals(target.blocks(), target.parts, target.shape)
    here = _intervals(source.blocks(), source.parts, source.shape)
    around = _intervals(nested, coarse, source.shape)
    lines = [
        _Line(
            extent, source.parts[:, d], (*(x[d] for x in here), *(x[d] for x in around)),
            (there[0][d], there[1][d]),
        )
        for d, extent in enumerate(source.shape)
    ]  # fmt: skip
    every = _boxes(*there)
    width = 1 if paired else len(target)
    near, far, near_messages, far_messages = np.zeros((4, len(source), width))
    step = max(AT_ONCE // max(width * source.ranks, 1), 1)
    for start in range(0, len(source), step):
        rows = np.arange(start, min(start + step, len(source)))
        columns = rows[:, None] if paired else np.arange(width)[None]
        mine = close = np.ones((1, 1, 1), np.int64)
        at = [(line.here[rows][:, None], line.there[columns]) for line in lines]
        for line, pair in zip(lines, at, strict=True):
            mine, close = mine * line.own[pair], close * line.near[pair]
        close = np.maximum(close, mine)
        wanted = every[columns]
        worst = (wanted - mine + 1e-3 * (wanted - close)).argmax(-1)
        own, inside, touched = np.ones((3, *worst.shape), np.int64)
        for line, pair in zip(lines, at, strict=True):
            own *= line.own[(*pair, worst)]
            inside *= line.near_count[(*pair, worst)]
            touched *= line.count[(*pair, worst)]
        most = every[columns, worst]
        held = np.take_along_axis(close, worst[..., None], -1)[..., 0]
        has = own > 0
        inside = np.maximum(inside, has)
        near[rows], far[rows] = held - own, most - held
        near_messages[rows], far_messages[rows] = inside - has, touched - inside
    ones = np.ones_like(near)
    return Bill(near, far, near_messages, far_messages, 0.0 * ones, ones, ones)


class _Line:
    """The overlaps along one dim, for every rank, of the cuts that sources and targets make.

    `here` and `there` number the cuts of each source and target. By these numbers and rank, `own`
    is what a rank has of what it needs, `near` what its node is sure to have, and the counts are
    from how many blocks that comes and from how many all of it.
    """

    def __init__(
        self, extent: int, parts: Ints, source: tuple[Ints, ...], target: tuple[Ints, ...]
    ) -> None:
        ranks = source[0].shape[1]
        rows, self.here = _distinct((*source, parts[:, None]))
        columns, self.there = _distinct(target)
        cuts = rows[:, None, -1:]
        begin, end, first, last = (rows[:, None, k * ranks : (k + 1) * ranks] for k in range(4))
        low, high = columns[None, :, :ranks], columns[None, :, ranks:]
        self.own = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
        first, last = np.maximum(first, low), np.minimum(last, high)
        self.near = np.maximum(last - first, 0)
        self.near_count = _touched(first, last, cuts, extent)
        self.count = _touched(low, high, cuts, extent)


def _distinct(columns: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """Return each row once, and where each stands."""
    rows, where = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    return rows, where.reshape(-1)


def _intervals(index: Ints, parts: Ints, shape: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return where blocks begin and end, (dims, layouts, ranks)."""
    extents = np.array(shape, np.int64)
    cuts = parts[:, None, :]
    begin, end = index * extents // cuts, (index + 1) * extents // cuts
    return np.moveaxis(begin, 2, 0).copy(), np.moveaxis(end, 2, 0).copy()


def _boxes(begin: Ints, end: Ints) -> Ints:
    """Return how many elements boxes hold; dims come first."""
    found = np.ones(begin.shape[1:], np.int64)
    for dim in range(len(begin)):
        found *= np.maximum(end[dim] - begin[dim], 0)
    return found


def _touched(begin: Ints, end: Ints, parts: Ints, extent: int) -> Ints:
    """Return how many blocks of a cut into `parts` the intervals touch."""
    first = ((begin + 1) * parts - 1) // extent
    last = (end * parts - 1) // extent
    return np.asarray(np.where(end > begin, last - first + 1, 0), np.int64)


def _scattered(layout: Layout) -> bool:
    """Whether several axes that are not neighbours cut one dim."""
    dims = [axis.dim for axis in layout.axes if axis.dim >= 0]
    return len(dims) != len(set(dims))


def _kept(parts: Ints, others: Ints, elsewhere: NDArray[np.bool_], extent: int) -> Floats:
    """Return how many positions of a dim every rank is sure to have of those that it needs."""
    low, high = np.minimum(parts, others), np.maximum(parts, others)
    found: Floats = np.ceil(extent / high)
    found[(low > 1) & (elsewhere | (high % low != 0))] = 0.0
    return found


def _outside(layouts: Layouts, node: int) -> Ints:
    """Return the parts of each dim that lie in different nodes."""
    nodes = max(layouts.ranks // node, 1)
    room = np.maximum(nodes // layouts.outer, 1)
    return np.asarray(np.gcd(layouts.parts, room), np.int64)


def _after(layouts: Layouts) -> Ints:
    """Return how far apart the ranks stand that share a block: the replicas after them."""
    last = (layouts.outer * layouts.parts).max(1, initial=1) * layouts.partial
    return np.asarray(layouts.ranks // np.minimum(last, layouts.ranks), np.int64)
