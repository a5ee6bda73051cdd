"""How far the messages of an exchange among neighbours reach: within a node, and beyond."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.candidates import LETTERS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Reach:
    """From how many ranks of the node and of all a rank receives, itself included, by candidate.

    `far_share` of what it receives comes from beyond the node.
    """

    near_parts: Floats
    all_parts: Floats
    far_share: Floats


def reach(by_group: Mapping[str, Floats], table: Ints, devices: int, node: int) -> Reach:
    """Find what comes from beyond the node, axis by axis.

    Of the ranks along one, so many as fit are in the node, and the worst rank stands at its edge.
    `by_group` has from how many ranks along each axis something comes.
    """
    near_parts = np.ones(len(table))
    all_parts = np.ones(len(table))
    far_share = np.zeros(len(table))
    for group, parts in by_group.items():
        size = table[:, [LETTERS.index(letter) for letter in group]].prod(1)
        inside = np.clip(node // stride(table, group[-1], devices), 1, size)
        sides = np.where(inside > 1, np.floor((parts - 1) / 2), 0.0)
        peers = np.where(parts >= size, inside - 1.0, sides)
        peers = np.where(inside == size, parts - 1, np.minimum(peers, parts - 1))
        near_parts *= 1 + peers
        all_parts *= parts
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.where(parts > 1, (parts - 1 - peers) / (parts - 1), 0.0)
        far_share = np.maximum(far_share, share)
    return Reach(near_parts, all_parts, far_share)


def stride(table: Ints, letter: str, devices: int) -> Ints:
    """Return how far apart the ranks along a letter's axis stand."""
    after = LETTERS.index(letter) + 1
    return np.asarray(devices // table[:, :after].prod(1), np.int64)
