"""Price the calls of a program one after the other, and note where every tensor lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node, Value
from tilewise.graph.unshared import overwrites, unshared
from tilewise.layout import Degrees, Layout
from tilewise.planner.calls import described, key_of, list_calls, use_measured
from tilewise.planner.cost import VIEWS, NodeCost, blocks_of, node_cost
from tilewise.planner.follow import follow, follow_simple, simple
from tilewise.planner.forms import Form, Known
from tilewise.planner.formulation import Formulation
from tilewise.planner.layouts import Layouts
from tilewise.planner.memory import FOLLOWED, keeps
from tilewise.planner.moves import MoveCosts, Reader
from tilewise.planner.payload import differentiable
from tilewise.planner.places import (
    Place,
    chooses,
    first_reader,
    largest,
    letter_roles,
    place_of,
)
from tilewise.planner.spans import Span, spans

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Walk:
    """Go through the program once, and note where every tensor lies."""

    def __init__(self, found: Formulation, named: Mapping[Value, str], with_calls: bool) -> None:
        self.found, self.named, self.with_calls = found, named, with_calls
        self.setting, self.choices = found.setting, found.choices
        self.places = self.choices.places
        self.grads = differentiable(self.choices.program)
        program = self.choices.program
        self.unshared = unshared(program.nodes, program.output_values)
        self.makers = program.producers()
        self.known = Known()
        self.kept: set[Value] = set()
        self.outside: set[Value] = set()
        self.given: dict[Value, Floats] = {}

    def run(self, inputs: Mapping[Value, Layout], *, io_channels: bool = False) -> None:
        """Price all calls; `inputs` lie as they are said to, `io_channels` is the plan's."""
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
        found = self.found
        found.spans = spans(self.choices, self.setting, found.called, self.grads)
        self._outputs(whole=not io_channels)

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
            maker = self.makers.get(operand)
            # a norm copies gradients that are parts of larger tensors
            over = overwrites(node, self.unshared) and getattr(maker, "kind", "") != "batch_norm"
            found = follow_simple(node, place, table, self.setting, grads=self.grads, over=over)
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
        self.given[value] = replace(wants, parts=parts).local()
        size = self.given[value] * self.setting.size(value)
        cost = self.found.costs[node.name]
        cost.given_bytes += size
        if keeps(node, self.grads).operands and node.kind not in FOLLOWED:
            copied = wants.local() < self.given[value]  # its part of the channels
            cost.saved_bytes += np.where(copied, wants.local() * self.setting.size(value), 0.0)

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
        stays &= node.kind not in FOLLOWED  # the operand that it follows stands for it
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

    def _outputs(self, *, whole: bool) -> None:
        """Charge the network's results, which are handed out with whole channels or as they lie."""
        for value in self.choices.program.output_values:
            place = self.places.get(value)
            text = self.named.get(value, "")
            maker = self.choices.program.producers().get(value)
            if place is None or maker is None:
                continue
            if not whole or "c" not in text:
                self._handed_out(value, maker, place, place.local)
                continue
            roles = letter_roles(text) | {"c": -1, "f": -1}
            table = self.choices.candidates[place.owner].table
            target = Layouts.of_degrees(value.shape, self.setting.devices, table, roles)
            targets, where = target.distinct()
            costs = MoveCosts(value, place.layouts, targets, self.setting, value in self.grads)
            moves = costs.pairs(place.where, where)
            self.found.costs[maker.name].exchange_forward += moves.forward
            self.found.costs[maker.name].exchange_backward += moves.backward
            self._handed_out(value, maker, place, target.local())

    def _handed_out(self, value: Value, maker: Node, place: Place, local: Floats) -> None:
        """Charge a result and its gradient: whoever has them holds both until backward is done."""
        if value not in self.grads:
            return
        called, size = self.found.called, local * self.setting.size(value)
        at, still = called.index(maker.name), local == place.local
        # as it lies its maker has it while it keeps it, and the gradient in its own backward
        result = np.where(still & (value in self.kept), 0.0, size)
        gradient = np.where(still & (maker.kind not in VIEWS), 0.0, size)
        for first, last, there in (
            (-1, at, 2 * size),
            (at - 1, at + 1, result + gradient),
            (at, len(called), result + size),
        ):
            self.found.spans.append(Span(place.owner, first, last, there))
