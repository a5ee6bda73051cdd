"""Write small sets in every format, for the tests of the readers and the loader."""

from __future__ import annotations

import gzip
import struct
import warnings
from pathlib import Path
from typing import Any

import google_crc32c
import h5py
import numpy as np
import zarr

from tilewise.data import (
    Hdf5Source,
    NiftiSource,
    NpySource,
    Permuted,
    Source,
    TfRecordSource,
    WholeSamples,
    ZarrSource,
)

FORMATS = ("hdf5", "hdf5-each", "hdf5-chunked", "zarr", "npy", "nifti", "tfrecord", "dataset")
Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(
    count: int, shape: tuple[int, ...], labels: tuple[int, ...], dtype: str = "int16", seed: int = 0
) -> Arrays:
    """Return whole samples x and labels y."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 200, (count, *shape)).astype(dtype)
    return {"x": x, "y": rng.standard_normal((count, *labels)).astype("float32")}


def numbers(count: int = 7) -> WholeSamples:
    """Return samples that are their own numbers."""
    return WholeSamples([np.float32(k) for k in range(count)])


def write(folder: Path, format: str, data: Arrays) -> Path:
    """Write samples in a format; returns what `opened` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    if format in ("hdf5", "hdf5-chunked"):
        with h5py.File(folder / "data.h5", "w") as file:
            for name, values in data.items():
                chunks = None
                if format == "hdf5-chunked" and values.ndim > 1:
                    chunks = (1, *(max(extent // 2, 1) for extent in values.shape[1:]))
                file.create_dataset(name, data=values, chunks=chunks,
                                    compression="gzip" if chunks else None)  # fmt: skip
    elif format == "hdf5-each":
        for index in range(len(data["x"])):
            with h5py.File(folder / f"{index:05d}.h5", "w") as file:
                for name, values in data.items():
                    file[name] = values[index]
    elif format == "zarr":
        group = zarr.open_group(folder / "data.zarr", mode="w")
        for name, values in data.items():
            chunks = (1, *(max(extent // 2, 1) for extent in values.shape[1:]))
            array = group.create_array(name, shape=values.shape, chunks=chunks, dtype=values.dtype)
            array[...] = values
    elif format == "npy":
        for name, values in data.items():
            np.save(folder / f"{name}.npy", values)
    elif format == "nifti":
        _write_nifti(folder, data)
    elif format == "tfrecord":
        for index in range(len(data["x"])):
            record = example({name: values[index] for name, values in data.items()})
            packed = record if index % 2 else gzip.compress(record)
            (folder / f"{index:05d}.tfrecord").write_bytes(packed)
    elif format == "dataset":
        np.savez(folder / "data.npz", **data)
    return folder


def opened(folder: Path, format: str, data_shape: tuple[int, ...]) -> Source:
    """Open what `write` wrote; the fields are x and y."""
    files = sorted(folder.iterdir())
    if format in ("hdf5", "hdf5-chunked"):
        return Hdf5Source(folder / "data.h5", ["x", "y"])
    if format == "hdf5-each":
        return Hdf5Source(files, ["x", "y"], open_files=2)
    if format == "zarr":
        return ZarrSource(folder / "data.zarr", ["x", "y"])
    if format == "npy":
        return NpySource({"x": folder / "x.npy", "y": folder / "y.npy"})
    if format == "nifti":
        images = [file for file in files if file.name.startswith("x")]
        labels = [file for file in files if file.name.startswith("y")]
        return NiftiSource({"x": images, "y": labels}, labels=["y"], open_files=2)
    if format == "tfrecord":
        stored = (*data_shape[1:], data_shape[0])
        source = TfRecordSource(files, {"x": ("int16", stored)}, ["x", "y"], open_files=2)
        return Permuted(source, {"x": (len(stored) - 1, *range(len(stored) - 1))})
    found = np.load(folder / "data.npz")
    return WholeSamples([{"x": x, "y": y} for x, y in zip(found["x"], found["y"])])


def _write_nifti(folder: Path, data: Arrays) -> None:
    import nibabel

    for name, values in data.items():
        for index, sample in enumerate(values):
            stored = np.moveaxis(sample, 0, 3) if sample.ndim == 4 else sample
            suffix = "nii.gz" if index % 2 else "nii"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                image = nibabel.Nifti1Image(stored, np.eye(4))
            nibabel.save(image, folder / f"{name}{index:03d}.{suffix}")


def example(features: dict[str, np.ndarray[Any, Any]]) -> bytes:
    """Encode a TensorFlow example as one record: floats as a list, the rest as bytes, dims last."""
    entries = b""
    for name, values in features.items():
        if values.dtype == np.float32:
            value = _field(2, _field(1, values.astype("<f4").tobytes()))
        else:
            last = np.moveaxis(values, 0, -1) if values.ndim > 1 else values
            value = _field(1, _field(1, last.tobytes()))
        entries += _field(1, _field(1, name.encode()) + _field(2, value))
    body = _field(1, entries)
    length = struct.pack("<Q", len(body))
    return length + _crc(length) + body + _crc(body)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)
