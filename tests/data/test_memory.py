"""A rank holds its slabs of prefetch + 2 batches, its share of the store, and little else."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

import data_files
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.layout import Layout
from tilewise.testing import ranks

M_MMAP_THRESHOLD = -3
BASE = 7 << 20


def peak(mesh: Mesh, file: str, prefetch: int, store: int | None, augment: Any) -> dict[str, int]:
    """Return the peak of this process' resident memory above its start, in bytes."""
    # Large blocks leave the process when they are freed, so that what is resident is in use.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    shape = (4, 64, 64, 64)
    cut = Layout.of((4, *shape), "ncdhw", "d2", ranks=mesh.size)
    for batch in td.loader(
        data_files.numbers(), Layout.replicated((2,), ranks=mesh.size), mesh=mesh
    ):
        del batch
    loader = td.loader(
        file,
        cut,
        mesh=mesh,
        prefetch=prefetch,
        store_bytes=store,
        transforms={"x": [td.Log1p(), td.Normalize(1.0, 2.0)]},
        augment=augment,
    )
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not there to be taken again
    Path("/proc/self/clear_refs").write_text("5")
    start = _status("VmRSS")
    for _ in range(2):
        for number, batch in enumerate(loader):
            assert batch[0].dtype == torch.float32
            if number < 2:  # long enough for a thread that makes too many to show it
                time.sleep(0.3)
            while loader._stream._ready.qsize() < min(prefetch, len(loader) - number - 1):
                time.sleep(0.001)
    slab = loader.feeds[0].batch_bytes(4, mesh.rank)
    kept = 0 if loader.store is None else loader.store.bytes
    found = {"peak": _status("VmHWM") - start, "slab": slab, "kept": kept}
    loader.close()
    return found


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
@pytest.mark.parametrize(
    ("prefetch", "store", "augment"),
    [
        (0, None, ()),
        (3, None, (td.Flip("d h w"),)),
        (2, 12 << 20, ()),
        (1, 12 << 20, (td.Flip("d"),)),
    ],
)
def test_peak_memory(prefetch: int, store: int | None, augment: Any, tmp_path: Path) -> None:
    """Ten batches, slabs of 8 MiB, stored as int16 (20 MiB on a rank) and used as float32."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file.create_dataset("x", (40, 4, 64, 64, 64), "int16", fillvalue=3)
    for found in ranks(2, peak, str(tmp_path / "data.h5"), prefetch, store, augment):
        assert found["slab"] == 8 << 20
        assert found["kept"] == (store or 0)
        least = found["slab"] * (prefetch + 1) + (store or 0)
        assert least / 2 < found["peak"] < least + found["slab"] + BASE
