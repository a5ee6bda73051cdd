"""Write a set to disk: fields `x`, `y`, … of `count` samples, and `set.json` that describes them.

    format    files   on disk                                   written by
    hdf5      one     data.h5, a dataset a field, sample first   bytes into their place
    hdf5      each    00000.h5, 00001.h5, …                      a file a sample
    zarr      one     data.zarr, an array a field, sample first  chunks, which no two samples share
    npy       one     x.npy, y.npy, …                            bytes into their place
    tfrecord  one     00000.tfrecord, 00001.tfrecord, …          a file a sample

The files are laid out before the first sample; then processes write samples independently, in any
order. Nothing is compressed: a slab's bytes on disk are its bytes in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import h5py  # type: ignore[import-untyped]
import numpy as np
import zarr
from numpy.typing import NDArray

from tilewise.data.tfrecord_write import write_record
from tilewise.errors import DataError

Array = NDArray[Any]

FORMATS = ("hdf5", "zarr", "npy", "tfrecord")
FILES = ("one", "each")
DESCRIPTION = "set.json"
# Edge of a Zarr chunk: 32³ float32 is 128 KiB, small enough for thin slabs, large enough to read.
CHUNK = 32


@dataclass(frozen=True, slots=True)
class Field:
    """The shape and dtype of one sample's part, without the sample dim."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Writer(Protocol):
    """Puts samples on disk; can be sent to another process."""

    def write(self, index: int, sample: Mapping[str, Array]) -> None:
        """Write one sample."""
        ...


def check_format(format: str, files: str) -> None:
    """Raise unless such a set can be written."""
    if format not in FORMATS:
        raise DataError(f"format {format!r} must be one of {', '.join(FORMATS)}")
    if files not in FILES:
        raise DataError(f"files {files!r} must be one of {', '.join(FILES)}")
    if files == "each" and format != "hdf5":
        raise DataError(f"files 'each' is for hdf5; {format} has its own way: use 'one'")


def lay_out(
    folder: Path, fields: Mapping[str, Field], count: int, *, format: str, files: str = "one"
) -> Writer:
    """Create the files of a set in an existing folder and return what fills them."""
    check_format(format, files)
    if files == "each":
        return _EachWriter(folder, dict(fields))
    if format == "hdf5":
        return _FlatWriter(lay_out_hdf5(folder / "data.h5", fields, count))
    if format == "npy":
        return _FlatWriter(
            {name: lay_out_npy(folder / f"{name}.npy", fields[name], count) for name in fields}
        )
    if format == "tfrecord":
        _check_records(fields)
        return _RecordWriter(folder, dict(fields))
    group = zarr.create_group(store=folder / "data.zarr", zarr_format=3)
    for name, field in fields.items():
        group.create_array(
            name,
            shape=(count, *field.shape),
            chunks=(1, *chunk(field)),
            dtype=field.dtype,
            compressors=None,
        )
    return _ZarrWriter(folder / "data.zarr", dict(fields))


def describe(folder: Path, description: Mapping[str, Any]) -> None:
    """Write what the set is; the last thing to do, for a set is whole once it has this file."""
    text = json.dumps(description, indent=2)
    (folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def chunk(field: Field) -> tuple[int, ...]:
    """Return the extents of a Zarr chunk of one sample: at most 32 along each dim."""
    return tuple(min(extent, CHUNK) for extent in field.shape)


@dataclass(frozen=True)
class Place:
    """Where the samples of a field begin in a file."""

    path: Path
    offset: int
    field: Field


@dataclass(frozen=True)
class _FlatWriter:
    places: dict[str, Place]

    def write(self, index: int, sample: Mapping[str, Array]) -> None:
        for name, place in self.places.items():
            array = _checked(name, sample, place.field, index)
            with open(place.path, "r+b") as file:
                file.seek(place.offset + index * place.field.nbytes)
                file.write(array.data)


@dataclass(frozen=True)
class _EachWriter:
    folder: Path
    fields: dict[str, Field]

    def write(self, index: int, sample: Mapping[str, Array]) -> None:
        with h5py.File(self.folder / f"{index:05d}.h5", "w") as file:
            for name, field in self.fields.items():
                file.create_dataset(name, data=_checked(name, sample, field, index))


@dataclass(frozen=True)
class _ZarrWriter:
    path: Path
    fields: dict[str, Field]

    def write(self, index: int, sample: Mapping[str, Array]) -> None:
        # A chunk of zeros is written too, so that one that is missing is an error.
        with zarr.config.set({"array.write_empty_chunks": True}):
            group = zarr.open_group(self.path, mode="r+")
            for name, field in self.fields.items():
                into: Any = group[name]
                into[index] = _checked(name, sample, field, index)


@dataclass(frozen=True)
class _RecordWriter:
    folder: Path
    fields: dict[str, Field]

    def write(self, index: int, sample: Mapping[str, Array]) -> None:
        arrays = {name: _checked(name, sample, self.fields[name], index) for name in self.fields}
        write_record(self.folder / f"{index:05d}.tfrecord", arrays)


def _check_records(fields: Mapping[str, Field]) -> None:
    """Raise unless the readers of CosmoFlow's files take such fields."""
    x, y = fields["x"], fields["y"]
    cube = len(x.shape) == 4 and x.shape[0] == 4 and len(set(x.shape[1:])) == 1
    if not cube or x.dtype != "int16" or len(y.shape) != 1 or y.dtype != "float32":
        raise DataError(
            "format 'tfrecord' is CosmoFlow's, for cubes of 4 channels in int16 and a list of "
            f"floats, not for {x.dtype} {x.shape} and {y.dtype} {y.shape}; use hdf5, zarr or npy"
        )


def _checked(name: str, sample: Mapping[str, Array], field: Field, index: int) -> Array:
    """Return a sample's array as it goes to disk: little-endian and contiguous."""
    array = np.asarray(sample[name])
    if array.shape != field.shape or array.dtype != np.dtype(field.dtype):
        raise DataError(
            f"sample {index}: {name!r} is {array.dtype} {array.shape}, "
            f"but the set holds {field.dtype} {field.shape}"
        )
    # ascontiguousarray would turn a scalar into one element
    return np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")


def lay_out_hdf5(path: Path, fields: Mapping[str, Field], count: int) -> dict[str, Place]:
    """Create contiguous datasets that have their place in the file before any byte is written."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    places = {}
    with h5py.File(path, "w") as file:
        for name, field in fields.items():
            dtype = h5py.h5t.py_create(np.dtype(field.dtype).newbyteorder("<"), logical=True)
            space = h5py.h5s.create_simple((count, *field.shape))
            dataset = h5py.h5d.create(file.id, name.encode(), dtype, space, dcpl=layout)
            places[name] = Place(path, dataset.get_offset(), field)
    return places


def lay_out_npy(path: Path, field: Field, count: int) -> Place:
    """Create an array file of its full size."""
    dtype = np.dtype(field.dtype).newbyteorder("<")
    array = np.lib.format.open_memmap(path, "w+", dtype, (count, *field.shape))
    return Place(path, int(array.offset), field)
