"""NIfTI images: one file for each field of a sample. Needs nibabel: the extra `nifti`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tilewise.data.handles import Handles
from tilewise.data.region import Array, Box
from tilewise.data.source import Counts, Field, Source, Storage, check_field, native
from tilewise.errors import DataError


class NiftiSource(Source):
    """Images x × y × z as stored, with a channel dim in front.

    An image of four dims has its last one as channels. Values are as stored, or, where the file
    has a slope and an intercept, scaled to float32. Of an uncompressed file only the slab is read;
    a gzipped one is decompressed from its start.

    Args:
        files: for each field by name, the files of all samples in order.
        labels: fields that get no channel dim when their images have three dims.
        reference: which of the files the others must be like.
    """

    def __init__(
        self,
        files: Mapping[str, Sequence[str | Path]],
        *,
        labels: Sequence[str] = (),
        open_files: int = 16,
        reference: int = 0,
    ) -> None:
        _nibabel()
        self.files = {name: [Path(file) for file in some] for name, some in files.items()}
        counts = {name: len(some) for name, some in self.files.items()}
        if not counts or len(set(counts.values())) != 1 or not next(iter(counts.values())):
            raise DataError(f"data: {counts} NIfTI files given, expected as many for each field")
        self.labels = tuple(labels)
        first = next(iter(self.files.values()))
        self.origin = first[reference] if len(first) > 1 else None
        self.counts = Counts()
        self._handles: Handles[Any] = Handles(_open, _close, kind="NIfTI", limit=open_files)
        self.fields: dict[str, Field] = {}
        self._storage: dict[str, Storage] = {}
        for name, some in self.files.items():
            with self._handles.use(some[reference]) as image:
                dtype = native(_dtype(image), str(some[reference]))
                self.fields[name] = Field(self._shape(name, image.shape), dtype)
                packed = some[reference].suffix == ".gz"
                # The file is in Fortran order: its last dim is the slowest.
                self._storage[name] = Storage(
                    tuple(reversed(image.shape)),
                    image.get_data_dtype().itemsize,
                    compression="gzip" if packed else "none",
                    whole=packed,
                )

    def _shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        if len(shape) == 4:
            return (int(shape[3]), *map(int, shape[:3]))
        lead = () if name in self.labels else (1,)
        return (*lead, *map(int, shape))

    def _stored(self, field: str, box: Box) -> Box:
        """Return a box in the file's own dims."""
        if len(self._storage[field].shape) == 4:
            return (*box[1:], box[0])
        return box if field in self.labels else box[1:]

    def __len__(self) -> int:
        return len(next(iter(self.files.values())))

    def storage(self, field: str) -> Storage:
        return self._storage[field]

    def place(self, index: int, field: str) -> str:
        return str(self.files[field][index])

    def touched(self, index: int, field: str, box: Box) -> int:
        return self._storage[field].touched(self._stored(field, box)[::-1])

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        path = self.files[field][index]
        with self._handles.use(path) as image:
            found = self._shape(field, image.shape)
            check_field(str(path), self.fields[field], found, _dtype(image), self.like)
            slices = tuple(slice(start, stop) for start, stop in self._stored(field, box))
            values = np.asarray(image.dataobj[slices])
            if values.ndim == 4:
                values = np.moveaxis(values, 3, 0)
            out[...] = values.reshape(out.shape)

    def close(self) -> None:
        self._handles.close()


def _nibabel() -> Any:
    try:
        import nibabel  # type: ignore[import-untyped,unused-ignore]
    except ImportError as error:
        raise DataError(
            "data: NIfTI files need nibabel; install it with: pip install 'tilewise[nifti]'"
        ) from error
    return nibabel


def _open(path: Path) -> Any:
    return _nibabel().load(path)


def _close(image: Any) -> None:
    image.uncache()


def _dtype(image: Any) -> np.dtype[Any]:
    """Return the dtype of the values: float32 where the file scales them."""
    slope, inter = image.dataobj.slope, image.dataobj.inter
    stored: np.dtype[Any] = np.dtype(image.get_data_dtype())
    return stored if (slope, inter) == (1.0, 0.0) else np.dtype("float32")
