"""What a move makes every rank receive, counted for all ranks at once.

A rank's messages are the product over dims of the overlaps of its target block with the source's
blocks (see layout/move.py). So is what it receives: with O[s, t] the overlap of source block s and
target block t along a dim, and q ranks with partial sums of each block,

    received = q · Π_dims Σ_s O[s, t]  −  Π_dims O[own s, own t]

Ranks of one node are consecutive. Where the axes of a cover do not nest in nodes, the split into
near (same node) and far is the nearest one that does; the total is exact always.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from tilewise.layout import PARTIAL, Axis, Cover, Move
from tilewise.planner.overlaps import overlap_matrix

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    """Elements and messages that each rank receives, and the sum where the move is one.

    `near` comes from the rank's own node. `summed` is the buffer of an all-reduce over
    `sharers` ranks, of which `sharers_near` are in one node.
    """

    near: Ints
    far: Ints
    near_messages: Ints
    far_messages: Ints
    summed: Ints
    sharers: int = 1
    sharers_near: int = 1

    @property
    def received(self) -> Ints:
        return self.near + self.far

    @property
    def elements(self) -> int:
        """What all ranks hand over, as the trace counts it: messages, and each rank's sum."""
        return int(self.received.sum() + self.summed.sum())

    @property
    def silent(self) -> bool:
        return not self.elements


@lru_cache(maxsize=4096)
def traffic(move: Move, node: int) -> Traffic:
    """Count a move on nodes of so many devices."""
    source, target = move.source, move.target
    ranks = np.arange(source.ranks)
    nothing = np.zeros(len(ranks), np.int64)
    if move.local:
        return Traffic(nothing, nothing, nothing, nothing, nothing)
    if move.stays:
        return _sum(source, ranks, node)
    pieces = split_axes(source.axes, node)
    inside = source_digits(pieces, ranks)
    own_source, own_target = coords(source, ranks), coords(target, ranks)
    total = np.full(len(ranks), partial_size(pieces), np.int64)
    near = np.full(len(ranks), partial_size(pieces, inner=True), np.int64)
    own = np.ones(len(ranks), np.int64)
    total_count, near_count, own_count = total.copy(), near.copy(), own.copy()
    for dim in range(len(source.shape)):
        overlaps = overlap_matrix(source.blocks[dim], target.blocks[dim])
        wanted = own_target[:, dim]
        mine = overlaps[own_source[:, dim], wanted]
        total *= overlaps.sum(0)[wanted]
        total_count *= (overlaps > 0).sum(0)[wanted]
        own *= mine
        own_count *= mine > 0
        if len(overlaps) == 1:
            near *= mine
            near_count *= mine > 0
            continue
        reach = _reachable(pieces, inside, dim, len(overlaps))
        held = np.where(reach, overlaps[:, wanted].T, 0)
        near *= held.sum(1)
        near_count *= (held > 0).sum(1)
    return Traffic(
        near - own, total - near, near_count - own_count, total_count - near_count, nothing
    )


def _sum(source: Cover, ranks: Ints, node: int) -> Traffic:
    sizes = np.ones(len(ranks), np.int64)
    for blocks, index in zip(source.blocks, coords(source, ranks).T, strict=True):
        sizes *= np.array([one.size for one in blocks], np.int64)[index]
    nothing = np.zeros(len(ranks), np.int64)
    pieces = split_axes(source.axes, node)
    count, near = partial_size(pieces), partial_size(pieces, inner=True)
    return Traffic(nothing, nothing, nothing, nothing, sizes * (count > 1), count, near)


def coords(cover: Cover, ranks: Ints) -> Ints:
    """Return the index of each rank's block along each dim."""
    out = np.zeros((len(ranks), len(cover.shape)), np.int64)
    rest = ranks.copy()
    steps = np.ones(len(cover.shape), np.int64)
    for axis in reversed(cover.axes):
        rest, digit = np.divmod(rest, axis.size)
        if axis.dim >= 0:
            out[:, axis.dim] += digit * steps[axis.dim]
            steps[axis.dim] *= axis.size
    return out


@dataclass(frozen=True)
class AxisPiece:
    """An axis, or the part of one that lies inside a node or outside."""

    size: int
    dim: int
    inner: bool


def split_axes(axes: tuple[Axis, ...], node: int) -> list[AxisPiece]:
    """Cut the axes where a node ends, slowest first."""
    found: list[AxisPiece] = []
    room = node
    for axis in reversed(axes):
        inner = gcd(axis.size, room)
        room //= inner
        if inner < axis.size:
            room = 1
        found += [AxisPiece(inner, axis.dim, True)] if inner > 1 else []
        found += [AxisPiece(axis.size // inner, axis.dim, False)] if inner < axis.size else []
    return found[::-1]


def source_digits(pieces: list[AxisPiece], ranks: Ints) -> list[Ints]:
    """Return each rank's position along each piece."""
    out = []
    rest = ranks.copy()
    for piece in reversed(pieces):
        rest, digit = np.divmod(rest, piece.size)
        out.append(digit)
    return out[::-1]


def partial_size(pieces: list[AxisPiece], *, inner: bool = False) -> int:
    """Return how many ranks hold partial sums of one block; `inner`, of those in one node."""
    return prod(p.size for p in pieces if p.dim == PARTIAL and (p.inner or not inner))


def _reachable(
    pieces: list[AxisPiece], digits: list[Ints], dim: int, parts: int
) -> NDArray[np.bool_]:
    """Tell for each rank which source blocks along `dim` its own node holds."""
    rest = np.arange(parts)
    found = np.ones((len(digits[0]), parts), bool)
    for piece, own in reversed(list(zip(pieces, digits))):
        if piece.dim == dim:
            rest, digit = np.divmod(rest, piece.size)
            if not piece.inner:
                found &= own[:, None] == digit
    return found
