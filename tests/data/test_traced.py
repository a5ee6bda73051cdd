"""What the operating system sees: every rank reads its slabs' bytes once, and then no file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data_files
from tilewise import data as td
from tilewise.comm import Mesh
from tilewise.errors import DataError
from tilewise.layout import Layout
from tilewise.testing import ranks

COUNT, SHAPE, LABELS = 6, (2, 32, 32, 32), (3,)
# HDF5's own bookkeeping of each file, and what the engine's threads read meanwhile.
EXTRA = 1 << 16


def cuts(size: int, degrees: str) -> list[Layout]:
    return [
        Layout.of((2, *SHAPE), "ncdhw", degrees, ranks=size),
        Layout.of((2, *LABELS), "n.", degrees, ranks=size),
    ]


def read_by_process() -> int:
    """Return how many bytes this process has read by system calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def traced(mesh: Mesh, folder: str, degrees: str) -> list[dict[str, int]]:
    """Return for each of three epochs what was asked for and what was read."""
    loader = td.loader(folder, cuts(mesh.size, degrees), mesh=mesh, store_bytes=1 << 24)
    found = []
    for _ in range(3):
        asked, read = loader.summary().file_bytes, read_by_process()
        for _batch in loader:
            pass
        asked, read = loader.summary().file_bytes - asked, read_by_process() - read
        found.append({"asked": asked, "read": read})
    loader.close()
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="needs Linux")
@pytest.mark.parametrize("format", ["hdf5-each", "hdf5"])
def test_system_calls_read_the_slabs_once(tmp_path: Path, format: str) -> None:
    data = data_files.arrays(COUNT, SHAPE, LABELS, "float32")
    folder = data_files.write(tmp_path, format, data)
    path = folder if format == "hdf5-each" else folder / "data.h5"
    whole = COUNT * int(np.prod(SHAPE)) * 4
    for found in ranks(2, traced, str(path), "d2"):
        first, *later = found
        assert first["asked"] == whole // 2 + COUNT * 12
        assert first["asked"] <= first["read"] < first["asked"] + EXTRA
        for epoch in later:
            assert epoch["asked"] == 0
            assert epoch["read"] < EXTRA


def without_files(mesh: Mesh, folder: str) -> list[Any]:
    """Go on after the files are gone."""
    loader = td.loader(folder, cuts(mesh.size, "n2 d2"), mesh=mesh, store_bytes=1 << 24)
    epochs = []
    for epoch in range(3):
        epochs.append([(batch.samples, *(tensor.numpy() for tensor in batch)) for batch in loader])
        mesh.agree("epoch")
        if epoch == 0:
            loader.source.close()
            if mesh.rank == 0:
                shutil.rmtree(folder)
            mesh.agree("removed")
    loader.close()
    return epochs


def test_later_epochs_need_no_files(tmp_path: Path) -> None:
    data = data_files.arrays(COUNT, SHAPE, LABELS)
    folder = data_files.write(tmp_path / "set", "hdf5-each", data)
    layouts = cuts(4, "n2 d2")
    for rank, epochs in enumerate(ranks(4, without_files, str(folder))):
        assert len(epochs) == 3
        for batches in epochs:
            for samples, *slabs in batches:
                for name, slab, layout in zip("xy", slabs, layouts):
                    expected = data[name][list(samples)][layout.slab(rank)]
                    np.testing.assert_array_equal(slab, expected)


def one_lacks_a_file(mesh: Mesh, folder: str, store: int | None) -> tuple[int, str]:
    path = Path(folder) / str(mesh.rank)
    loader = td.loader(path, cuts(mesh.size, "d2"), mesh=mesh, shuffle=False, store_bytes=store)
    if mesh.rank == 1:
        (path / "00003.h5").unlink()
    taken = 0
    try:
        for _ in range(2):
            for _batch in loader:
                taken += 1
    except DataError as error:
        return taken, str(error)
    return taken, ""


@pytest.mark.parametrize("store", [None, 0, 1 << 24])
def test_a_file_that_one_rank_alone_lacks_is_raised_on_all(
    tmp_path: Path, store: int | None
) -> None:
    """Each rank has a copy of the set; rank 1's lost a file after it was opened."""
    data = data_files.arrays(COUNT, SHAPE, LABELS)
    for rank in range(2):
        data_files.write(tmp_path / str(rank), "hdf5-each", data)
    first, second = ranks(2, one_lacks_a_file, str(tmp_path), store)
    assert first == second
    assert first[0] == 1
    assert "epoch 1, batch 2: rank 1: data: " in first[1]
    assert "1/00003.h5: no such file" in first[1]
