"""Messages that start as one, as NCCL needs them, shown over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilewise as tw
from tilewise import Mesh
from tilewise.comm.pool import Pool


def step(mesh: Mesh, bundles: bool) -> tuple[int, list[Tensor]]:
    """Train one step of a split network; returns how many bundles there were, and the results."""
    mesh.bundles = bundles
    started = 0
    batch = dist.batch_isend_irecv

    def counted(messages: Sequence[Any]) -> Any:
        nonlocal started
        started += 1
        return batch(messages)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 5, padding=2)
    )
    x = torch.randn(2, 2, 11, 9)
    split = tw.parallelize(model, x, {"0": "h2 w2", "1": "h2 w2", "2": "n2 f2"}, mesh=mesh)
    slab = split.scatter(x).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counted)
        y = split(slab)
        y.square().sum().backward()
    return started, [y.detach(), slab.grad, *(p.grad for p in split.parameters())]


@pytest.mark.parametrize("ranks", [4])
def test_bundled_messages_bring_what_single_ones_do(ranks: int) -> None:
    pool = Pool(ranks, timeout=60.0)
    try:
        everyone = tuple(range(ranks))
        single = pool.run(everyone, step, (False,), 120)
        bundled = pool.run(everyone, step, (True,), 120)
    finally:
        pool.close()
    for (none, expected), (some, found) in zip(single, bundled, strict=True):
        assert none == 0
        # two halos, statistics, what moves between layouts: there and back
        assert some >= 6
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
