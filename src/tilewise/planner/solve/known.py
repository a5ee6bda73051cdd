"""Moves that are computed once, where all of a tensor's labels make a small table."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tilewise.planner.solve.problem import Ints, MoveCost, Moves, Problem, Transfer

LARGEST = 1 << 17
"""The most entries of a table to compute whole."""


def know(problem: Problem) -> Problem:
    """Return the same problem with moves looked up instead of computed, where that is little."""
    return replace(problem, transfers=tuple(map(known, problem.transfers)))


def known(transfer: Transfer) -> Transfer:
    """Return a tensor whose moves are looked up, if their table is small."""
    sources = np.unique(transfer.leaves)
    targets = np.unique(np.concatenate([c.wants for c in transfer.consumers]))
    if isinstance(transfer.cost, _Lookup) or len(sources) * len(targets) > LARGEST:
        return transfer
    return replace(transfer, cost=_Lookup(transfer.cost, sources, targets))


class _Lookup:
    """A table of moves by labels."""

    def __init__(self, cost: MoveCost, sources: Ints, targets: Ints) -> None:
        self._sources, self._targets = sources, targets
        self._moves = cost(sources, targets)

    def __call__(self, source: Ints, target: Ints) -> Moves:
        rows = np.searchsorted(self._sources, source)
        return self._moves.at(rows, np.searchsorted(self._targets, target))
