"""What every reader is: samples of named fields, of which any box can be read on its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.region import Array, Box
from tilewise.errors import DataError

# The unit in which a file system reads: shorter gaps between two runs are read along.
PAGE = 4096

# What to do about arrays in a file that are no fields.
CHOOSE = (
    "name the fields to read: fields= of a loader, keys= of open_source, --key of `tilewise data`, "
    "data.fields of a recipe"
)


@dataclass(frozen=True, slots=True)
class Field:
    """The shape and dtype of one sample's array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{'×'.join(map(str, self.shape)) or 'scalar'} {self.dtype.name}"


@dataclass(frozen=True, slots=True)
class Storage:
    """How an array lies in its file.

    Args:
        shape: of the whole array on disk, the sample dim included if it has one.
        chunks: extents of a chunk, which is read as a whole; None is row-major without chunks.
        compression: a name for people.
        whole: whether any read must go through all of the sample.
    """

    shape: tuple[int, ...]
    itemsize: int
    chunks: tuple[int, ...] | None = None
    compression: str = "none"
    whole: bool = False

    def touched(self, box: Box) -> int:
        """Return how many bytes (uncompressed) the file system must deliver for a box."""
        extents = [stop - start for start, stop in box]
        if not all(extent > 0 for extent in extents):
            return 0
        if self.whole:
            return prod(self.shape) * self.itemsize
        if self.chunks is None:
            return self._touched_rows(extents)
        counts = [
            (stop - 1) // chunk - start // chunk + 1
            for (start, stop), chunk in zip(box, self.chunks)
        ]
        return prod(counts) * prod(self.chunks) * self.itemsize

    def _touched_rows(self, extents: Sequence[int]) -> int:
        touched = span = stride = self.itemsize
        for extent, whole in zip(reversed(extents), reversed(self.shape)):
            gap = stride - span
            touched = extent * touched + (extent - 1) * (gap if gap < PAGE else 0)
            span += (extent - 1) * stride
            stride *= whole
        return touched


@dataclass(slots=True)
class Counts:
    """What was read so far: the bytes asked for, and those the chunks forced along."""

    reads: int = 0
    requested_bytes: int = 0
    touched_bytes: int = 0

    def add(self, requested_bytes: int, touched_bytes: int) -> None:
        """Count a read."""
        self.reads += 1
        self.requested_bytes += requested_bytes
        self.touched_bytes += touched_bytes

    @property
    def amplification(self) -> float:
        """Bytes touched for each byte asked for."""
        return self.touched_bytes / self.requested_bytes if self.requested_bytes else 1.0


class Source(ABC):
    """Samples of named fields. Opening one reads no data; files are opened when first needed.

    Attributes:
        origin: of several files, the one from which the fields were taken.
        like: what makes a sample the measure of the others, for people.
    """

    fields: dict[str, Field]
    counts: Counts
    origin: Path | None = None
    like: str = "the first sample"

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def storage(self, field: str) -> Storage:
        """Return how a field lies on disk."""

    @abstractmethod
    def place(self, index: int, field: str) -> str:
        """Return the file and key of a sample's field, for people."""

    @abstractmethod
    def touched(self, index: int, field: str, box: Box) -> int:
        """Return how many bytes of the file a read of this box goes through."""

    @abstractmethod
    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        """Read a box of a sample's field into a contiguous array of the box's shape."""

    def read(
        self, index: int, field: str, box: Box, out: Array, counts: Counts | None = None
    ) -> None:
        """Read and count, in `counts` too; what goes wrong becomes a DataError with the place."""
        if not out.size:
            return
        try:
            self.fill(index, field, box, out)
        except (DataError, MemoryError):
            raise
        except Exception as error:
            raise DataError(
                f"data: {self.place(index, field)}: cannot read {as_text(box)} of sample {index}: "
                f"{error or type(error).__name__}"
            ) from error
        touched = self.touched(index, field, box)
        for some in (self.counts, counts):
            if some is not None:
                some.add(out.nbytes, touched)

    def verify(self, index: int) -> None:
        """Check what reading alone does not: checksums, where the format has them."""
        return None

    def close(self) -> None:
        """Close all files."""
        return None


def as_text(box: Box) -> str:
    """Write a box as it would stand in an index."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"


def native(dtype: np.dtype[Any], place: str, advice: str = "") -> np.dtype[Any]:
    """Return the dtype in this machine's byte order; only numbers and booleans will do."""
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(
            f"data: {place}: dtype {dtype} found, expected an integer, a float or a boolean of "
            f"at most 64 bits{advice and f'; {advice}'}"
        )
    return dtype.newbyteorder("=")


def check_field(
    place: str,
    expected: Field,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    like: str = Source.like,
) -> None:
    """Raise unless the array found at a place is what it is in the samples that it must be like."""
    if len(shape) != len(expected.shape):
        raise DataError(
            f"data: {place}: rank {len(shape)} found (shape {tuple(shape)}), expected rank "
            f"{len(expected.shape)} (shape {expected.shape}) as in {like}"
        )
    if tuple(shape) != expected.shape:
        raise DataError(
            f"data: {place}: shape {tuple(shape)} found, expected {expected.shape} as in {like}"
        )
    if native(dtype, place) != expected.dtype:
        raise DataError(
            f"data: {place}: dtype {dtype} found, expected {expected.dtype} as in {like}"
        )
