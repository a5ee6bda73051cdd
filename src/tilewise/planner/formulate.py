"""Turn a captured model and a machine into a planning problem (see solve/problem.py).

Each layer with candidates is a variable; the calls that follow it are priced with it. Each tensor
that another variable reads is a transfer: how the source's candidates leave it, how the readers'
candidates want it, and what the move costs. A reader's own halo is not part of the move: it is
priced with the reader, for an operand that already lies right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import PlanError
from tilewise.graph.captured import Graph
from tilewise.graph.graph import Node, Value
from tilewise.graph.labels import labels
from tilewise.graph.sync import BUCKET_BYTES
from tilewise.layout import Degrees, Layout
from tilewise.plan import Plan
from tilewise.planner.calls import SplitCall, described, key_of, list_calls, use_measured
from tilewise.planner.cost import VIEWS, NodeCost, Setting, blocks_of, node_cost
from tilewise.planner.follow import follow, follow_simple, simple
from tilewise.planner.forms import Form, Known
from tilewise.planner.layouts import Layouts
from tilewise.planner.memory import keeps
from tilewise.planner.moves import MoveCosts, Reader, Tables
from tilewise.planner.parameters import Parameters
from tilewise.planner.payload import differentiable
from tilewise.planner.places import (
    Choices,
    Place,
    choices,
    chooses,
    decided,
    first_reader,
    input_layouts,
    largest,
    letter_roles,
    place_of,
)
from tilewise.planner.solve import Consumer, Problem, Transfer, Variable
from tilewise.planner.spans import Span, spans
from tilewise.planner.stretches import named, stretches

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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


def formulate(
    graph: Graph,
    setting: Setting,
    *,
    pins: Mapping[str, Degrees] | None = None,
    recompute: bool = False,
    with_calls: bool = False,
    inputs: Mapping[Value, Layout] | None = None,
) -> Formulation:
    """Price all candidates of all layers, and all moves between them.

    With `recompute` a layer and those behind it may also be computed again in backward.
    `with_calls` also lists all calls under all their splits, to be measured. `inputs` lie as they
    are said to, others as the first layer with candidates wants them.
    """
    texts = labels(graph.training)
    setting = replace(setting, bucket_bytes=min(BUCKET_BYTES, _parameter_bytes(graph, setting)))
    some = choices(graph, texts, setting.devices, pins or {})
    if not some.names:
        raise PlanError("plan: the model has no layer with weights or windows to split")
    some.stretches = stretches(some) if recompute else [()] * len(some.names)
    both = zip(some.candidates, some.stretches, strict=True)
    some.candidates = [one.twice() if stretch else one for one, stretch in both]
    found = Formulation(graph, setting, some)
    _Walk(found, texts, with_calls).run(inputs or {})
    for cost in found.costs.values():
        cost.scale(setting.step)
    found.problem = _problem(found)
    return found


def formulate_plan(
    graph: Graph, setting: Setting, plan: Plan
) -> tuple[Formulation, tuple[int, ...]]:
    """Price one plan as it runs, whatever it leaves unnamed; return its choice too."""
    pins, inputs = decided(graph, plan), input_layouts(graph, plan, setting.devices)
    found = formulate(graph, setting, pins=pins, recompute=bool(plan.recompute), inputs=inputs)
    return found, found.choice(Plan(pins, recompute=plan.recompute))


class _Walk:
    """Go through the program once, and note where every tensor lies."""

    def __init__(self, found: Formulation, named: Mapping[Value, str], with_calls: bool) -> None:
        self.found, self.named, self.with_calls = found, named, with_calls
        self.setting, self.choices = found.setting, found.choices
        self.places = self.choices.places
        self.grads = differentiable(self.choices.program)
        self.known = Known()
        self.kept: set[Value] = set()
        self.outside: set[Value] = set()
        self.given: set[Value] = set()

    def run(self, inputs: Mapping[Value, Layout]) -> None:
        program = self.choices.program
        for value in program.inputs:
            owner = first_reader(value, program, self.choices.variable)
            if owner is not None:
                some, text = self.choices.candidates[owner], self.named[value]
                if value in inputs:
                    given = Layouts.of_layouts([inputs[value]])
                    self.places[value] = Place(owner, given, np.zeros(len(some), np.int64))
                    continue
                self.places[value] = place_of(
                    value, owner, some, text, self.setting.devices, channels=False
                )
        layers = {layer.name: layer for layer in self.found.graph.layers}
        for node in program.nodes:
            if chooses(node, layers[node.name]):
                self._decide(node)
            else:
                self._follow(node)
        self.found.parameters.charge(self.found.costs, self.setting)
        self._outputs()
        self._hold()
        found = self.found
        found.spans = spans(self.choices, self.setting, found.called, self.grads)

    def _decide(self, node: Node) -> None:
        """Price a call with candidates of its own."""
        variable = self.choices.variable[node.name]
        some = self.choices.candidates[variable]
        form = Form(node, self.named, some.table, self.setting.devices, self.known)
        cost = node_cost(form, self.setting, grads=self.grads)
        if self._by_call:
            splits = [some.degrees(index) for index in range(len(some))]
            self._measured(node, cost, splits, np.arange(len(some)))
        self.choices.owner[node.name] = variable
        self.found.costs[node.name] = cost
        self.found.parameters.use(node, blocks_of(form))
        for index, value in enumerate(form.operands):
            if value.held or value not in self.places:
                continue
            wants = Layouts.of_degrees(
                value.shape, self.setting.devices, some.table, form.roles(index)
            )
            swap = form.swap("bring", index, prod(value.shape))
            rim = form.rim() if index == 0 else np.zeros(len(some), bool)
            halo = (swap.received > 0) & ~rim
            copy = form.share("need", index) * prod(value.shape)
            fused = np.full(len(some), form.fused and index == 0)
            apart = rim | (fused & (swap.received == 0))
            self._read(node, variable, value, wants, halo, (apart, apart & ~rim))
            if keeps(node, self.grads).operands:
                # a copy with neighbours' rows, or those apart; whether the operand stays, see _hold
                copy = np.where(halo, copy, np.where(rim, swap.received, 0.0))
                cost.saved_bytes += copy * self.setting.size(value)
        for out in node.outs:
            text = self.named[out]
            place = place_of(out, variable, some, text, self.setting.devices)
            self.places[out] = place
            cost.saved_bytes += place.local * keeps(node, self.grads).beside_bytes
        self._note_results(node)

    def _follow(self, node: Node) -> None:
        """Price a call where its largest operand lies, or is brought to by a pin."""
        operand = largest(node, self.places)
        if operand is None:
            return  # it is computed from what every rank holds
        place = self.places[operand]
        pinned = self.choices.variable.get(node.name)
        if pinned is not None:
            some, text = self.choices.candidates[pinned], self.named[operand]
            place = place_of(operand, pinned, some, text, self.setting.devices)
        table = self.choices.candidates[place.owner].table
        if simple(node, operand):
            found = follow_simple(node, place, table, self.setting, grads=self.grads)
        else:
            found = follow(node, operand, place, self.named, table, self.setting, grads=self.grads)
        self.choices.owner[node.name] = place.owner
        self.found.costs[node.name] = found.cost
        self.found.parameters.use(node, found.blocks)
        if self._by_call:
            layouts = [place.layouts.layout_at(row) for row in range(len(place.layouts))]
            self._measured(node, found.cost, layouts, place.where, operand)
        reads = dict(found.wants)
        if pinned is not None:
            reads[operand] = place.layouts.take(place.where)
        for value, wants in reads.items():
            if value in self.places:
                none = np.zeros(len(table), bool)
                self._read(node, place.owner, value, wants, none, (none, none))
            elif value.origin == "input" and value not in self.given:
                self._give(node, value, wants)
        self.places.update(zip(node.outs, found.places, strict=True))
        if pinned is None and keeps(node, self.grads).operands:
            self._keep(operand, node)
        self._note_results(node)

    @property
    def _by_call(self) -> bool:
        return self.with_calls or bool(self.setting.machine.call_times)

    def _measured(
        self,
        node: Node,
        cost: NodeCost,
        splits: list[Degrees] | list[Layout],
        where: Ints,
        operand: Value | None = None,
    ) -> None:
        """List a call under all its splits, and use what was measured of them."""
        machine, call = self.setting.machine, described(node, self.named, self.grads)
        overlap = machine.overlap_halo
        use_measured(cost, machine, [key_of(call, one) for one in splits], where, overlap)
        if self.with_calls:
            seconds = cost.forward(overlap) + cost.backward(overlap)
            first = {int(row): index for index, row in reversed(list(enumerate(where)))}
            self.found.calls |= list_calls(
                node, call, splits, operand, self.grads, lambda row: float(seconds[first[row]])
            )

    def _give(self, node: Node, value: Value, wants: Layouts) -> None:
        """Charge an input that no layer with candidates reads, such as a target, to its reader.

        It is cut as that one needs it, but for channels (see graph/lower.py). What is broadcast is
        needed whole: losses of elements begin so, and every rank is handed all of their target.
        """
        texts = [self.named.get(v, "") for v in node.values() if v is not value]
        channels = [t.index("c") for t in texts if len(t) == len(value.shape) and "c" in t]
        parts = wants.parts.copy()
        parts[:, channels if node.kind != "broadcast_tensors" else slice(None)] = 1
        size = replace(wants, parts=parts).local() * self.setting.size(value)
        self.found.costs[node.name].given_bytes += size
        self.given.add(value)

    def _note_results(self, node: Node) -> None:
        if keeps(node, self.grads).results:
            self.kept.update(node.outs)

    def _keep(self, value: Value, node: Node) -> None:
        """Note that a call of a tensor's own variable keeps it, in their stretch or behind it."""
        self.kept.add(value)
        if node.name not in self.choices.stretches[self.choices.owner[node.name]]:
            self.outside.add(value)

    def _read(
        self,
        node: Node,
        variable: int,
        value: Value,
        wants: Layouts,
        halo: Bools,
        rim: tuple[Bools, Bools],
    ) -> None:
        """Note a reader of a tensor; one of the tensor's own variable pays for the move itself.

        `rim` tells where it leaves its slab as it lies, and where moves count that it is joined.
        """
        place = self.places[value]
        stays = keeps(node, self.grads, split=bool(halo.all())).operands
        if place.owner != variable:
            reader = Reader(node, variable, wants, stays, halo, *rim)
            self.found.readers.setdefault(value, []).append(reader)
            return
        cost = self.found.costs[node.name]
        if stays and not halo.all():
            self._keep(value, node)
            copied = ~halo & (wants.local() != place.local)  # of an input, say, some channels
            cost.saved_bytes += np.where(copied, wants.local() * self.setting.size(value), 0.0)
        targets, where = wants.distinct()
        costs = MoveCosts(value, place.layouts, targets, self.setting, value in self.grads)
        moves = costs.pairs(place.where, where)
        cost.exchange_forward += moves.forward
        cost.exchange_backward += moves.backward

    def _outputs(self) -> None:
        """Charge the network's results, which are handed out with whole channels."""
        for value in self.choices.program.output_values:
            place = self.places.get(value)
            text = self.named.get(value, "")
            maker = self.choices.program.producers().get(value)
            if place is None or maker is None or "c" not in text:
                continue
            roles = letter_roles(text) | {"c": -1, "f": -1}
            table = self.choices.candidates[place.owner].table
            target = Layouts.of_degrees(value.shape, self.setting.devices, table, roles)
            targets, where = target.distinct()
            costs = MoveCosts(value, place.layouts, targets, self.setting, value in self.grads)
            moves = costs.pairs(place.where, where)
            self.found.costs[maker.name].exchange_forward += moves.forward
            self.found.costs[maker.name].exchange_backward += moves.backward

    def _hold(self) -> None:
        """Charge what is kept to the variable under which it lies, each tensor once."""
        makers = self.choices.program.producers()
        first = next(iter(self.found.costs))
        for name, cost in self.found.costs.items():
            cost.again += self.choices.again(name)
            # computed again, it needs in backward what it needs forward
            anew = np.maximum(cost.burst_bytes, cost.workspace_bytes)
            cost.burst_bytes[:] = np.where(cost.again > 0, anew, cost.burst_bytes)
        for value in self.choices.program.inputs:
            if value not in self.places and value not in self.given:
                whole = prod(value.shape) * self.setting.size(value)
                self.found.costs[first].given_bytes += whole
        gone: dict[Value, Bools] = {}
        for value, place in self.places.items():
            readers = self.found.readers.get(value, [])
            keepers = [reader for reader in readers if reader.keeps]
            always = [reader for reader in keepers if keeps(reader.node, self.grads).operands]
            keepers = always or keepers
            size = place.local * self.setting.size(value)
            maker = makers.get(value)
            if value.origin == "input" or value in self.kept or len(keepers) > 1:
                if maker is None:
                    self.found.costs[self._charged(value, first)].given_bytes += size
                else:
                    cost = self.found.costs[maker.name]
                    own = keeps(maker, self.grads).results
                    saved = cost.saved_bytes if own else cost.later_bytes
                    # what its stretch keeps, if that is computed again, is there only meanwhile
                    saved += size if value in self.kept else np.where(cost.again > 0, 0.0, size)
                    if value in self.outside or len(keepers) > 1:
                        cost.left_bytes += cost.again * size
                    else:
                        gone[value] = cost.again > 0
                self.kept.add(value)
                continue
            fresh = maker is not None and maker.in_place is None and maker.kind not in VIEWS
            if maker is not None and fresh and value in self.grads:
                # nobody keeps it here, yet it is there when its maker is done
                self.found.costs[maker.name].workspace_bytes += size
            if keepers:
                # kept by this reader alone: as its copy with a halo, or else as it is
                reader = keepers[0]
                local = reader.wants.local() * self.setting.size(value)
                cost = self.found.costs[reader.node.name]
                cost.saved_bytes += np.where(reader.halo | (cost.again > 0), 0.0, local)
        self._hold_results()
        tables = Tables()
        for value, readers in self.found.readers.items():
            place = self.places[value]
            kept = np.full(len(place.where), value in self.kept)
            if value in gone:
                kept &= ~gone[value]
            again = [self.found.costs[reader.node.name].again > 0 for reader in readers]
            self.found.moves[value] = MoveCosts.shared(
                value, place, readers, self.setting, value in self.grads, kept, again, tables
            )

    def _hold_results(self) -> None:
        """Charge what stands beside a stretch while its backward runs.

        That are its results, made again, and their gradients, which are all there from the start.
        """
        program = self.choices.program
        readers: dict[Value, list[str]] = {}
        for node in program.nodes:
            for value in node.values():
                readers.setdefault(value, []).append(node.name)
        makers = program.producers()
        for value, place in self.places.items():
            maker = makers.get(value)
            stretch = () if maker is None else self.choices.stretches[place.owner]
            if maker is None or maker.name not in stretch:
                continue
            leaves = value in program.output_values
            if not leaves and all(name in stretch for name in readers.get(value, ())):
                continue
            size = place.local * self.setting.size(value)
            anew = keeps(maker, self.grads, in_place=False)
            written = maker.in_place is not None and not anew.results
            beside = 1.0 if written or value not in self.kept else 0.0
            for name in stretch:
                cost = self.found.costs.get(name)
                if cost is not None:
                    gradient = 0.0 if name == maker.name else 1.0
                    cost.burst_bytes += cost.again * size * (beside + gradient)

    def _charged(self, value: Value, first: str) -> str:
        """Return the call that an input's bytes are charged to."""
        owner = self.places[value].owner
        return next((n for n, i in self.choices.variable.items() if i == owner), first)


def _problem(found: Formulation) -> Problem:
    """Add up the calls of each variable, and list transfers and ties."""
    overlap, hiding = found.setting.machine.overlap_halo, found.setting.machine.overlap_sums
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
        burst = burst + np.where(sync > 0, bucket, 0.0)
        states = found.setting.states
        held = sum(c.held_bytes + c.block_bytes + (1 + states) * c.trained_bytes for c in costs)
        variables.append(
            Variable.of(
                name,
                sum(cost.forward(overlap) + cost.optimizer for cost in costs),
                sum(cost.backward(overlap) for cost in costs) + (1.0 - hiding) * sync,
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
    sizes = _parameter_sizes(found.graph, found.setting)
    return min(sum(sizes.values()), BUCKET_BYTES + max(sizes.values(), default=0))


def _parameter_bytes(graph: Graph, setting: Setting) -> int:
    return max(sum(_parameter_sizes(graph, setting).values()), 1)


def _parameter_sizes(graph: Graph, setting: Setting) -> dict[str, int]:
    """Return the bytes of every trained parameter."""
    return {
        str(value.source): prod(value.shape) * setting.itemsize
        for node in graph.training.nodes
        for value in node.values()
        if value.trained
    }
