"""Passes of a split model in which rank 1 of two fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tilewise as tw
from tilewise import Mesh, ParallelModel, Plan
from worlds import Failure

X = torch.ones(2, 2, 8, 8)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
    return nn.Sequential(*layers)


def build(mesh: Mesh, **options: Any) -> ParallelModel:
    graph = tw.capture(net(), (X,))
    dist.barrier()  # a first capture is slow, and slower on one rank than on the other
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
