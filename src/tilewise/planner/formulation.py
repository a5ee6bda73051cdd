"""A planning problem (see solve/problem.py), and what its numbers stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tilewise.graph.captured import Graph
from tilewise.graph.graph import Value
from tilewise.graph.sync import BUCKET_BYTES
from tilewise.layout import Degrees
from tilewise.plan import Plan
from tilewise.planner.calls import SplitCall
from tilewise.planner.cost import NodeCost, Setting
from tilewise.planner.moves import MoveCosts, Reader
from tilewise.planner.parameters import Parameters
from tilewise.planner.places import Choices
from tilewise.planner.solve import Consumer, Problem, Transfer, Variable
from tilewise.planner.spans import Span
from tilewise.planner.stretches import named


@dataclass
class Formulation:
    """A problem, and what its numbers stand for."""

    graph: Graph
    setting: Setting
    choices: Choices
    costs: dict[str, NodeCost] = field(default_factory=dict)
    readers: dict[Value, list[Reader]] = field(default_factory=dict)
    moves: dict[Value, MoveCosts] = field(default_factory=dict)
    calls: dict[str, SplitCall] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    parameters: Parameters = field(default_factory=Parameters)
    problem: Problem = field(init=False)

    @property
    def names(self) -> list[str]:
        """The layers with candidates, one for each variable."""
        return self.choices.names

    @property
    def called(self) -> list[str]:
        """The calls that have costs, in order."""
        return [node.name for node in self.choices.program.nodes if node.name in self.costs]

    @property
    def timed(self) -> Problem:
        """The problem without the bytes of moved copies, which plans without a limit do not need.

        The bytes of a very large number of moves take as long to find as their seconds.
        """
        both = zip(self.problem.transfers, self.moves.values(), strict=True)
        transfers = tuple(replace(transfer, cost=moves.seconds) for transfer, moves in both)
        return replace(self.problem, transfers=transfers)

    def waiting_seconds(self, choice: Sequence[int]) -> float:
        """Return the seconds of gradient sums that nothing can hide, which count as backward."""
        owner = self.choices.owner
        return float(sum(cost.waiting[choice[owner[name]]] for name, cost in self.costs.items()))

    def plan(self, choice: tuple[int, ...]) -> Plan:
        """Return chosen candidates as a plan."""
        found = list(zip(self.names, self.choices.candidates, choice, strict=True))
        again = [some.again[index] for _, some, index in found]
        return Plan(
            {name: some.degrees(index) for name, some, index in found},
            recompute=tuple(named(s) for s, yes in zip(self.choices.stretches, again) if yes),
        )

    def nearest(self, degrees: Degrees) -> tuple[int, ...]:
        """Return the candidates that come nearest to the same degrees for all layers."""
        wanted = np.array([[size for _, size in degrees.items()]], np.int64)
        return tuple(int(some.nearest(wanted)[0]) for some in self.choices.candidates)

    def choice(self, plan: Plan) -> tuple[int, ...]:
        """Return the candidates that a plan's degrees are."""
        found = zip(self.names, self.choices.candidates, self.again(plan), strict=True)
        return tuple(
            some.index(plan.layers.get(name, Degrees()), again=again) for name, some, again in found
        )

    def again(self, plan: Plan) -> list[bool]:
        """Return the layers whose stretches a plan computes again, as far as they may be here.

        Other patterns of a plan are not priced.
        """
        return [
            bool(some.again.any()) and named(stretch) in plan.recompute
            for some, stretch in zip(self.choices.candidates, self.choices.stretches, strict=True)
        ]


def problem_of(found: Formulation) -> Problem:
    """Add up the calls of each variable, and list transfers and ties."""
    overlap = found.setting.machine.overlap_halo
    members: list[list[NodeCost]] = [[] for _ in found.names]
    for name, cost in found.costs.items():
        members[found.choices.owner[name]].append(cost)
    bucket = _largest_bucket(found)
    variables = []
    for name, costs in zip(found.names, members, strict=True):
        passing = [(c.burst_bytes, c.workspace_bytes, c.copy_bytes) for c in costs]
        burst = np.max(passing, axis=(0, 1))
        burst = burst + sum(c.inner_bytes for c in costs)
        sync = np.asarray(sum(cost.sync for cost in costs))
        waiting = np.asarray(sum(cost.waiting for cost in costs))
        burst = burst + np.where(sync > 0, bucket, 0.0)
        states = found.setting.states
        held = sum(c.held_bytes + c.block_bytes + (1 + states) * c.trained_bytes for c in costs)
        variables.append(
            Variable.of(
                name,
                sum(cost.forward(overlap) + cost.optimizer for cost in costs),
                sum(cost.backward(overlap) for cost in costs) + waiting,
                sync,
                np.ceil(held).astype(np.int64),
                np.ceil(burst).astype(np.int64),
            )
        )
    transfers = []
    for value, readers in found.readers.items():
        place, moves = found.choices.places[value], found.moves[value]
        consumers = tuple(
            Consumer(reader.variable, wants)
            for reader, wants in zip(readers, moves.wants, strict=True)
        )
        transfers.append(Transfer(value.name, place.owner, moves.leaves, consumers, moves))
    ties = found.parameters.ties(found.choices.variable)
    return Problem(tuple(variables), tuple(transfers), tuple(ties))


def _largest_bucket(found: Formulation) -> int:
    """Return the most bytes that a bucket of gradients has under any plan."""
    sizes = parameter_sizes(found.graph, found.setting)
    return min(sum(sizes.values()), BUCKET_BYTES + max(sizes.values(), default=0))


def parameter_sizes(graph: Graph, setting: Setting) -> dict[str, int]:
    """Return the bytes of every trained parameter."""
    return {
        str(value.source): prod(value.shape) * setting.itemsize
        for node in graph.training.nodes
        for value in node.values()
        if value.trained
    }
