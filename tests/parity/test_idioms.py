"""Networks in the idioms people use lower natively and equal one device under every plan.

Half of the plans get their turn for each; TILEWISE_THOROUGH=1 runs them all.
"""

from __future__ import annotations

import pytest
import torch

from drawing import THOROUGH
from idioms import IDIOMS
from tilewise import Degrees, Graph, Mesh, capture
from tilewise.testing import ranks
from tilewise.testing.verify import LOSSES, Result, draw_targets, verify

PLANS = ("n2", "h2", "w3", "c2", "f2", "h2 w2", "c2 f2", "n2 h2 c2")


def build(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    make, shape = IDIOMS[name]
    torch.manual_seed(3)
    model = make().double()
    return model, torch.randn(shape, dtype=torch.float64)


def check(mesh: Mesh, name: str, graph: Graph, plan: str) -> Result:
    model, x = build(name)
    return verify(mesh, model, [x], plan, steps=1, graph=graph)


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_equals_one_device(name: str) -> None:
    model, x = build(name)
    graph = capture(model, x, LOSSES["mse"], targets=draw_targets(model, [x], "mse"))
    turn = list(IDIOMS).index(name) % 2
    for plan in PLANS if THOROUGH else PLANS[turn::2]:
        plan = plan.replace("h", "w") if x.dim() == 3 and "w" not in plan else plan
        plan = plan.replace("h2 ", "") if x.dim() == 3 else plan
        result = ranks(Degrees.parse(plan).product, check, name, graph, plan)[0]
        assert result.ok, (plan, result)
        assert not result.fallbacks, (plan, result.fallbacks)
