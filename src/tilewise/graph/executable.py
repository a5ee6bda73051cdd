"""A planned program on a mesh: steps on this rank's tensors.

Exchanges are inserted where an operand does not lie as an operator needs it. A tensor that several
operators need in the same way moves once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.comm import Chain, Exchange, Mesh
from tilewise.errors import PlanError
from tilewise.graph.graph import Node, Value
from tilewise.graph.held import Held
from tilewise.graph.lower import Planned
from tilewise.graph.recompute import recomputed
from tilewise.graph.rule import Lowered
from tilewise.graph.sync import Entry, GradSync
from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Cover, Layout, Move
from tilewise.ops.draws import Draws
from tilewise.ops.operation import Bound, Need
from tilewise.plan import Plan


def home(need: Need) -> Layout:
    """Return the layout that a need extends: the same axes, balanced blocks, no halos."""
    return Layout(
        need.cover.shape,
        Axes(Axis(a.size, REPLICA if a.dim == PARTIAL else a.dim) for a in need.cover.axes),
    )


@dataclass
class Step:
    """One operator, or one move that several operators share, with its places in memory."""

    run: Bound | Exchange
    layer: str
    inputs: list[tuple[str, Any]]
    outputs: list[int]
    no_grad: bool = False
    recompute: bool = False
    frees: list[int] = field(default_factory=list)


class Executable:
    """A planned program on a mesh: run it with this rank's slabs and parameters."""

    def __init__(self, planned: Planned, plan: Plan, mesh: Mesh, held: Held, draws: Draws) -> None:
        self.mesh, self.held, self.planned, self.draws = mesh, held, planned, draws
        program = planned.program
        self.input_layouts = tuple(planned.layouts[value] for value in program.inputs)
        self.steps: list[Step] = []
        self.uses: list[tuple[str, tuple[int, ...]]] = []
        self.slots: dict[Any, int] = {}
        self.sync: dict[tuple[str, ...], GradSync] = {}
        for value in program.inputs:
            self._slot(value)
        sharing = _sharing(planned)
        for node, lowered in zip(program.nodes, planned.lowered):
            self._add(node, lowered, sharing, plan)
        self._outputs(plan)
        self._free()
        self.stretches = self._stretches()

    def _slot(self, key: Any) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def _add(self, node: Node, lowered: Lowered, sharing: Sharing, plan: Plan) -> None:
        sources: list[Layout | Cover | None] = []
        inputs: list[tuple[str, Any]] = []
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if value.held:
                storage = self.held.storage(value)
                direct = storage.same_blocks(need.cover)
                sources.append(None if direct else storage)
                ranks = need.cover.sharers(self.mesh.rank) if direct else ()
                inputs.append(("held", (value, ranks)))
                if value.origin == "parameter" and len(ranks) > 1:
                    self.uses.append((str(value.source), ranks))
                continue
            slot, source = self._brought(value, need, sharing, plan, node)
            sources.append(source)
            inputs.append(("slot", slot))
        bound = lowered.operation.bind(self.mesh, sources, layer=node.name)
        again = plan.recomputes(node.name) and any(not v.held for v in lowered.operands)
        if lowered.in_place is not None and not again and self._may_write(node, bound):
            bound.local = lowered.in_place
        outputs = [self._slot(out) for out in node.outs]
        self.steps.append(Step(bound, node.name, inputs, outputs, node.no_grad, again))

    def _may_write(self, node: Node, bound: Bound) -> bool:
        first = node.values()[0]
        return (
            first.origin == "node"
            and bound.brings[0] is None
            and first not in self.planned.program.output_values
        )

    def _brought(
        self, value: Value, need: Need, sharing: Sharing, plan: Plan, node: Node
    ) -> tuple[int, Layout | Cover | None]:
        """Return where the operand is found, and how it lies there."""
        layout = self.planned.layouts[value]
        slot = self._slot(value)
        base = home(need)
        if sharing.homes[value, base.axes] > 1 and base != layout:
            slot, layout = self._moved(value, slot, layout, base, node), base
        if sharing.needs[value, need] > 1 and not Move(Cover.of(layout), need.cover).local:
            return self._moved(value, slot, layout, need, node), None
        return slot, layout

    def _moved(
        self, value: Value, slot: int, source: Layout, target: Layout | Need, node: Node
    ) -> int:
        """Return the slot of a moved copy; the first who asks makes it."""
        key = (value, target)
        if key not in self.slots:
            cover, fill = (
                (target.cover, target.fill) if isinstance(target, Need) else (Cover.of(target), 0.0)
            )
            exchange = Exchange(self.mesh, source, cover, layer=node.name, fill=fill)
            step = Step(exchange, node.name, [("slot", slot)], [self._slot(key)])
            self.steps.append(step)
        return self.slots[key]

    def _outputs(self, plan: Plan) -> None:
        self.output_layouts: tuple[Layout, ...] = ()
        self.output_slots: list[int] = []
        for value in self.planned.program.output_values:
            if value.held:
                raise PlanError(
                    f"the model returns its own {value.origin} {value.source}; return a copy"
                )
            layout = self.planned.layouts[value]
            text = self.planned.labels[value]
            target = layout
            if not plan.io_channels and "c" in text:
                target = layout.uncut(text.index("c"))
            slot = self._slot(value)
            if target != layout:
                exchange = Exchange(self.mesh, layout, target, layer="output")
                new = self._slot((value, "output"))
                self.steps.append(Step(exchange, "output", [("slot", slot)], [new]))
                slot = new
            self.output_layouts += (target,)
            self.output_slots.append(slot)

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

    def _stretches(self) -> list[list[Step]]:
        """Join neighbouring steps that are computed again in backward."""
        found: list[list[Step]] = []
        for step in self.steps:
            if step.recompute and found and found[-1][0].recompute:
                found[-1].append(step)
            else:
                found.append([step])
        return found

    def run(self, inputs: Sequence[Tensor], *, sync: bool = True) -> tuple[Tensor, ...]:
        """Compute this rank's slabs of the outputs from its slabs of the inputs."""
        memory: list[Any] = [None] * len(self.slots)
        memory[: len(inputs)] = inputs
        chain = Chain()
        entry: Entry | None = None
        if torch.is_grad_enabled() and self.mesh.size > 1:
            chain.start()
            entry = self._enter(sync)
        for stretch in self.stretches:
            if stretch[0].recompute:
                self._recompute(stretch, memory, chain, entry)
            else:
                self._step(stretch[0], memory, chain, entry)
        outputs = tuple(memory[slot] for slot in self.output_slots)
        return chain.tie(outputs) if len(outputs) > 1 else outputs

    def _recompute(
        self, steps: list[Step], memory: list[Any], chain: Chain, entry: Entry | None
    ) -> None:
        """Run a stretch as one node that keeps only what it reads."""
        made = [slot for step in steps for slot in step.outputs]
        freed = {slot for step in steps for slot in step.frees}
        read = dict.fromkeys(
            what
            for step in steps
            for where, what in step.inputs
            if where == "held" or what not in made
        )
        slots = [what for what in read if isinstance(what, int)]
        held = [what for what in read if not isinstance(what, int)]
        left = [slot for slot in made if slot not in freed]

        def body(tensors: Sequence[Tensor], inner: Chain, again: bool) -> tuple[Tensor, ...]:
            here: list[Any] = [None] * len(memory)
            for slot, tensor in zip(slots, tensors):
                here[slot] = tensor
            known = dict(zip(held, tensors[len(slots) :]))
            if again:  # buffers were updated the first time
                for what, tensor in known.items():
                    if what[0].origin == "buffer":
                        known[what] = tensor.clone()
            for step in steps:
                self._step(step, here, inner, None, known)
            return tuple(here[slot] for slot in left)

        operands = [memory[slot] for slot in slots]
        operands += [self._held(what, chain, entry) for what in held]
        results = recomputed(body, operands, chain, self.draws)
        for slot, tensor in zip(left, results, strict=True):
            memory[slot] = tensor
        for slot in freed:
            memory[slot] = None

    def _enter(self, sync: bool) -> Entry:
        tensors = {name: self.held.get(name) for name, _ in self.uses}
        names = tuple(name for name, tensor in tensors.items() if tensor.requires_grad)
        if names not in self.sync:
            wanted = set(names)
            self.sync[names] = GradSync(
                self.mesh, [(n, tensors[n], ranks) for n, ranks in self.uses if n in wanted]
            )
        return self.sync[names].enter(tensors, sync=sync)

    def _step(
        self,
        step: Step,
        memory: list[Any],
        chain: Chain,
        entry: Entry | None,
        known: dict[Any, Tensor] | None = None,
    ) -> None:
        operands = [
            memory[what]
            if where == "slot"
            else known[what]
            if known is not None
            else self._held(what, chain, entry)
            for where, what in step.inputs
        ]
        if step.no_grad:
            with torch.no_grad():
                result = self._call(step, operands, chain)
        else:
            result = self._call(step, operands, chain)
        if isinstance(result, Tensor):
            memory[step.outputs[0]] = result
        else:
            for slot, tensor in zip(step.outputs, result, strict=True):
                memory[slot] = tensor
        del operands
        for slot in step.frees:
            memory[slot] = None

    def _call(self, step: Step, operands: list[Tensor], chain: Chain) -> Any:
        if isinstance(step.run, Exchange):
            return step.run(operands[0], chain)
        return step.run(*operands, chain=chain)

    def _held(
        self, what: tuple[Value, tuple[int, ...]], chain: Chain, entry: Entry | None
    ) -> Tensor:
        value, ranks = what
        tensor = self.held.tensor(value)
        if entry is not None and len(ranks) > 1 and tensor.requires_grad:
            return entry.get(str(value.source), ranks, chain)
        return tensor


@dataclass
class Sharing:
    """How many operators need a value in the same way, and from the same layout."""

    needs: Counter[tuple[Value, Need]]
    homes: Counter[tuple[Value, Axes]]


def _sharing(planned: Planned) -> Sharing:
    needs: Counter[tuple[Value, Need]] = Counter()
    for lowered in planned.lowered:
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if not value.held:
                needs[value, need] += 1
    homes = Counter((value, home(need).axes) for value, need in needs)
    return Sharing(needs, homes)
