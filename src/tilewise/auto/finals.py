"""The last word on a plan: those that may be the fastest run for real, in turn.

What is predicted from single calls does not know how ranks that wait for each other share their
cores and memory in a whole step. So plans that are not hopeless by prediction each run some steps,
under the caller's autocast, in turn; those that fall behind leave, and the others run again. The
machine may be slower for some of the time, so plans are compared within each turn (see `evened`).
What was measured is kept on disk for the next time.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tilewise.auto.calls import drawn, head, refusal
from tilewise.auto.tell import slowest, tell
from tilewise.comm import Mesh
from tilewise.comm.heap import steady
from tilewise.graph.captured import Graph
from tilewise.graph.parallel import ParallelModel
from tilewise.graph.runs import no_autocast
from tilewise.layout import Degrees
from tilewise.ops.kept import folder, load, store
from tilewise.plan import Plan
from tilewise.planner.candidates import all_degrees
from tilewise.planner.search import Found

HOPELESS = 2.5  # how many times the best prediction's time a plan may be predicted to take
MOST = 24  # plans that run
BEHIND = 1.2  # how many times the fastest one's time a plan may take to run again
STEPS = 3
SECONDS = 90.0  # after which no further plan runs for the first time, and no round begins
COPIES = 4  # of the parameters, that a plan which is kept for its next turn may hold
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def uniform_plans(found: Found) -> dict[str, Plan]:
    """Return the plans that give all layers the same degrees where they can have them."""
    every = all_degrees(found.devices)
    known = {letter for layer in found.formulation.graph.layers for letter in layer.extents}
    plans = {}
    for row in every[(every.prod(1) == found.devices) | (every.prod(1) == 1)]:
        degrees = Degrees(*map(int, row))
        if any(size > 1 and letter not in known for letter, size in degrees.items()):
            continue  # no layer has that to cut
        plans[str(degrees)] = found.formulation.plan(found.formulation.nearest(degrees))
    return plans


def contenders(found: Found) -> list[Plan]:
    """Return the plan that was found, and those in common use that fit, best prediction first."""
    usual = [*uniform_plans(found).values(), *(one.plan for one in found.baselines.values())]
    others = {plan.to_json(): plan for plan in usual}
    others.pop(found.plan.to_json(), None)
    seconds: dict[str, float] = {}
    for text, plan in others.items():
        with suppress(ValueError):  # layers that share a parameter would be cut differently
            seconds[text] = found.seconds(plan)
    close = [found.plan]
    for text in sorted(seconds, key=seconds.__getitem__):
        if len(close) == MOST or seconds[text] > HOPELESS * found.step_seconds:
            break
        if found.price(others[text]).fits:
            close.append(others[text])
    return close


@dataclass
class Kept:
    """Plans between their turns: all of them stay if there is room for all, else none does.

    One that stays has its memory elsewhere than one that is built anew for its turn, and would take
    more or less time for that.
    """

    keeps: bool = False
    steps: dict[str, Callable[[], None]] = field(default_factory=dict)

    @classmethod
    def within(cls, spare: float, model: nn.Module, graph: Graph, plans: int) -> Kept:
        """Keep so many plans if they hold no more than `spare` bytes, the same on all ranks."""
        return cls(plans * _holds(model, graph) <= spare)

    def only(self, texts: Iterable[str]) -> None:
        """Let go of all other plans; what they hold goes round in circles."""
        self.steps = {text: self.steps[text] for text in texts if text in self.steps}
        gc.collect()


def room(found: Found, plans: Sequence[Plan]) -> float:
    """Return how many bytes a rank has to spare beside a step under any of the plans."""
    peak = max(found.price(plan).peak_bytes for plan in plans)
    return max(found.memory_bytes - peak, 0) / 3


def race(
    mesh: Mesh,
    model: nn.Module,
    graph: Graph,
    plans: Sequence[Plan],
    device: torch.device,
    backend: str,
    optimizer: str,
    rounds: int,
    spare: float,
) -> Generator[str, None, list[float]]:
    """Return the seconds of a step under each plan, known or measured now; yields what runs.

    Infinite for those that did not run: the model refused, or time was up. All plans together may
    keep `spare` bytes between their turns.
    """
    path = _kept_in(mesh, backend)
    key = f"{head(mesh, device)} {_digest(model, graph, plans)} {optimizer} {rounds}"
    known = json.loads(tell(mesh, json.dumps(load(path).get(key)) if mesh.rank == 0 else None))
    if isinstance(known, list) and len(known) == len(plans):
        return [inf if one is None else float(one) for one in known]
    times: list[list[float]] = [[] for _ in plans]
    left = list(range(len(plans)))
    began = time.monotonic()
    trial = Mesh(mesh.world_ranks)  # so that what only a plan that loses needs is closed again
    kept = Kept.within(spare, model, graph, len(plans))
    try:
        for number in range(1, rounds + 1):
            for place, index in enumerate(left, start=1):
                yield f"plans: {place} of {len(left)}, round {number}"
                seconds = step_seconds(trial, model, graph, plans[index], device, optimizer, kept)
                times[index].append(seconds)
                late = slowest(mesh, [time.monotonic() - began])[0] > SECONDS
                if late and number == 1 and place > 1:
                    break
            now = evened(times)
            best = min(now[i] for i in left)
            left = [i for i in left if now[i] <= BEHIND * best]
            kept.only(plans[i].to_json() for i in left)
            if late or len(left) < 2 or not isfinite(best):
                break
    finally:
        kept.only(())
        trial.close()
    # who left early is judged by few turns, and does not win by them
    found = [one if i in left else max(one, best) for i, one in enumerate(evened(times))]
    if mesh.rank == 0 and isfinite(min(found)):
        store(path, {key: [one if isfinite(one) else None for one in found]})
    return found


def evened(times: Sequence[Sequence[float]]) -> list[float]:
    """Return one time for each plan of those it took in the first turns, which all began with.

    A turn in which the plans that took part in all turns were slow counts for less: each plan's
    times are taken relative to theirs. The scale is that of the faster turns. Infinite for plans
    without any time.
    """
    turns = max(map(len, times))
    lasting = [each for each in times if len(each) == turns and isfinite(sum(each))]
    if not lasting:
        return [min(each, default=inf) for each in times]
    paces = [median(turn) for turn in zip(*lasting)]
    scale = quantiles(paces, n=4, method="inclusive")[0] if turns > 1 else paces[0]
    return [
        scale * median(seconds / pace for seconds, pace in zip(each, paces)) if each else inf
        for each in times
    ]


def step_seconds(
    mesh: Mesh,
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    device: torch.device,
    optimizer: str = "momentum",
    kept: Kept | None = None,
) -> float:
    """Return the seconds of a training step on the slowest rank, after some that do not count.

    Infinite where the model refuses what is drawn for it. The model itself stays as it is.
    """
    kept = Kept() if kept is None else kept
    text = plan.to_json()
    step = kept.steps.get(text) or _step(
        mesh, ParallelModel(model, graph, plan, mesh).train(), graph, device, optimizer
    )
    times = []
    try:
        # tunes, and takes its memory back from the plan before it
        steady(step, partial(mesh.total, layer="auto"))
        for _ in range(STEPS):
            mesh.agree("auto")
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    except Exception as error:
        refusal(error)
        times = [inf]
    if kept.keeps and isfinite(times[0]):
        kept.steps[text] = step
    else:
        del step
        gc.collect()
    return slowest(mesh, [median(times)])[0]


def _holds(model: nn.Module, graph: Graph) -> int:
    """Return the bytes that a plan holds between steps at most, and so the same on all ranks."""
    examples = tree_leaves((graph.inputs, graph.targets or ()))
    tensors = [one for one in examples if isinstance(one, Tensor)]
    states = [*model.parameters()] * COPIES + [*model.buffers()]
    return sum(one.numel() * one.element_size() for one in (*tensors, *states))


def _step(
    mesh: Mesh, split: ParallelModel, graph: Graph, device: torch.device, optimizer: str
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
    updates = OPTIMIZERS[optimizer](parameters, lr=1e-6) if parameters else None

    def step() -> None:
        split.zero_grad()
        outputs = [
            one for one in tree_leaves(call(*slabs)) if isinstance(one, Tensor) and one.grad_fn
        ]
        with no_autocast():
            torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        if updates is not None:
            updates.step()

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
