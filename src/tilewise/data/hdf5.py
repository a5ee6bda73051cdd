"""HDF5: one file with many samples, or many files with one sample or more each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]

from tilewise.data.handles import Handles
from tilewise.data.region import Array, Box
from tilewise.data.source import CHOOSE, Counts, Field, Source, Storage, check_field, native
from tilewise.errors import DataError


class Hdf5Source(Source):
    """Samples in HDF5 files, read by independent hyperslabs.

    Args:
        files: one file, or several.
        keys: the datasets to read, in the order of the fields; all of them by default.
        stacked: whether the datasets' first dim counts samples. By default one file is, and
            several hold a sample each. Several stacked files are all opened once for their counts.
        open_files: how many files are open at most.
        reference: which of the files the others must be like.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        keys: Sequence[str] | None = None,
        *,
        stacked: bool | None = None,
        open_files: int = 16,
        reference: int = 0,
    ) -> None:
        one = isinstance(files, (str, Path))
        self.files = [Path(files)] if isinstance(files, (str, Path)) else [Path(f) for f in files]
        if not self.files:
            raise DataError("data: no HDF5 files given")
        self.stacked = one if stacked is None else stacked
        self.counts = Counts()
        self._handles: Handles[_File] = Handles(_File, _File.close, kind="HDF5", limit=open_files)
        self.fields: dict[str, Field] = {}
        self._storage: dict[str, Storage] = {}
        path = self.files[reference]
        self.origin = path if len(self.files) > 1 else None
        with self._handles.looking():
            with self._handles.use(path) as opened:
                for key in keys or _datasets(opened.file):
                    self._add(opened.file, path, key, "" if keys else CHOOSE)
            if not self.fields:
                raise DataError(f"data: {path}: no datasets found, expected at least one")
            self._ends = [len(self.files)] if not self.stacked else self._count()

    def _add(self, file: h5py.File, path: Path, key: str, advice: str) -> None:
        place = f"{path}: {key!r}"
        dataset = _dataset(file, path, key)
        shape = tuple(map(int, dataset.shape))
        if self.stacked and not shape:
            raise DataError(
                f"data: {place}: a scalar found, expected a first dim that counts"
                f"{advice and f'; {advice}'}"
            )
        dtype = native(dataset.dtype, place, advice)
        self.fields[key] = Field(shape[1:] if self.stacked else shape, dtype)
        self._storage[key] = Storage(
            shape,
            dtype.itemsize,
            None if dataset.chunks is None else tuple(map(int, dataset.chunks)),
            str(dataset.compression or "none"),
        )

    def _count(self) -> list[int]:
        """Return, for each stacked file, the number of samples up to its end."""
        lengths = []
        for path in self.files:
            with self._handles.use(path) as opened:
                found = {key: len(_dataset(opened.file, path, key)) for key in self.fields}
            if len(set(found.values())) > 1:
                raise DataError(
                    f"data: {path}: first dims {found} found, expected as many samples in each; "
                    f"{CHOOSE}"
                )
            lengths.append(next(iter(found.values())))
        return list(accumulate(lengths))

    def __len__(self) -> int:
        return self._ends[-1]

    def storage(self, field: str) -> Storage:
        return self._storage[field]

    def place(self, index: int, field: str) -> str:
        return f"{self.files[self._where(index)[0]]}: {field!r}"

    def touched(self, index: int, field: str, box: Box) -> int:
        _, at = self._where(index)
        return self._storage[field].touched(((at, at + 1), *box) if self.stacked else box)

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        number, at = self._where(index)
        path = self.files[number]
        with self._handles.use(path) as opened:
            if field not in opened.checked:
                dataset = _dataset(opened.file, path, field)
                self._check(dataset, path, field, number)
                opened.checked[field] = dataset
            dataset = opened.checked[field]
            if not dataset.shape:
                out[...] = dataset[()]
                return
            slices = tuple(slice(start, stop) for start, stop in box)
            if self.stacked:
                dataset.read_direct(out[None], (slice(at, at + 1), *slices))
            else:
                dataset.read_direct(out, slices)

    def _where(self, index: int) -> tuple[int, int]:
        """Return a sample's file and its place within."""
        if not self.stacked:
            return index, 0
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number - 1] if number else 0)

    def _check(self, dataset: Any, path: Path, field: str, number: int) -> None:
        shape = tuple(dataset.shape)
        check_field(
            f"{path}: {field!r}",
            self.fields[field],
            shape[1:] if self.stacked and shape else shape,
            dataset.dtype,
            self.like,
        )
        if not self.stacked:
            return
        expected = self._ends[number] - (self._ends[number - 1] if number else 0)
        if shape[0] != expected:
            raise DataError(
                f"data: {path}: {field!r}: {shape[0]} samples found, expected {expected} as when "
                "it was first opened; the file changed during the run"
            )

    def close(self) -> None:
        self._handles.close()


class _File:
    """An open file and those of its datasets that were found to be what they should be."""

    def __init__(self, path: Path) -> None:
        self.file = h5py.File(path, "r", locking="best-effort")
        self.checked: dict[str, Any] = {}

    def close(self) -> None:
        self.checked.clear()
        self.file.close()


def _datasets(file: h5py.File) -> list[str]:
    """List the paths of all datasets, in alphabetical order."""
    found: list[str] = []
    file.visititems(lambda name, item: found.append(name) if _is_data(item) else None)
    return sorted(found)


def _is_data(item: Any) -> bool:
    return isinstance(item, h5py.Dataset) and item.shape is not None


def _dataset(file: h5py.File, path: Path, key: str) -> Any:
    item = file.get(key)
    if not _is_data(item):
        raise DataError(
            f"data: {path}: key {key!r} not found, expected a dataset; it has "
            f"{', '.join(map(repr, _datasets(file))) or 'none'}"
        )
    return item
