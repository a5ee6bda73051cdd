"""Choose a few ranks that stand for all of a world.

For every move and every tensor some ranks have the most to do. A handful of ranks is looked for
that has one of them for each.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.lower import Planned
from tilewise.layout import Cover
from tilewise.planner.payload import Payload
from tilewise.planner.traffic import coords

MOST = 5


def typical_ranks(payload: Payload, most: int = MOST) -> tuple[int, ...]:
    """Return rank 0 and those that have the most to do, as few as possible."""
    rows = [*_loads(payload), *_sizes(payload.planned, payload.ranks)]
    worst = np.array([row == row.max() for row in rows if row.max() > row.min()])
    chosen = [0]
    while len(worst) and len(chosen) < min(most, payload.ranks):
        worst = worst[~worst[:, chosen[-1]]]
        if len(worst):
            chosen.append(int(worst.sum(0).argmax()))
    return tuple(sorted(chosen))


def _loads(payload: Payload) -> list[NDArray[np.int64]]:
    """Return what each rank receives in each move, near and far, and in how many messages."""
    rows = []
    for sent in payload.sent:
        for found in payload.traffic(sent):
            if found is not None and not found.silent:
                rows += [found.near, found.far, found.near_messages, found.far_messages]
    return rows


def _sizes(planned: Planned, ranks: int) -> list[NDArray[np.int64]]:
    """Return the size of each rank's slab of each tensor."""
    everyone = np.arange(ranks)
    rows = []
    for layout in planned.layouts.values():
        cover = Cover.of(layout)
        size = np.ones(ranks, np.int64)
        for dim, index in enumerate(coords(cover, everyone).T):
            size *= np.array([block.size for block in cover.blocks[dim]])[index]
        rows.append(size)
    return rows
