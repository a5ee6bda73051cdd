"""Time training steps with and without input: what reading costs CosmoFlow on 64³."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.functional import mse_loss

from tilewise.bench.io import PREFETCH, IoCase, evict
from tilewise.bench.timing import slowest, spread
from tilewise.comm import Mesh
from tilewise.data.loading import Loader
from tilewise.data.transform import Log1p
from tilewise.graph import parallelize
from tilewise.models import cosmoflow

EDGE = 64


def measure_training(
    mesh: Mesh, case: IoCase, rounds: int, steps: int
) -> Generator[int, None, dict[str, list[float]]]:
    """Return the seconds of steps on one batch in memory, from files, and from the store.

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
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for epoch in range(rounds):
        for name, batches in kinds.items():
            if mesh.rank == 0:
                evict(Path(case.folder))
            mesh.agree("bench io: evicted")
            coming = batches(epoch)
            step(next(coming))
            mesh.agree("bench io: steps")
            start = time.perf_counter()
            for _ in range(steps):
                step(next(coming))
            times[name].append(slowest(mesh, [(time.perf_counter() - start) / steps])[0])
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


def training_report(times: dict[str, list[float]]) -> dict[str, Any]:
    """Put together what was measured: medians, and the share of a step that input costs."""
    shares = {
        name: median([1 - without / took for took, without in zip(some, times["memory"])])
        for name, some in times.items()
        if name != "memory"
    }
    return {
        "step_s": {name: median(some) for name, some in times.items()},
        "step_spread": {name: spread(some) for name, some in times.items()},
        "input_share": shares["files"],
        "input_share_store": shares["store"],
    }
