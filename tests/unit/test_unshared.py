"""Which gradients are written over, and that only those are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.graph import capture
from tilewise.graph.unshared import fresh_gradients, overwrites, unshared
from tilewise.ops import overwrite
from tilewise.ops.overwrite import Overwriting


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.twice = nn.Conv2d(2, 2, 3, padding=1)
        self.slope = slope

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        alone = F.leaky_relu(self.first(x), self.slope)
        shared = F.relu(self.second(alone))
        summed = F.relu(shared + x)
        returned = F.relu(self.twice(shared))
        return self.twice(summed).mean(), returned


def test_only_gradients_that_nobody_else_holds() -> None:
    """One is read twice, one by a sum, one is handed out."""
    program = capture(Net(), (torch.randn(2, 2, 5, 5),)).training
    free = unshared(program.nodes, program.output_values)
    kinds = {node.out: node.kind for node in program.nodes}
    assert sorted(kinds[value] for value in free) == ["leaky_relu", "relu"]
    over = [node for node in program.nodes if overwrites(node, free)]
    assert [node.kind for node in over] == ["leaky_relu", "relu"]
    reader = next(node for node in program.nodes if over[1].out in node.values())
    assert reader.path == "twice"
    assert fresh_gradients(program.nodes) == {
        "first.weight", "first.bias", "second.weight", "second.bias",
    }  # fmt: skip


def test_a_slope_that_turns_values_round_is_left_alone() -> None:
    program = capture(Net(slope=-0.5), (torch.randn(2, 2, 5, 5),)).training
    free = unshared(program.nodes, program.output_values)
    assert "leaky_relu" not in {node.kind for node in program.nodes if overwrites(node, free)}


@pytest.mark.parametrize("kind", ["relu", "leaky_relu"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("left", [None, "view", "small"])
def test_the_gradient_is_torchs_and_lies_where_it_came(
    kind: str, in_place: bool, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if left != "small":
        monkeypatch.setattr(overwrite, "OVERWRITTEN_BYTES", 0)
    plain = F.relu if kind == "relu" else lambda x: F.leaky_relu(x, 0.1)
    written = torch.relu_ if kind == "relu" else lambda x: F.leaky_relu_(x, 0.1)
    call = Overwriting(kind, 0.1, lambda inner, x: (written if in_place else plain)(x))
    leaf = torch.randn(3, 4, requires_grad=True)
    x = leaf * 2
    y = call([], x.view(4, 3) if left == "view" else x).view(3, 4)
    expected = plain(leaf * 2)
    assert torch.equal(y, expected)
    dy = torch.randn(3, 4)
    (wanted,) = torch.autograd.grad(expected, leaf, dy)
    given = dy.clone()
    (found,) = torch.autograd.grad(y, leaf, given)
    assert torch.equal(found, wanted)
    # written over, but not where torch forbids it or is faster
    assert torch.equal(given, dy) == (left is not None)


def test_derivatives_of_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overwrite, "OVERWRITTEN_BYTES", 0)
    call = Overwriting("leaky_relu", 0.1, lambda inner, x: F.leaky_relu(x, 0.1))
    x, found = torch.randn(3, 4, dtype=torch.float64), []
    for some in (lambda x: call([], x), lambda x: F.leaky_relu(x, 0.1)):
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad((some(leaf * leaf) ** 2).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(first.sum(), leaf)[0])
    assert torch.equal(*found)
