"""Check a recipe without training: model, data, plan, metrics and memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from tilewise.auto.plan import unmeasured
from tilewise.data import Source
from tilewise.errors import RecipeError
from tilewise.graph import as_plan, capture
from tilewise.graph.captured import Graph
from tilewise.graph.lower import Planned, plan_program
from tilewise.graph.steps import output_layouts
from tilewise.host import memory_bytes
from tilewise.ops.draws import Draws
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate_plan
from tilewise.planner.machine import load_machine
from tilewise.planner.search import parse_bytes
from tilewise.planner.timeline import peak_bytes
from tilewise.train.inputs import Sets, augments, examples, open_sets, transforms
from tilewise.train.job import build_model, freeze, make_metrics, plan_options
from tilewise.train.losses import loss_function
from tilewise.train.optimizer import planned_as
from tilewise.train.progress import check_stop
from tilewise.train.recipe import Recipe


@dataclass(frozen=True)
class Checked:
    """What a recipe comes to; bytes are those of the fullest rank."""

    parameters: int
    layers: int
    samples: dict[str, int]
    input_shape: tuple[int, ...]
    slab_shape: tuple[int, ...]
    model_bytes: int
    input_bytes: int
    limit_bytes: int
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.model_bytes + self.input_bytes <= self.limit_bytes


def check(recipe: Recipe, ranks: int) -> Checked:
    """Capture the model, open the data and plan for so many ranks; errors say what is wrong.

    For an `auto` plan, which is found by measuring on the ranks, the one that a search without
    measuring finds is checked; a note says so.
    """
    sets = open_sets(recipe)
    try:
        transforms(sets.train, recipe.data)
        augments(recipe.data)
        x, *targets = examples(sets.train, recipe)
        model = build_model(recipe)
        parameters = sum(p.numel() for p in model.parameters())
        freeze(model, recipe.model.frozen)
        graph = capture(model, x, loss_function(recipe), targets=tuple(targets))
        plan = _plan(graph, recipe, ranks)
        plan.check(ranks)
        planned = plan_program(graph.training, plan, ranks=ranks, rank=0, draws=Draws(0))
        _check_metrics(recipe, sets, graph, plan, ranks, targets)
        layout = planned.layouts[graph.training.inputs[0]]
        return Checked(
            parameters,
            len(graph.layers),
            {
                name: 0 if source is None else len(source)
                for name, source in
                (("train", sets.train), ("valid", sets.valid), ("test", sets.test))
            },
            tuple(x.shape),
            layout.local_shape(0),
            _model_bytes(graph, plan, recipe, ranks),
            _input_bytes(planned, recipe, sets.train),
            _limit(recipe, ranks),
            plan.notes,
        )  # fmt: skip
    finally:
        sets.close()


def _plan(graph: Graph, recipe: Recipe, ranks: int) -> Plan:
    """Return the recipe's plan, or what stands for an `auto` one."""
    options = plan_options(recipe)
    if recipe.plan != AUTO:
        return replace(as_plan(graph, recipe.plan), **options)
    if ranks == 1:
        return Plan.uniform(graph, "1", **options)
    found, machine = unmeasured(
        graph, ranks, memory=_limit(recipe, ranks), optimizer=planned_as(recipe.train),
        recompute="recompute" not in options,
    )  # fmt: skip
    note = (
        f"plan 'auto' is found on the ranks, by measuring; checked is what a search with the rates "
        f"of machine {machine.name!r} finds: {found.plan.told()}"
    )
    return replace(found.plan, notes=(note, *found.plan.notes), **options)


def _check_metrics(
    recipe: Recipe, sets: Sets, graph: Graph, plan: Plan, ranks: int, targets: list[Tensor]
) -> None:
    metrics = make_metrics(recipe, sets)
    planned = plan_program(graph.evaluation, plan, ranks=ranks, rank=0, draws=Draws(0))
    output = output_layouts(planned, plan)[0].shape
    for metric in metrics:
        wanted = (*output[:1], *output[2:]) if metric.indices else output
        if len(targets) != 1 or tuple(targets[0].shape) != wanted:
            found = [tuple(target.shape) for target in targets]
            raise RecipeError(
                f"recipe: {metric.name} of outputs {output} needs one target of shape {wanted}, "
                f"there are {found}"
            )
    check_stop(recipe, [metric.name for metric in metrics], sets)


def _model_bytes(graph: Graph, plan: Plan, recipe: Recipe, ranks: int) -> int:
    """Return what a step holds at most, by the planner's account.

    What a recipe's own patterns save by computing again is not in it.
    """
    train = recipe.train
    itemsize = torch.float64.itemsize if train.precision == "float64" else torch.float32.itemsize
    # bytes do not depend on the machine's rates
    setting = Setting(load_machine("lassen"), ranks, "float32", itemsize, planned_as(train))
    return peak_bytes(*formulate_plan(graph, setting, plan))


def _input_bytes(planned: Planned, recipe: Recipe, source: Source) -> int:
    """Return what loading holds: batches made ahead, and the store."""
    slabs = sum(
        prod(planned.layouts[value].local_shape(0)) * value.dtype.itemsize
        for value in planned.program.inputs
    )
    whole = len(source) * sum(field.bytes for field in source.fields.values())
    store = 0 if recipe.data.store is None else min(parse_bytes(recipe.data.store), whole)
    return (recipe.data.prefetch + 2) * slabs + store


def _limit(recipe: Recipe, ranks: int) -> int:
    """Return the recipe's memory, or a rank's share of this machine's."""
    if recipe.memory is not None:
        return parse_bytes(recipe.memory)
    return memory_bytes() // ranks
