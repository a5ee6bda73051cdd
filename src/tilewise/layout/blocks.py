"""Balanced 1-D blocks.

    extent 10 in 4 parts    0 1|2 3 4|5 6|7 8 9
    extent 10 in 2 parts    0 1 2 3 4|5 6 7 8 9

Block k of p starts at floor(k·extent/p), so sizes differ by at most one, and the blocks of a
finer cut nest in those of a coarser one whenever its degree is a multiple.
"""

from __future__ import annotations

Interval = tuple[int, int]


def block(extent: int, parts: int, index: int) -> Interval:
    """Return block `index` of `extent` cut into `parts`, as (start, stop)."""
    return index * extent // parts, (index + 1) * extent // parts


def block_of(extent: int, parts: int, position: int) -> int:
    """Return the index of the block that holds `position`."""
    return ((position + 1) * parts - 1) // extent


def overlap(a: Interval, b: Interval) -> Interval | None:
    """Return the common part of two intervals, or None where there is none."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else None
