"""A tensor in pieces: what lies around a slab, without the slab itself.

A halo is thin. Joined to its slab it is a copy of the whole slab, which often nobody needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Frame:
    """Disjoint boxes of a larger tensor, each with its values; `like` is of their kind."""

    boxes: Sequence[Box]
    pieces: Sequence[Tensor]
    like: Tensor

    def read(self, box: Box) -> Tensor:
        """Return the values in a box; zeros where there is no piece."""
        found = [
            (common, piece[shift(common, inside)])
            for inside, piece in zip(self.boxes, self.pieces)
            if (common := overlap(box, inside)) is not None
        ]
        shape = extents(box)
        if len(found) == 1 and extents(found[0][0]) == shape:
            return found[0][1]
        out: Tensor = self.like.new_zeros(shape)
        for common, values in found:
            out[shift(common, box)] = values
        return out

    def write(self, box: Box, values: Tensor, *, add: bool) -> None:
        """Put or add the values of a box to the pieces that it meets."""
        for inside, piece in zip(self.boxes, self.pieces):
            common = overlap(box, inside)
            if common is not None:
                part = values[shift(common, box)]
                here = piece[shift(common, inside)]
                here.add_(part) if add else here.copy_(part)


def overlap(a: Box, b: Box) -> Box | None:
    """Return what two boxes have in common."""
    found = []
    for one, other in zip(a, b):
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        if start >= stop:
            return None
        found.append(slice(start, stop))
    return tuple(found)


def shift(box: Box, within: Box) -> Box:
    """Return a box as seen from the corner of another."""
    return tuple(
        slice(one.start - other.start, one.stop - other.start) for one, other in zip(box, within)
    )


def extents(box: Box) -> torch.Size:
    return torch.Size(one.stop - one.start for one in box)
