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
from tilewise.graph.graph import Node, Value, values_in
from tilewise.graph.held import Held, at_rest
from tilewise.graph.lower import Planned
from tilewise.graph.reach import Use
from tilewise.graph.recompute import recomputed
from tilewise.graph.rule import Lowered
from tilewise.graph.sync import Aside, Entry, GradSync
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


class WriteBack:
    """Put a changed copy of a buffer back to where the model holds it."""

    def __init__(self, mesh: Mesh, source: Cover, target: Cover, *, layer: str) -> None:
        self.exchange = Exchange(mesh, at_rest(source), target, layer=layer)

    def __call__(self, changed: Tensor, held: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            held.copy_(self.exchange.start(changed).finish())
        return ()


@dataclass
class Step:
    """One operator, or one move that several operators share, with its places in memory.

    `recompute` is the pattern by which it is computed again in backward, `writes` are the buffers
    that it changes.
    """

    run: Bound | Exchange | WriteBack
    layer: str
    inputs: list[tuple[str, Any]]
    outputs: list[int]
    no_grad: bool = False
    recompute: str | None = None
    writes: tuple[Value, ...] = ()
    frees: list[int] = field(default_factory=list)


class Executable:
    """A planned program on a mesh: run it with this rank's slabs and parameters."""

    def __init__(
        self, planned: Planned, plan: Plan, mesh: Mesh, held: Held, draws: Draws, aside: Aside
    ) -> None:
        self.mesh, self.held, self.planned = mesh, held, planned
        self.draws, self.aside = draws, aside
        program = planned.program
        self.steps: list[Step] = []
        self.uses: list[Use] = []
        self.slots: dict[Any, int] = {}
        self.sync: dict[tuple[Use, ...], GradSync] = {}
        for value in program.inputs:
            self._slot(value)
        sharing = _sharing(planned)
        kept = _kept(planned, plan)
        for node, lowered in zip(program.nodes, planned.lowered):
            self._add(node, lowered, sharing, plan.recomputes(node.name), kept)
        self.output_slots = self._outputs(plan)
        self._free()
        self.stretches = self._stretches()

    # -- building --------------------------------------------------------------------------

    def _slot(self, key: Any) -> int:
        return self.slots.setdefault(key, len(self.slots))

    def _add(
        self, node: Node, lowered: Lowered, sharing: Sharing, again: str | None, kept: set[Value]
    ) -> None:
        sources: list[Layout | Cover | None] = []
        inputs: list[tuple[str, Any]] = []
        written = _written(node)
        back: list[Step] = []
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if not value.held:
                slot, source = self._brought(value, need, sharing, node, again)
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
        return (
            first.origin == "node"
            and bound.brings[0] is None
            and first not in kept
            and first not in self.planned.program.output_values
        )

    def _brought(
        self, value: Value, need: Need, sharing: Sharing, node: Node, again: str | None
    ) -> tuple[int, Layout | Cover | None]:
        """Return where the operand is found, and how it lies there."""
        layout = self.planned.layouts[value]
        slot = self._slot(value)
        base = home(need)
        if sharing.homes[value, base.axes] > 1 and base != layout:
            slot, layout = self._moved(value, slot, layout, base, node, again), base
        if sharing.needs[value, need] > 1 and not Move(Cover.of(layout), need.cover).local:
            return self._moved(value, slot, layout, need, node, again), None
        return slot, layout

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
            step = Step(exchange, node.name, [("slot", slot)], [self._slot(key)], recompute=again)
            self.steps.append(step)
        return self.slots[key]

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

    def _stretches(self) -> list[list[Step]]:
        """Join neighbouring steps that are computed again in backward together."""
        found: list[list[Step]] = []
        for step in self.steps:
            if step.recompute and found and found[-1][0].recompute == step.recompute:
                found[-1].append(step)
            else:
                found.append([step])
        return found

    # -- running ---------------------------------------------------------------------------

    def run(self, inputs: Sequence[Tensor], *, sync: bool = True) -> tuple[Tensor, ...]:
        """Compute this rank's slabs of the outputs from its slabs of the inputs."""
        memory: list[Any] = [None] * len(self.slots)
        memory[: len(inputs)] = inputs
        chain = Chain()
        entry: Entry | None = None
        if torch.is_grad_enabled() and self.mesh.size > 1:
            chain.start()
            entry = self._enter(chain, sync)
        for stretch in self.stretches:
            if stretch[0].recompute:
                self._recompute(stretch, memory, chain, entry)
            else:
                self._step(stretch[0], memory, chain, entry)
        outputs = tuple(memory[slot] for slot in self.output_slots)
        return outputs if entry is None else entry.leave(outputs)

    def _enter(self, chain: Chain, sync: bool) -> Entry:
        """Let the parameters in, and those of other programs whose gradients wait to be summed."""
        uses = [use for use in self.uses if self.held.get(use[0]).requires_grad]
        left = [
            use
            for use in (self.aside.grads if sync else ())
            if use not in uses and self.held.get(use[0]).requires_grad
        ]
        key = (*left, *uses)
        parameters = {name: self.held.get(name) for name, _ in key}
        if key not in self.sync:
            self.sync[key] = GradSync(self.mesh, self.aside, key, parameters)
        return Entry(
            self.sync[key],
            parameters,
            chain,
            outputs=len(self.output_slots),
            sync=sync,
            left=left,
        )

    def _recompute(
        self, steps: list[Step], memory: list[Any], chain: Chain, entry: Entry | None
    ) -> None:
        """Run a stretch as one node that keeps only what it reads."""
        made = {slot for step in steps for slot in step.outputs}
        freed = {slot for step in steps for slot in step.frees}
        read = dict.fromkeys(
            (where, what)
            for step in steps
            for where, what in step.inputs
            if where == "held" or what not in made
        )
        slots = [what for where, what in read if where == "slot"]
        held = [what for where, what in read if where == "held"]
        left = sorted(made - freed)
        written = {value for step in steps for value in step.writes}
        before = {value: self.held.tensor(value).clone() for value in written}
        fixed = [what for what in held if what[0] not in before]

        def body(tensors: Sequence[Tensor], inner: Chain, again: bool) -> tuple[Tensor, ...]:
            here: list[Any] = [None] * len(memory)
            for slot, tensor in zip(slots, tensors):
                here[slot] = tensor
            known = dict(zip(fixed, tensors[len(slots) :]))
            now = {v: old.clone() if again else self.held.tensor(v) for v, old in before.items()}
            known |= {what: now[what[0]] for what in held if what[0] in now}
            for step in steps:
                self._step(step, here, inner, None, known)
            return tuple(here[slot] for slot in left)

        operands = [memory[slot] for slot in slots]
        operands += [self._held(what, entry) for what in fixed]
        results = recomputed(body, operands, chain, self.draws)
        for slot, tensor in zip(left, results, strict=True):
            memory[slot] = tensor
        for slot in freed:
            memory[slot] = None

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
            else self._held(what, entry)
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
        if isinstance(step.run, WriteBack):
            return step.run(*operands)
        return step.run(*operands, chain=chain)

    def _held(self, what: tuple[Value, tuple[int, ...]], entry: Entry | None) -> Tensor:
        value, ranks = what
        tensor = self.held.tensor(value)
        if entry is not None and value.origin == "parameter" and tensor.requires_grad:
            return entry.get((str(value.source), ranks))
        return tensor


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


def _written(node: Node) -> list[Value]:
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


def _sharing(planned: Planned) -> Sharing:
    needs: Counter[tuple[Value, Need]] = Counter()
    for lowered in planned.lowered:
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if not value.held:
                needs[value, need] += 1
    homes = Counter((value, home(need).axes) for value, need in needs)
    return Sharing(needs, homes)
