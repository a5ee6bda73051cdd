"""Operators that need the same part of a tensor bring it once, the same way on all ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise import Mesh, parallelize
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
