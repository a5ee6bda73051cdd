"""What a layer costs under each of its candidates: seconds and bytes, from its form.

compute     the slowest rank's arithmetic and memory traffic (uneven slabs count)
halo        rows of neighbours, which may hide behind the compute
exchange    the reduce-scatter over c, statistics of norms
sync        the sum of the gradients of the layer's blocks over the ranks that share them
optimizer   reading and writing blocks and states
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import PlanError
from tilewise.graph.graph import Node, Value
from tilewise.planner.candidates import LETTERS
from tilewise.planner.forms import Form, Swap
from tilewise.planner.layouts import Layouts
from tilewise.planner.machine import Machine
from tilewise.planner.price import link_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Tensors of a parameter's size that each optimizer keeps."""

TEMPORARIES = {"sgd": 0, "momentum": 0, "rmsprop": 1, "adam": 2, "adamw": 2}
"""Tensors of one parameter's size that torch's optimizers make for a moment."""

PASSES = {
    "batch_norm": (3, 5),
    "group_norm": (3, 5),
    "instance_norm": (3, 5),
    "layer_norm": (3, 5),
    "softmax": (3, 3),
    "log_softmax": (3, 3),
    "dropout": (4, 3),
}
"""How often a call reads or writes a tensor of its result's size, forward and backward."""

VIEWS = {
    "view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "detach", "alias",
    "expand", "broadcast_tensors", "contiguous",
}  # fmt: skip
"""Calls that leave their operand where it is."""


@dataclass
class NodeCost:
    """Seconds and bytes of one call for every candidate of the layer that decides its split.

    Bytes are those of the fullest rank: `given` of the network's inputs, `saved` for the call's own
    backward, `later` of results that only calls after it save, `burst` while its backward runs, of
    which `workspace` is there forward too (for a call without gradients that is all), `block` of
    its parameters, `trained` of those that have gradients and states, and `copy` of what is made of
    them while gradients are summed and the optimizer runs. A parameter counts for the first call
    that uses it; `gradient` bytes are there from the call's backward on, so for the last one.
    `waiting` is what of `sync` nothing can hide.

    `again` is 1 where the call's stretch is computed again in backward: then saved and later bytes
    are there only meanwhile, and `left` are those that stay.
    """

    compute_forward: Floats
    compute_backward: Floats
    halo_forward: Floats
    halo_backward: Floats
    exchange_forward: Floats
    exchange_backward: Floats
    sync: Floats
    waiting: Floats
    optimizer: Floats
    given_bytes: Floats
    saved_bytes: Floats
    later_bytes: Floats
    burst_bytes: Floats
    workspace_bytes: Floats
    block_bytes: Floats
    trained_bytes: Floats
    gradient_bytes: Floats
    copy_bytes: Floats
    again: Floats
    left_bytes: Floats

    @classmethod
    def zero(cls, count: int) -> NodeCost:
        return cls(*(np.zeros(count) for _ in fields(cls)))

    def forward(self, overlap: float) -> Floats:
        """Seconds forward; a share of the compute hides the halo."""
        halo = bare(self.halo_forward, self.compute_forward, overlap)
        return self.compute_forward + halo + self.exchange_forward

    def backward(self, overlap: float) -> Floats:
        """Seconds backward, gradient sums left out; with forward, where that is run again."""
        halo = bare(self.halo_backward, self.compute_backward, overlap)
        again = self.again * self.forward(overlap)
        return self.compute_backward + halo + self.exchange_backward + again

    @property
    def held_bytes(self) -> Floats:
        """Bytes kept from forward to backward."""
        kept = np.where(self.again > 0, self.left_bytes, self.saved_bytes + self.later_bytes)
        return self.given_bytes + kept

    @property
    def inner_bytes(self) -> Floats:
        """Bytes kept only while the call's stretch is computed again and its backward runs."""
        return self.again * (self.saved_bytes + self.later_bytes)

    def scale(self, step: WholeStep) -> None:
        """Let all seconds be those within a step."""
        self.compute_forward *= step.layers
        self.compute_backward *= step.layers
        self.halo_forward *= step.layers
        self.halo_backward *= step.layers
        self.exchange_forward *= step.layers
        self.exchange_backward *= step.layers
        self.optimizer *= step.layers
        self.sync *= step.sums
        self.waiting *= step.sums

    def take(self, rows: Ints | int) -> NodeCost:
        """Return the cost of some candidates."""
        return NodeCost(*(np.asarray(getattr(self, field.name)[rows]) for field in fields(self)))


def bare(halo: Floats, compute: Floats, overlap: float) -> Floats:
    """Return what of a halo's seconds does not hide behind that share of the compute."""
    return np.maximum(halo - overlap * compute, 0.0)


@dataclass(frozen=True)
class WholeStep:
    """How many times as long as by themselves parts of a step take within one.

    `layers` are calls with their own messages, and the optimizer; `moves` bring tensors from one
    layer to the next; `sums` are those of gradients.
    """

    layers: float = 1.0
    moves: float = 1.0
    sums: float = 1.0


@dataclass(frozen=True)
class Setting:
    """What a cost depends on besides the layer."""

    machine: Machine
    devices: int
    dtype: str
    itemsize: int
    optimizer: str
    step: WholeStep = WholeStep()

    def __post_init__(self) -> None:
        if self.optimizer not in STATES:
            raise PlanError(
                f"plan: optimizer (={self.optimizer!r}) must be one of {', '.join(STATES)}"
            )
        self.machine.rates(self.dtype)

    @property
    def node(self) -> int:
        return self.machine.devices_per_node

    @property
    def states(self) -> int:
        """How many tensors of a parameter's size the optimizer keeps."""
        return STATES[self.optimizer]

    def size(self, value: Value) -> int:
        """Return the bytes of an element: the training dtype's for floats."""
        return self.itemsize if value.dtype.is_floating_point else value.dtype.itemsize


def node_cost(form: Form, setting: Setting, *, grads: set[Value]) -> NodeCost:
    """Price a call whose candidates are the form's; `grads` are the values with gradients."""
    node, table = form.node, form.table
    cost = NodeCost.zero(len(table))
    moving = [(i, v) for i, v in enumerate(form.operands) if not v.held]
    results = list(enumerate(node.outs))
    buffers = _Buffers(len(table))
    for index, value in moving:
        swap = form.swap("bring", index, prod(value.shape))
        cost.halo_forward += swap_s(swap, setting, setting.size(value))
        buffers.forward(swap.received * setting.size(value))
        if value in grads:
            back = form.swap("bring_back", index, prod(value.shape))
            cost.halo_backward += swap_s(back, setting, setting.size(value))
            buffers.backward(back.received * setting.size(value))
    for index, value in results:
        swap = form.swap("finish", index, prod(value.shape))
        cost.exchange_forward += swap_s(swap, setting, setting.size(value))
        given = form.share("give", index) * prod(value.shape) * setting.size(value)
        buffers.forward(swap.received * setting.size(value), given)
        if value in grads:
            back = form.swap("finish_back", index, prod(value.shape))
            cost.exchange_backward += swap_s(back, setting, setting.size(value))
            out = form.share("out", index) * prod(value.shape) * setting.size(value)
            buffers.gathered(back.received * setting.size(value), given, out)
    _add_compute(cost, form, setting, moving, grads)
    buffers.add_to(cost, backward=any(out in grads for out in node.outs))
    return cost


@dataclass(frozen=True)
class Block:
    """What a call needs of a parameter, for every candidate: elements, and how many ranks share
    them. `layouts` tell which rank needs which block."""

    parameter: Value
    elements: Floats
    sharers: Ints
    layouts: Layouts


def blocks_of(form: Form) -> list[Block]:
    """List the blocks of parameters that a call needs."""
    return [
        Block(
            value,
            form.share("need", index) * prod(value.shape),
            form.sharers(index),
            Layouts.of_degrees(value.shape, form.devices, form.table, form.roles(index)),
        )
        for index, value in enumerate(form.operands)
        if value.origin == "parameter"
    ]


class _Buffers:
    """What a call holds while messages travel: those that come and, as much again, those that go.

    Exchanges of one call follow each other, so the largest counts. Partial results stand beside
    theirs until they are scattered. A gradient is gathered before the arithmetic of backward, and
    as it came it is there until that is done; operands' gradients travel behind the arithmetic.
    """

    def __init__(self, count: int) -> None:
        self.forth, self.back, self.before, self.came = np.zeros((4, count))

    def forward(self, received: Floats, partial: Floats | float = 0.0) -> None:
        self.forth = np.maximum(self.forth, np.where(received > 0, 2 * received + partial, 0.0))

    def backward(self, received: Floats) -> None:
        self.back = np.maximum(self.back, 2 * received)

    def gathered(self, received: Floats, whole: Floats, part: Floats) -> None:
        """Note the gradient of a result, of which a rank has a part."""
        travels = received > 0
        # a rank sends its part to all others as it lies
        self.before = np.maximum(self.before, np.where(travels, received + part + whole, 0.0))
        self.came = np.maximum(self.came, np.where(travels, part, 0.0))

    def add_to(self, cost: NodeCost, *, backward: bool) -> None:
        cost.workspace_bytes += self.forth
        if backward:
            behind = cost.burst_bytes + self.back + self.came
            cost.burst_bytes[:] = np.maximum(behind, self.before)


def _add_compute(
    cost: NodeCost,
    form: Form,
    setting: Setting,
    moving: Sequence[tuple[int, Value]],
    grads: set[Value],
) -> None:
    """Add the slowest rank's compute, and what it needs for a moment."""
    node, machine = form.node, setting.machine
    brought = sum(
        (form.share("need", i) * prod(v.shape) * setting.size(v) for i, v in moving),
        np.zeros(len(form.table)),
    )
    given = sum(
        (form.share("give", i) * prod(v.shape) * setting.size(v) for i, v in enumerate(node.outs)),
        np.zeros(len(form.table)),
    )
    back = any(value in grads for _, value in moving)
    forward, backward = _workspace(form, setting, brought, given)
    joined = np.where(form.rim(), brought, 0.0)
    cost.workspace_bytes += forward + joined
    has = any(out in grads for out in node.outs)
    factors = form.operands[1:3] if node.kind == "addmm" else form.operands[:2]
    gradients = has * sum(value in grads or value.trained for value in factors)
    if not has:
        for name, some in (("need", moving), ("out", enumerate(node.outs))):
            for i, value in some:
                if value.origin != "input":
                    share = form.share(name, i) * prod(value.shape)
                    cost.workspace_bytes += share * setting.size(value)
    elif gradients > back or not node.flops:
        cost.burst_bytes += given + brought * back + backward + joined
    else:  # the weight has none
        cost.burst_bytes += given + brought * back + forward + joined
    if not node.flops:
        cost.compute_forward += memory_s(machine, brought + given)
        cost.compute_backward += back * memory_s(machine, brought + given)
        return
    weight = 1
    share = form.share("give", 0, ("n", "d", "h", "w")) * form.share("need", weight, ("cf",))
    blocks = form.share("need", weight) * prod(form.operands[weight].shape) * setting.itemsize
    flops = node.flops * share
    channels = np.sqrt(
        (form.share("need", 0, ("cf",)) * _channels(form.operands[0], node))
        * (form.share("give", 0, ("cf",)) * _channels(node.out, node))
    )
    arithmetic = machine.arithmetic_s(node.kind, setting.dtype, flops, channels)
    moved = memory_s(machine, brought + given + blocks)
    cost.compute_forward += np.maximum(arithmetic + machine.call_s, moved)
    rate = machine.rates(setting.dtype).backward_share
    once = np.maximum(arithmetic / rate + machine.call_s, moved)
    cost.compute_backward += once * gradients
    _use_measured(cost, form, setting, has)


def _workspace(
    form: Form, setting: Setting, brought: Floats, given: Floats
) -> tuple[Floats, Floats]:
    """Return the copies that a convolution makes in blocks of channels, forward and backward.

    Forward it is one of operand and result; the gradient of the weight needs both, unless there are
    too few channels for a block: then the operand is read as it lies.
    """
    block = setting.machine.workspace_channel_block
    if block == 1 or not form.node.kind.startswith("conv"):
        return np.zeros_like(brought), np.zeros_like(brought)
    channels = form.share("need", 0, ("cf",)) * form.operands[0].shape[1]
    filters = form.share("give", 0, ("cf",)) * form.node.out.shape[1]
    operand, result = (
        size * np.ceil(count / block) * block / np.maximum(count, 1.0)
        for size, count in ((brought, channels), (given, filters))
    )
    one = np.maximum(operand, result)
    return one, np.where(channels >= block, operand + result, one)


def _use_measured(cost: NodeCost, form: Form, setting: Setting, backward: bool) -> None:
    """Put measured times of local shapes in place of the model's where the machine has them."""
    measured = setting.machine.measured
    if not measured:
        return
    local = [local_extents(form, index) for index in range(min(2, len(form.operands)))]
    options = call_options(form.node)
    rows = np.concatenate(local, axis=1)
    split = local[0].shape[1]
    for (kind, dtype, shapes, given), found in measured.items():
        row = [extent for shape in shapes for extent in shape]
        alike = len(row) == rows.shape[1] and len(shapes[0]) == split
        if alike and (kind, dtype, given) == (form.node.kind, setting.dtype, options):
            where = (rows == row).all(1)
            cost.compute_forward[where] = found.forward_s
            cost.compute_backward[where] = backward * found.backward_s


def local_extents(form: Form, index: int) -> Ints:
    """Return the local shape of an operand on the fullest rank, for every candidate."""
    value, roles = form.operands[index], form.roles(index)
    shape = np.tile(np.array(value.shape, np.float64), (len(form.table), 1))
    for group in ("n", "d", "h", "w", "cf"):
        dims = {roles[letter] for letter in group if roles[letter] >= 0}
        for dim in dims:
            if len(dims) == 1:
                shape[:, dim] *= form.share("need", index, (group,))
            else:
                column = LETTERS.index(next(x for x in group if roles[x] == dim))
                shape[:, dim] = np.ceil(shape[:, dim] / form.table[:, column])
    return np.rint(shape).astype(np.int64)


def call_options(node: Node) -> str:
    """Return the arguments of a call that are no tensors, as text."""
    return repr([a for a in node.args if not isinstance(a, Value) and a is not None])


def _channels(value: Value, node: Node) -> int:
    return value.shape[-1] if node.kind == "linear" else value.shape[1]


def mean_channels(node: Node, operands: Sequence[Sequence[int]], out: Sequence[int]) -> float:
    """Return the geometric mean of the channels that a call with arithmetic reads and makes.

    Shapes are local ones. The channels of a matrix product are the dim that is summed over and the
    columns of the result; a product with a vector makes one column.
    """
    if node.kind.startswith("conv"):
        return sqrt(max(operands[0][1] * out[1], 1))
    x, other = operands[1:3] if node.kind == "addmm" else operands[:2]
    return sqrt(max(x[-1] * (out[-1] if len(other) > 1 else 1), 1))


def memory_s(machine: Machine, moved_bytes: Floats) -> Floats:
    """Return the seconds of a call that only reads and writes so many bytes."""
    return np.where(moved_bytes > 0, machine.call_s + machine.traffic_s(moved_bytes), 0.0)


def swap_s(swap: Swap, setting: Setting, itemsize: int) -> Floats:
    """Return the seconds of an exchange among neighbours along each axis."""
    machine, reach = setting.machine, swap.reach(setting.node)
    received = swap.received * itemsize
    messages = np.where(received > 0, reach.all_parts - 1, 0.0)
    near = np.where(received > 0, reach.near_parts - 1, 0.0)
    far_s = link_s(machine.network, received * reach.far_share, messages - near)
    return far_s + link_s(machine.node, received * (1 - reach.far_share), near)
