"""One rank of a world that is not there: messages are noted, and nobody answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from tilewise.comm import Exchange
from tilewise.comm.exchange import KINDS
from tilewise.comm.mesh import Group
from tilewise.comm.silent import Done, SilentMesh
from tilewise.graph.steps import Arrive, Early, Step, WriteBack
from tilewise.layout import Cover
from tilewise.ops.operation import Bound, Need
from tilewise.simulate.record import Message, Recorder, Sum

GRADIENTS = "gradients of "
BACKWARD = " (backward)"


class SimulatedMesh(SilentMesh):
    """A rank whose messages go to the recorder instead of to others."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, rank)
        self.recorder: Recorder | None = None
        self.kinds: dict[int, str] = {}

    def send(self, buffer: Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Note a message to a peer."""
        self.trace.add("send", layer, (peer,), _bytes(buffer))
        self._message(buffer, peer, tag, layer, sent=True)
        return super().send(buffer, peer, tag=tag, layer=layer)

    def receive(self, buffer: Tensor, peer: int, *, tag: int, layer: str) -> Any:
        """Note a message from a peer; the buffer stays as it is."""
        self._message(buffer, peer, tag, layer, sent=False)
        return Done()

    def sum(self, buffer: Tensor, group: Group, *, layer: str, wait: bool = True) -> Any:
        """Note a sum."""
        work = super().sum(buffer, group, layer=layer, wait=wait)
        if work is None:
            return None
        self.trace.add("sum", layer, group.ranks, _bytes(buffer))
        if self.recorder is not None:
            gradients = layer.startswith(GRADIENTS)
            where = self.recorder.here(None if gradients else _plain(layer))
            kind = "gradients" if gradients else "sum"
            where.events.append(Sum(kind, group.ranks, _bytes(buffer)))
        return work

    def total(self, numbers: Sequence[float], *, layer: str) -> list[float]:
        """Note a sum of what hosts know."""
        if self.size > 1 and self.recorder is not None:
            self.trace.add("sum", layer, self.world_ranks, 4 * len(numbers))
            where = self.recorder.here("output")
            where.events.append(Sum("sum", self.world_ranks, 4 * len(numbers)))
        return super().total(numbers, layer=layer)

    def learn(self, steps: Iterable[Step]) -> None:
        """Learn from a program what its messages are for.

        An exchange's own kind only says what waiting for it counts as.
        """
        for step in steps:
            if isinstance(step.run, Bound):
                self._learn_bound(step.run, [where == "held" for where, _ in step.inputs])
            elif isinstance(step.run, Early):
                for exchange in step.run.exchanges:
                    self._name(exchange, _brought(exchange, Need(exchange.move.target)))
            elif not isinstance(step.run, Arrive):
                run = step.run.exchange if isinstance(step.run, WriteBack) else step.run
                held = isinstance(step.run, WriteBack) or step.inputs[0][0] == "held"
                self._name(run, "held" if held else "move")

    def _learn_bound(self, bound: Bound, held: list[bool]) -> None:
        needs = bound.operation.needs
        for bring, need, is_held in zip(bound.brings, needs, held, strict=True):
            if bring is not None:
                self._name(bring, "held" if is_held else _brought(bring, need))
        for inner in bound.inner:
            self._name(inner, "inner")
        for finish in bound.finishes:
            if finish is not None:
                self._name(finish, "scatter")

    def _name(self, exchange: Exchange, kind: str) -> None:
        self.kinds[exchange.forth.tag] = self.kinds[exchange.back.tag] = kind

    def _message(self, buffer: Tensor, peer: int, tag: int, layer: str, *, sent: bool) -> None:
        if self.recorder is not None:
            number = tag // KINDS
            kind = self.kinds.get(number, "move")
            where = self.recorder.here(_plain(layer))
            where.events.append(Message(kind, number, peer, _bytes(buffer), sent))


def _brought(exchange: Exchange, need: Need) -> str:
    """Say what an operand is brought for."""
    if exchange.move.source != Cover.of(need.home):
        return "move"
    return "gather" if need.cover.partial else "halo"


def _bytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _plain(layer: str) -> str:
    return layer.removesuffix(BACKWARD)
