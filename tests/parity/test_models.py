"""Every shipped network equals one device under every kind of plan, with no fallback.

Those of many layers are in test_deep_models.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from drawing import THOROUGH
from model_cases import (
    CASES,
    DEEP,
    DRAWN,
    PLANS,
    TURNS,
    equals_one_device,
    equals_under_random_plans,
)
from tilewise import Degrees, Mesh, models
from tilewise.testing import ranks
from tilewise.testing.verify import verify


def test_all_plans_get_their_turn() -> None:
    of_images = [some for name, some in TURNS.items() if len(CASES[name][1]) == 4]
    assert {plan for some in of_images for plan in some} == {*PLANS}


@pytest.mark.parametrize("name", [name for name in CASES if name not in DEEP])
def test_model_equals_one_device(name: str) -> None:
    equals_one_device(name)


@pytest.mark.parametrize("name", [name for name in DRAWN if name not in DEEP])
def test_random_plans_equal_one_device(name: str) -> None:
    equals_under_random_plans(name)


class SmallResNet(nn.Module):
    """Three residual blocks; few layers, so that rounding does not grow over twenty steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(3))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms):
            x = x + torch.relu(norm(conv(x)))
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "plans"),
    [
        ("cosmoflow", {"size": 16, "width": 0.125}, (2, 4, 16, 16, 16), ("c2",)),
        ("", {}, (4, 3, 33, 35), ("h2", "n2 w2")),
    ],
)
def test_loss_curves_agree_over_twenty_steps(
    name: str, arguments: dict[str, Any], shape: tuple[int, ...], plans: tuple[str, ...]
) -> None:
    for plan in ("h2", "c2", "n2 w2") if THOROUGH else plans:
        losses = ranks(
            Degrees.parse(plan).product, follow, name, arguments, shape, plan, timeout=280
        )[0]
        assert len(losses) == 20
        for found, expected in losses:
            assert abs(found - expected) <= 1e-9 * abs(expected)


def follow(
    mesh: Mesh, name: str, arguments: dict[str, Any], shape: tuple[int, ...], plan: str
) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = (models.get(name) if name else SmallResNet)(**arguments).double()
    x = torch.randn(shape, dtype=torch.float64)
    return verify(mesh, model, [x], plan, steps=20, lr=1e-3).losses
