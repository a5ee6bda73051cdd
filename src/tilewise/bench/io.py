"""Time input: whole samples read by one rank and scattered, slabs from files, the store.

All ways are measured in turn in every round, each over one epoch of the same batches, after the
files were put out of the page cache. Rank 0 reads ahead in a thread when it reads whole samples,
as the loader does, so that the ways differ in what is read and sent and in nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from tilewise.auto.tell import slowest
from tilewise.bench.timing import spread
from tilewise.comm import Mesh
from tilewise.data.loading import Loader
from tilewise.data.open import open_source
from tilewise.data.order import Order
from tilewise.data.planned import planned_layouts
from tilewise.data.region import Array, whole
from tilewise.data.source import Source
from tilewise.data.write import DESCRIPTION, Field, describe, lay_out
from tilewise.layout import Layout

CHANNELS, TARGETS = 4, 4
PREFETCH = 2
Progress = Generator[int, None, Any]


@dataclass(frozen=True)
class IoCase:
    """A set of random int16 volumes, one HDF5 file each, and how it is read."""

    folder: str
    edge: int
    count: int
    batch: int

    @property
    def fields(self) -> dict[str, Field]:
        shape = (CHANNELS, self.edge, self.edge, self.edge)
        return {"x": Field(shape, "int16"), "y": Field((TARGETS,), "float32")}

    @property
    def sample_bytes(self) -> int:
        return sum(field.nbytes for field in self.fields.values())

    @property
    def description(self) -> dict[str, Any]:
        fields = {
            name: {"shape": list(field.shape), "dtype": field.dtype}
            for name, field in self.fields.items()
        }
        return {"format": "hdf5", "files": "each", "count": self.count, "fields": fields}

    @property
    def exists(self) -> bool:
        """Whether the folder holds the set already."""
        file = Path(self.folder) / DESCRIPTION
        return file.is_file() and json.loads(file.read_text()) == self.description


def make_set(mesh: Mesh, case: IoCase) -> Progress:
    """Write the set, each rank its share of the samples; yield one for each written here."""
    folder = Path(case.folder)
    writer = lay_out(folder, case.fields, case.count, format="hdf5", files="each")
    random = np.random.default_rng(mesh.rank)
    for index in range(mesh.rank, case.count, mesh.size):
        counts = random.integers(0, 1 << 12, case.fields["x"].shape, np.int16)
        writer.write(index, {"x": counts, "y": random.random(TARGETS, np.float32)})
        yield 1
    mesh.agree("bench io: written")
    if mesh.rank == 0:
        describe(folder, case.description)


def measure(mesh: Mesh, case: IoCase, rounds: int) -> Progress:
    """Measure all ways; yield one after each epoch of each way, those that fill stores included."""
    torch.set_num_threads(1)
    ways: dict[str, _Way] = {
        "whole": _Whole(mesh, case),
        "slab": _Slabs(mesh, case, f"d{mesh.size}", stored=False),
        "store": _Slabs(mesh, case, f"d{mesh.size}", stored=True),
        "store_moved": _Slabs(mesh, case, f"n{mesh.size}", stored=True),
    }
    first: dict[str, int] = {}
    for name in ("store", "store_moved"):
        first[name] = _epoch(mesh, case, ways[name], 0)[1]
        yield 1
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    read: dict[str, int] = {}
    fetched: dict[str, int] = {}
    for epoch in range(1, rounds + 1):
        for name, way in ways.items():
            took, read[name], fetched[name] = _epoch(mesh, case, way, epoch)
            seconds[name].append(slowest(mesh, [took])[0])
            yield 1
    for way in ways.values():
        way.close()
    rates = {name: [case.count / took for took in some] for name, some in seconds.items()}
    return {
        "rates": rates,
        "bytes_read": read | {f"{name}_first": count for name, count in first.items()},
        "bytes_fetched": fetched,
    }


def report(case: IoCase, found: Sequence[Any]) -> dict[str, Any]:
    """Put together what the ranks measured."""
    rates = found[0]["rates"]
    ratios = {
        "slab_over_whole": [a / b for a, b in zip(rates["slab"], rates["whole"])],
        "store_over_slab": [a / b for a, b in zip(rates["store"], rates["slab"])],
        "store_moved_over_slab": [a / b for a, b in zip(rates["store_moved"], rates["slab"])],
    }
    return {
        "ranks": len(found),
        "samples": case.count,
        "sample_bytes": case.sample_bytes,
        "set_bytes": case.count * case.sample_bytes,
        "batch": case.batch,
        "rounds": len(rates["whole"]),
        **{f"{name}_samples_s": median(some) for name, some in rates.items()},
        **{f"{name}_spread": spread(some) for name, some in rates.items()},
        **{name: median(some) for name, some in ratios.items()},
        "bytes_read_per_rank": _by_rank(found, "bytes_read"),
        "bytes_fetched_per_rank": _by_rank(found, "bytes_fetched"),
        "load": os.getloadavg()[0],
    }


def _by_rank(found: Sequence[Any], key: str) -> dict[str, list[int]]:
    return {name: [one[key][name] for one in found] for name in found[0][key]}


def evict(folder: Path) -> None:
    """Ask the kernel to drop the set's files from its page cache."""
    for path in folder.iterdir():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


class _Way(ABC):
    """A way to bring batches to this rank."""

    source: Source

    @abstractmethod
    def epoch(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch."""

    def close(self) -> None:
        self.source.close()


def _epoch(mesh: Mesh, case: IoCase, way: _Way, epoch: int) -> tuple[float, int, int]:
    """Return an epoch's seconds, bytes read from files, and bytes that came from the device."""
    if mesh.rank == 0:
        evict(Path(case.folder))
    mesh.agree("bench io: evicted")
    read, fetched = way.source.counts.requested_bytes, _from_device()
    start = time.perf_counter()
    for _ in way.epoch(epoch):
        pass
    mesh.agree("bench io: epoch")
    took = time.perf_counter() - start
    return took, way.source.counts.requested_bytes - read, _from_device() - fetched


def _from_device() -> int:
    """Return how many bytes this process made the kernel fetch from storage; Linux only."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes")), 0)


class _Slabs(_Way):
    """The loader, with or without the store."""

    def __init__(self, mesh: Mesh, case: IoCase, degrees: str, *, stored: bool) -> None:
        self.source = open_source(case.folder)
        self.loader = Loader(
            self.source,
            planned_layouts(self.source, degrees, batch=case.batch),
            mesh=mesh,
            prefetch=PREFETCH,
            store_bytes=case.count * case.sample_bytes if stored else None,
        )

    def epoch(self, epoch: int) -> Iterator[Any]:
        self.loader.set_epoch(epoch)
        return iter(self.loader)

    def close(self) -> None:
        self.loader.close()


class _Whole(_Way):
    """Rank 0 reads whole samples and sends every rank its slab."""

    def __init__(self, mesh: Mesh, case: IoCase) -> None:
        self.mesh, self.case = mesh, case
        self.source = open_source(case.folder)
        self.layouts = planned_layouts(self.source, f"d{mesh.size}", batch=case.batch)
        self.order = Order(case.count, case.batch)

    def epoch(self, epoch: int) -> Iterator[Any]:
        order = self.order.epoch(epoch)
        numbers = [self.order.of(order, number) for number in range(len(self.order))]
        read = _ahead(self._read, numbers) if self.mesh.rank == 0 else iter(numbers)
        for samples, found in zip(numbers, read):
            layouts = [
                layout.with_shape((len(samples), *layout.shape[1:])) for layout in self.layouts
            ]
            if self.mesh.rank == 0:
                yield self._send(found, layouts)
            else:
                yield self._receive(layouts)

    def _read(self, samples: list[int]) -> list[Array]:
        out = []
        for name, field in self.source.fields.items():
            batch = np.empty((len(samples), *field.shape), field.dtype)
            for row, sample in zip(batch, samples):
                self.source.read(sample, name, whole(field.shape), row)
            out.append(batch)
        return out

    def _send(self, batch: list[Array], layouts: list[Layout]) -> list[torch.Tensor]:
        parts = [
            [torch.from_numpy(np.array(field[layout.slab(rank)])) for rank in range(self.mesh.size)]
            for field, layout in zip(batch, layouts)
        ]
        sent = [
            (self.mesh.send(field[rank], rank, tag=number + 1, layer="bench io"), rank)
            for number, field in enumerate(parts)
            for rank in range(1, self.mesh.size)
        ]
        for work, rank in sent:
            self.mesh.wait(work, "send", peer=rank, layer="bench io")
        return [field[0] for field in parts]

    def _receive(self, layouts: list[Layout]) -> list[torch.Tensor]:
        out = []
        for number, (layout, field) in enumerate(zip(layouts, self.source.fields.values())):
            slab = np.empty(layout.local_shape(self.mesh.rank), field.dtype)
            out.append(torch.from_numpy(slab))
            work = self.mesh.receive(out[-1], 0, tag=number + 1, layer="bench io")
            self.mesh.wait(work, "receive", peer=0, layer="bench io")
        return out


def _ahead(make: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
    """Make things in a thread, a few ahead of need."""
    ready: queue.Queue[Any] = queue.Queue(PREFETCH)

    def run() -> None:
        for item in items:
            ready.put(make(item))

    threading.Thread(target=run, daemon=True).start()
    for _ in items:
        yield ready.get()
