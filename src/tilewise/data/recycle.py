"""Memory for slabs, used again once nobody holds what was in it.

Fresh memory costs more than what is then copied into it: a page fault for every 4 KiB, 16 MiB in
8 ms where the copy alone took 1.6 ms.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from torch import Tensor

from tilewise.data.region import Array


class Recycler:
    """Hands out tensors of up to `size` bytes; at most `keep` free blocks wait to be used again."""

    def __init__(self, size: int, keep: int) -> None:
        self.size, self.keep = size, keep
        self._free: list[Array] = []

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor without values; its memory comes back when its last view is gone."""
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        if not count:
            return torch.empty(shape, dtype=dtype)
        try:
            block = self._free.pop()
        except IndexError:
            block = np.empty(self.size, np.uint8)
        # The tensor's storage holds this one array, however many tensors share it.
        held = block[:count]
        weakref.finalize(held, self._put_back, block).atexit = False
        return torch.from_numpy(held).view(dtype).view(shape)

    def _put_back(self, block: Array) -> None:
        if len(self._free) < self.keep:
            self._free.append(block)
