"""The distributed in-memory store: which rank keeps which tile of which sample.

A sample is kept by the ranks that first needed it, each of them its own tile: the same place in
every sample, so that nobody ever holds a whole one. Who needs a sample when follows from the order
of the epoch, and how much fits follows from the budget. So every rank knows the owner of every
tile without asking, and can tell before an epoch what it will send to whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tilewise.data.feed import Feed
from tilewise.data.order import Order
from tilewise.data.region import Array
from tilewise.layout import block

FILE = -1


class Owner(NamedTuple):
    """Whose tiles a sample's slabs come from: a part of the batch, or FILE; `new` if read now."""

    part: int
    new: bool = False


class Store:
    """Tiles of samples as they are stored in the files, within a budget of bytes for each rank.

    `bytes` is what this rank keeps.
    """

    def __init__(self, feeds: Sequence[Feed], order: Order, rank: int, budget: int) -> None:
        self.feeds, self.rank, self.budget = feeds, rank, budget
        self.owners = [np.full(order.samples, FILE, dtype=np.int32) for _ in feeds]
        self.room = _room(feeds, order, budget)
        self.tiles: list[dict[int, Array]] = [{} for _ in feeds]
        self.bytes = 0

    @property
    def held(self) -> float:
        """The share of the set, by bytes, that the ranks keep between them."""
        total = sum(feed.field.bytes * len(owner) for feed, owner in zip(self.feeds, self.owners))
        kept = sum(
            feed.field.bytes * int((owner != FILE).sum())
            for feed, owner in zip(self.feeds, self.owners)
        )
        return kept / total if total else 1.0

    def assign(self, feed: Feed, samples: Sequence[int]) -> list[Owner]:
        """Return the owner of each sample of a batch, those among them that become one now."""
        owners, room = self.owners[feed.number], list(self.room[feed.number])
        found = []
        for position, sample in enumerate(samples):
            part = int(owners[sample])
            if part != FILE:
                found.append(Owner(part))
                continue
            part = feed.share.part_of(len(samples), position)
            if room[part]:
                room[part] -= 1
                found.append(Owner(part, new=True))
            else:
                found.append(Owner(FILE))
        return found

    def commit(
        self,
        feed: Feed,
        samples: Sequence[int],
        owners: Sequence[Owner],
        tiles: Mapping[int, Array],
    ) -> None:
        """Keep the tiles read for a batch, once all ranks know that reading went well."""
        self.tiles[feed.number].update(tiles)
        self.bytes += sum(tile.nbytes for tile in tiles.values())
        for sample, owner in zip(samples, owners):
            if owner.new:
                self.owners[feed.number][sample] = owner.part
                self.room[feed.number][owner.part] -= 1


def _room(feeds: Sequence[Feed], order: Order, budget: int) -> list[list[int]]:
    """Return, for each field and part of the batch, how many samples the ranks there can keep.

    A rank's budget is shared among the fields by what an epoch brings of each. Ranks with the same
    part of the batch keep the same samples, so the one with the least room decides.
    """
    room = [[order.samples] * feed.share.parts for feed in feeds]
    counts = [_epoch_counts(order, feed.share.parts) for feed in feeds]
    for rank in range(feeds[0].share.ranks):
        parts = [feed.share.part(rank) for feed in feeds]
        mine = [count[part] for count, part in zip(counts, parts)]
        total = sum(feed.tile_bytes(rank) * count for feed, count in zip(feeds, mine))
        for number, (feed, count, part) in enumerate(zip(feeds, mine, parts)):
            if feed.tile_bytes(rank) and count:
                room[number][part] = min(room[number][part], budget * count // total)
    return room


def _epoch_counts(order: Order, parts: int) -> list[int]:
    """Return how many samples of an epoch fall to each part of the batch."""
    counts = [0] * parts
    last = len(order) - 1
    for size, times in ((order.batch, last), (order.size(last), 1)):
        for part in range(parts):
            start, stop = block(size, parts, part)
            counts[part] += times * (stop - start)
    return counts
