"""A plan is chosen for the optimizer that the recipe trains with."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from small_runs import make_set, recipe
from tilewise.auto import plan as auto_plans
from tilewise.plan import Plan
from tilewise.planner.cost import STATES
from tilewise.train.inputs import examples, open_sets
from tilewise.train.job import build_model, planned
from tilewise.train.optimizer import make_optimizer, planned_as
from tilewise.train.recipe import TrainSection, from_dict

KINDS = [("sgd", 0.0), ("sgd", 0.9), ("rmsprop", 0.0), ("rmsprop", 0.9), ("adam", 0.9),
         ("adamw", 0.0)]  # fmt: skip


@pytest.mark.parametrize(("name", "momentum"), KINDS)
def test_the_planner_counts_the_states_that_are_kept(name: Any, momentum: float) -> None:
    section = TrainSection(loss="mse", batch=1, optimizer=name, momentum=momentum)
    parameter = nn.Parameter(torch.ones(3, 2))
    optimizer = make_optimizer(section, [parameter])
    parameter.grad = torch.ones(3, 2)
    optimizer.step()
    states = [one for one in optimizer.state[parameter].values() if one.shape == parameter.shape]
    assert STATES[planned_as(section)] == len(states)


def test_an_auto_plan_is_for_the_recipes_optimizer(tmp_path: Path) -> None:
    table = recipe(make_set(tmp_path / "set"), plan="auto", train_optimizer="sgd")
    read = from_dict(table)
    sets = open_sets(read)
    x, *targets = examples(sets.train, read)
    seen = []

    def search(graph: Any, mesh: Any, *, optimizer: str, **_: Any) -> Any:
        seen.append(optimizer)
        yield "searching"
        return Plan.uniform(graph, "n2"), None, {}

    mesh: Any = mock.Mock(size=2)
    with mock.patch.object(auto_plans, "auto_plan", search):
        planned(build_model(read), x, tuple(targets), read, mesh)
    sets.close()
    assert seen == ["momentum"]
