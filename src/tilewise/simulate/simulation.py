"""Simulate a training step of a split model on a machine, and hold it against the planner.

found = simulate(model, graph, plan, devices=2048, machine="lassen")
found.step_seconds, found.peak_bytes, found.agreement.bytes_equal
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from tilewise.errors import PlanError
from tilewise.graph import Graph
from tilewise.graph.lower import plan_program
from tilewise.ops.draws import Draws
from tilewise.plan import Plan
from tilewise.planner.cost import Setting
from tilewise.planner.machine import Machine, load_machine
from tilewise.planner.payload import Payload
from tilewise.simulate.agreement import Agreement, differences, planned_cost
from tilewise.simulate.choose import typical_ranks
from tilewise.simulate.price import Priced, Prices
from tilewise.simulate.rank import RankRun, run_rank
from tilewise.simulate.schedule import Timeline, lay, slowest

MOST_DEVICES = 4096


class Simulation:
    """What some ranks of a world do in one step, and when."""

    def __init__(
        self, graph: Graph, plan: Plan, setting: Setting, payload: Payload, runs: Sequence[RankRun]
    ) -> None:
        self.graph, self.plan, self.setting = graph, plan, setting
        self.payload, self.runs = payload, tuple(runs)
        self._prices = {run.rank: Prices(run.planned, run.rank, setting) for run in runs}

    @property
    def devices(self) -> int:
        return self.setting.devices

    @property
    def machine(self) -> Machine:
        return self.setting.machine

    @cached_property
    def priced(self) -> dict[int, list[Priced]]:
        """Each rank's segments with their seconds."""
        return {
            run.rank: [self._prices[run.rank].price(segment) for segment in run.segments]
            for run in self.runs
        }

    @cached_property
    def timelines(self) -> dict[int, Timeline]:
        """Each rank's own timeline: what it would take if nobody kept it waiting."""
        overlap = self.machine.overlap_halo
        return {rank: lay(segments, overlap) for rank, segments in self.priced.items()}

    @cached_property
    def slowest(self) -> list[Priced]:
        """The segments, each with the seconds of the slowest of the simulated ranks."""
        return slowest(list(self.priced.values()))

    @cached_property
    def timeline(self) -> Timeline:
        """The step, in which every layer waits for the slowest of the simulated ranks."""
        return lay(self.slowest, self.machine.overlap_halo)

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def peak_bytes(self) -> int:
        """What the fullest of the simulated ranks holds at its fullest moment."""
        return max(run.peak_bytes for run in self.runs)

    @property
    def fullest(self) -> RankRun:
        """The rank that holds the most."""
        return max(self.runs, key=lambda run: run.peak_bytes)

    @cached_property
    def agreement(self) -> Agreement:
        """Compare with what the planner says of the same plan."""
        found = [
            d for run in self.runs for d in differences(self.payload, run.rank, run.received())
        ]
        priced = planned_cost(self.graph, self.plan, self.setting)
        if priced is None:
            return Agreement(None, None, self.payload.bytes, None, None, tuple(found))
        cost, peak = priced
        return Agreement(
            cost.seconds,
            peak,
            self.payload.bytes,
            self.step_seconds / cost.seconds,
            self.peak_bytes / peak,
            tuple(found),
        )


def simulate(
    model: nn.Module,
    graph: Graph,
    plan: Plan,
    *,
    devices: int,
    machine: str | Path | Machine,
    ranks: Sequence[int] | None = None,
    optimizer: str = "adam",
    dtype: str | torch.dtype = "float32",
) -> Simulation:
    """Run a training step of some ranks of a world, without the world.

    Args:
        model: what was captured; on the meta device it costs no memory.
        graph: what `capture` returned.
        plan: how the layers are split.
        devices: the size of the world, up to 4,096.
        machine: a preset's name, a machine file, or a Machine.
        ranks: those to simulate; a few that have the most to do by default.
        optimizer: `sgd`, `momentum`, `rmsprop`, `adam` or `adamw`: how much state it keeps.
        dtype: what the model is trained in; the model's own.
    """
    if not 1 <= devices <= MOST_DEVICES:
        raise PlanError(f"simulate: devices (={devices}) must be between 1 and {MOST_DEVICES}")
    name = str(dtype).removeprefix("torch.")
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise PlanError(f"simulate: dtype (={name!r}) is not a dtype of torch")
    setting = Setting(load_machine(machine), devices, name, kind.itemsize, optimizer)
    plan.check(devices)
    planned = plan_program(graph.training, plan, ranks=devices, rank=0, draws=Draws(0))
    payload = Payload(planned, plan, node=setting.node)
    chosen = typical_ranks(payload) if ranks is None else tuple(ranks)
    for rank in chosen:
        if not 0 <= rank < devices:
            raise PlanError(f"simulate: rank {rank} is not one of 0 … {devices - 1}")
    runs = [
        run_rank(model, graph, plan, ranks=devices, rank=rank, optimizer=optimizer)
        for rank in chosen
    ]
    return Simulation(graph, plan, setting, payload, runs)
