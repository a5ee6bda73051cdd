"""Time training steps with and without input: what reading costs CosmoFlow on 64³."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import mse_loss

from tilewise.auto import parallelize
from tilewise.auto.tell import slowest
from tilewise.bench.io import PREFETCH, IoCase, evict
from tilewise.bench.timing import spread
from tilewise.comm import Mesh
from tilewise.data.loading import Loader
from tilewise.data.transform import Log1p
from tilewise.models import cosmoflow

EDGE = 64


@dataclass
class StepTimes:
    """Seconds of every step, on its slowest rank: in all, of a rank's cores, waiting for input."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    @property
    def lists(self) -> tuple[list[float], list[float], list[float]]:
        return self.wall, self.cpu, self.waiting


def measure_training(
    mesh: Mesh, case: IoCase, rounds: int, steps: int
) -> Generator[int, None, dict[str, StepTimes]]:
    """Time steps on one batch in memory, from files, and from the store.

    Every round trains `steps` steps of each kind, after one that is not timed; while they run, the
    loader goes on making batches ahead as it does in the middle of an epoch.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.rand(case.batch, 4, EDGE, EDGE, EDGE), torch.rand(case.batch, 4)
    model = parallelize(
        cosmoflow(size=EDGE), (x,), f"d{mesh.size}", loss=mse_loss, targets=y, mesh=mesh
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loaders = {
        name: Loader(
            case.folder,
            model.input_layouts,
            mesh=mesh,
            prefetch=PREFETCH,
            store_bytes=budget,
            transforms={"x": Log1p()},
        )
        for name, budget in (("files", None), ("store", case.count * case.sample_bytes))
    }
    for _ in loaders["store"]:
        pass
    slabs = model.scatter(x, y)

    def step(batch: Sequence[torch.Tensor]) -> None:
        optimizer.zero_grad()
        model.loss(*batch).backward()
        optimizer.step()

    kinds: dict[str, Callable[[int], Iterator[Any]]] = {
        "memory": lambda epoch: repeat(slabs),
        **{name: _batches(loader) for name, loader in loaders.items()},
    }
    times = {name: StepTimes() for name in kinds}
    for epoch in range(rounds):
        for name, batches in kinds.items():
            if mesh.rank == 0:
                evict(Path(case.folder))
            mesh.agree("bench io: evicted")
            coming = batches(epoch)
            step(next(coming))
            mesh.agree("bench io: steps")
            took = StepTimes()
            for _ in range(steps):
                start, cpu = time.perf_counter(), time.process_time()
                batch = next(coming)
                took.waiting.append(time.perf_counter() - start)
                step(batch)
                took.wall.append(time.perf_counter() - start)
                took.cpu.append(time.process_time() - cpu)
            for some, mine in zip(times[name].lists, took.lists):
                some += slowest(mesh, mine)
            yield 1
    for loader in loaders.values():
        loader.close()
    return times


def batches_needed(steps: int) -> int:
    """Return how many batches an epoch must have for the loader to be at work in all steps."""
    return 1 + steps + PREFETCH


def _batches(loader: Loader) -> Callable[[int], Iterator[Any]]:
    def begin(epoch: int) -> Iterator[Any]:
        loader.set_epoch(epoch)
        return iter(loader)

    return begin


def training_report(times: dict[str, StepTimes]) -> dict[str, Any]:
    """Put together what was measured: medians of all steps, and the share that input costs.

    On a machine that others use, the share of the cores' time says more than that of the clock's.
    """
    without = times["memory"]

    def share(took: list[float], base: list[float]) -> float:
        return 1 - median(base) / median(took)

    return {
        "step_s": {name: median(one.wall) for name, one in times.items()},
        "step_spread": {name: spread(one.wall) for name, one in times.items()},
        "step_cpu_s": {name: median(one.cpu) for name, one in times.items()},
        "waiting_s": {name: median(one.waiting) for name, one in times.items()},
        "input_share": share(times["files"].wall, without.wall),
        "input_share_store": share(times["store"].wall, without.wall),
        "input_cpu_share": share(times["files"].cpu, without.cpu),
        "input_cpu_share_store": share(times["store"].cpu, without.cpu),
    }
