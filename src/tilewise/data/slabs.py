"""Read one rank's slabs directly, without a loader."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilewise.data.region import Array, cut_out, pieces, runs
from tilewise.data.share import Share
from tilewise.data.source import Source
from tilewise.errors import DataError
from tilewise.layout import Cover, Layout


def read_cover(
    source: Source,
    field: str,
    samples: Sequence[int],
    cover: Cover | Layout,
    rank: int,
    *,
    fill: float = 0,
) -> Array:
    """Return the rank's slab of a batch of samples, with the halo that the cover asks for.

    Positions past the sample's edge hold `fill`. The cover's batch is the number of samples.
    """
    expected = (len(samples), *source.fields[field].shape)
    if cover.shape != expected:
        raise DataError(
            f"data: field {field!r} of {len(samples)} samples has the shape {expected}, the cover "
            f"is of {cover.shape}"
        )
    share = Share(cover, expected[1:])
    rows = share.rows(len(samples), rank)
    out = np.full((len(rows), *share.slab_shape(rank)), fill, source.fields[field].dtype)
    wanted = [runs(block) for block in share.wanted(rank)]
    for row, position in zip(out, rows):
        for piece in pieces(wanted, range(len(wanted))):
            buffer = np.empty(piece.shape, out.dtype)
            source.read(samples[position], field, piece.stored, buffer)
            cut_out(row, piece.local)[...] = buffer
    return out
