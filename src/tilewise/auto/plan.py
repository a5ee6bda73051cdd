"""`plan="auto"`: measure once, search, try the best ones, and use the fastest.

Measurements are kept on disk, so that the next run of the same model on the same machine only
searches. Rank 0 searches and tells the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tilewise.auto.calibrate import CONDITIONS, Measured, calibrate, conditions, machine_of
from tilewise.auto.calls import said, time_calls, worth_measuring
from tilewise.auto.finals import contenders, race, room
from tilewise.auto.tell import hosts, tell, told
from tilewise.auto.unsplit import split, why_unsplit
from tilewise.comm import Mesh
from tilewise.comm.pool import exhausted
from tilewise.errors import PlanError
from tilewise.graph.captured import Graph, as_tuple, capture
from tilewise.graph.labels import labels
from tilewise.graph.parallel import ParallelModel, PlanLike, as_plan
from tilewise.graph.runs import no_autocast
from tilewise.ops.kept import store
from tilewise.plan import Plan
from tilewise.plan.given import AUTO
from tilewise.planner.calls import SplitCall
from tilewise.planner.cost import Setting
from tilewise.planner.formulate import formulate
from tilewise.planner.machine import (
    LOCAL,
    CallTime,
    Machine,
    MachineError,
    load_machine,
    local_path,
)
from tilewise.planner.search import Found, parse_bytes, search
from tilewise.planner.solve import InfeasibleError
from tilewise.planner.whole import Parts, fit_step

LOG = logging.getLogger("tilewise")
STRANGER = "lassen"  # whose rates are taken where none were measured
TIME_LIMIT = 20.0
ROUNDS = (2, 6, 6)  # of running plans, learning from it between them
FINALISTS = 4
# Passes of measuring calls: how many times its best split's time a split may be predicted to take,
# and for how many seconds calls are measured. What the first learns tells what is worth the second.
PASSES = ((1.5, 120.0), (2.5, 120.0))


def parallelize(
    model: nn.Module,
    inputs: Any,
    plan: PlanLike = "1",
    *,
    memory: str | int | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    mesh: Mesh | None = None,
    seed: int = 0,
    read_halos: bool = False,
) -> ParallelModel:
    """Split a model over the ranks of a mesh.

    Args:
        model: any nn.Module, with the same values on every rank; it is left as it is. One on the
            meta device gets its values afterwards, by `ParallelModel.materialize`.
        inputs: example inputs of the global shape, one tensor or a tuple; fake or meta ones do.
        plan: degrees for all layers such as `n2 h2`, a dict of degrees by layer pattern, a Plan,
            the path of a plan file, or `auto` for the fastest one that this machine's measurements
            lead to; the first time, they take a minute or a few.
        memory: bytes a rank that an `auto` plan may use, such as `16GiB`; what there is by default.
        loss: a function of (output, *targets), for `ParallelModel.loss`.
        targets: example targets of the loss, where their shape cannot be guessed.
        mesh: the ranks that take part; all of torch.distributed's by default.
        seed: of dropout and other random layers; the same seed draws the same under every plan.
        read_halos: inputs come with the halo that their first layer needs, as
            `ParallelModel.input_covers` says, instead of exchanging it: a loader reads it.
    """
    mesh = Mesh() if mesh is None else mesh
    graph = capture(model, inputs, loss, targets=None if targets is None else as_tuple(targets))
    chosen = read_plan(graph, plan, mesh, memory=memory, model=model)
    return ParallelModel(model, graph, chosen, mesh, seed=seed, read_halos=read_halos)


def read_plan(
    graph: Graph,
    plan: PlanLike,
    mesh: Mesh,
    *,
    memory: str | int | None = None,
    optimizer: str = "adam",
    model: nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Read a plan in any of the forms that `parallelize` takes, `auto` among them.

    An `auto` plan for training needs the model: the best ones by prediction are tried on it, with
    such an optimizer, under the caller's autocast. `options` are a plan's beside its
    degrees, and what is tried has them. Rank 0 logs a warning if an `auto` plan splits nothing.
    """
    options = options or {}
    if plan != AUTO:
        if memory is not None:
            raise PlanError("plan: memory limits an 'auto' plan only; leave it out")
        return replace(as_plan(graph, plan), **options)
    if mesh.size == 1:
        return Plan.uniform(graph, "1", **options)
    with torch.random.fork_rng():  # what is drawn depends on what was measured before
        searching = auto_plan(
            graph, mesh, memory=memory, optimizer=optimizer, model=model, options=options
        )
        chosen: Plan
        chosen, found, ran = exhausted(searching, lambda _: None)
    if found is not None and not split(chosen):
        LOG.warning(why_unsplit(chosen, found, ran))
    return chosen


def auto_plan(
    graph: Graph,
    mesh: Mesh,
    *,
    memory: str | int | None = None,
    optimizer: str = "adam",
    model: nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
) -> Generator[str, None, tuple[Plan, Found | None, dict[str, float]]]:
    """Search, and try plans on the model; returns the fastest, and on rank 0 what was found.

    With them come the seconds of a step under each plan that ran, by its JSON without options.

    The plan that was found and those in common use run first. The fastest of them run again, beside
    the one that is predicted to be the fastest with what their steps have taught. If that teaches
    of another one, it runs beside the fastest so far. Yields what is being measured.
    """
    device = device_of(model)
    found = yield from auto_search(
        graph, mesh, memory=memory, optimizer=optimizer, device=device,
        recompute="recompute" not in (options or {}),
    )  # fmt: skip
    first, ran, chosen = found, dict[str, float](), ""

    def next_up(turn: int) -> str:
        nonlocal found
        assert first is not None
        if not ran:
            texts = [one.to_json() for one in contenders(first)]
        else:
            found = _learned(first, ran)
            new = found.plan.to_json()
            if turn == 1:
                best = sorted(ran, key=ran.__getitem__)[:FINALISTS]
                texts = list(dict.fromkeys([new, *best]))
            else:
                texts = [chosen] if new in ran else [new, chosen]
        return json.dumps([texts, room(first, [Plan.from_json(text) for text in texts])])

    for turn, rounds in enumerate(ROUNDS):
        texts, spare = json.loads(told(mesh, partial(next_up, turn)))
        chosen = chosen or texts[0]
        if model is None or on_meta(model) or len(texts) == 1:
            break  # nothing to run, or nothing new
        plans = [replace(Plan.from_json(text), **(options or {})) for text in texts]
        seconds = yield from race(
            mesh, model, graph, plans, device, _backend(), optimizer, rounds, spare
        )
        ran.update({text: one for text, one in zip(texts, seconds) if isfinite(one)})
        chosen = texts[seconds.index(min(seconds))]
        if not ran:
            break  # the model refuses what is drawn for it
    return replace(Plan.from_json(chosen), **(options or {})), found, ran


def _learned(found: Found, ran: Mapping[str, float]) -> Found:
    """Search again with what whole steps under some plans have taken."""
    formulation = found.formulation
    plans = [Plan.from_json(text) for text in ran]
    steps = [Parts.of(formulation, formulation.choice(plan)) for plan in plans]
    return found.learned(fit_step(steps, list(ran.values())), plans)


def auto_search(
    graph: Graph,
    mesh: Mesh,
    *,
    memory: str | int | None = None,
    optimizer: str = "adam",
    device: torch.device | None = None,
    recompute: bool = True,
) -> Generator[str, None, Found | None]:
    """Measure what is not known yet and search; rank 0 gets what was found, the others None.

    Yields what is being measured. Where memory is short, layers may be computed again.
    """
    if memory is not None:
        parse_bytes(memory)  # what cannot be read is said before anything is measured
    device = torch.device("cpu") if device is None else device
    backend = _backend()
    dtype = _dtype(graph)
    machine = with_rates((yield from local_machine(mesh, backend)), dtype)
    itemsize = getattr(torch, dtype).itemsize
    setting = Setting(machine, mesh.size, dtype, itemsize, optimizer)
    known, tried = dict[str, CallTime](), list[int]()
    for hopeless, seconds in PASSES:
        calls = list(formulate(graph, setting, with_calls=True).calls.values())
        # ranks on other hosts may have kept other times, but all measure the same calls
        places = json.loads(told(mesh, partial(_worth, calls, hopeless, tried)))
        listed, tried = [calls[place] for place in places], [*tried, *places]
        measuring = time_calls(mesh, listed, labels(graph.training), device, backend, seconds)
        times = yield from said(mesh, measuring)
        known |= {one.call: one for one in times}
        machine = machine.model_copy(update={"call_times": tuple(known.values())})
        setting = replace(setting, machine=machine)
    found: list[Found] = []

    def find(again: bool) -> str:
        try:
            found.append(
                search(
                    graph, devices=mesh.size, machine=machine, memory=memory, optimizer=optimizer,
                    dtype=dtype, time_limit=TIME_LIMIT, recompute=again,
                )
            )  # fmt: skip
        except InfeasibleError:
            if again and found:
                return ""  # what was found is what there is
            if again or not recompute:
                raise
        return "short" if not found or found[0].short else ""

    if told(mesh, lambda: find(again=False)) and recompute:
        told(mesh, lambda: find(again=True))
    return min(found, key=lambda one: one.step_seconds, default=None)


def _worth(calls: list[SplitCall], hopeless: float, tried: list[int]) -> str:
    worth = worth_measuring(calls, hopeless)
    return json.dumps([place for place in worth if place not in tried])


def unmeasured(
    graph: Graph,
    ranks: int,
    *,
    memory: str | int | None,
    optimizer: str,
    recompute: bool,
) -> tuple[Found, Machine]:
    """Search without measuring; returns what was found, and whose rates it is for.

    They are those of this machine, if they are kept, else a preset's. An `auto` plan, for which
    every layer is measured and plans run, may be another one.
    """
    try:
        machine = load_machine(LOCAL, devices=ranks)
    except MachineError:
        machine = load_machine(STRANGER)
    dtype = _dtype(graph)
    machine = with_rates(machine, dtype)

    def find(again: bool) -> Found:
        return search(
            graph, devices=ranks, machine=machine, memory=memory, optimizer=optimizer, dtype=dtype,
            time_limit=TIME_LIMIT, recompute=again,
        )  # fmt: skip

    try:
        return find(again=False), machine
    except InfeasibleError:
        if not recompute:
            raise
        return find(again=True), machine


def with_rates(machine: Machine, dtype: str) -> Machine:
    """Return the machine with float32's rates for a dtype that it has none of.

    They only serve to leave out what is hopeless: the calls of an `auto` plan are measured.
    """
    if dtype in machine.compute:
        return machine
    rates = machine.compute["float32"]
    return machine.model_copy(update={"compute": machine.compute | {dtype: rates}})


def local_machine(mesh: Mesh, backend: str) -> Generator[str, None, Machine]:
    """Return this machine's rates with so many ranks, measured if they are not known yet."""
    path = local_path(mesh.size, backend)
    spread = hosts(mesh)
    known: str | None = None
    if mesh.rank == 0:
        known = ""
        if path.is_file():
            try:
                machine = load_machine(path)
                known = machine.to_json() if fits_here(machine, spread) else ""
            except MachineError:
                known = ""
    text = tell(mesh, known)
    if text:
        return Machine.from_json(text)
    found = Measured()

    def run(function: Callable[..., Any], *args: Any) -> Any:
        with no_autocast():
            return function(mesh, *args)

    for name, _ in calibrate(found, run):
        yield name
    text = told(mesh, lambda: machine_of(found, mesh.size, spread=spread).to_json())
    machine = Machine.from_json(text)
    if mesh.rank == 0:
        keep(machine, mesh.size, backend)
    return machine


def keep(machine: Machine, ranks: int, backend: str) -> None:
    """Keep a machine for `local` and `auto`."""
    store(local_path(ranks, backend), machine.model_dump(mode="json"))


def fits_here(machine: Machine, spread: str) -> bool:
    """Whether a kept machine was measured on such processors and hosts with these versions.

    What nothing can be is measured again.
    """
    return machine.believable and machine.sources.get(CONDITIONS) == conditions(spread)


def device_of(model: nn.Module | None) -> torch.device:
    """Return where a model computes."""
    first = None if model is None or on_meta(model) else next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def on_meta(model: nn.Module) -> bool:
    """Whether a model has no values yet."""
    return any(one.device.type == "meta" for one in model.parameters())


def _backend() -> str:
    return dist.get_backend() if dist.is_initialized() else "gloo"


def _dtype(graph: Graph) -> str:
    """Return the dtype that most parameters have."""
    sizes: dict[str, int] = {}
    for node in graph.training.nodes:
        for value in node.values():
            if value.origin == "parameter":
                name = str(value.dtype).removeprefix("torch.")
                sizes[name] = sizes.get(name, 0) + torch.Size(value.shape).numel()
    return max(sizes, key=lambda name: sizes[name], default="float32")
