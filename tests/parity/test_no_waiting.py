"""A training step never asks a tensor for its value, nor copies from the host: a GPU would stop."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from drawing import THOROUGH
from tilewise import Graph, Mesh, ParallelModel, Plan, capture
from tilewise.comm import Chain
from tilewise.graph.reach import Passing, Reach, leave
from tilewise.models import unet3d
from tilewise.ops.constants import numbers, there
from tilewise.testing import ranks

ASKING = {
    "item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__", "numpy",
    "cpu", "nonzero", "argwhere", "unique", "masked_select", "equal", "allclose", "is_nonzero",
    "new_tensor",
}  # fmt: skip

COPYING = {"tensor", "as_tensor", "to"}


def _names_a_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(arg, (torch.device, Tensor)) for arg in (*args, *kwargs.values()))


class NoAsking(TorchFunctionMode):
    """Raise where the value of a tensor is asked for, or numbers of the host go to a device.

    Without a GPU all devices are one: what is made or copied for a named device counts.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKING:
            raise AssertionError(f"{name} waits for the device")
        if name in COPYING and _names_a_device(args[1:], kwargs or {}):
            raise AssertionError(f"{name} copies from the host and waits for the device")
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
        x = F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)
        x = F.interpolate(self.up(F.silu(self.down(x))), scale_factor=2, mode="bilinear")
        out: Tensor = self.head(self.drop(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return out


CASES: dict[str, Any] = {
    "net": (Net, (4, 3, 9, 8), (4, 6)),
    "unet3d": (lambda: unet3d(width=0.0625), (2, 1, 8, 16, 8), (2, 3, 8, 16, 8)),
}
PLANS = ("n2 h2", "c2 f2", "h2 f2", "h2 w2")
TURNS = {"net": PLANS, "unet3d": PLANS if THOROUGH else PLANS[:2]}


def drawn(name: str) -> tuple[Tensor, Tensor]:
    _, shape, outputs = CASES[name]
    torch.manual_seed(0)
    return torch.randn(shape), torch.randn(outputs)


@cache
def captured(name: str) -> Graph:
    x, target = drawn(name)
    return capture(CASES[name][0](), (x,), F.mse_loss, targets=(target,))


def step(mesh: Mesh, name: str, graph: Graph, plan: str) -> None:
    x, target = drawn(name)
    model = ParallelModel(CASES[name][0](), graph, Plan.uniform(graph, plan), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    slabs = model.scatter(x, target)
    for number in range(3):
        optimizer.zero_grad()
        if number == 0:  # opening groups, capturing and constants are not the hot path
            model.loss(*slabs).backward()
            model.mean(model(slabs[0]))
            optimizer.step()
            continue
        agree = mesh.agree
        mesh.agree = lambda *_, **__: None  # type: ignore[method-assign]  # hosts among themselves
        try:
            with NoAsking():
                model.loss(*slabs).backward()
                model.mean(model(slabs[0]))
        finally:
            mesh.agree = agree  # type: ignore[method-assign]
        optimizer.step()


@pytest.mark.parametrize(("name", "plan"), [(name, plan) for name in CASES for plan in TURNS[name]])
def test_no_value_is_asked_for(name: str, plan: str) -> None:
    ranks(4, step, name, captured(name), plan)


def ask(mesh: Mesh) -> None:
    with NoAsking():
        torch.ones(2).sum().item()


def copy(mesh: Mesh) -> None:
    x = torch.ones(2)
    with NoAsking():
        torch.tensor([1, 2], dtype=torch.long, device=x.device)


def test_the_check_can_fail() -> None:
    with pytest.raises(AssertionError, match="item waits for the device"):
        ranks(1, ask)
    with pytest.raises(AssertionError, match="tensor copies from the host"):
        ranks(1, copy)


def test_the_thread_of_messages_leaves_no_device() -> None:
    """Outputs lie on a device from which nothing can be copied; the token is on the host."""
    chain = Chain()
    chain.start()
    assert chain.token is not None
    output = torch.ones(3, device="meta", requires_grad=True) * 2
    passing = Passing(Mesh.alone(), Reach(), [False])
    leave((output,), passing, chain)[0].sum().backward()
    assert chain.token.grad is not None
    assert passing.used == [True]


def test_constants_go_to_a_device_once() -> None:
    """They are made where a later pass with gradients can use them, too."""
    host, device = torch.arange(3), torch.device("meta")
    with torch.inference_mode():
        copies = [there(host, device, torch.float64) for _ in range(2)]
        made = [numbers((0, 1), torch.long, device) for _ in range(2)]
    for first, second in (copies, made):
        assert first is second
        assert first.device == device
        assert not first.is_inference()
    assert there(host, host.device) is host
