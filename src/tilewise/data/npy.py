"""NPY: one memory-mapped file for each field, the first dim counting samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.handles import Handles
from tilewise.data.region import Array, Box, cut_out
from tilewise.data.source import CHOOSE, Counts, Field, Source, Storage, check_field, native
from tilewise.errors import DataError


class NpySource(Source):
    """Samples in NPY files, of which the pages that a box touches are read.

    Args:
        files: a file for each field by name; or one file, whose field is named `x`.
    """

    def __init__(self, files: str | Path | Mapping[str, str | Path]) -> None:
        given = {"x": files} if isinstance(files, (str, Path)) else files
        if not given:
            raise DataError("data: no NPY files given")
        self.files = {name: Path(path) for name, path in given.items()}
        self.counts = Counts()
        self._handles: Handles[Array] = Handles(_open, _close, kind="NPY", limit=len(self.files))
        self.fields: dict[str, Field] = {}
        self._storage: dict[str, Storage] = {}
        lengths = {}
        advice = CHOOSE if len(self.files) > 1 else ""
        for name, path in self.files.items():
            with self._handles.use(path) as array:
                if not array.ndim:
                    raise DataError(
                        f"data: {path}: a scalar found, expected a dim that counts"
                        f"{advice and f'; {advice}'}"
                    )
                dtype = native(array.dtype, str(path), advice)
                self.fields[name] = Field(array.shape[1:], dtype)
                self._storage[name] = _storage(array)
                lengths[str(path)] = len(array)
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"data: {lengths} samples found, expected as many in each file; {CHOOSE}"
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def storage(self, field: str) -> Storage:
        return self._storage[field]

    def place(self, index: int, field: str) -> str:
        return str(self.files[field])

    def touched(self, index: int, field: str, box: Box) -> int:
        return self._storage[field].touched(((index, index + 1), *box))

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        path = self.files[field]
        with self._handles.use(path) as array:
            check_field(str(path), self.fields[field], array.shape[1:], array.dtype)
            out[...] = cut_out(array[index, ...], tuple(slice(start, stop) for start, stop in box))

    def close(self) -> None:
        self._handles.close()


def _open(path: Path) -> Array:
    opened: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(opened, np.ndarray):
        raise ValueError("an archive of several arrays")
    return opened


def _close(array: Array) -> None:
    """Leave the map to the last reference; numpy has no way to close it earlier."""


def _storage(array: Array) -> Storage:
    fortran = array.flags.f_contiguous and not array.flags.c_contiguous
    return Storage(array.shape, array.dtype.itemsize, whole=fortran)
