"""Numbers for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(count: float) -> str:
    """Return bytes in the largest unit that leaves a number above 1."""
    count, unit = _in_units(count)
    return f"{count:.3g} {unit}" if count < 1000 or unit == UNITS[-1] else f"{count:.0f} {unit}"


def enough(count: int) -> str:
    """Return bytes as `size` does, but with five digits and no less than there are."""
    number, unit = _in_units(count)
    digits = 4 - floor(log10(number)) if number else 0
    return f"{ceil(number * 10**digits) / 10**digits:g} {unit}" if digits > 0 else f"{count} B"


def all_enough(counts: Sequence[int]) -> list[str]:
    """Return bytes in one unit, for a column: no less than there are, the least in five digits."""
    number, unit = _in_units(min(counts))
    digits = 4 - floor(log10(number)) if number else 0
    if unit == UNITS[0] or digits <= 0:
        return [f"{count} B" for count in counts]
    scale = 10**digits / 1024 ** UNITS.index(unit)
    return [f"{ceil(count * scale) / 10**digits:.{digits}f} {unit}" for count in counts]


def _in_units(count: float) -> tuple[float, str]:
    for unit in UNITS[:-1]:
        if count < 1024:
            return count, unit
        count /= 1024
    return count, UNITS[-1]
