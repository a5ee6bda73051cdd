"""Numbers out of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tilewise.auto.tell import slowest
from tilewise.comm import Mesh


def spread(times: list[float]) -> float:
    """Return the middle half of the times, relative to their median."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / median(ordered)


def until_all_are_done(mesh: Mesh, times: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return what rounds took until the slowest rank was done, for each of several measurements.

    Ranks that begin together but do not wait for each other each have their own time; whatever
    needs all of them lasts as long as the slowest of that round.
    """
    longest = iter(slowest(mesh, [seconds for each in times for seconds in each]))
    return [[next(longest) for _ in each] for each in times]
