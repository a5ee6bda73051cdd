"""How much the blocks of one cut of a dim share with those of another."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilewise.layout.cover import Block, Piece

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Overlaps:
    """The pairs of blocks that share positions; of many blocks these are few.

    `by_source` and `by_target` are the positions that each block shares with all others, the
    counts with how many of them it shares any.
    """

    def __init__(self, source: tuple[Block, ...], target: tuple[Block, ...]) -> None:
        some, a, b = (column[_filled(source)] for column in pieces(source))
        others, c, d = (column[_filled(target)] for column in pieces(target))
        i, j = _pairs(a, b, c, d)
        lengths = np.minimum(b[i], d[j]) - np.maximum(a[i], c[j])
        self._width = len(target)
        self._pairs, where = np.unique(some[i] * self._width + others[j], return_inverse=True)
        self._lengths = np.bincount(where.reshape(-1), lengths, len(self._pairs))
        here, there = np.divmod(self._pairs, self._width)
        self.by_source = np.bincount(here, self._lengths, len(source))
        self.by_target = np.bincount(there, self._lengths, len(target))
        self.source_counts = np.bincount(here, minlength=len(source))
        self.target_counts = np.bincount(there, minlength=len(target))

    def of(self, source: Ints, target: Ints) -> Floats:
        """Return what each of some source blocks shares with the target block beside it."""
        if not len(self._pairs):
            return np.zeros(len(source))
        wanted = source * self._width + target
        at = np.minimum(np.searchsorted(self._pairs, wanted), len(self._pairs) - 1)
        return np.where(self._pairs[at] == wanted, self._lengths[at], 0.0)


def _pairs(a: Ints, b: Ints, c: Ints, d: Ints) -> tuple[Ints, Ints]:
    """Return which intervals [a, b) and [c, d) share positions; none is empty."""
    order = np.argsort(c, kind="stable")
    c, d = c[order], d[order]
    if (d[1:] < d[:-1]).any():
        i, j = np.nonzero(np.minimum(b[:, None], d) > np.maximum(a[:, None], c))
        return i, order[j]
    # neither begin nor end falls: those that share some with one follow each other
    first = np.searchsorted(d, a, side="right")
    count = np.maximum(np.searchsorted(c, b, side="left") - first, 0)
    i = np.repeat(np.arange(len(a)), count)
    before = np.cumsum(count) - count
    return i, order[np.arange(len(i)) - before[i] + first[i]]


def _filled(blocks: tuple[Block, ...]) -> NDArray[np.bool_]:
    _, start, stop = pieces(blocks)
    return start < stop


@lru_cache(maxsize=4096)
def pieces(blocks: tuple[Block, ...]) -> tuple[Ints, Ints, Ints]:
    """Return the block, start and stop of all pieces; a block without any has an empty one."""
    rows = [
        (index, piece.start, piece.stop)
        for index, block in enumerate(blocks)
        for piece in (block.pieces or (Piece(0, 0, 0),))
    ]
    found = np.array(rows, np.int64)
    return found[:, 0], found[:, 1], found[:, 2]


def overlap_matrix(source: tuple[Block, ...], target: tuple[Block, ...]) -> Ints:
    """Return how many positions each source block shares with each target block."""
    s, a, b = pieces(source)
    t, c, d = pieces(target)
    lengths = np.maximum(np.minimum(b[:, None], d) - np.maximum(a[:, None], c), 0)
    if len(s) > len(source):  # pieces stand in the order of their blocks
        lengths = np.add.reduceat(lengths, np.searchsorted(s, np.arange(len(source))), 0)
    if len(t) > len(target):
        lengths = np.add.reduceat(lengths, np.searchsorted(t, np.arange(len(target))), 1)
    return np.asarray(lengths, np.int64)
