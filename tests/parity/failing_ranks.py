"""One rank of a small world in which rank 1 does not do its part; prints what rank 0 meets.

Run as: failing_ranks.py RANK STORE SCENARIO...
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from tilewise.comm import Exchange, Mesh
from tilewise.errors import TilewiseError
from tilewise.layout import PARTIAL, Axes, Axis, Block, Cover, Layout

TIMEOUT = 2.0
SHARED = Layout((4,), [Axis(2, 0)])
COPIES = Layout.replicated((4,), ranks=2)
SUMS = Layout((4,), [Axis(2, PARTIAL)])


def silent_receive(mesh: Mesh) -> None:
    exchange = Exchange(mesh, SHARED, COPIES, layer="conv1")
    if mesh.rank == 0:
        exchange.start(torch.zeros(2)).finish()


def silent_send(mesh: Mesh) -> None:
    first = Cover((4,), Axes([Axis(2, 0)]), ((Block.of(0, 4), Block.of(4, 4)),))
    exchange = Exchange(mesh, first, COPIES, layer="conv1")
    if mesh.rank == 0:
        exchange.start(torch.zeros(4)).finish()


def silent_sum(mesh: Mesh) -> None:
    exchange = Exchange(mesh, SUMS, COPIES, layer="norm1")
    if mesh.rank == 0:
        exchange.start(torch.zeros(4)).finish()


def silent_backward(mesh: Mesh) -> None:
    x = torch.zeros(2, requires_grad=True)
    y = Exchange(mesh, SHARED, SUMS, layer="conv1")(x)
    if mesh.rank == 0:
        y.sum().backward()


def silent_agree(mesh: Mesh) -> None:
    if mesh.rank == 0:
        mesh.agree("plan", 1)


def silent_mesh(mesh: Mesh) -> None:
    if mesh.rank == 0:
        Mesh()


def another_path(mesh: Mesh) -> None:
    exchanges = [Exchange(mesh, SHARED, COPIES, layer=name) for name in ("conv1", "conv2")]
    exchanges[mesh.rank].start(torch.zeros(2)).finish()


def another_dtype(mesh: Mesh) -> None:
    dtype = torch.float64 if mesh.rank == 0 else torch.float32
    exchange = Exchange(mesh, SHARED, COPIES, layer="conv1")
    exchange.start(torch.zeros(2, dtype=dtype)).finish()


def death(mesh: Mesh) -> None:
    exchange = Exchange(mesh, SHARED, COPIES, layer="conv1")
    if mesh.rank == 1:
        os._exit(0)
    exchange.start(torch.zeros(2)).finish()


def death_in_sum(mesh: Mesh) -> None:
    exchange = Exchange(mesh, SUMS, COPIES, layer="norm1")
    if mesh.rank == 1:
        os._exit(0)
    exchange.start(torch.zeros(4)).finish()


def main(rank: int, path: str, scenarios: list[Callable[[Mesh], None]]) -> None:
    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    store.set_timeout(timedelta(seconds=60))
    met = {}
    for number, scenario in enumerate(scenarios):
        store.set(f"ready/{number}/{rank}", "1")
        store.wait([f"ready/{number}/{other}" for other in (0, 1)])
        began = time.monotonic()
        text = "nothing raised"
        try:
            mesh = Mesh()
            scenario(mesh)
        except TilewiseError as error:
            text = f"{type(error).__name__}: {error}"
        met[scenario.__name__] = (text, time.monotonic() - began)
        if rank == 1 and text == "nothing raised":
            store.wait([f"done/{number}"])  # stay silent, but alive
        store.set(f"done/{number}", "1")
    print(json.dumps(met), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], [globals()[name] for name in sys.argv[3:]])
