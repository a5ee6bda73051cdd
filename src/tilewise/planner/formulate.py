"""Turn a captured model and a machine into a planning problem (see solve/problem.py).

Each layer with candidates is a variable; the calls that follow it are priced with it. Each tensor
that another variable reads is a transfer: how the source's candidates leave it, how the readers'
candidates want it, and what the move costs. A reader's own halo is not part of the move: it is
priced with the reader, for an operand that already lies right.

    walk.py         prices the calls and notes where every tensor lies
    holding.py      charges what is kept for backward
    formulation.py  adds up the calls of each variable
"""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.errors import PlanError
from tilewise.graph.captured import Graph
from tilewise.graph.graph import Value
from tilewise.graph.labels import labels
from tilewise.layout import Degrees, Layout
from tilewise.plan import Plan
from tilewise.planner.cost import Setting
from tilewise.planner.formulation import Formulation, problem_of
from tilewise.planner.holding import hold
from tilewise.planner.places import choices, decided, input_layouts
from tilewise.planner.stretches import stretches
from tilewise.planner.walk import Walk


def formulate(
    graph: Graph,
    setting: Setting,
    *,
    pins: Mapping[str, Degrees] | None = None,
    recompute: bool = False,
    with_calls: bool = False,
    inputs: Mapping[Value, Layout] | None = None,
    io_channels: bool = False,
) -> Formulation:
    """Price all candidates of all layers, and all moves between them.

    With `recompute` a layer and those behind it may also be computed again in backward.
    `with_calls` also lists all calls under all their splits, to be measured. `inputs` lie as they
    are said to, others as the first layer with candidates wants them. With `io_channels` results
    are handed out as they lie, else with whole channels.
    """
    texts = labels(graph.training)
    some = choices(graph, texts, setting.devices, pins or {})
    if not some.names:
        raise PlanError("plan: the model has no layer with weights or windows to split")
    some.stretches = stretches(some) if recompute else [()] * len(some.names)
    both = zip(some.candidates, some.stretches, strict=True)
    some.candidates = [one.twice() if stretch else one for one, stretch in both]
    found = Formulation(graph, setting, some)
    walk = Walk(found, texts, with_calls)
    walk.run(inputs or {}, io_channels=io_channels)
    hold(walk)
    for cost in found.costs.values():
        cost.scale(setting.step)
    found.problem = problem_of(found)
    return found


def formulate_plan(
    graph: Graph, setting: Setting, plan: Plan
) -> tuple[Formulation, tuple[int, ...]]:
    """Price one plan as it runs, whatever it leaves unnamed; return its choice too."""
    pins, inputs = decided(graph, plan), input_layouts(graph, plan, setting.devices)
    found = formulate(
        graph,
        setting,
        pins=pins,
        recompute=bool(plan.recompute),
        inputs=inputs,
        io_channels=plan.io_channels,
    )
    return found, found.choice(Plan(pins, recompute=plan.recompute))
