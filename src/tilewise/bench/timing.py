"""Numbers out of repeated measurements."""

from __future__ import annotations

from statistics import median


def spread(times: list[float]) -> float:
    """Return the middle half of the times, relative to their median."""
    ordered = sorted(times)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / median(ordered)
