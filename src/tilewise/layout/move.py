"""A move brings a tensor from one cover to another: who sends which boxes to whom.

Redistribution, halo exchange, gather and reduce-scatter are all this. A receiver adds what the
*distinct* holders of an element hand it: where the source is disjoint that is a copy, where it
holds partial sums or overlapping blocks it is a sum. Of replicas one is asked, the one that is
nearest in rank order, which is the receiver itself wherever it can be.

The adjoint of a move is the move back. On the way back, blocks that overlap are distinct holders
and add up, replicas are not and count once, and ranks with partial sums each receive the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

from tilewise.errors import LayoutError
from tilewise.layout.cover import Block, Cover
from tilewise.layout.layout import REPLICA

Box = tuple[slice, ...]


class Transfer(NamedTuple):
    """A box of the source's local tensor and where it goes in the target's."""

    source: Box
    target: Box
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Message:
    """All that travels between two ranks, in the order in which both of them list it."""

    peer: int
    transfers: tuple[Transfer, ...]

    @property
    def elements(self) -> int:
        return sum(transfer.elements for transfer in self.transfers)


@dataclass(frozen=True)
class Move:
    """What moves where between two covers of one tensor."""

    source: Cover
    target: Cover

    def __post_init__(self) -> None:
        if self.source.shape != self.target.shape or self.source.ranks != self.target.ranks:
            raise LayoutError(
                f"move: source {self.source.shape} on {self.source.ranks} ranks and target "
                f"{self.target.shape} on {self.target.ranks} ranks must be the same tensor and "
                "the same ranks"
            )

    @property
    def adjoint(self) -> Move:
        """The move of gradients: back from target to source."""
        return Move(self.target, self.source)

    @property
    def stays(self) -> bool:
        """Whether every rank keeps its block, and at most partial sums are to be added."""
        return self.source.plain and self.source.same_blocks(self.target)

    @property
    def local(self) -> bool:
        """Whether every rank already holds just what it needs."""
        return self.stays and not self.source.partial

    def receives(self, rank: int) -> list[Message]:
        """List what `rank` gets, itself among the peers, in the order in which it adds up."""
        source, target = self.source, self.target
        mine = target.coords(rank)
        overlaps = [
            [
                (index, found)
                for index, held in enumerate(source.blocks[dim])
                if (found := _overlaps(held, target.blocks[dim][mine[dim]]))
            ]
            for dim in range(len(mine))
        ]
        here = source.axes.digits(rank)
        nearest = {
            position: (here[position],)
            for position, axis in enumerate(source.axes)
            if axis.dim == REPLICA
        }
        messages = []
        for combination in product(*overlaps):
            transfers = _transfers([found for _, found in combination])
            choices = source.axes.choices([index for index, _ in combination], nearest)
            for digits in product(*choices):
                messages.append(Message(source.axes.rank(digits), transfers))
        return messages

    def sends(self, rank: int) -> list[Message]:
        """List what `rank` gives away, itself among the peers, each peer once."""
        source, target = self.source, self.target
        mine = source.coords(rank)
        here = source.axes.digits(rank)
        replicas = [i for i, axis in enumerate(source.axes) if axis.dim == REPLICA]
        overlaps = [
            [
                (index, found)
                for index, needed in enumerate(target.blocks[dim])
                if (found := _overlaps(source.blocks[dim][mine[dim]], needed))
            ]
            for dim in range(len(mine))
        ]
        messages = []
        for combination in product(*overlaps):
            transfers = _transfers([found for _, found in combination])
            for peer in target.axes.ranks_at([index for index, _ in combination]):
                there = source.axes.digits(peer)
                if all(there[i] == here[i] for i in replicas):
                    messages.append(Message(peer, transfers))
        return sorted(messages, key=lambda message: message.peer)


def _overlaps(held: Block, needed: Block) -> list[tuple[int, int, int]]:
    """List (local start in held, local start in needed, length) of all common stretches."""
    found = []
    for want in needed.pieces:
        for have in held.pieces:
            start, stop = max(have.start, want.start), min(have.stop, want.stop)
            if start < stop:
                found.append(
                    (have.at + start - have.start, want.at + start - want.start, stop - start)
                )
    return found


def _transfers(overlaps: list[list[tuple[int, int, int]]]) -> tuple[Transfer, ...]:
    return tuple(
        Transfer(
            tuple(slice(at, at + length) for at, _, length in box),
            tuple(slice(at, at + length) for _, at, length in box),
            tuple(length for _, _, length in box),
        )
        for box in product(*overlaps)
    )
