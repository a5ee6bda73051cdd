"""A training step never asks a tensor for its value: on a GPU that would stop it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tilewise import Mesh, parallelize
from tilewise.models import unet3d
from tilewise.testing import ranks

ASKING = {
    "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__", "numpy",
    "cpu", "nonzero", "argwhere", "unique", "masked_select", "equal", "allclose", "is_nonzero",
}  # fmt: skip


class NoAsking(TorchFunctionMode):
    """Raise where the value of a tensor is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKING:
            raise AssertionError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.group = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = F.max_pool2d(self.group(x), 3, stride=1, padding=1) + x
        x = F.interpolate(self.up(F.silu(self.down(x))), scale_factor=2, mode="bilinear")
        out: Tensor = self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return out


CASES: dict[str, Any] = {
    "net": (Net, (4, 3, 9, 8), (4, 6)),
    "unet3d": (lambda: unet3d(width=0.0625), (2, 1, 8, 16, 8), (2, 3, 8, 16, 8)),
}


def step(mesh: Mesh, name: str, plan: str) -> None:
    build, shape, outputs = CASES[name]
    torch.manual_seed(0)
    x, target = torch.randn(shape), torch.randn(outputs)
    model = parallelize(build(), x, plan, loss=F.mse_loss, targets=target, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slabs = model.scatter(x, target)
    for number in range(3):
        optimizer.zero_grad()
        if number == 0:  # opening groups and capturing are not the hot path
            model.loss(*slabs).backward()
            optimizer.step()
            continue
        agree = mesh.agree
        mesh.agree = lambda *_, **__: None  # type: ignore[method-assign]  # hosts among themselves
        try:
            with NoAsking():
                model.loss(*slabs).backward()
        finally:
            mesh.agree = agree  # type: ignore[method-assign]
        optimizer.step()


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2", "h2 f2", "h2 w2"])
@pytest.mark.parametrize("name", CASES)
def test_no_value_is_asked_for(name: str, plan: str) -> None:
    ranks(4, step, name, plan)


def ask(mesh: Mesh) -> None:
    with NoAsking():
        torch.ones(2).sum().item()


def test_the_check_can_fail() -> None:
    with pytest.raises(AssertionError, match="item waits for the device"):
        ranks(1, ask)
