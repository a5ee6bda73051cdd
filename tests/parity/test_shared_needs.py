"""Operators that need the same part of a tensor bring it once, the same way on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise import Mesh, capture, parallelize
from tilewise.comm import joint
from tilewise.comm.pool import Pool
from tilewise.graph.parallel import as_plan
from tilewise.simulate import simulate
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close


class Branches(nn.Module):
    """A convolution and a pool whose windows are alike, as in Inception."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.last = nn.Conv2d(6, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.cat([self.conv(x), F.avg_pool2d(x, 3, 1, 1)], 1))
        return found


def fewer_samples(mesh: Mesh) -> list[int]:
    """Bring fewer samples than they have parts; returns how many tags each batch takes."""
    torch.manual_seed(0)
    serial, split = Branches().double(), Branches().double()
    split.load_state_dict(serial.state_dict())
    whole = torch.randn(2, 3, 8, 6, dtype=torch.float64)
    model = parallelize(split, whole, {"*": "n2 h2", "last": "c2 h2"}, mesh=mesh)
    tags = []
    for batch in (2, 1):
        before = mesh.tag()
        x = whole[:batch]
        y = model(model.scatter(x, batch=batch), batch=batch)
        assert_close(model.gather(y, batch=batch), serial(x), "output")
        y.square().sum().backward()
        tags.append(mesh.tag() - before)
    return tags


def test_ranks_without_samples_share_as_the_others_do() -> None:
    first, *others = ranks(4, fewer_samples)
    assert all(tags == first for tags in others)
    assert first[0] == first[1]


class Skips(nn.Module):
    """What the first layer makes is added twice, later on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (
            nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.third(self.second(x)) + x
        found: Tensor = self.fourth(y) + x
        return found


PLAN = {"first": "n2", "second": "n2", "third": "h2", "fourth": "w2"}


def skip_twice(mesh: Mesh, small: int) -> int:
    """Add a tensor in two layouts that it does not have; returns how many messages are sent."""
    torch.manual_seed(0)
    serial, split = Skips().double(), Skips().double()
    split.load_state_dict(serial.state_dict())
    whole = torch.randn(2, 3, 6, 6, dtype=torch.float64, requires_grad=True)
    model = parallelize(split, whole.detach(), PLAN, mesh=mesh)
    slab = model.scatter(whole.detach()).requires_grad_()
    sent = 0
    isend = dist.isend

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return isend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joint, "SMALL_BYTES", small)
        patch.setattr(dist, "isend", counted)
        y = model(slab)
    expected = serial(whole)
    assert_close(model.gather(y), expected, "output")
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_close(slab.grad, model.scatter(whole.grad), "gradient of x")
    for (name, found), one in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert_close(found.grad, one.grad, name)
    return sent


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_a_tensor_that_moves_to_two_layouts_sends_one_small_message(backend: str) -> None:
    pool = Pool(2, backend=backend, timeout=60.0)
    try:
        apart, together = (pool.run((0, 1), skip_twice, (n,), 120) for n in (0, 1 << 20))
    finally:
        pool.close()
    assert [count - 1 for count in apart] == together


def test_messages_that_travel_as_one_count_for_their_layers() -> None:
    model, x = Skips(), torch.randn(2, 3, 6, 6)
    graph = capture(model, x)
    found = simulate(model, graph, as_plan(graph, PLAN), devices=2, machine="lassen")
    assert found.agreement.planned_bytes > 0
    assert found.agreement.differences == ()
