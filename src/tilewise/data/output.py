"""Write a split tensor to one file, each rank its own slabs, without asking another rank.

.h5     a contiguous dataset `y`     bytes into their place
.npy    an array                     bytes into their place
.zarr   a group with an array `y`    chunks, of which no two ranks share one
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from tilewise.data.write import Array, Field, Place, lay_out_hdf5, lay_out_npy
from tilewise.errors import DataError
from tilewise.layout import Layout

NAME = "y"
SUFFIXES = (".h5", ".hdf5", ".npy", ".zarr")
LARGEST_CHUNK = 64


class Output(ABC):
    """A file of the full size, to be filled slab by slab."""

    @abstractmethod
    def write(self, at: Sequence[int], slab: Array) -> None:
        """Put a slab where its first element belongs."""


def check_output(path: Path) -> None:
    """Raise unless a file of that name can be written."""
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: the name must end in one of {', '.join(SUFFIXES)}")
    if path.exists():
        raise DataError(f"{path}: exists already; name another file, or remove it")


def create_output(path: Path, layout: Layout, count: int, dtype: str) -> None:
    """Create the file for `count` samples; on one rank.

    `layout` says how a batch is cut, its first dim being the samples.
    """
    field = Field(tuple(layout.shape[1:]), dtype)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".zarr":
            group = zarr.create_group(store=path, zarr_format=3)
            group.create_array(
                NAME,
                shape=(count, *field.shape),
                chunks=(1, *chunks(layout)),
                dtype=dtype,
                compressors=None,
            )
        elif path.suffix == ".npy":
            lay_out_npy(path, field, count)
        else:
            lay_out_hdf5(path, {NAME: field}, count)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error}") from error


def open_output(path: Path) -> Output:
    """Open a file that another rank has created, to write into it."""
    if path.suffix == ".zarr":
        return _ZarrOutput(path)
    if path.suffix == ".npy":
        array = np.lib.format.open_memmap(path, "r")
        return _FlatOutput(Place(path, int(array.offset), _field(array)), len(array))
    import h5py  # type: ignore[import-untyped]

    with h5py.File(path, "r") as file:
        dataset = file[NAME]
        return _FlatOutput(Place(path, dataset.id.get_offset(), _field(dataset)), len(dataset))


def _field(array: Any) -> Field:
    return Field(tuple(array.shape[1:]), array.dtype.name)


def chunks(layout: Layout) -> tuple[int, ...]:
    """Return chunk extents for a sample, such that every cut lies between two chunks."""
    found = []
    for dim in range(1, len(layout.shape)):
        extent = layout.shape[dim]
        cuts = {layout.intervals(rank)[dim][0] for rank in range(layout.ranks)}
        step = gcd(*cuts) or extent
        fits = [size for size in range(1, min(step, LARGEST_CHUNK) + 1) if step % size == 0]
        found.append(min(extent, LARGEST_CHUNK) if step == extent else max(fits))
    return tuple(found)


class _FlatOutput(Output):
    """Bytes of a contiguous array, at their offsets in the file."""

    def __init__(self, place: Place, count: int) -> None:
        self.place = place
        self.shape = (count, *place.field.shape)
        self.dtype = np.dtype(place.field.dtype).newbyteorder("<")

    def write(self, at: Sequence[int], slab: Array) -> None:
        slab = np.ascontiguousarray(slab, dtype=self.dtype)
        if not slab.size:
            return
        tail = len(slab.shape)  # the dims from here on are whole: one run of bytes
        while tail > 0 and slab.shape[tail - 1] == self.shape[tail - 1]:
            tail -= 1
        lead = max(tail - 1, 0)
        strides = [prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        descriptor = os.open(self.place.path, os.O_WRONLY)
        try:
            for index in product(*(range(extent) for extent in slab.shape[:lead])):
                here = [start + step for start, step in zip(at, index)] + list(at[lead:])
                offset = sum(i * stride for i, stride in zip(here, strides))
                _write_all(
                    descriptor,
                    memoryview(slab[index]).cast("B"),
                    self.place.offset + offset * self.dtype.itemsize,
                )
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class _ZarrOutput(Output):
    def __init__(self, path: Path) -> None:
        group = zarr.open_group(path, mode="r+")
        self.array: Any = group[NAME]

    def write(self, at: Sequence[int], slab: Array) -> None:
        if slab.size:
            where = tuple(slice(start, start + size) for start, size in zip(at, slab.shape))
            with zarr.config.set({"array.write_empty_chunks": True}):
                self.array[where] = slab
