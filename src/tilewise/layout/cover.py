"""A cover says which pieces of a tensor each rank holds or needs, and where it keeps them.

A layout is a cover whose blocks are disjoint and balanced. Other covers have blocks that overlap
(halos), reach past the tensor's edge (padding), around it (circular), or consist of several
pieces (the filters of a weight block).

    block 1 of 3, halo 1, extent 9       global   . . 2 3 4 5 6 . .
                                         local        0 1 2 3 4
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from typing import NamedTuple

from tilewise.errors import LayoutError
from tilewise.layout.blocks import Interval, block
from tilewise.layout.layout import PARTIAL, REPLICA, Axes, Axis, Layout


class Piece(NamedTuple):
    """Positions [start, stop) of the global dim, kept from local position `at` on."""

    start: int
    stop: int
    at: int


class Block(NamedTuple):
    """What a rank keeps along one dim: a local extent and the pieces that fill it.

    Local positions that no piece fills lie past the tensor's edge.
    """

    size: int
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, start: int, stop: int) -> Block:
        """Keep one interval of the dim and nothing else."""
        pieces = (Piece(start, stop, 0),) if start < stop else ()
        return cls(max(stop - start, 0), pieces)

    @classmethod
    def clipped(cls, start: int, stop: int, extent: int) -> Block:
        """Keep an interval that may reach past the dim's ends; those positions stay unfilled."""
        inside = Piece(max(start, 0), min(stop, extent), max(-start, 0))
        filled = (inside,) if inside.start < inside.stop else ()
        return cls(max(stop - start, 0), filled)

    @classmethod
    def circular(cls, start: int, stop: int, extent: int) -> Block:
        """Keep an interval that goes on at the dim's other end, as often as it takes."""
        pieces = []
        position = start
        while position < stop and extent:
            turn = position // extent
            end = min(stop, (turn + 1) * extent)
            pieces.append(Piece(position - turn * extent, end - turn * extent, position - start))
            position = end
        return cls(max(stop - start, 0), tuple(pieces))

    @classmethod
    def union(cls, intervals: Sequence[Interval]) -> Block:
        """Keep several intervals side by side; those that go on where one ends are one piece.

        So blocks that hold the same are equal, however they were put together.
        """
        pieces: list[Piece] = []
        at = 0
        for start, stop in intervals:
            if start < stop and pieces and pieces[-1].stop == start:
                pieces[-1] = pieces[-1]._replace(stop=stop)
            elif start < stop:
                pieces.append(Piece(start, stop, at))
            at += max(stop - start, 0)
        return cls(at, tuple(pieces))

    @property
    def filled(self) -> bool:
        """Whether every local position comes from the tensor."""
        return sum(piece.stop - piece.start for piece in self.pieces) == self.size


@lru_cache(maxsize=4096)
def balanced(extent: int, parts: int) -> tuple[Block, ...]:
    """Return the blocks of a layout along one dim; the same few are asked for all the time."""
    return tuple(Block.of(*block(extent, parts, index)) for index in range(parts))


@dataclass(frozen=True)
class Cover:
    """The blocks of every dim, and the axes that deal them out to ranks."""

    shape: tuple[int, ...]
    axes: Axes
    blocks: tuple[tuple[Block, ...], ...]

    def __post_init__(self) -> None:
        if len(self.blocks) != len(self.shape):
            raise LayoutError(f"cover: blocks for {len(self.blocks)} dims of a tensor {self.shape}")
        for dim, blocks in enumerate(self.blocks):
            if len(blocks) != self.axes.parts(dim):
                raise LayoutError(
                    f"cover: dim {dim} has {len(blocks)} blocks for {self.axes.parts(dim)} parts"
                )

    @classmethod
    def of(cls, layout: Layout) -> Cover:
        """Cover the tensor as a layout does."""
        return cls.on(layout, {})

    @classmethod
    def on(cls, layout: Layout, needs: dict[int, Callable[[int, int], Block]]) -> Cover:
        """Cover the layout's dims, some of them by blocks of another rule.

        `needs[dim](start, stop)` gives the block wanted for the balanced block [start, stop).
        """
        dims = []
        for dim, (extent, parts) in enumerate(zip(layout.shape, layout.degrees)):
            rule = needs.get(dim)
            dims.append(
                balanced(extent, parts)
                if rule is None
                else tuple(rule(*block(extent, parts, index)) for index in range(parts))
            )
        return cls(layout.shape, layout.axes, tuple(dims))

    @property
    def ranks(self) -> int:
        return self.axes.ranks

    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the index of the rank's block along each dim."""
        return self.axes.coords(rank, len(self.shape))

    def block(self, rank: int, dim: int) -> Block:
        """Return what the rank keeps along `dim`."""
        return self.blocks[dim][self.coords(rank)[dim]]

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what the rank keeps."""
        return tuple(blocks[index].size for blocks, index in zip(self.blocks, self.coords(rank)))

    def boxes(self, rank: int) -> list[tuple[slice, ...]]:
        """List the boxes of the rank's local tensor that hold elements: all within the edge."""
        dims = [
            [slice(piece.at, piece.at + piece.stop - piece.start) for piece in blocks[index].pieces]
            for blocks, index in zip(self.blocks, self.coords(rank))
        ]
        return list(product(*dims))

    def sharers(self, rank: int, mark: int = PARTIAL) -> tuple[int, ...]:
        """List the ranks that hold partial sums, or REPLICAs, of the same block as `rank`."""
        digits = self.axes.digits(rank)
        choices = [
            range(axis.size) if axis.dim == mark else (digit,)
            for axis, digit in zip(self.axes, digits)
        ]
        return tuple(self.axes.rank(choice) for choice in product(*choices))

    @property
    def disjoint(self) -> bool:
        """Whether every element is kept at most once, replicas aside."""
        return not self.partial and not any(_overlap(blocks) for blocks in self.blocks)

    @property
    def partial(self) -> bool:
        """Whether ranks hold partial sums."""
        return any(axis.dim == PARTIAL for axis in self.axes)

    @property
    def plain(self) -> bool:
        """Whether no two blocks overlap and none reaches past the edge."""
        return not any(
            _overlap(blocks) or not all(one.filled for one in blocks) for blocks in self.blocks
        )

    def same_blocks(self, other: Cover) -> bool:
        """Whether every rank keeps the same under both, replicas and partial sums alike."""
        return (
            self.shape == other.shape
            and self.blocks == other.blocks
            and _replicas_only(self.axes) == _replicas_only(other.axes)
        )


def _overlap(blocks: Sequence[Block]) -> bool:
    pieces = sorted(piece for one in blocks for piece in one.pieces)
    return any(a.stop > b.start for a, b in pairwise(pieces))


def _replicas_only(axes: Axes) -> Axes:
    return Axes(Axis(axis.size, REPLICA if axis.dim == PARTIAL else axis.dim) for axis in axes)
