"""What calls cost that follow the layer before them: element-wise calls, norms, reshapes, losses.

Element-wise calls and batch norm have closed forms. Of any other call the rule is asked, once for
each layout that its operand may have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tilewise.graph.graph import Node, Value
from tilewise.graph.held import at_rest
from tilewise.graph.lower import lower_call
from tilewise.graph.rule import REGISTRY, Lowered, Site
from tilewise.layout import PARTIAL, Axes, Cover, Degrees, Layout, Move
from tilewise.ops.draws import Draws
from tilewise.ops.overwrite import OVERWRITTEN_BYTES
from tilewise.planner.candidates import LETTERS
from tilewise.planner.cost import (
    PASSES,
    VIEWS,
    Block,
    Floats,
    Ints,
    NodeCost,
    Setting,
    mean_channels,
    memory_s,
)
from tilewise.planner.layouts import Layouts
from tilewise.planner.memory import keeps
from tilewise.planner.payload import WIDE, inner_exchange
from tilewise.planner.places import Place
from tilewise.planner.price import link_s, traffic_s
from tilewise.planner.traffic import traffic

LOSSES = {
    "mse_loss": 1,
    "smooth_l1_loss": 1,
    "huber_loss": 1,
    "binary_cross_entropy_with_logits": 2,
    "l1_loss": 3,
}
"""How many tensors of its prediction's size the backward of a loss holds beside what it keeps."""

SIMPLE = {"batch_norm", "dropout", "to", "type_as", "to_copy"}


@dataclass
class Followed:
    """A call that follows: its cost by candidate, where its results lie, and its other operands.

    `wants` holds, for each operand but the one it follows, the layouts that the candidates want,
    `blocks` what it needs of parameters.
    """

    cost: NodeCost
    places: list[Place]
    wants: dict[Value, Layouts]
    blocks: list[Block]


def simple(node: Node, operand: Value) -> bool:
    """Whether a call works element by element on one tensor, or is a batch norm."""
    alone = [value for value in node.values() if not value.held] == [operand]
    if not alone or len(node.outs) != 1 or node.out.shape != operand.shape:
        return False
    registered = REGISTRY.get(node.kind)
    elementwise = registered is not None and registered.apply.__name__ == "elementwise"
    return elementwise or node.kind in SIMPLE


def follow_simple(
    node: Node,
    place: Place,
    table: Ints,
    setting: Setting,
    *,
    grads: set[Value],
    over: bool = False,
) -> Followed:
    """Price an element-wise call or a batch norm where its operand lies.

    `over`: its backward is written over the gradient that it gets.
    """
    cost = NodeCost.zero(len(table))
    local = place.local
    size = local * setting.size(node.out)
    forward, backward = PASSES.get(node.kind, (2, 3))
    if node.kind not in VIEWS:
        cost.compute_forward += memory_s(setting.machine, forward * size)
        if node.out in grads:
            cost.compute_backward += memory_s(setting.machine, backward * size)
            cost.burst_bytes += np.where(over & (size >= OVERWRITTEN_BYTES), 1, 2) * size
        else:
            cost.workspace_bytes += 2 * size
    cost.saved_bytes += local * keeps(node, grads).beside_bytes
    shape, parts = node.out.shape, place.layouts.parts[place.where]
    if not shape:  # a single number: no channels, nothing is cut
        shape, parts = (1,), np.ones((len(parts), 1), parts.dtype)
    channel = 1 if len(shape) > 1 else 0
    channels = np.ceil(shape[channel] / parts[:, channel])
    others = parts.prod(1) // parts[:, channel]
    if node.kind == "batch_norm" and node.args[5]:
        statistics = _statistics_s(channels, others, table, setting)
        cost.exchange_forward += statistics
        cost.exchange_backward += statistics * (node.values()[0] in grads)
    blocks = [
        Block(v, channels, others, _beside(v, node, place, others))
        for v in node.values()
        if v.origin == "parameter"
    ]
    return Followed(cost, [place], {}, blocks)


def _beside(parameter: Value, node: Node, place: Place, sharers: Ints) -> Layouts:
    """Return how a parameter of an element-wise call or a batch norm is cut beside its operand."""
    shape, layouts = node.out.shape, place.layouts
    lead = len(shape) - len(parameter.shape)
    dims = [1] if node.kind in SIMPLE and len(shape) > 1 else range(lead, len(shape))
    parts = np.ones((len(layouts), len(parameter.shape)), np.int64)
    outer = parts.copy()
    for dim, at in zip(range(len(parameter.shape)), dims):
        if at >= 0 and parameter.shape[dim] == shape[at]:
            parts[:, dim], outer[:, dim] = layouts.parts[:, at], layouts.outer[:, at]
    where = place.where
    return Layouts(parameter.shape, layouts.ranks, parts[where], outer[where], sharers)


def _statistics_s(channels: Floats, sharers: Ints, table: Ints, setting: Setting) -> Floats:
    """Return the seconds in which ranks tell each other mean and deviations of their channels."""
    fast = setting.devices // table[:, : LETTERS.index("w") + 1].prod(1)
    near = np.minimum(np.maximum(setting.node // fast, 1), sharers)
    one = 2 * channels * WIDE
    inside = link_s(setting.machine.node, one * (near - 1), near - 1.0)
    return inside + link_s(setting.machine.network, one * (sharers - near), sharers - near * 1.0)


def follow(
    node: Node,
    operand: Value,
    place: Place,
    labels: Mapping[Value, str],
    table: Ints,
    setting: Setting,
    *,
    grads: set[Value],
) -> Followed:
    """Ask the rule of a call under each layout of the operand that it follows."""
    rows = [
        _Asked(node, operand, place.layouts.layout_at(row), labels, setting, grads)
        for row in range(len(place.layouts))
    ]
    cost = NodeCost.zero(len(table))
    for name in ("compute_forward", "compute_backward", "exchange_forward", "exchange_backward"):
        column = getattr(cost, name)
        column += np.array([getattr(row, name) for row in rows])[place.where]
    has = any(out in grads for out in node.outs)
    passing = cost.burst_bytes if has else cost.workspace_bytes
    passing += np.array([row.burst for row in rows])[place.where]
    cost.saved_bytes += np.array([row.beside for row in rows])[place.where]
    blocks = [
        Block(
            value,
            np.array([row.blocks[i][0] for row in rows], np.float64)[place.where],
            np.array([row.blocks[i][1] for row in rows], np.int64)[place.where],
            _asked_layouts([row.blocks[i] for row in rows]).take(place.where),
        )
        for i, (_, _, value, _) in enumerate(rows[0].blocks)
    ]
    places = []
    for index in range(len(node.outs)):
        layouts, where = Layouts.of_layouts([row.outs[index] for row in rows]).distinct()
        places.append(Place(place.owner, layouts, where[place.where]))
    wants = {
        value: Layouts.of_layouts([row.wants[value] for row in rows]).take(place.where)
        for value in rows[0].wants
    }
    return Followed(cost, places, wants, blocks)


def _asked_layouts(blocks: Sequence[tuple[int, int, Value, Axes]]) -> Layouts:
    """Return where blocks of a parameter are needed, and for how many ranks' results."""
    found = Layouts.of_layouts([Layout(value.shape, axes) for *_, value, axes in blocks])
    return replace(found, partial=np.array([sharers for _, sharers, *_ in blocks], np.int64))


class _Asked:
    """What a call does where its operand lies in one layout."""

    def __init__(
        self,
        node: Node,
        operand: Value,
        layout: Layout,
        labels: Mapping[Value, str],
        setting: Setting,
        grads: set[Value],
    ) -> None:
        lowered = lower_where(node, operand, layout, labels)
        operation, machine = lowered.operation, setting.machine
        self.outs = operation.outs
        self.exchange_forward = self.exchange_backward = 0.0
        moves: list[tuple[Cover, Cover, int, bool]] = []
        self.wants: dict[Value, Layout] = {}
        self.blocks: list[tuple[int, int, Value, Axes]] = []
        local = 0.0
        for value, need in zip(lowered.operands, operation.needs, strict=True):
            size = _largest(need.cover)
            if value is operand:
                moves.append((Cover.of(layout), need.cover, setting.size(value), value in grads))
            elif not value.held:
                self.wants[value] = need.home
            elif value.origin == "parameter":
                sharers = prod(a.size for a in need.cover.axes if a.dim == PARTIAL)
                self.blocks.append((size, sharers, value, at_rest(need.cover).axes))
            if not value.held:
                local += size * setting.size(value)
        for index, ends in enumerate(operation.inner):
            width, back = inner_exchange(node, index, len(operation.inner), setting.size)
            moves.append((*ends, width, back and operand in grads))
        for out, give, to in zip(node.outs, operation.gives, operation.outs, strict=True):
            moves.append((give, Cover.of(to), setting.size(out), out in grads))
            local += _largest(give) * setting.size(out)
        for source, target, width, back in moves:
            move = Move(source, target)
            self.exchange_forward += traffic_s(machine, traffic(move, setting.node), width)
            if back:
                found = traffic(move.adjoint, setting.node)
                self.exchange_backward += traffic_s(machine, found, width)
        still = node.kind in VIEWS
        forward, backward = PASSES.get(node.kind, (1, 1))
        self.compute_forward = 0.0 if still else float(memory_s(machine, np.array(local * forward)))
        has = node.out in grads
        self.compute_backward = has * self.compute_forward * backward / forward
        if node.flops:
            moved = local + sum(size * setting.size(value) for size, _, value, _ in self.blocks)
            forth_s, back_s = _product_s(node, lowered, setting, moved, grads)
            self.compute_forward, self.compute_backward = forth_s, has * back_s
        self.burst = 0.0 if still else 2.0 * local
        if node.kind in LOSSES and not node.out.shape:
            self.burst = LOSSES[node.kind] * _largest(Cover.of(layout)) * setting.size(operand)
        self.beside = keeps(node, grads).beside_bytes * float(_largest(Cover.of(operation.outs[0])))


def _product_s(
    node: Node, lowered: Lowered, setting: Setting, moved_bytes: float, grads: set[Value]
) -> tuple[float, float]:
    """Return the seconds of the fullest rank's part of a product, forward and backward.

    The factors' gradients are a product each; `c` cuts what is summed over.
    """
    machine, operation = setting.machine, lowered.operation
    first = 1 if node.kind == "addmm" else 0
    factors = lowered.operands[first : first + 2]
    shapes = [_extents(need.cover) for need in operation.needs]
    out, dim = _extents(operation.gives[0]), 1 if node.kind.startswith("conv") else -1
    share = prod(out) / prod(node.out.shape) * shapes[first][dim] / factors[0].shape[dim]
    channels = np.array(mean_channels(node, shapes, out))
    flops = np.array(node.flops * share)
    arithmetic = float(machine.arithmetic_s(node.kind, setting.dtype, flops, channels))
    moved = float(memory_s(machine, np.array(moved_bytes)))
    back = arithmetic / machine.rates(setting.dtype).backward_share
    gradients = sum(value in grads or value.trained for value in factors)
    return max(arithmetic + machine.call_s, moved), gradients * max(back + machine.call_s, moved)


def lower_where(
    node: Node, operand: Value, layout: Layout, labels: Mapping[Value, str], *, rank: int = 0
) -> Lowered:
    """Plan one call that follows an operand; others lie like it, or whole."""
    layouts = {
        value: layout.with_shape(value.shape)
        if value is operand or value.shape == operand.shape
        else Layout.replicated(value.shape, ranks=layout.ranks)
        for value in node.values()
        if not value.held
    }
    site = Site(node, layouts, dict(labels), None, layout.ranks, rank, Draws(0))
    site.followed = _degrees_like(layout, labels.get(operand, ""))
    return lower_call(site)


def _degrees_like(layout: Layout, text: str) -> Degrees:
    """Return the degrees of a layout as its labels name them."""
    found = {letter: parts for letter, parts in zip(text, layout.degrees) if letter in "ndhwc"}
    return Degrees(**found) if layout.ranks % prod(found.values()) == 0 else Degrees()


def _largest(cover: Cover) -> int:
    return prod(_extents(cover))


def _extents(cover: Cover) -> tuple[int, ...]:
    """Return the shape of the fullest rank's part."""
    return tuple(max(one.size for one in blocks) for blocks in cover.blocks)
