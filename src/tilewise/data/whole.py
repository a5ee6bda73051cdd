"""Any map-style torch Dataset: whole samples, of which slabs are cut out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tilewise.data.region import Array, Box
from tilewise.data.source import Counts, Field, Source, Storage, check_field, native
from tilewise.errors import DataError


class WholeSamples(Source):
    """A Dataset whose samples are a tensor, array or number, or a tuple or dict of those.

    Fields are named by the dict's keys, or `0`, `1`, … in order. Every rank loads every sample of
    its part of the batch whole, so the Dataset must give the same values on each.
    """

    def __init__(self, dataset: Any) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise DataError(
                f"data: {type(dataset).__name__} is not a map-style Dataset: it must have "
                "__getitem__ and __len__"
            )
        self.dataset = dataset
        self.counts = Counts()
        self._last: tuple[int, dict[str, Array]] | None = None
        if not len(dataset):
            raise DataError(f"data: {type(dataset).__name__} has no samples")
        self.fields: dict[str, Field] = {}
        for name, array in self._sample(0).items():
            self.fields[name] = Field(array.shape, native(array.dtype, self.place(0, name)))

    def __len__(self) -> int:
        return len(self.dataset)

    def storage(self, field: str) -> Storage:
        found = self.fields[field]
        return Storage(found.shape, found.dtype.itemsize, compression="unknown", whole=True)

    def place(self, index: int, field: str) -> str:
        return f"{type(self.dataset).__name__}[{index}]: {field!r}"

    def touched(self, index: int, field: str, box: Box) -> int:
        return self.storage(field).touched(box)

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        sample = self._sample(index)
        where = self.place(index, field)
        if field not in sample:
            raise DataError(f"data: {where}: not found, expected it; it has {list(sample)}")
        found = sample[field]
        check_field(where, self.fields[field], found.shape, found.dtype)
        out[...] = found[tuple(slice(start, stop) for start, stop in box)]

    def _sample(self, index: int) -> dict[str, Array]:
        """Load a sample; its fields are usually asked for one after the other."""
        last = self._last  # of another loader's thread, it may be, where two share this source
        if last is None or last[0] != index:
            last = self._last = None
            try:
                item = self.dataset[index]
            except Exception as error:
                raise DataError(
                    f"data: {type(self.dataset).__name__}[{index}] raised {error!r}"
                ) from error
            last = self._last = (index, _arrays(item))
        return last[1]


def _arrays(item: Any) -> dict[str, Array]:
    if isinstance(item, Mapping):
        return {str(name): _array(value) for name, value in item.items()}
    values = item if isinstance(item, (tuple, list)) else (item,)
    return {str(number): _array(value) for number, value in enumerate(values)}


def _array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value)
