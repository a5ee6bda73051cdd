"""Run the steps of a program on this rank's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewise.comm import Chain, Mesh
from tilewise.comm.formats import between, is_last
from tilewise.graph.formats import Formats
from tilewise.graph.graph import Value
from tilewise.graph.held import Held
from tilewise.graph.lower import Planned
from tilewise.graph.recompute import recomputed
from tilewise.graph.shares import Shares
from tilewise.graph.steps import Step, Steps, WriteBack
from tilewise.graph.sync import Entry, GradSync
from tilewise.ops.draws import Draws
from tilewise.ops.operation import Bound
from tilewise.plan import Plan


class Watch(Protocol):
    """Sees every operator of a pass: its layer before it runs, its results after."""

    def before(self, layer: str) -> None: ...

    def after(self, layer: str, results: Sequence[Tensor]) -> None: ...


class Executable:
    """A planned program on a mesh: run it with this rank's slabs and parameters."""

    def __init__(
        self, planned: Planned, plan: Plan, mesh: Mesh, held: Held, draws: Draws, shares: Shares
    ) -> None:
        self.mesh, self.held, self.draws, self.shares = mesh, held, draws, shares
        built = Steps(planned, plan, mesh, held)
        self.uses, self.fresh = built.uses, built.fresh
        self.places, self.output_slots = len(built.slots), built.output_slots
        self.stretches = _stretches(built.steps)
        self.written = {value for step in built.steps for value in step.writes}
        self.sync: dict[tuple[Any, ...], GradSync] = {}
        self.watch: Watch | None = None
        self.formats = Formats([step.run for step in built.steps if isinstance(step.run, Bound)])

    def run(
        self, inputs: Sequence[Tensor], *, sync: bool = True, watch: Watch | None = None
    ) -> tuple[Tensor, ...]:
        """Compute this rank's slabs of the outputs from its slabs of the inputs."""
        self.watch = watch
        try:
            return self._run(inputs, sync)
        finally:
            self.watch = None

    def _run(self, inputs: Sequence[Tensor], sync: bool) -> tuple[Tensor, ...]:
        memory: list[Any] = [None] * self.places
        last = self.formats.choose(inputs)
        memory[: len(inputs)] = _all_between(inputs, last)
        chain = Chain()
        entry: Entry | None = None
        if torch.is_grad_enabled() and self.mesh.size > 1:
            chain.start()
            entry = self._enter(inputs, chain, sync)
        for number, stretch in enumerate(self.stretches):
            if stretch[0].recompute and torch.is_grad_enabled():
                self._recompute(number, memory, chain, entry)
                continue
            for step in stretch:
                self._step(step, memory, chain, entry)
        outputs = tuple(memory[slot] for slot in self.output_slots)
        if last is not None:  # as people expect from what they gave
            outputs = tuple(_all_between(outputs, any(map(is_last, inputs))))
        return outputs if entry is None else entry.leave(outputs)

    def _enter(self, inputs: Sequence[Tensor], chain: Chain, sync: bool) -> Entry:
        """Let the parameters in."""
        uses = [use for use in self.uses if self.held.get(use[0]).requires_grad]
        parameters = {name: self.held.get(name) for name, _ in uses}
        kinds = ((tensor.dtype, tensor.device) for tensor in parameters.values())
        key = (*uses, *kinds, *(tensor.requires_grad for tensor in inputs))
        if key not in self.sync:
            self.sync[key] = GradSync(self.mesh, self.shares, uses, self.fresh, parameters)
        return Entry(self.sync[key], parameters, chain, outputs=len(self.output_slots), sync=sync)

    def _recompute(self, number: int, memory: list[Any], chain: Chain, entry: Entry | None) -> None:
        """Run a stretch as one node that keeps only what it reads."""
        steps = self.stretches[number]
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
        for what in fixed:
            tensor = self._held(what, entry)
            # another pass may have written it before this one is computed again
            operands.append(tensor.clone() if what[0] in self.written else tensor)
        results = recomputed(
            body,
            operands,
            chain,
            self.draws,
            name=f"#{number}",
            wants=None if entry is None else entry.passing.wants,
        )
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
        if self.watch is not None and isinstance(step.run, Bound):
            self.watch.before(step.layer)
        if step.no_grad:
            with torch.no_grad():
                result = self._call(step, operands, chain)
        else:
            result = self._call(step, operands, chain)
        if self.watch is not None and isinstance(step.run, Bound):
            self.watch.after(step.layer, [result] if isinstance(result, Tensor) else result)
        if isinstance(result, Tensor):
            memory[step.outputs[0]] = result
        else:
            for slot, tensor in zip(step.outputs, result, strict=True):
                memory[slot] = tensor
        del operands
        for slot in step.frees:
            memory[slot] = None

    def _call(self, step: Step, operands: list[Tensor], chain: Chain) -> Any:
        run: Any = step.run
        return run(*operands) if isinstance(run, WriteBack) else run(*operands, chain=chain)

    def _held(self, what: tuple[Value, tuple[int, ...]], entry: Entry | None) -> Tensor:
        value, ranks = what
        tensor = self.held.tensor(value)
        if entry is not None and value.origin == "parameter" and tensor.requires_grad:
            return entry.get((str(value.source), ranks))
        return tensor


def _all_between(tensors: Sequence[Tensor], last: bool | None) -> list[Tensor]:
    return [x if last is None else between(x, last=last) for x in tensors]


def _stretches(steps: list[Step]) -> list[list[Step]]:
    """Join neighbouring steps that are computed again in backward together."""
    found: list[list[Step]] = []
    for step in steps:
        if step.recompute and found and found[-1][0].recompute == step.recompute:
            found[-1].append(step)
        else:
            found.append([step])
    return found
