"""Run one training step of the lowered program on one rank, with tensors that hold no values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise.graph import Graph, ParallelModel
from tilewise.graph.executable import Executable
from tilewise.graph.held import Held
from tilewise.graph.lower import Planned
from tilewise.graph.steps import Step
from tilewise.graph.template import rebuild
from tilewise.plan import Plan
from tilewise.planner.cost import STATES, TEMPORARIES
from tilewise.simulate.mesh import SimulatedMesh
from tilewise.simulate.record import Kernel, Message, Recorder, Segment, Sum


@dataclass
class RankRun:
    """What one rank did in a step.

    Bytes held all the time are `block_bytes` of parameters, `state_bytes` of the optimizer, and
    `other_bytes` of buffers and inputs.
    """

    rank: int
    planned: Planned
    segments: list[Segment]
    peak_bytes: int
    block_bytes: int
    state_bytes: int
    other_bytes: int

    @property
    def flops(self) -> int:
        return sum(segment.flops for segment in self.segments)

    @cached_property
    def messages(self) -> list[tuple[Segment, Message]]:
        """All messages, with where they belong."""
        return [(s, e) for s in self.segments for e in s.events if isinstance(e, Message)]

    @cached_property
    def sums(self) -> list[tuple[Segment, Sum]]:
        """All sums, with where they belong."""
        return [(s, e) for s in self.segments for e in s.events if isinstance(e, Sum)]

    @property
    def kernels(self) -> list[tuple[Segment, Kernel]]:
        """All arithmetic, with where it belongs."""
        return [(s, e) for s in self.segments for e in s.events if isinstance(e, Kernel)]

    @property
    def handed_bytes(self) -> int:
        """What this rank hands over, as a trace counts it: what it sends, and its sums."""
        sent = sum(message.bytes for _, message in self.messages if message.sent)
        return sent + sum(one.bytes for _, one in self.sums)

    def received(self) -> dict[str, int]:
        """Return the bytes that come to this rank for each layer; `gradients` stand apart."""
        found: dict[str, int] = {}
        for segment, message in self.messages:
            if not message.sent:
                found[segment.layer] = found.get(segment.layer, 0) + message.bytes
        for segment, one in self.sums:
            layer = "gradients" if one.kind == "gradients" else segment.layer
            found[layer] = found.get(layer, 0) + one.bytes
        return found


class _Watched(Executable):
    """An executable that tells a recorder which step runs."""

    recorder: Recorder

    def _step(self, step: Step, *arguments: Any) -> None:
        with self.recorder.step(step.layer):
            super()._step(step, *arguments)


def run_rank(
    model: nn.Module, graph: Graph, plan: Plan, *, ranks: int, rank: int, optimizer: str = "adam"
) -> RankRun:
    """Run forward, backward, gradient sums and the optimizer's update of one rank.

    The model is on the meta device, or else only its shapes matter. The update is not run but
    noted, layer by layer: its states are there all the time, its temporaries while a layer's blocks
    are updated.
    """
    mesh = SimulatedMesh(ranks, rank)
    split = ParallelModel(_on_meta(model), graph, plan, mesh)
    run = split.runs.find(graph.inputs, graph.targets)
    executable = _Watched(run.planned, plan, mesh, split.held, split.draws, split.runs.shares)
    mesh.learn(step for stretch in executable.stretches for step in stretch)
    run.executable = executable
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        for name in split.held.places:
            block = split.held.get(name)
            if block.is_meta:
                split.held.put(name, torch.empty(block.shape, dtype=block.dtype))
        values = run.planned.program.inputs
        slabs = [
            torch.empty(layout.local_shape(rank), dtype=value.dtype)
            for layout, value in zip(run.given, values, strict=True)
        ]
    parameters, others = list(split.parameters()), [*split.buffers(), *slabs]
    blocks = sum(map(_bytes, parameters))
    states = STATES[optimizer] * sum(_bytes(p) for p in parameters if p.requires_grad)
    recorder = Recorder([*parameters, *others], always_bytes=states)
    mesh.recorder = executable.recorder = recorder
    with fake, recorder:
        outputs, _ = split.runs.run(slabs, graph.inputs, graph.targets, sync=True)
        ends = [output for output in outputs if output.requires_grad]
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        del outputs, ends
    mesh.recorder = None
    updates = _updates(run.planned, split.held, recorder.now, TEMPORARIES[optimizer])
    return RankRun(
        rank,
        run.planned,
        [*recorder.segments.values(), *updates],
        peak_bytes=max([recorder.peak, *(update.peak_bytes for update in updates)]),
        block_bytes=blocks,
        state_bytes=states,
        other_bytes=sum(map(_bytes, others)),
    )


def _updates(planned: Planned, held: Held, now: int, temporaries: int) -> list[Segment]:
    """Return the update of each layer's blocks, with all gradients there; shared ones once."""
    found = []
    for name, parameters in planned.program.first_uses().items():
        largest = max(_bytes(held.tensor(value)) for value in parameters)
        peak = now + temporaries * largest
        found.append(Segment(name, "optimizer", peak_bytes=peak, end_bytes=now))
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _on_meta(model: nn.Module) -> nn.Module:
    """Return the model if it has no values, or one like it that has none."""
    if all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return model
    return rebuild(
        model,
        lambda _, p: nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad),
        lambda _, b: b.to("meta"),
    )
