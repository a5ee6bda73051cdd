"""The steps of a planned program on a mesh: which tensors go where, what moves, what is freed.

Exchanges are inserted where an operand does not lie as an operator needs it. A tensor that several
operators need in the same way moves once. A move whose source is there before its operator's turn
starts at once and ends in that turn, so that it travels behind whatever runs in between.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.comm import Chain, Exchange, Mesh, Posted
from tilewise.errors import PlanError
from tilewise.graph.graph import Node, Value, values_in
from tilewise.graph.held import Held, at_rest
from tilewise.graph.lower import Planned
from tilewise.graph.rule import Lowered
from tilewise.graph.shares import Use
from tilewise.graph.unshared import fresh_gradients, overwrites, slope_of, unshared
from tilewise.layout import Axes, Cover, Layout, Move
from tilewise.ops.conv_run import ConvRun
from tilewise.ops.operation import Bound, Need
from tilewise.ops.overwrite import Overwriting
from tilewise.plan import Plan

MAY_ALIAS = {
    "contiguous", "to", "type_as", "to_copy", "dropout", "feature_dropout", "alpha_dropout",
    "reshape", "view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as",
    "ravel", "permute", "transpose", "t", "movedim", "moveaxis", "swapaxes", "expand", "slice",
    "narrow", "select", "detach", "alias", "split", "chunk", "unbind", "pad", "repeat", "roll",
    "flip", "tensor_split", "split_with_sizes", "broadcast_tensors", "numpy_T",
}  # fmt: skip
"""Calls whose result may be their operand's memory here and a copy on one device."""


class WriteBack:
    """Put a changed copy of a buffer back to where the model holds it."""

    def __init__(self, mesh: Mesh, source: Cover, target: Cover, *, layer: str) -> None:
        self.exchange = Exchange(mesh, at_rest(source), target, layer=layer)

    def __call__(self, changed: Tensor, held: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            held.copy_(self.exchange.start(changed).finish())
        return ()


@dataclass
class Early:
    """The start of moves of one tensor that end later."""

    exchanges: tuple[Exchange, ...]

    def __call__(self, tensor: Tensor, chain: Chain) -> tuple[Any, ...]:
        return Posted.start(self.exchanges, tensor, chain)


class Arrive:
    """The end of a move that started earlier."""

    def __call__(self, started: tuple[Posted, Tensor], chain: Chain) -> Tensor:
        posted, tie = started
        return posted.finish(tie, chain)


@dataclass
class Step:
    """One operator, or one move (or the start or end of one), with its places in memory.

    `recompute` is the pattern by which it is computed again in backward, `writes` are the buffers
    that it changes.
    """

    run: Bound | Exchange | Early | Arrive | WriteBack
    layer: str
    inputs: list[tuple[str, Any]]
    outputs: list[int]
    no_grad: bool = False
    recompute: str | None = None
    writes: tuple[Value, ...] = ()
    frees: list[int] = field(default_factory=list)


class Steps:
    """Build the steps of a program; all ranks do so together.

    `slots` numbers the places in memory, `uses` lists how parameters are read, and `fresh` names
    the parameters whose gradients are new tensors that nothing else shares.
    """

    def __init__(self, planned: Planned, plan: Plan, mesh: Mesh, held: Held) -> None:
        self.mesh, self.held, self.planned = mesh, held, planned
        program = planned.program
        self.steps: list[Step] = []
        self.uses: list[Use] = []
        self.slots: dict[Any, int] = {}
        self.early: dict[int, list[tuple[Exchange, int]]] = {}
        self.makers = program.producers()
        for value in program.inputs:
            self._slot(value)
        sharing = shared_needs(planned)
        kept = _kept(planned, plan)
        self.unshared = unshared(program.nodes, program.output_values)
        for node, lowered in zip(program.nodes, planned.lowered):
            self._add(node, lowered, sharing, plan.recomputes(node.name), kept)
        self.fresh = fresh_gradients(program.nodes)
        self.output_slots = self._outputs(plan)
        self.steps = self._in_order()
        self._free()
        self._wait_patiently()

    def _slot(self, key: Any) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def _add(
        self, node: Node, lowered: Lowered, sharing: Sharing, again: str | None, kept: set[Value]
    ) -> None:
        sources: list[Layout | Cover | None] = []
        inputs: list[tuple[str, Any]] = []
        written = written_buffers(node)
        back: list[Step] = []
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if not value.held:
                overlaps = lowered.operation.fused and not sources  # by itself
                early = not overlaps and not node.no_grad
                slot, source = self._brought(value, need, sharing, node, again, early)
                sources.append(source)
                inputs.append(("slot", slot))
                continue
            storage = self.held.storage(value)
            direct = storage.same_blocks(need.cover)
            if value in written and not direct:
                inputs.append(("slot", self._copied(value, need.cover, storage, node, again, back)))
                sources.append(None)
                continue
            sources.append(None if direct else storage)
            ranks = need.cover.sharers(self.mesh.rank) if direct else ()
            inputs.append(("held", (value, ranks)))
            if value.origin == "parameter":
                self.uses.append((str(value.source), ranks))
        bound = lowered.operation.bind(self.mesh, sources, layer=node.name)
        if lowered.in_place is not None and not again and self._may_write(node, bound, kept):
            bound.local = lowered.in_place
        if overwrites(node, self.unshared):
            bound.local = Overwriting(node.kind, slope_of(node), bound.local)
        outputs = [self._slot(out) for out in node.outs]
        self.steps.append(
            Step(bound, node.name, inputs, outputs, node.no_grad, again, tuple(written))
        )
        self.steps += back

    def _copied(
        self,
        value: Value,
        need: Cover,
        storage: Cover,
        node: Node,
        again: str | None,
        back: list[Step],
    ) -> int:
        """Return the slot of a copy of a buffer that is changed; `back` gets the way back."""
        slot = self._slot((value, node))
        held = ("held", (value, ()))
        fetch = Exchange(self.mesh, storage, need, layer=node.name)
        self.steps.append(Step(fetch, node.name, [held], [slot], True, again))
        put = WriteBack(self.mesh, need, storage, layer=node.name)
        back.append(Step(put, node.name, [("slot", slot), held], [], True, again, (value,)))
        return slot

    def _may_write(self, node: Node, bound: Bound, kept: set[Value]) -> bool:
        first = node.values()[0]
        maker = self.makers.get(first)
        return (
            first.origin == "node"
            and (maker is None or maker.kind not in MAY_ALIAS)
            and bound.brings[0] is None
            and first not in kept
            and first not in self.planned.program.output_values
        )

    def _brought(
        self, value: Value, need: Need, sharing: Sharing, node: Node, again: str | None, early: bool
    ) -> tuple[int, Layout | Cover | None]:
        """Return where the operand is found, and how it lies there."""
        layout = self.planned.layouts[value]
        slot = self._slot(value)
        if value in self.planned.direct:
            return slot, None
        base = need.home
        if sharing.homes[value, base.axes] > 1 and base != layout:
            slot, layout = self._moved(value, slot, layout, base, node, again), base
        several = sharing.needs[value, need] > 1
        if (several or (early and self._waits(slot, again))) and moves(layout, need.cover):
            return self._moved(value, slot, layout, need, node, again), None
        return slot, layout

    def _waits(self, slot: int, again: str | None) -> bool:
        """Whether something runs between the making of a tensor and the next step."""
        maker = next((s for s in reversed(self.steps) if slot in s.outputs), None)
        if again or (maker is not None and maker.recompute):
            return False  # a stretch that is computed again stays in one piece
        return bool(self.steps) and maker is not self.steps[-1]

    def _moved(
        self,
        value: Value,
        slot: int,
        source: Layout,
        target: Layout | Need,
        node: Node,
        again: str | None,
    ) -> int:
        """Return the slot of a moved copy; the first who asks makes it."""
        key = (value, target)
        if key not in self.slots:
            cover, fill = (
                (target.cover, target.fill) if isinstance(target, Need) else (Cover.of(target), 0.0)
            )
            exchange = Exchange(self.mesh, source, cover, layer=node.name, fill=fill)
            if self._waits(slot, again) and not exchange.forth.still:
                under_way = self._slot((key, "under way"))
                self.early.setdefault(slot, []).append((exchange, under_way))
                step = Step(Arrive(), node.name, [("slot", under_way)], [self._slot(key)])
            else:
                made = [self._slot(key)]
                step = Step(exchange, node.name, [("slot", slot)], made, recompute=again)
            self.steps.append(step)
        return self.slots[key]

    def _in_order(self) -> list[Step]:
        """Return all steps, the start of moves right behind the making of their source."""
        given = range(len(self.planned.program.inputs))
        found = [step for slot in given for step in self._starts(slot)]
        for step in self.steps:
            found.append(step)
            for slot in step.outputs:
                found += self._starts(slot)
        return found

    def _starts(self, slot: int) -> list[Step]:
        if slot not in self.early:
            return []
        exchanges, under_way = zip(*self.early[slot])
        return [Step(Early(exchanges), exchanges[0].layer, [("slot", slot)], list(under_way))]

    def _outputs(self, plan: Plan) -> list[int]:
        """Return the slots of the outputs, brought to where they are handed out."""
        slots = []
        targets = output_layouts(self.planned, plan)
        for value, target in zip(self.planned.program.output_values, targets):
            layout = self.planned.layouts[value]
            slot = self._slot(value)
            if target != layout:
                exchange = Exchange(self.mesh, layout, target, layer="output")
                new = self._slot((value, "output"))
                self.steps.append(Step(exchange, "output", [("slot", slot)], [new]))
                slot = new
            slots.append(slot)
        return slots

    def _free(self) -> None:
        """Let go of every tensor after its last use."""
        last: dict[int, Step] = {}
        for step in self.steps:
            for slot in step.outputs:
                last[slot] = step
            for where, slot in step.inputs:
                if where == "slot":
                    last[slot] = step
        for slot, step in last.items():
            if slot not in self.output_slots:
                step.frees.append(slot)

    def _wait_patiently(self) -> None:
        """Tell convolutions behind whose backward a message is waited for, before the next one."""
        soon: dict[int, bool] = {}  # whether backward waits on its way from here
        for step in self.steps:
            run, slots = step.run, [what for where, what in step.inputs if where == "slot"]
            here = isinstance(run, Exchange)
            if isinstance(run, Bound):
                if isinstance(run.fused, ConvRun):
                    where, what = step.inputs[0]
                    run.fused.patient = where == "slot" and soon.get(what, False)
                here = bool(run.inner) or (run.fused is None and any(map(soon.get, slots)))
            soon.update(dict.fromkeys(step.outputs, here))


def moves(source: Layout, target: Cover) -> bool:
    """Whether anything is sent to bring a tensor from one layout to another."""
    return not Move(Cover.of(source), target).local


def output_layouts(planned: Planned, plan: Plan) -> tuple[Layout, ...]:
    """Return how the outputs are handed out: not cut along channels unless the plan says so."""
    found = []
    for value in planned.program.output_values:
        if value.held:
            raise PlanError(
                f"the model returns its own {value.origin} {value.source}; return a copy"
            )
        layout, text = planned.layouts[value], planned.labels[value]
        cut = not plan.io_channels and "c" in text
        found.append(layout.uncut(text.index("c")) if cut else layout)
    return tuple(found)


def written_buffers(node: Node) -> list[Value]:
    """List the buffers that a call changes."""
    if node.kind in ("batch_norm", "instance_norm"):
        return [value for value in node.args[3:5] if value is not None] if node.args[5] else []
    found = []
    schema = getattr(node.in_place, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            found += [value for value in values_in(given) if value.held]
    return found


def _kept(planned: Planned, plan: Plan) -> set[Value]:
    """Return what layers that are computed again read: it must stay as it is until then."""
    return {
        value
        for node in planned.program.nodes
        if plan.recomputes(node.name)
        for value in node.values()
    }


@dataclass
class Sharing:
    """How many operators need a value in the same way, and from the same layout."""

    needs: Counter[tuple[Value, Need]]
    homes: Counter[tuple[Value, Axes]]


def shared_needs(planned: Planned) -> Sharing:
    """Count how often each value is needed alike."""
    needs: Counter[tuple[Value, Need]] = Counter()
    for lowered in planned.lowered:
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if not value.held:
                needs[value, need] += 1
    homes = Counter((value, need.home.axes) for value, need in needs)
    return Sharing(needs, homes)
