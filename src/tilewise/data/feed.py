"""One field on its way from the files to the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilewise.data.augmentation import Augmentation, Seen
from tilewise.data.recycle import Recycler
from tilewise.data.region import STRETCH, Array, Box, Piece, Run, cut_out, runs, stretches, whole
from tilewise.data.share import Share
from tilewise.data.source import Field
from tilewise.data.transform import Transform, as_float
from tilewise.layout import Cover, Layout

LONG_STRETCH = 8 * STRETCH


class Feed:
    """A field, how it is cut, and what is done to its numbers.

    Args:
        number: which one of the loader's fields it is.
        field: a stored sample.
        layout: of the batch that the model takes.
    """

    def __init__(
        self,
        number: int,
        name: str,
        field: Field,
        layout: Layout | Cover,
        transforms: Sequence[Transform],
        augmentation: Augmentation,
    ) -> None:
        self.number, self.name, self.field = number, name, field
        self.transforms, self.augmentation = list(transforms), augmentation
        self.share = Share(layout, field.shape)
        self.as_stored = augmentation.seen(None, name, len(field.shape))
        self.changes = augmentation.changes_values(name)
        self.plain = not self.transforms and not self.changes
        single = np.zeros((1,) * len(field.shape), field.dtype)
        self.dtype = self._worked(copied(single), whole(single.shape)).dtype
        # Stored values are then converted right into the slab, and changed there.
        self.in_place = (
            bool(self.transforms)
            and all(transform.in_place for transform in self.transforms)
            and as_float(copied(single)).dtype == self.dtype
        )

    def _worked(self, tensor: Tensor, box: Box, epoch: int = 0, sample: int = 0) -> Tensor:
        """Transform and augment values, in place as far as that goes."""
        for transform in self.transforms:
            tensor = transform.apply(tensor, box)
        if self.changes:
            tensor = self.augmentation.change(tensor, self.share.shape, box, epoch, sample)
        return tensor

    def tile_bytes(self, rank: int) -> int:
        """Return how much the store keeps of a sample on a rank."""
        return self.share.tile_elements(rank) * self.field.dtype.itemsize

    def batch_bytes(self, batch: int, rank: int) -> int:
        """Return the most that the rank's slab of up to a batch takes, stored or worked."""
        rows = -(-batch // self.share.parts)  # block 2 of 5 has one row of 8, and two rows of 7
        elements = int(np.prod(self.share.slab_shape(rank), dtype=np.int64))
        return rows * elements * max(self.field.dtype.itemsize, self.dtype.itemsize)

    def allocate(self, batch: int, rank: int, memory: Recycler) -> Tensor:
        """Return room for the rank's slab of a batch; past the sample's edge it is zero."""
        shape = (len(self.share.rows(batch, rank)), *self.share.slab_shape(rank))
        slab = memory.take(shape, self.dtype)
        return slab if self.share.filled else slab.zero_()

    def wanted(self, seen: Seen, rank: int) -> list[list[Run]]:
        """Return the runs of each seen dim that fill the rank's slab of a sample."""
        blocks = self.share.wanted(rank)
        return [runs(block, index) for block, index in zip(blocks, seen.index)]

    def put(self, row: Tensor, values: Array, piece: Piece, epoch: int, sample: int) -> None:
        """Bring a piece, seen as the slab sees it, to its place in the slab."""
        target = row[piece.local]
        if self.plain:
            np.copyto(place(row, piece), values)
            return
        # a thread that computes alone wakes no others, and so may take longer stretches
        limit = STRETCH if torch.get_num_threads() > 1 else LONG_STRETCH
        for stretch in stretches(values.shape, limit):
            box = tuple(
                (start + (cut.start or 0), stop if cut.stop is None else start + cut.stop)
                for (start, stop), cut in zip(piece.out, stretch)
            )
            part, stored = target[stretch], cut_out(values, stretch)
            if self.in_place:
                np.copyto(part.numpy(), stored, casting="unsafe")
            worked = self._worked(part if self.in_place else copied(stored), box, epoch, sample)
            if worked is not part:
                part.copy_(worked)


def copied(stored: Array) -> Tensor:
    """Return stored values as a tensor of its own."""
    return torch.from_numpy(np.array(stored, order="C"))


def place(row: Tensor, piece: Piece) -> Array:
    """Return the piece's place in a slab as an array that shares its memory."""
    return cut_out(row.numpy(), piece.local)


def straight(piece: Piece, seen: Seen) -> bool:
    """Whether the piece is stored in the order in which it is seen."""
    return not any(piece.back) and seen.perm == tuple(range(len(seen.perm)))
