"""What a kind of set is, and what the kinds share: their random numbers and their baselines.

Sample i of a set is a function of (kind, size, seed, i) alone. No state is carried from one sample
to the next, so any process may make any of them, in any order, with the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tilewise.data.write import Array, Field

Sample = dict[str, Array]


class Kind(Protocol):
    """What the module of a kind offers; `size` is the edge, in voxels, nodes or pixels."""

    @property
    def SMALLEST(self) -> int:
        """Return the least size at which the set makes sense."""
        ...

    def fields(self, size: int) -> dict[str, Field]:
        """Return what a sample has."""
        ...

    def sample(self, size: int, seed: int, index: int) -> Sample:
        """Make one sample."""
        ...

    def tally(self, y: Array) -> Array:
        """Return what the baseline needs to know of one sample's labels."""
        ...

    def baseline(self, tallies: Array) -> dict[str, Any]:
        """Return what a trivial predictor scores on samples with these tallies."""
        ...

    def facts(self, size: int, count: int, seed: int) -> dict[str, Any]:
        """Return what else the set's description says."""
        ...


def generator(kind: str, seed: int, index: int) -> np.random.Generator:
    """Return the random numbers of one sample."""
    entropy = (zlib.crc32(kind.encode()), seed, index)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))


def class_counts(y: Array, classes: int) -> Array:
    """Return how many elements each class has."""
    return np.bincount(y.reshape(-1), minlength=classes)


def constant_class(tallies: Array, names: Sequence[str]) -> dict[str, Any]:
    """Score the predictor that gives every element the commonest class.

    With p_c the share of class c over all samples and m the commonest: accuracy p_m, Dice
    2 p_m / (1 + p_m) for m and 0 for the others. The cross-entropy -Σ p_c ln p_c is that of the
    best constant probabilities, the p_c themselves.
    """
    shares = tallies.sum(0) / tallies.sum()
    most = int(shares.argmax())
    present = shares[shares > 0]
    top = float(shares[most])
    return {
        "predictor": f"all {names[most]}",
        "accuracy": top,
        "dice": {
            name: 2 * top / (1 + top) if index == most else 0.0 for index, name in enumerate(names)
        },
        "cross_entropy": float(abs((present * np.log(present)).sum())),
        "shares": {name: float(share) for name, share in zip(names, shares)},
    }
