"""How much of a file a rank must go through to read its slabs."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewise.data.feed import Feed
from tilewise.data.region import pieces
from tilewise.data.source import Source
from tilewise.data.whole import WholeSamples


def read_costs(source: Source, feeds: Sequence[Feed], rank: int, sample: int) -> tuple[int, int]:
    """Return the bytes of a rank's slabs of a sample, and those its reads go through."""
    requested = touched = 0
    for feed in feeds:
        seen = feed.as_stored
        for piece in pieces(feed.wanted(seen, rank), seen.perm):
            requested += prod(piece.shape) * feed.field.dtype.itemsize
            touched += source.touched(sample, feed.name, piece.stored)
    return requested, touched


def amplification(source: Source, feeds: Sequence[Feed], rank: int) -> float:
    """Return bytes gone through for each byte of the rank's slabs, in a few samples."""
    requested = touched = 0
    for sample in {0, len(source) // 2, len(source) - 1}:
        some = read_costs(source, feeds, rank, sample)
        requested, touched = requested + some[0], touched + some[1]
    return touched / requested if requested else 1.0


def whole_note(source: WholeSamples, name: str, factor: float) -> str:
    """Say what a Dataset of whole samples costs."""
    whole = sum(field.bytes for field in source.fields.values())
    return (
        f"{name}: {type(source.dataset).__name__} hands over whole samples, so this rank reads "
        f"{size_text(whole)} of each where its slabs are {size_text(int(whole / factor))} "
        f"({factor:.1f} times as much); files opened by tilewise.data are read by slabs"
    )


def size_text(count: int) -> str:
    """Write a number of bytes for people."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
