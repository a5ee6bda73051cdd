"""Chunks that would serve a plan's slabs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from tilewise.data.source import PAGE
from tilewise.layout import Block

# Of chunks that read at most so much more than the least, the largest is taken.
NEARLY = 1.05


def fitting_chunks(
    blocks: Sequence[Sequence[Block]], itemsize: int
) -> tuple[tuple[int, ...], float]:
    """Return extents of a chunk for slabs, given by each dim's blocks, and their amplification.

    Slabs of even extents are chunks themselves. Uneven ones do not start where chunks of their own
    extent do: 37 cut into 18 | 19 has chunks of 3, as 18 is a multiple of 3 and 19 nearly is.
    Chunks that are smaller than a page are not worth their seeks.
    """
    slab = prod(max(one.size for one in dim) for dim in blocks)
    enough = min(slab * itemsize, PAGE)
    found: list[tuple[int, tuple[int, ...], float]] = []
    for chosen in product(*map(_candidates, blocks)):
        chunk = tuple(extent for extent, _ in chosen)
        if prod(chunk) * itemsize >= enough:
            found.append((prod(chunk), chunk, prod(factor for _, factor in chosen)))
    least = min(factor for _, _, factor in found)
    _, chunk, factor = max(one for one in found if one[2] <= least * NEARLY)
    return chunk, factor


def _candidates(blocks: Sequence[Block]) -> list[tuple[int, float]]:
    """Return extents along a dim and their amplification: each less than any larger one's."""
    wanted = sum(one.size for one in blocks)
    largest = max(one.size for one in blocks)
    found: list[tuple[int, float]] = []
    for extent in range(largest, 0, -1):
        factor = _touched(blocks, extent) / wanted
        if not found or factor < found[-1][1]:
            found.append((extent, factor))
    return found or [(1, 1.0)]


def _touched(blocks: Sequence[Block], extent: int) -> int:
    """Return how many positions are gone through where chunks of an extent are read whole."""
    return extent * sum(
        (piece.stop - 1) // extent - piece.start // extent + 1
        for one in blocks
        for piece in one.pieces
    )
