"""The last word on a plan: the best ones by prediction run for real, in turn.

What is predicted from single calls does not know how ranks that wait for each other share their
cores and memory in a whole step. So a few plans that come close to the best prediction each run
some steps, under the caller's autocast, and the fastest one is taken. It is kept on disk for the
next time.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Generator, Sequence
from math import inf, isfinite
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tilewise.auto.calls import drawn, head, refusal
from tilewise.auto.tell import slowest, tell
from tilewise.comm import Mesh
from tilewise.graph.captured import Graph
from tilewise.graph.parallel import ParallelModel
from tilewise.graph.runs import no_autocast
from tilewise.layout import Degrees
from tilewise.ops.kept import folder, load, store
from tilewise.plan import Plan
from tilewise.planner.candidates import all_degrees
from tilewise.planner.search import Found

CLOSE = 1.6  # how many times the best prediction's time a plan may be predicted to take
PLANS = 6
ROUNDS = 3
STEPS = 3
SECONDS = 60.0  # after which no further round begins


def uniform_plans(found: Found) -> dict[str, Plan]:
    """Return the plans that give all layers the same degrees where they can have them."""
    every = all_degrees(found.devices)
    plans = {}
    for row in every[(every.prod(1) == found.devices) | (every.prod(1) == 1)]:
        degrees = Degrees(*map(int, row))
        plans[str(degrees)] = found.formulation.plan(found.formulation.nearest(degrees))
    return plans


def finalists(found: Found) -> list[Plan]:
    """Return the plan that was found, and those in common use that come close and fit."""
    usual = [*uniform_plans(found).values(), *(one.plan for one in found.baselines.values())]
    others = {plan.to_json(): plan for plan in usual}
    others.pop(found.plan.to_json(), None)
    seconds = {text: found.seconds(plan) for text, plan in others.items()}
    close = [found.plan]
    for text in sorted(seconds, key=seconds.__getitem__):
        if len(close) == PLANS or seconds[text] > CLOSE * found.step_seconds:
            break
        if found.price(others[text]).fits:
            close.append(others[text])
    return close


def fastest(
    mesh: Mesh,
    model: nn.Module,
    graph: Graph,
    plans: Sequence[Plan],
    device: torch.device,
    backend: str,
) -> Generator[str, None, Plan]:
    """Return the plan whose steps are the fastest, known or measured now; yields what runs."""
    path = _kept_in(mesh, backend)
    key = f"{head(mesh, device)} {_digest(model, graph, plans)}"
    known = tell(mesh, str(load(path).get(key, "")) if mesh.rank == 0 else None)
    if known:
        return plans[int(known)]
    times: list[list[float]] = [[] for _ in plans]
    began = time.monotonic()
    trial = Mesh(mesh.world_ranks)  # so that what only a plan that loses needs is closed again
    for number in range(1, ROUNDS + 1):
        for index, (plan, seconds) in enumerate(zip(plans, times), start=1):
            yield f"plans: {index} of {len(plans)}, round {number} of {ROUNDS}"
            seconds.append(step_seconds(trial, model, graph, plan, device))
        if slowest(mesh, [time.monotonic() - began])[0] > SECONDS:
            break
    trial.close()
    middles = [median(seconds) for seconds in times]
    best = min(range(len(plans)), key=middles.__getitem__)
    if mesh.rank == 0 and isfinite(middles[best]):
        store(path, {key: best})
    return plans[best]


def step_seconds(
    mesh: Mesh, model: nn.Module, graph: Graph, plan: Plan, device: torch.device
) -> float:
    """Return the seconds of a training step on the slowest rank, after a first one that tunes.

    Infinite where the model refuses what is drawn for it. The model itself stays as it is.
    """
    step = _step(mesh, ParallelModel(model, graph, plan, mesh).train(), graph, device)
    times = []
    try:
        step()
        for _ in range(STEPS):
            mesh.agree("auto")
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    except Exception as error:
        refusal(error)
        times = [inf]
    del step
    gc.collect()
    return slowest(mesh, [median(times)])[0]


def _step(
    mesh: Mesh, split: ParallelModel, graph: Graph, device: torch.device
) -> Callable[[], None]:
    """Return a step on drawn slabs, put together as the example inputs are."""
    values = [value for value in graph.training.inputs if value.origin == "input"]
    drawing = iter(
        [
            drawn(value, layout, mesh.rank, device)
            for value, layout in zip(values, split.input_layouts, strict=True)
        ]
    )
    examples = (*graph.inputs, *(graph.targets or ()))
    slabs = tree_map_only(Tensor, lambda _: next(drawing), examples)
    call = split if graph.loss is None else split.loss
    parameters = list(split.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-6, momentum=0.9) if parameters else None

    def step() -> None:
        split.zero_grad()
        outputs = [
            one for one in tree_leaves(call(*slabs)) if isinstance(one, Tensor) and one.grad_fn
        ]
        with no_autocast():
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        if optimizer is not None:
            optimizer.step()

    return step


def _kept_in(mesh: Mesh, backend: str) -> Path:
    return folder() / f"plans-{mesh.size}-{backend}.json"


def _digest(model: nn.Module, graph: Graph, plans: Sequence[Plan]) -> str:
    """Name a model's calls, what is trained of it, and the plans to choose from."""
    trained = [name for name, one in model.named_parameters() if one.requires_grad]
    calls = [
        (node.name, node.kind, node.no_grad, [(v.shape, v.dtype) for v in node.values()])
        for node in graph.training.nodes
    ]
    text = repr((calls, trained)) + "".join(plan.to_json() for plan in plans)
    return hashlib.sha256(text.encode()).hexdigest()
