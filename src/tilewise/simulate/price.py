"""Seconds of what a rank did, on a machine.

Messages and sums are priced as they were recorded, arithmetic by the operations that ran. What a
layer reads and writes beside its arithmetic follows from the slabs of its operands and results: how
often it passes over them is the planner's own table, so that the two differ only where the program
does something else than the planner thinks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tilewise.graph.graph import Node, Value
from tilewise.graph.lower import Planned
from tilewise.graph.rule import Lowered
from tilewise.planner.cost import (
    PASSES,
    VIEWS,
    Floats,
    Setting,
    call_options,
    mean_channels,
    memory_s,
)
from tilewise.planner.follow import simple
from tilewise.planner.price import link_s, sum_s
from tilewise.simulate.record import Kernel, Message, Segment, Sum

HIDDEN = ("halo", "gather")
"""Messages that travel behind their layer's compute, as far as the machine can."""

CHANNELS = 64.0
"""What a call is taken for whose rule runs a product, but whose shapes do not tell which."""


@dataclass(frozen=True)
class Priced:
    """A segment's seconds: compute, halos that it may hide, and exchanges that stand before and
    after it."""

    segment: Segment
    compute_s: float = 0.0
    halo_s: float = 0.0
    before_s: float = 0.0
    after_s: float = 0.0
    gradients: tuple[tuple[Sum, float], ...] = ()

    def slower(self, other: Priced) -> Priced:
        """Return the slower one of each of two ranks' seconds."""
        return Priced(
            self.segment,
            max(self.compute_s, other.compute_s),
            max(self.halo_s, other.halo_s),
            max(self.before_s, other.before_s),
            max(self.after_s, other.after_s),
            max(self.gradients, other.gradients, key=lambda some: sum(s for _, s in some)),
        )


class Call:
    """A layer's call on one rank: its slabs and how they are passed over."""

    def __init__(
        self,
        node: Node,
        lowered: Lowered,
        rank: int,
        setting: Setting,
        updates: Collection[Value] = (),
    ) -> None:
        self.node, self.setting, self.rank = node, setting, rank
        self.operation, self.operands = lowered.operation, lowered.operands
        self.brought = self.blocks = self.updated = self.given = 0
        for value, need in zip(self.operands, self.operation.needs, strict=True):
            size = prod(need.cover.local_shape(rank)) * setting.size(value)
            if not value.held:
                self.brought += size
            elif value.origin == "parameter":
                self.blocks += size
                self.updated += size * (value in updates)
        for value, give in zip(node.outs, self.operation.gives, strict=True):
            self.given += prod(give.local_shape(rank)) * setting.size(value)

    @cached_property
    def _passes(self) -> tuple[float, float]:
        """Bytes read and written, forward and backward."""
        node = self.node
        if node.kind in VIEWS:
            return 0.0, 0.0
        operand = next((value for value in self.operands if not value.held), None)
        if operand is not None and simple(node, operand):
            forward, backward = PASSES.get(node.kind, (2, 3))
            return forward * self.given, backward * self.given
        forward, backward = PASSES.get(node.kind, (1, 1))
        local = self.brought + self.given
        return forward * local, backward * local

    def compute_s(self, segment: Segment) -> float:
        """Return the seconds of a segment of this call."""
        if segment.phase == "optimizer":
            return self.update_s
        backward = segment.phase == "backward"
        measured = self._measured
        if measured is not None:
            return measured[1] if backward else measured[0]
        kernels = [event for event in segment.events if isinstance(event, Kernel)]
        if kernels:
            return sum(self._kernel_s(kernel, backward) for kernel in kernels)
        if not segment.calls:
            return 0.0
        moved = self._passes[backward]
        return float(memory_s(self.setting.machine, _array(moved)))

    def _kernel_s(self, kernel: Kernel, backward: bool) -> float:
        machine, setting = self.setting.machine, self.setting
        flops = _array(kernel.flops / kernel.gradients)
        arithmetic = float(
            machine.arithmetic_s(self.node.kind, setting.dtype, flops, _array(self._channels))
        )
        if backward:
            arithmetic /= machine.rates(setting.dtype).backward_share
        moved = float(memory_s(machine, _array(self.brought + self.given + self.blocks)))
        return kernel.gradients * max(arithmetic + machine.call_s, moved)

    @cached_property
    def _channels(self) -> float:
        if not self.node.flops:
            return CHANNELS
        shapes = [need.cover.local_shape(self.rank) for need in self.operation.needs]
        return mean_channels(self.node, shapes, self.operation.gives[0].local_shape(self.rank))

    @cached_property
    def _measured(self) -> tuple[float, float] | None:
        """Seconds forward and backward where the machine has measured these shapes."""
        measured = self.setting.machine.measured
        if not measured or not self.node.flops:
            return None
        shapes = tuple(need.cover.local_shape(self.rank) for need in self.operation.needs[:2])
        key = (self.node.kind, self.setting.dtype, shapes, call_options(self.node))
        found = measured.get(key)
        return None if found is None else (found.forward_s, found.backward_s)

    @property
    def update_s(self) -> float:
        """Seconds in which the optimizer updates blocks that no call before uses."""
        moved = self.updated * (3 + 2 * self.setting.states)
        return float(memory_s(self.setting.machine, _array(moved)))


class Prices:
    """The prices of one rank's segments."""

    def __init__(self, planned: Planned, rank: int, setting: Setting) -> None:
        self.rank, self.setting = rank, setting
        updates = planned.program.first_uses()
        self.calls = {
            node.name: Call(node, lowered, rank, setting, updates.get(node.name, ()))
            for node, lowered in zip(planned.program.nodes, planned.lowered, strict=True)
        }

    def price(self, segment: Segment) -> Priced:
        """Price all that a segment did."""
        call = self.calls.get(segment.layer)
        compute = 0.0 if call is None else call.compute_s(segment)
        worked = next((i for i, e in enumerate(segment.events) if isinstance(e, Kernel)), None)
        halo = before = after = 0.0
        tags = dict.fromkeys(e.tag for e in segment.events if isinstance(e, Message))
        for tag in tags:
            group = [
                (i, e)
                for i, e in enumerate(segment.events)
                if isinstance(e, Message) and e.tag == tag
            ]
            seconds = self.messages_s(e for _, e in group)
            if group[0][1].kind in HIDDEN:
                halo += seconds
            elif worked is not None and group[0][0] > worked:
                after += seconds
            else:
                before += seconds
        gradients = []
        for event in segment.events:
            if isinstance(event, Sum) and event.kind == "gradients":
                gradients.append((event, self.sum_s(event)))
            elif isinstance(event, Sum):
                after += self.sum_s(event)
        return Priced(segment, compute, halo, before, after, tuple(gradients))

    def messages_s(self, messages: Iterable[Message]) -> float:
        """Return the seconds in which messages that are under way together arrive."""
        machine = self.setting.machine
        near: list[int] = []
        far: list[int] = []
        for message in messages:
            if not message.sent:
                same = message.peer // self.setting.node == self.rank // self.setting.node
                (near if same else far).append(message.bytes)
        by_link = ((machine.node, near), (machine.network, far))
        seconds = [link_s(link, _array(sum(some)), _array(len(some))) for link, some in by_link]
        return float(sum(seconds))

    def sum_s(self, one: Sum) -> float:
        """Return the seconds of an all-reduce."""
        node = self.setting.node
        inside = len({rank // node for rank in one.ranks}) == 1
        span = 1.0 if inside else node + 1.0
        size, count = _array(one.bytes), _array(len(one.ranks))
        return float(sum_s(self.setting.machine, size, count, _array(span)))


def _array(number: float) -> Floats:
    return np.asarray(number, np.float64)
