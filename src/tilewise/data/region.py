"""Which elements of a stored sample land where in a rank's slab.

A slab is asked for in the coordinates of the sample as the model sees it. Between that and the
file lies an index map: for each dim the list of stored positions, in the order in which they
appear. Flips, rolls and crops are such lists; a transpose exchanges the dims. A list falls into
runs of consecutive positions, and the runs of all dims into boxes that can be read at once.

    stored 0 1 2 3 4 5 6 7, rolled by 3 and flipped    2 1 0 7 6 5 4 3
    the slab [1, 5) of it                                1 0|7 6        two runs, both backward
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.layout import Block
from tilewise.layout.blocks import Interval

Box = tuple[Interval, ...]
Slices = tuple[slice, ...]
Array = NDArray[Any]
Index = NDArray[np.int64]

# Elements worked on at a time: temporaries stay in cache and do not grow with the slab, and torch
# does not wake other threads for fewer than 2¹⁵, which the model's computation has better use for.
STRETCH = (1 << 15) - 1


class Run(NamedTuple):
    """Stored positions [start, stop) of a dim, seen from `out` on, kept from local `at` on."""

    start: int
    stop: int
    at: int
    out: int
    back: bool

    def clipped(self, interval: Interval) -> Run | None:
        """Return the part of the run whose stored positions lie in the interval."""
        start, stop = max(self.start, interval[0]), min(self.stop, interval[1])
        if start >= stop:
            return None
        skipped = self.stop - stop if self.back else start - self.start
        return Run(start, stop, self.at + skipped, self.out + skipped, self.back)


class Piece(NamedTuple):
    """A box of the stored sample and where it goes.

    `stored` counts in the stored dims, `local`, `out` and `back` in the seen ones: slices of the
    rank's slab, positions in the whole sample, and whether the dim is walked backward.
    """

    stored: Box
    local: Slices
    out: Box
    back: tuple[bool, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents of the stored box."""
        return tuple(stop - start for start, stop in self.stored)


def runs(block: Block, index: Index | None = None) -> list[Run]:
    """Return the runs that fill a rank's block of one dim, through an index map."""
    found = []
    for start, stop, at in block.pieces:
        if index is None:
            found.append(Run(start, stop, at, start, False))
            continue
        values = index[start:stop]
        steps = np.diff(values)
        position = 0
        while position < len(values):
            end, back = _run_end(steps, position), False
            first, last = int(values[position]), int(values[end])
            if last < first:
                first, last, back = last, first, True
            found.append(Run(first, last + 1, at + position, start + position, back))
            position = end + 1
    return found


def _run_end(steps: Index, position: int) -> int:
    """Return the last position of the run of equal steps of ±1 that begins at `position`."""
    if position >= len(steps) or abs(steps[position]) != 1:
        return position
    breaks = np.flatnonzero(steps[position:] != steps[position])
    return position + int(breaks[0]) if len(breaks) else len(steps)


def clip(some: Sequence[Run], interval: Interval) -> list[Run]:
    """Keep what of the runs is stored within an interval."""
    return [part for run in some if (part := run.clipped(interval)) is not None]


def pieces(dims: Sequence[Sequence[Run]], perm: Sequence[int]) -> Iterator[Piece]:
    """Combine the runs of all seen dims to boxes; seen dim j is stored dim perm[j]."""
    for combination in product(*dims):
        stored: list[Interval] = [(0, 0)] * len(perm)
        for dim, run in zip(perm, combination):
            stored[dim] = (run.start, run.stop)
        yield Piece(
            tuple(stored),
            tuple(slice(run.at, run.at + run.stop - run.start) for run in combination),
            tuple((run.out, run.out + run.stop - run.start) for run in combination),
            tuple(run.back for run in combination),
        )


def seen(stored: Array, piece: Piece, perm: Sequence[int]) -> Array:
    """Return a stored box as the piece's place sees it: dims in order, flips applied; a view."""
    return stored.transpose(perm)[tuple(slice(None, None, -1 if b else 1) for b in piece.back)]


def within(box: Box, tile: Box) -> Slices:
    """Return the slices that cut a box out of the array that holds `tile`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(box, tile))


def cut_out(array: Array, slices: Slices) -> Array:
    """Return a box of an array as an array that shares its memory, a single element too."""
    every: Any = (*slices, ...)
    found: Array = array[every]
    return found


def whole(shape: Sequence[int]) -> Box:
    """Return the box of everything."""
    return tuple((0, extent) for extent in shape)


def stretches(shape: Sequence[int], limit: int = STRETCH) -> Iterator[Slices]:
    """Cut a box into slices of at most about `limit` elements, in storage order."""
    if not all(shape):
        return
    inner = 1
    dim = len(shape)
    while dim and inner * shape[dim - 1] <= limit:
        dim -= 1
        inner *= shape[dim]
    tail = (slice(None),) * (len(shape) - dim)
    if not dim:
        yield tail
        return
    step = max(limit // inner, 1)
    for outer in product(*(range(extent) for extent in shape[: dim - 1])):
        head = tuple(slice(at, at + 1) for at in outer)
        for start in range(0, shape[dim - 1], step):
            yield (*head, slice(start, min(start + step, shape[dim - 1])), *tail)
