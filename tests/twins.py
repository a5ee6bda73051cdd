"""Small networks, and a parallel model beside the same one on one device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise import Mesh, ParallelModel, Plan, capture, full_state_dict
from tilewise.graph import Graph, as_plan
from tilewise.testing.compare import assert_close


class Small(nn.Module):
    """A stem, a residual block with squeeze and excitation, a strided layer and a linear head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6))
        self.conv = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 4, 1)
        self.excite = nn.Conv2d(4, 6, 1)
        self.down = nn.Conv2d(6, 10, 3, stride=2)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x), inplace=True)
        y = self.norm(self.conv(x))
        weight = F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))
        x = F.relu(x + y * torch.sigmoid(self.excite(weight)))
        x = self.drop(F.relu(self.down(x)))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class Dense(nn.Module):
    """An output for every pixel: two convolutions with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.last = nn.Conv2d(5, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.relu(self.norm(self.first(x))))
        return out


SHAPES = {"Small": (4, 3, 9, 8), "Dense": (4, 2, 7, 6)}
NETS: dict[str, Callable[..., nn.Module]] = {"Small": Small, "Dense": Dense}


def build(net: Callable[..., nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """Build a network with the same values in every process."""
    torch.manual_seed(3)
    model = net().to(dtype)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model


def draw(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Draw a tensor, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def classes(count: int, *shape: int, seed: int = 2) -> Tensor:
    """Draw classes, the same in every process."""
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


@cache
def captured(
    net: Callable[..., nn.Module],
    shape: tuple[int, ...],
    loss: Callable[..., Tensor] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Graph:
    """Capture once for all ranks and tests."""
    return capture(build(net, dtype), (draw(*shape, dtype=dtype),), loss)


def split(
    mesh: Mesh,
    model: nn.Module,
    graph: Graph,
    plan: str | Mapping[str, str] | Plan,
    **options: Any,
) -> ParallelModel:
    """Split a model whose graph was captured before."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return ParallelModel(model, graph, as_plan(graph, plan), mesh, **options)


def whole_grads(model: ParallelModel) -> dict[str, Tensor | None]:
    """Gather the gradients of all parameters."""
    return {
        name: None if p.grad is None else model.gather_held(name, p.grad)
        for name, p in model.named_parameters()
    }


def assert_same(
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    tolerance: float = 1e-10,
) -> None:
    """Compare tensors by name; None must be None in both."""
    assert list(found) == list(expected)
    sizes = [t.detach().abs().max().item() for t in expected.values() if t is not None]
    for name, tensor in expected.items():
        other = found[name]
        assert (tensor is None) == (other is None), f"{name}: {other} instead of {tensor}"
        if tensor is not None and other is not None:
            assert_close(other, tensor, name, largest=max(sizes), tolerance=tolerance)


def assert_grads(model: ParallelModel, serial: nn.Module, tolerance: float = 1e-10) -> None:
    """Compare all parameter gradients with one device's."""
    assert_same(
        whole_grads(model),
        {name: p.grad for name, p in serial.named_parameters()},
        tolerance=tolerance,
    )


def assert_state(model: ParallelModel, serial: nn.Module, tolerance: float = 1e-10) -> None:
    """Compare all parameters and buffers with one device's."""
    assert_same(full_state_dict(model), serial.state_dict(), tolerance=tolerance)
