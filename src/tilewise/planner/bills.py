"""What moving a tensor between any two of many layouts costs the worst rank.

Ranks along the same axis at the same place hold nested blocks under both layouts; where the axes
stand at different places, some rank has nothing of what it needs. So what the worst rank keeps is

    Π_dims  extent / max(parts)     where all dims that both cut stand alike, else 0

which is exact for divisible extents and degrees, and rounded up to whole rows otherwise. Where
that is not exact and there are few layouts and ranks, all ranks are looked at instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.distinct import distinct_rows
from tilewise.planner.layouts import Layouts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

AT_ONCE = 1 << 17
"""How many (pair of layouts, rank)s to look at together."""


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

    def at(self, rows: Ints) -> Bill:
        """Return some rows."""
        columns = (getattr(self, name) for name in self.__dataclass_fields__)
        every = len(self.near)
        return Bill(*(one.take(rows, 0) if len(one) == every else one for one in columns))

    def turned(self) -> Bill:
        """Return the same for targets (rows) and sources (columns)."""
        columns = (getattr(self, name).T for name in self.__dataclass_fields__)
        return Bill(*columns)


class Between:
    """The moves from each of some layouts (rows) to each of others (columns), and back.

    With `paired` moves go from each row to the column beside it: the bill has one column.
    """

    def __init__(
        self, source: Layouts, target: Layouts, node: int, *, by_rank: bool = False
    ) -> None:
        self.source, self.target, self.node, self.by_rank = source, target, node, by_rank

    def forth(self, rows: Ints, columns: Ints, *, paired: bool = False) -> Bill:
        """Bill moves from sources to targets."""
        if self.by_rank:
            some, others = self.source.take(rows), self.target.take(columns)
            return _moved_by_rank(some, others, self.node, paired)
        return self._forth.bill(rows, columns, paired)

    def back(
        self,
        rows: Ints,
        columns: Ints,
        *,
        paired: bool = False,
        alike: tuple[Ints, Ints] | None = None,
    ) -> Bill:
        """Bill the way back: gradients of the targets to the sources.

        `alike` is what is known of the columns, if it is not to be found again for each of many
        blocks of rows.

        Where ranks used a block for different results, each of them has a partial sum of its
        gradient: a rank gets all of them, or where blocks stay where they are, they are summed.
        """
        few, where = (columns, None) if alike is None else alike
        if self.by_rank:
            some, others = self.source.take(rows), self.target.take(few)
            there = _moved_by_rank(others, some, self.node, paired)
        else:
            there = self._back.bill(few, rows, paired)
        there = there if where is None else there.at(where)
        bill = there if paired else there.turned()
        partial = _columns(self.target.partial[columns], paired)
        if (partial == 1).all():
            return bill
        mine = self._local[rows][:, None]
        here, beside = self._same
        sums = (partial > 1) & (here[rows][:, None] == _columns(beside[columns], paired))
        spread = (partial - 1) * mine + bill.near + bill.far
        # of the ranks with partial sums, those that stand next to each other share a node
        after = _columns(self._after[columns], paired)
        close = np.minimum(partial, np.maximum(self.node // after, 1))
        near = np.minimum(spread, (close - 1) * mine + bill.near)
        found = Bill(
            near,
            np.maximum(spread - near, 0.0),
            bill.near_messages + (close - 1),
            bill.far_messages + (partial - close),
            np.zeros(near.shape),
            partial.astype(np.float64),
            (partial * after).astype(np.float64),
        )
        at = np.nonzero(sums)  # few: where all blocks are the same
        for one in (found.near, found.far, found.near_messages, found.far_messages):
            one[at] = 0.0
        found.summed[at] = np.broadcast_to(mine, near.shape)[at]
        return found

    def alike(self, columns: Ints) -> tuple[Ints, Ints] | None:
        """Return columns one for each layout of blocks, and where each column's is among them.

        None where parts and places do not tell all of a layout.
        """
        if self.source.index is not None or self.target.index is not None:
            return None
        _, first, where = np.unique(self._same[1][columns], return_index=True, return_inverse=True)
        return columns[first], where.reshape(-1)

    @cached_property
    def every_forth(self) -> tuple[Bill, Ints | None]:
        """All moves there as `forth` bills them, where alike to one target each, and which one."""
        rows, columns = np.arange(len(self.source)), np.arange(len(self.target))
        few, where = self._every_alike or (columns, None)
        return self.forth(rows, few), where

    @cached_property
    def every_back(self) -> Bill:
        """All moves back."""
        rows, columns = np.arange(len(self.source)), np.arange(len(self.target))
        return self.back(rows, columns, alike=self._every_alike)

    @cached_property
    def _every_alike(self) -> tuple[Ints, Ints] | None:
        return self.alike(np.arange(len(self.target)))

    @cached_property
    def _forth(self) -> _Way:
        return _Way(self.source, self.target, self.node)

    @cached_property
    def _back(self) -> _Way:
        return _Way(self.target, self.source, self.node)

    @cached_property
    def _local(self) -> Floats:
        return self.source.local()

    @cached_property
    def _after(self) -> Ints:
        return _after(self.target)

    @cached_property
    def _same(self) -> tuple[Ints, Ints]:
        """Numbers of sources and targets, equal where the blocks are."""
        both = self.source, self.target
        keys = [np.hstack([one.parts, np.where(one.parts > 1, one.outer, 1)]) for one in both]
        _, where = _distinct((np.concatenate(keys),))
        return where[: len(self.source)], where[len(self.source) :]


class _Way:
    """Moves in one direction: few cuts of a dim differ, the rest is products.

    Dims are taken two by two. For each pair, `_pairs` has the cut of each source and target, and
    tables by these: what a rank has of what it needs, what its node is sure to have, from how many
    blocks all of it comes, and from how many in its node.
    """

    def __init__(self, source: Layouts, target: Layouts, node: int) -> None:
        self.wanted = target.local()
        outside = _outside(source, node)
        dims = range(len(source.shape))
        one = [_along(source, target, outside, dim) for dim in dims]
        both = zip(one[::2], one[1::2])
        self._pairs = [_both(*pair) for pair in both] + one[len(one) // 2 * 2 :]

    def bill(self, rows: Ints, columns: Ints, paired: bool) -> Bill:
        wanted = _columns(self.wanted[columns], paired)
        found: Floats | None = None
        for here, there, tables in self._pairs:
            if paired:
                factor = tables[:, here[rows], there[columns]][:, :, None]
            elif len(rows) < len(columns):
                factor = tables.take(here[rows], 1).take(there[columns], 2)
            else:
                factor = tables.take(there[columns], 2).take(here[rows], 1)
            found = factor if found is None else np.multiply(found, factor, out=found)
        if found is None:
            found = np.ones((4, len(rows), 1 if paired else len(columns)))
        own, held, blocks, near_blocks = found
        own_blocks = own > 0
        near_blocks = np.minimum(near_blocks * (held > 0), blocks)
        none, one = np.zeros((1, 1)), np.ones((1, 1))
        return Bill(
            np.maximum(held - own, 0.0),
            np.maximum(wanted - np.maximum(held, own), 0.0),
            np.maximum(near_blocks - own_blocks, 0.0),
            np.maximum(blocks - np.maximum(near_blocks, own_blocks), 0.0),
            none,
            one,
            one,
        )


_Cuts = tuple[Ints, Ints, Floats]
"""Which cut each source and each target has, and tables by these."""


def _along(source: Layouts, target: Layouts, outside: Ints, dim: int) -> _Cuts:
    """Compare the cuts of one dim."""
    extent = source.shape[dim]
    mine = (source.parts[:, dim], source.outer[:, dim], outside[:, dim])
    some, here = _distinct(tuple(column[:, None] for column in mine))
    theirs = (target.parts[:, dim], target.outer[:, dim])
    others, there = _distinct(tuple(column[:, None] for column in theirs))
    parts, place, coarse = (column[:, None] for column in some.T)
    wants, elsewhere = others[None, :, 0], place != others[None, :, 1]
    tables = (
        _kept(parts, wants, elsewhere, extent),
        _kept(coarse, wants, elsewhere, extent),
        np.maximum(parts // wants, 1),
        np.maximum(parts // np.maximum(coarse, wants), 1),
    )
    return here, there, np.array(tables, np.float64)


def _both(first: _Cuts, second: _Cuts) -> _Cuts:
    """Compare the cuts of two dims at once, of which few differ too."""
    rows, here = _distinct((first[0][:, None], second[0][:, None]))
    columns, there = _distinct((first[1][:, None], second[1][:, None]))
    tables = [
        one[2].take(rows[:, k], 1).take(columns[:, k], 2) for k, one in enumerate((first, second))
    ]
    return here, there, tables[0] * tables[1]


def _columns(values: NDArray[Any], paired: bool) -> NDArray[Any]:
    """Stand the targets' values against the sources': across all of them, or beside each."""
    return values[:, None] if paired else values[None]


def _moved_by_rank(source: Layouts, target: Layouts, node: int, paired: bool) -> Bill:
    """Look at every rank's blocks under both layouts.

    Along one dim few layouts differ, so overlaps are found once for those; the rest is products.
    """
    coarse = _outside(source, node)
    lines = [_Line(source, target, coarse, dim) for dim in range(len(source.shape))]
    every = np.ones((len(target), target.ranks), np.int64)
    for line in lines:
        every *= line.wanted[line.there]
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
        worst = (1000 * (wanted - mine) + (wanted - close)).argmax(-1)
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
    from how many blocks that comes and from how many all of it. `wanted` is what a rank needs, by
    the target's number.
    """

    def __init__(self, source: Layouts, target: Layouts, coarse: Ints, dim: int) -> None:
        extent = source.shape[dim]
        first, self.here = source.cuts(dim)
        rows = source.take(first)
        cuts, around = rows.parts[:, dim, None], coarse[first, dim, None]
        index = rows.blocks()[:, :, dim]
        begin, end = (one[:, None] for one in _intervals(index, cuts, extent))
        nested = _intervals(index // (cuts // around), around, extent)
        first, self.there = target.cuts(dim)
        columns = target.take(first)
        wants = columns.blocks()[:, :, dim], columns.parts[:, dim, None]
        low, high = (one[None] for one in _intervals(*wants, extent))
        self.wanted = np.maximum(high - low, 0)[0]
        self.own = np.maximum(np.minimum(end, high) - np.maximum(begin, low), 0)
        inner, outer = np.maximum(nested[0][:, None], low), np.minimum(nested[1][:, None], high)
        self.near = np.maximum(outer - inner, 0)
        self.near_count = _touched(inner, outer, cuts[:, None], extent)
        self.count = _touched(low, high, cuts[:, None], extent)


def _distinct(columns: tuple[Ints, ...]) -> tuple[Ints, Ints]:
    """Return each row once, and where each stands."""
    table = np.concatenate(columns, axis=1)
    first, where = distinct_rows(table)
    return table[first], where


def _intervals(index: Ints, parts: Ints, extent: int) -> tuple[Ints, Ints]:
    """Return where blocks of a dim begin and end."""
    return index * extent // parts, (index + 1) * extent // parts


def _touched(begin: Ints, end: Ints, parts: Ints, extent: int) -> Ints:
    """Return how many blocks of a cut into `parts` the intervals touch."""
    first = ((begin + 1) * parts - 1) // extent
    last = (end * parts - 1) // extent
    return np.asarray(np.where(end > begin, last - first + 1, 0), np.int64)


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
