"""What each rank takes of a field: its samples of a batch, and its slab of each of them.

The layout of a field cuts the batch (dim 0) and the sample (the other dims). The ranks with the
same part of the batch hold one sample between them; the ranks with the same slab hold that slab of
different samples.

    n2 d2, four samples      samples 0 1   samples 2 3
           upper half          rank 0        rank 2
           lower half          rank 1        rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from tilewise.data.region import Box
from tilewise.errors import LayoutError
from tilewise.layout import Block, Cover, Layout, block
from tilewise.layout.blocks import Interval, block_of


class Share:
    """A field's layout, seen as a cut of the batch and a cut of each sample.

    Args:
        layout: a Layout, or a Cover where slabs come with a halo; the batch is dim 0.
        stored: the shape of a stored sample, from which the tiles are cut that the store keeps:
            disjoint, balanced, and at the same place for all samples.
    """

    def __init__(self, layout: Layout | Cover, stored: Sequence[int]) -> None:
        cover = Cover.of(layout) if isinstance(layout, Layout) else layout
        self.axes, self.ranks = cover.axes, cover.ranks
        self.shape = cover.shape[1:]
        self.blocks = cover.blocks[1:]
        self.parts = self.axes.parts(0)
        balanced = [Block.of(*block(cover.shape[0], self.parts, k)) for k in range(self.parts)]
        if list(cover.blocks[0]) != balanced:
            raise LayoutError(
                f"layout: the batch of a cover of {cover.shape} must be cut into balanced blocks"
            )
        self.tiles: tuple[tuple[Interval, ...], ...] = tuple(
            tuple(block(extent, parts, k) for k in range(parts))
            for extent, parts in zip(stored, map(self.axes.parts, range(1, len(cover.shape))))
        )
        self.filled = all(one.filled for blocks in self.blocks for one in blocks)
        self._free = [place for place, axis in enumerate(self.axes) if axis.dim < 0]
        self._coords = [self.axes.coords(rank, len(cover.shape)) for rank in range(self.ranks)]
        self._ranks: dict[tuple[int, tuple[int, ...], int], int] = {}

    def part(self, rank: int) -> int:
        """Return which part of the batch the rank holds."""
        return self._coords[rank][0]

    def part_of(self, batch: int, position: int) -> int:
        """Return which part of a batch a position falls into."""
        return block_of(batch, self.parts, position)

    def rows(self, batch: int, rank: int) -> range:
        """Return the positions within a batch that the rank holds."""
        return range(*block(batch, self.parts, self.part(rank)))

    def place(self, rank: int) -> tuple[int, ...]:
        """Return the index of the rank's block along each dim of the sample."""
        return self._coords[rank][1:]

    def wanted(self, rank: int) -> tuple[Block, ...]:
        """Return the blocks of a sample that the rank wants, halo included."""
        return tuple(blocks[k] for blocks, k in zip(self.blocks, self.place(rank)))

    def slab_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's slab of a sample."""
        return tuple(one.size for one in self.wanted(rank))

    def tile(self, rank: int) -> Box:
        """Return the box of a stored sample that the rank keeps in the store."""
        return tuple(tiles[k] for tiles, k in zip(self.tiles, self.place(rank)))

    def tile_elements(self, rank: int) -> int:
        return prod(stop - start for start, stop in self.tile(rank))

    def rank_at(self, part: int, place: tuple[int, ...], like: int) -> int:
        """Return the rank with this part of the batch and place in the sample.

        Of replicas, it is the one in the same copy as rank `like`.
        """
        key = (part, place, like)
        if key not in self._ranks:
            digits = self.axes.digits(like)
            same = {position: (digits[position],) for position in self._free}
            choices = self.axes.choices((part, *place), same)
            self._ranks[key] = self.axes.rank(next(product(*choices)))
        return self._ranks[key]
