"""Zarr: an array, or a group with an array for each field, the first dim counting samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zarr
from zarr.buffer.cpu import NDBuffer

from tilewise.data.region import Array, Box
from tilewise.data.source import CHOOSE, Counts, Field, Source, Storage, native
from tilewise.errors import DataError


class ZarrSource(Source):
    """Samples in a Zarr store, version 3 (2 is read too); whole chunks are read and decoded.

    A chunk that does not exist holds the fill value: that is how Zarr stores constant chunks, so
    a lost chunk cannot be told from an empty one while reading; `absent` counts them.

    Args:
        path: the store's folder. A single array is a field named `x`.
        keys: the arrays to read, in the order of the fields; all of them by default.
    """

    def __init__(self, path: str | Path, keys: Sequence[str] | None = None) -> None:
        self.path = Path(path)
        self.counts = Counts()
        root = _open(self.path)
        if isinstance(root, zarr.Array):
            self._arrays: dict[str, Any] = {"x": root}
        else:
            self._arrays = {key: _array(root, self.path, key) for key in keys or _keys(root)}
        if not self._arrays:
            raise DataError(f"data: {self.path}: no arrays found, expected at least one")
        self.fields: dict[str, Field] = {}
        advice = "" if keys or len(self._arrays) == 1 else CHOOSE
        for key, array in self._arrays.items():
            if not array.shape:
                raise DataError(
                    f"data: {self.path}: {key!r}: a scalar found, expected a first dim that counts"
                    f"{advice and f'; {advice}'}"
                )
            dtype = native(array.dtype, f"{self.path}: {key!r}", advice)
            self.fields[key] = Field(tuple(map(int, array.shape[1:])), dtype)
        lengths = {key: int(array.shape[0]) for key, array in self._arrays.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"data: {self.path}: first dims {lengths} found, expected as many samples in "
                f"each; {CHOOSE}"
            )
        self._length = next(iter(lengths.values()))
        self._stamps = {key: self._stamp(key) for key in self._arrays}
        self._storage = {key: self._stored(key) for key in self._arrays}

    def __len__(self) -> int:
        return self._length

    def storage(self, field: str) -> Storage:
        return self._storage[field]

    def _stored(self, field: str) -> Storage:
        array = self._arrays[field]
        names = ", ".join(type(codec).__name__.removesuffix("Codec") for codec in array.compressors)
        return Storage(
            tuple(map(int, array.shape)),
            self.fields[field].dtype.itemsize,
            tuple(map(int, array.chunks)),
            names.lower() or "none",
        )

    def place(self, index: int, field: str) -> str:
        return f"{self.path}: {field!r}"

    def touched(self, index: int, field: str, box: Box) -> int:
        return self.storage(field).touched(((index, index + 1), *box))

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        self._check_unchanged(field)
        slices = (slice(index, index + 1), *(slice(start, stop) for start, stop in box))
        target = NDBuffer.from_numpy_array(out[None])
        self._arrays[field].get_basic_selection(slices, out=target)

    def absent(self, field: str) -> int:
        """Return how many chunks (shards, where there are any) of a field do not exist."""
        array = self._arrays[field]
        return int(array.nchunks - array.nchunks_initialized)

    def _check_unchanged(self, field: str) -> None:
        found = self._stamp(field)
        if found != self._stamps[field]:
            raise DataError(
                f"data: {self.path}: {field!r}: its metadata changed during the run: "
                f"{found} found, expected {self._stamps[field]} (bytes, time)"
            )

    def _stamp(self, field: str) -> tuple[int, int] | None:
        folder = self.path / self._arrays[field].path
        for name in ("zarr.json", ".zarray"):
            if (folder / name).is_file():
                facts = (folder / name).stat()
                return facts.st_size, facts.st_mtime_ns
        return None


def _open(path: Path) -> Any:
    if not path.exists():
        raise DataError(f"data: {path}: no such folder, expected a Zarr store")
    try:
        return zarr.open(path, mode="r")
    except Exception as error:
        raise DataError(
            f"data: {path}: not a Zarr store, expected one: {error or type(error).__name__}"
        ) from error


def _keys(root: Any) -> list[str]:
    return sorted(root.array_keys())


def _array(root: Any, path: Path, key: str) -> Any:
    try:
        found = root[key]
    except Exception as error:
        raise DataError(
            f"data: {path}: key {key!r} not found, expected an array; it has "
            f"{', '.join(map(repr, _keys(root))) or 'none'} ({type(error).__name__})"
        ) from error
    if not isinstance(found, zarr.Array):
        raise DataError(f"data: {path}: {key!r} is a group, expected an array")
    return found
