"""What rank 1 of two fails to do; rank 0 must be told."""

from __future__ import annotations

import os

import torch

from tilewise.comm import Exchange, Mesh
from tilewise.layout import PARTIAL, Axes, Axis, Block, Cover, Layout
from worlds import TIMEOUT

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
        Mesh(timeout=TIMEOUT)


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
