"""What solving a problem finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewise.planner.solve.weights import Weights


@dataclass(frozen=True, slots=True)
class Solution:
    """An assignment and what is known about it.

    Args:
        choice: the candidate of each variable.
        seconds: its time.
        peak_bytes: its memory.
        bound: no assignment that fits is faster than this.
        optimal: whether the choice is proven best, up to one part in 10⁹.
        gap: (seconds − bound) / bound.
        weights: those that gave the bound.
        solve_seconds: how long it took to find.
        statistics: what the solver did.
    """

    choice: tuple[int, ...]
    seconds: float
    peak_bytes: int
    bound: float
    optimal: bool
    gap: float
    weights: Weights
    solve_seconds: float
    statistics: Mapping[str, float]
