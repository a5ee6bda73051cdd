"""Inputs that come with their halo: the same training, and no message for the first layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import data_files
import tilewise as tw
from tilewise.comm import Mesh
from tilewise.layout import Cover
from tilewise.testing import RanksError, ranks

COUNT, SHAPE = 5, (2, 9, 8, 7)


class Stem(nn.Module):
    """A first layer of some kind, and a layer behind it."""

    def __init__(self, first: nn.Module, *, skip: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.skip = first, nn.Conv3d(3, 3, 3, padding=1), skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y.mean((2, 3, 4)) + (x.mean((2, 3, 4)).sum(1, keepdim=True) if self.skip else 0)


STEMS = {
    "same": lambda: Stem(nn.Conv3d(2, 3, 3, padding=1)),
    "strided": lambda: Stem(nn.Conv3d(2, 3, (5, 3, 2), stride=2, padding=(2, 1, 0))),
    "dilated": lambda: Stem(nn.Conv3d(2, 3, 3, padding=2, dilation=2)),
    "skip": lambda: Stem(nn.Conv3d(2, 3, 3, padding=1), skip=True),
}


def train(mesh: Mesh, stem: str, plan: str, folder: str, read_halos: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    model = STEMS[stem]().double()
    x, y = torch.empty(2, *SHAPE).double(), torch.empty(2, 3).double()
    split = tw.parallelize(
        model, x, plan, loss=F.mse_loss, targets=y, mesh=mesh, read_halos=read_halos
    )
    loader = tw.data.loader(
        folder,
        split.input_covers,
        mesh=mesh,
        transforms=dict.fromkeys("xy", torch.float64),
        store_bytes=1 << 20,
    )
    optimizer = torch.optim.SGD(split.parameters(), lr=1e-3)
    losses = []
    with mesh.trace.record() as events:
        for _ in range(2):
            for batch in loader:
                optimizer.zero_grad()
                loss = split.loss(*batch, batch=batch.size)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    loader.close()
    moved = sum(e.bytes for e in events if e.operation == "send" and e.layer == "first")
    covers = isinstance(split.input_covers[0], Cover)
    whole = torch.arange(2.0 * np.prod(SHAPE)).double().reshape(2, *SHAPE) / 1000
    with torch.no_grad():
        out = split.gather(split(split.scatter(whole)))
    return {"losses": losses, "moved": moved, "covers": covers, "out": out.numpy()}


@pytest.mark.parametrize(
    ("stem", "plan", "world"),
    [
        ("same", "d2 h2", 4),
        ("same", "n2 w3", 6),
        ("strided", "d2 w2", 4),
        ("dilated", "h4", 4),
        ("same", "d2 f2", 4),
        ("skip", "d2", 2),
    ],
)
def test_training_is_the_same(stem: str, plan: str, world: int, tmp_path: Path) -> None:
    data_files.write(tmp_path, "npy", data_files.arrays(COUNT, SHAPE, (3,)))
    expected = ranks(1, train, stem, "1", str(tmp_path), False)[0]
    exchanged = ranks(world, train, stem, plan, str(tmp_path), False)
    found = ranks(world, train, stem, plan, str(tmp_path), True)
    for one in found:
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        np.testing.assert_allclose(one["out"], expected["out"], rtol=1e-10)
    assert any(one["moved"] for one in exchanged)
    if stem == "skip":
        assert not any(one["covers"] for one in found)
    else:
        assert all(one["covers"] for one in found)
        assert not any(one["moved"] for one in found) or "f" in plan


def wants_gradient(mesh: Mesh) -> None:
    x = torch.randn(2, *SHAPE).double()
    split = tw.parallelize(STEMS["same"]().double(), x, "d2", mesh=mesh, read_halos=True)
    split(split.scatter(x).requires_grad_())


def test_an_input_that_needs_a_gradient_is_refused() -> None:
    with pytest.raises(RanksError, match="without read_halos"):
        ranks(2, wants_gradient)
