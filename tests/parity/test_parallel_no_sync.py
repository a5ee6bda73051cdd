"""Gradients that are not summed after every pass: nothing is lost, comes back or counts twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise import Mesh, ParallelModel, Plan
from tilewise.errors import MismatchError, PlanError
from tilewise.graph import Graph
from tilewise.testing import ranks
from twins import assert_grads, build, captured, draw, split

SHAPE = (4, 3, 7, 6)


class Heads(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.main = nn.Conv2d(4, 2, 1)
        self.side = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(x))
        return self.main(x), self.side(x)


def loss(model: nn.Module, seed: int, head: int = 0) -> Tensor:
    """Return the same number from a split model and from one device."""
    x = draw(*SHAPE, seed=seed)
    split = isinstance(model, ParallelModel)
    outputs = model.gather(model(model.scatter(x))) if split else model(x)
    total: Tensor = outputs[head].square().sum()
    return total


def keep(model: ParallelModel, *args: Any) -> Tensor:
    with model.no_sync():
        return loss(model, *args)


def by_hand(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = change(parameter.grad)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "model": lambda model: model.zero_grad(),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1).zero_grad(),
    "zeros": lambda model: torch.optim.SGD(model.parameters(), 0.1).zero_grad(set_to_none=False),
    "none": lambda model: by_hand(model, lambda grad: None),
    "zero_": lambda model: by_hand(model, lambda grad: grad.zero_()),
    "mul_": lambda model: by_hand(model, lambda grad: grad.mul_(0.5)),
    "scaled": lambda model: by_hand(model, lambda grad: grad * 0.5),
}


def change(mesh: Mesh, graph: Graph, plan: str) -> None:
    for apply in CHANGES.values():
        serial, model = build(Heads), split(mesh, build(Heads), graph, plan)
        loss(serial, 0).backward()
        loss(model, 0).backward()  # what is there before counts once, too
        loss(serial, 1).backward()
        keep(model, 1).backward()
        apply(serial)
        apply(model)
        loss(serial, 2).backward()
        keep(model, 2).backward()
        loss(serial, 3).backward()
        loss(model, 3).backward()
        assert_grads(model, serial)


@pytest.mark.parametrize(("world", "plan"), [(2, "n2"), (3, "h3"), (4, "h2 f2"), (4, "n2")])
def test_whoever_clears_or_scales_grad_does_so_with_what_is_not_summed(
    world: int, plan: str
) -> None:
    ranks(world, change, captured(Heads, SHAPE), plan)


def some_inputs(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Heads), split(mesh, build(Heads), graph, plan)
    loss(serial, 1).backward()
    keep(model, 1).backward()
    loss(serial, 2).backward(inputs=[serial.main.weight])
    loss(model, 2).backward(inputs=[model.main.weight])
    assert_grads(model, serial)
    loss(serial, 3).backward(inputs=[serial.main.weight])
    keep(model, 3).backward(inputs=[model.main.weight])
    loss(serial, 4).backward()
    loss(model, 4).backward()
    assert_grads(model, serial)


@pytest.mark.parametrize("plan", ["n2", "h2 f2"])
def test_backward_of_some_parameters_loses_nothing_of_the_others(plan: str) -> None:
    ranks(4, some_inputs, captured(Heads, SHAPE), plan)


def freeze(mesh: Mesh, graph: Graph, plan: str, names: tuple[str, ...]) -> None:
    serial, model = build(Heads), split(mesh, build(Heads), graph, plan)
    loss(serial, 1).backward()
    keep(model, 1).backward()
    for one in (serial, model):
        for name in names:
            one.get_submodule(name).requires_grad_(False)
    x = draw(*SHAPE)
    slab = model.scatter(x).requires_grad_()
    model.gather(model(slab))[0].square().sum().backward()
    serial(x.requires_grad_())[0].square().sum().backward()
    assert_grads(model, serial)


@pytest.mark.parametrize("names", [("body",), ("body", "main", "side")])
def test_parameters_that_are_frozen_meanwhile_get_their_sums(names: tuple[str, ...]) -> None:
    ranks(2, freeze, captured(Heads, SHAPE), "n2", names)


def together(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Heads), split(mesh, build(Heads), graph, plan)
    for one in (serial, model):
        loss(one, 0).backward()
    (keep(model, 1) + loss(model, 2, 1)).backward()
    (loss(model, 3) + keep(model, 4, 1)).backward()
    for seed, head in ((1, 0), (2, 1), (3, 0), (4, 1)):
        loss(serial, seed, head).backward()
    for one in (serial, model):
        loss(one, 5).backward()
    assert_grads(model, serial)


@pytest.mark.parametrize("plan", ["n2", "h2 f2"])
def test_passes_with_and_without_a_sum_share_one_backward(plan: str) -> None:
    ranks(4, together, captured(Heads, SHAPE), plan)


class Tied(nn.Module):
    """One weight in layers that cut their work differently."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3, 3, padding=1)
        self.b = nn.Conv2d(3, 3, 3, padding=1)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Any:
        return (self.b(F.relu(self.a(x))),)


def tied(mesh: Mesh, graph: Graph, degrees: dict[str, str]) -> None:
    serial, model = build(Tied), split(mesh, build(Tied), graph, Plan.of(graph, degrees))
    for sync in (True, False, False, True, True):
        loss(serial, 1).backward()
        (loss(model, 1) if sync else keep(model, 1)).backward()
        if sync:
            assert_grads(model, serial)


@pytest.mark.parametrize("degrees", [{"a": "n4", "b": "n2"}, {"a": "n2", "b": "n2"}])
def test_a_weight_whose_layers_share_it_differently_counts_once(degrees: dict[str, str]) -> None:
    ranks(4, tied, captured(Tied, SHAPE), degrees)


def differ(mesh: Mesh, graph: Graph) -> str:
    model = split(mesh, build(Heads), graph, "n2")
    keep(model, 1).backward(inputs=None if mesh.rank == 0 else [model.main.weight])
    with pytest.raises(MismatchError) as caught:
        loss(model, 2)
    return str(caught.value)


def test_ranks_that_disagree_on_what_is_to_be_summed_learn_it() -> None:
    found = ranks(2, differ, captured(Heads, SHAPE))
    assert found[0] == found[1]
    assert "'gradients to be summed': ['body.bias'" in found[0]


def too_early(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Heads), graph, "n2")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    keep(model, 1).backward()
    scaler = tw.GradScaler(model)
    scaler.scale(torch.ones(()))
    for use in (
        optimizer.step,
        lambda: tw.clip_grad_norm_(model, 1.0),
        lambda: scaler.unscale_(optimizer),
    ):
        with pytest.raises(PlanError, match=r"the gradient of body\.\w+ is not summed yet"):
            use()
    loss(model, 2).backward()
    tw.clip_grad_norm_(model, 1.0)
    optimizer.step()
    keep(model, 3).backward()
    optimizer.zero_grad()
    optimizer.step()  # nothing is there to be stepped by


def test_shares_are_no_gradients_to_step_or_clip() -> None:
    ranks(2, too_early, captured(Heads, SHAPE))
