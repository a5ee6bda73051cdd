"""Latency and bandwidth of what carries the messages, with a fitted α + β·bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.auto.tell import slowest
from tilewise.comm import Mesh

SIZES = tuple(4**k for k in range(3, 13))  # 64 bytes to 16 MiB
PRIMITIVES = ("exchange", "sum", "all-gather", "reduce-scatter")


@dataclass
class Primitive:
    """One kind of message: seconds by bytes, and the line through them."""

    name: str
    seconds: dict[int, float]
    alpha_s: float
    beta_s_per_byte: float
    fit_error: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_messages(mesh: Mesh, rounds: int) -> Generator[int, None, list[Primitive]]:
    """Time each primitive at each size over all ranks; yields after each size."""
    torch.set_num_threads(1)
    found = []
    for name in PRIMITIVES:
        seconds = {}
        for size in SIZES:
            seconds[size] = _time(mesh, _prepare(mesh, name, size), rounds, size)
            yield 1
        found.append(Primitive(name, seconds, *fit(seconds)))
    return found


def fit(seconds: dict[int, float]) -> tuple[float, float, float]:
    """Fit α + β·bytes by least squares of relative errors; returns α, β and the median error."""
    sizes = torch.tensor([float(size) for size in seconds], dtype=torch.float64)
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    rows = torch.stack([1 / times, sizes / times], 1)
    solved = torch.linalg.lstsq(rows, torch.ones(len(times), 1, dtype=torch.float64)).solution
    alpha, beta = (max(float(value), 0.0) for value in solved.flatten())
    errors = [abs(alpha + beta * size - found) / found for size, found in seconds.items()]
    return alpha, beta, median(errors)


def _prepare(mesh: Mesh, name: str, size: int) -> Callable[[], Any]:
    group, count = mesh.group(), size // 4
    mine, other = torch.ones(count), torch.empty(count)
    if name == "exchange":
        return lambda: _exchange(mesh, mine, other)
    if name == "sum":
        return lambda: dist.all_reduce(mine, group=group.handle)
    whole = torch.empty(count * mesh.size)
    parts = list(whole.split(count))
    if name == "all-gather":
        return lambda: dist.all_gather(parts, mine, group=group.handle)
    return lambda: dist.reduce_scatter(other, parts, group=group.handle)


def _exchange(mesh: Mesh, mine: Tensor, other: Tensor) -> None:
    """Send to the next rank and receive from the one before."""
    after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    works = [
        (mesh.receive(other, before, tag=1, layer="bench"), "receive", before),
        (mesh.send(mine, after, tag=1, layer="bench"), "send", after),
    ]
    for work, kind, peer in works:
        mesh.wait(work, kind, peer=peer, layer="bench")


def _time(mesh: Mesh, send: Callable[[], Any], rounds: int, size: int) -> float:
    repeats = max(1, min(50, 2**22 // size))
    times = []
    for _ in range(rounds + 1):
        mesh.agree("bench")
        start = time.perf_counter()
        for _ in range(repeats):
            send()
        times.append((time.perf_counter() - start) / repeats)
    return slowest(mesh, [median(times[1:])])[0]
