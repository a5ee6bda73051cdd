"""One rank of a world of two in which rank 1 fails in the middle of a model's pass.

Prints what rank 0 meets. Run as: failing_models.py RANK STORE SCENARIO
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tilewise as tw
from tilewise import Mesh, ParallelModel, Plan
from tilewise.errors import TilewiseError

TIMEOUT = 2.0
X = torch.ones(2, 2, 8, 8)


class Failure(Exception):
    """What goes wrong on rank 1."""


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
    return nn.Sequential(*layers)


def build(mesh: Mesh, **options: Any) -> ParallelModel:
    graph = tw.capture(net(), (X,))
    return ParallelModel(net(), graph, Plan.uniform(graph, "h2", **options), mesh)


@contextmanager
def failing(mesh: Mesh, name: str) -> Iterator[None]:
    """Let the local operator of this name fail on rank 1."""

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if mesh.rank == 1 and func.overloadpacket.__name__ == name:
                raise Failure(name)
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


def forward(mesh: Mesh) -> None:
    model = build(mesh)
    with failing(mesh, "relu"):
        model(model.scatter(X))


def backward(mesh: Mesh) -> None:
    model = build(mesh)
    y = model(model.scatter(X))
    with failing(mesh, "convolution_backward"):
        y.sum().backward()


def recomputed_backward(mesh: Mesh) -> None:
    model = build(mesh, recompute=("*",))
    y = model(model.scatter(X))
    with failing(mesh, "relu"):
        y.sum().backward()


def no_forward(mesh: Mesh) -> None:
    model = build(mesh)
    if mesh.rank == 1:
        raise Failure
    model(model.scatter(X))


def no_backward(mesh: Mesh) -> None:
    model = build(mesh)
    y = model(model.scatter(X))
    if mesh.rank == 1:
        raise Failure
    y.sum().backward()


def death(mesh: Mesh) -> None:
    model = build(mesh)
    y = model(model.scatter(X))
    if mesh.rank == 1:
        os._exit(0)
    y.sum().backward()


def main(rank: int, path: str, name: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    store.set_timeout(timedelta(seconds=120))
    tw.capture(net(), (X,))  # whatever is slow the first time
    store.set(f"ready/{rank}", "1")
    store.wait(["ready/0", "ready/1"])
    mesh = Mesh()
    began = time.monotonic()
    text = "nothing raised"
    try:
        globals()[name](mesh)
    except (TilewiseError, Failure) as error:
        text = f"{type(error).__name__}: {error}"
    if rank == 1:
        store.wait(["done"])  # stay silent, but alive
    print(json.dumps((text, time.monotonic() - began)), flush=True)
    store.set("done", "1")
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
