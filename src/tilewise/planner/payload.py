"""All that a planned program sends in one training step, without sending it.

The same decisions as in graph/steps.py are taken from the same planned program: an operand that
lies elsewhere is brought, one that several calls need alike is brought once, gradients travel back
where there are any, and the gradients of parameters are summed over the ranks that share a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tilewise.graph.graph import Node, Program, Value
from tilewise.graph.held import chosen_covers, whole_cover
from tilewise.graph.lower import Planned
from tilewise.graph.rule import Lowered
from tilewise.graph.steps import output_layouts, shared_needs, written_buffers
from tilewise.layout import Cover, Layout, Move
from tilewise.ops.operation import Need
from tilewise.plan import Plan
from tilewise.planner.traffic import Traffic, traffic

NORMS = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "var", "std")
PICKS = ("amax", "amin", "max", "min", "argmax", "argmin")
WIDE = 8  # bytes of a float64 or int64
Size = Callable[[Value], int]


@dataclass(frozen=True)
class Sent:
    """One exchange: for which layer, of which kind, how many bytes an element, and back too?

    `kind` is `halo` (an operand that lies right but for its neighbours' rows), `exchange` (any
    other tensor of the network), or `held` (a parameter or buffer). `times` counts the forward
    passes: two where the layer is computed again.
    """

    layer: str
    kind: str
    move: Move
    itemsize: int
    backward: bool
    times: int = 1


@dataclass(frozen=True)
class Shared:
    """A parameter whose block's gradients are summed over the ranks that share it."""

    layer: str
    parameter: str
    cover: Cover
    itemsize: int

    @property
    def bytes(self) -> int:
        """What all ranks bring to the sum: their blocks, and a flag beside each."""
        sizes = [prod(self.cover.local_shape(rank)) for rank in range(self.cover.ranks)]
        return sum(size + 1 for size in sizes) * self.itemsize


class Payload:
    """What a planned training program sends; `size` tells the bytes of an element of a tensor.

    By default those are of the dtype that the program was captured in.
    """

    def __init__(
        self, planned: Planned, plan: Plan, *, node: int, size: Size | None = None
    ) -> None:
        self.planned, self.plan, self.node = planned, plan, node
        self.size = width if size is None else size
        self.ranks = max((layout.ranks for layout in planned.layouts.values()), default=1)
        self.differentiable = differentiable(planned.program)
        self.storage = chosen_covers(planned.lowered, lambda value: str(value.source), self.ranks)
        self.sent = tuple(self._sent())

    def _sent(self) -> Iterator[Sent]:
        planned = self.planned
        sharing = shared_needs(planned)
        moved: dict[tuple[Value, Layout | Need], None] = {}
        for node, lowered in zip(planned.program.nodes, planned.lowered):
            times = 2 if self.plan.recomputes(node.name) else 1
            for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
                if value.held:
                    yield from self._held(node, value, need, times)
                    continue
                layout, base = planned.layouts[value], need.home
                wanted: list[tuple[Layout | Need, Cover, bool]] = []
                if sharing.homes[value, base.axes] > 1 and base != layout:
                    wanted.append((base, Cover.of(layout), True))
                    layout = base
                again = sharing.needs[value, need] > 1
                shared = again and not Move(Cover.of(layout), need.cover).local
                wanted.append((need, Cover.of(layout), shared))
                for target, source, once in wanted:
                    if once and (value, target) in moved:
                        continue
                    if once:
                        moved[value, target] = None
                    cover = target.cover if isinstance(target, Need) else Cover.of(target)
                    grad = value in self.differentiable and not node.no_grad
                    kind = _kind(source, need) if target is need else "exchange"
                    yield Sent(node.name, kind, Move(source, cover), self.size(value), grad, times)
            yield from self._own(node, lowered, times)
        for value, target in zip(planned.program.output_values, output_layouts(planned, self.plan)):
            move = Move(Cover.of(planned.layouts[value]), Cover.of(target))
            yield Sent("output", "exchange", move, self.size(value), value in self.differentiable)

    def _held(self, node: Node, value: Value, need: Need, times: int) -> Iterator[Sent]:
        """Yield what brings a parameter or buffer that is not held as it is needed."""
        storage = self.storage.get(str(value.source))
        if value.origin == "constant" or storage is None:
            storage = whole_cover(value.shape, self.ranks)
        if storage.same_blocks(need.cover):
            return
        move = Move(storage, need.cover)
        grad = value.trained and not node.no_grad
        yield Sent(node.name, "held", move, self.size(value), grad, times)
        if value in written_buffers(node):
            yield Sent(node.name, "held", move.adjoint, self.size(value), False)

    def _own(self, node: Node, lowered: Lowered, times: int) -> Iterator[Sent]:
        """Yield the exchanges inside a call, and those that finish its results."""
        operation = lowered.operation
        grads = any(out in self.differentiable for out in node.outs)
        inputs = any(v in self.differentiable for v in lowered.operands if not v.held)
        for index, ends in enumerate(operation.inner):
            size, back = inner_exchange(node, index, len(operation.inner), self.size)
            backward = back and inputs and not node.no_grad
            yield Sent(node.name, "exchange", Move(*ends), size, backward, times)
        for out, given, layout in zip(node.outs, operation.gives, operation.outs, strict=True):
            move = Move(given, Cover.of(layout))
            backward = grads and out in self.differentiable
            yield Sent(node.name, "exchange", move, self.size(out), backward, times)

    @cached_property
    def shared(self) -> tuple[Shared, ...]:
        """The parameters whose gradients are summed."""
        found: dict[tuple[str, Cover], Shared] = {}
        for node, lowered in zip(self.planned.program.nodes, self.planned.lowered):
            for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
                name = str(value.source)
                if not value.trained or not need.cover.partial:
                    continue
                if self.storage[name].same_blocks(need.cover):
                    one = Shared(node.name, name, need.cover, self.size(value))
                    found.setdefault((name, need.cover), one)
        return tuple(found.values())

    def traffic(self, sent: Sent) -> tuple[Traffic, Traffic | None]:
        """Count an exchange forward, and backward where gradients travel."""
        back = traffic(sent.move.adjoint, self.node) if sent.backward else None
        return traffic(sent.move, self.node), back

    @cached_property
    def bytes_by_layer(self) -> dict[str, int]:
        """Bytes that all ranks together hand over for each layer, gradient sums included."""
        found: dict[str, int] = {}
        for sent in self.sent:
            forward, back = self.traffic(sent)
            elements = forward.elements * sent.times + (back.elements if back else 0)
            found[sent.layer] = found.get(sent.layer, 0) + elements * sent.itemsize
        for one in self.shared:
            found[one.layer] = found.get(one.layer, 0) + one.bytes
        outputs = len(self.planned.program.output_values)
        if outputs > 1 and self.ranks > 1:
            found["output"] = found.get("output", 0) + 4 * outputs * self.ranks
        return {layer: size for layer, size in found.items() if size}

    @property
    def bytes(self) -> int:
        """Bytes that all ranks together hand over in one training step."""
        return sum(self.bytes_by_layer.values())


def width(value: Value) -> int:
    """Return the bytes of one element as it was captured."""
    return value.dtype.itemsize


def inner_exchange(node: Node, index: int, count: int, size: Size) -> tuple[int, bool]:
    """Return bytes an element and whether gradients come back, of an exchange inside a call.

    Statistics travel in float64, half types are summed in float32; see the operators' files.
    """
    value = node.values()[0]
    wide = max(size(value), 4)
    if node.kind in NORMS:
        return WIDE, True
    if node.kind in PICKS:
        return WIDE, False
    if node.kind.startswith("adaptive_max") or node.kind.startswith("max_pool"):
        return (WIDE, False) if index else (size(value), True)
    if node.kind in ("softmax", "log_softmax", "cross_entropy_loss") and count > 1:
        return wide, index > 0
    return wide, True


def _kind(source: Cover, need: Need) -> str:
    """Tell a halo, whose rows come from neighbours, from other moves."""
    home = Cover.of(need.home)
    return "halo" if source == home and not need.cover.partial else "exchange"


def differentiable(program: Program) -> set[Value]:
    """Return the values that have a gradient: those computed from trained ones, in floats."""
    found: set[Value] = set()
    for node in program.nodes:
        if node.no_grad or node.kind == "detach":
            continue
        has = [value in found or value.trained for value in node.values()]
        if node.kind == "broadcast_tensors":  # each result is one operand's
            found.update(out for out, grad in zip(node.outs, has) if grad)
        elif any(has):
            found.update(out for out in node.outs if out.dtype.is_floating_point)
    return found
