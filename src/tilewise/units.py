"""Numbers for people to read."""

from __future__ import annotations


def size(count: float) -> str:
    """Return bytes in the largest unit that leaves a number above 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}" if count < 1000 else f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"
