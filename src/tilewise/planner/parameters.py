"""What parameters cost: each counts once, however many calls use it.

Where several layers share a parameter, what matters is which rank needs which block of it: under
degrees of the same numbers these may differ, as ranks without work of their own stand last, and a
transposed convolution's channels are another's filters. Ranks hold a parameter as all calls need
it, if they need the same blocks of it; or else all of it, and its gradient is gathered from the
calls (see graph/held.py). The search takes no such plan where there is a choice; one that is given
is priced so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node
from tilewise.graph.sync import ALONE_BYTES, BUCKET_BYTES
from tilewise.layout import Layout
from tilewise.planner.cost import TEMPORARIES, Block, NodeCost, Setting, memory_s
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.layouts import Layouts
from tilewise.planner.moves import MoveCosts
from tilewise.planner.price import sum_s
from tilewise.planner.solve import Tie

Ints = NDArray[np.int64]
Costs = Mapping[str, NodeCost]


@dataclass(frozen=True)
class Buckets:
    """How gradients are summed (see graph/sync.py), as far as that is alike under all plans.

    `late` are the parameters of the bucket that is complete when backward is done: their sums hide
    behind nothing. Those in `alone` are summed one by one as long as their blocks are large; all
    others of a bucket together have `small_bytes`.
    """

    late: Collection[str]
    alone: Collection[str]
    small_bytes: int


class Parameters:
    """The parameters of a program, each with the blocks that calls need of it."""

    def __init__(self) -> None:
        self.uses: dict[str, dict[str, Block]] = {}

    def use(self, node: Node, blocks: Sequence[Block]) -> None:
        """Note the parameters that a call uses."""
        for block in blocks:
            self.uses.setdefault(str(block.parameter.source), {})[node.name] = block

    def charge(self, costs: Costs, setting: Setting) -> None:
        """Charge each parameter once: to the first call, but for what others add.

        Its gradient is there from the backward of the last one on. That of any other one makes
        another gradient, and the sum of both. It is summed over ranks in a copy, whatever its size
        (see graph/sync.py), which simulations still have when the optimizer begins.
        """
        first: dict[str, list[Block]] = {}
        buckets = self._buckets(setting)
        for uses in self.uses.values():
            held = uses
            if apart(uses.values()):
                held = _whole(uses, costs, setting, buckets)
            name, block = next(iter(held.items()))
            first.setdefault(name, []).append(block)
            if not block.parameter.trained:
                continue
            *others, last = held
            costs[last].gradient_bytes += held[last].elements * setting.itemsize
            for other in others:
                costs[other].burst_bytes += 2 * held[other].elements * setting.itemsize
        for name, blocks in first.items():
            _add_parameters(costs[name], blocks, setting, buckets)
            for block in blocks:
                shared = len(self.uses[str(block.parameter.source)]) > 1
                if shared and block.parameter.trained:
                    copied = np.where(block.sharers > 1, block.elements, 0.0)
                    costs[name].copy_bytes += copied * setting.itemsize

    def _buckets(self, setting: Setting) -> Buckets:
        """Return how gradients are summed where no channels are cut.

        Where blocks are smaller, the bucket that is complete last has more of them.
        """
        late: set[str] = set()
        alone: set[str] = set()
        every = small = 0
        for name, uses in self.uses.items():
            block = next(iter(uses.values()))
            if not block.parameter.trained:
                continue
            size = prod(block.parameter.shape) * setting.itemsize
            if every < BUCKET_BYTES:
                late.add(name)
            if len(uses) == 1 and size >= ALONE_BYTES:
                alone.add(name)
            else:
                small += size
            every += size
        return Buckets(late, alone, min(BUCKET_BYTES, every) * small // max(every, 1))

    def ties(self, variable: Mapping[str, int]) -> list[Tie]:
        """Tie layers with candidates that share parameters, so that these need not move."""
        together: dict[tuple[int, ...], list[list[Ints]]] = {}
        for uses in self.uses.values():
            mine = {variable[name]: block for name, block in uses.items() if name in variable}
            if len(mine) > 1 and not apart(uses.values()):
                together.setdefault(tuple(mine), []).append(lie_alike(mine.values()))
        ties = []
        for members, several in together.items():
            rows = [np.stack(columns, 1) for columns in zip(*several, strict=True)]
            labels = distinct_rows(np.concatenate(rows))[1]
            ties.append(Tie(members, tuple(_split(labels, [len(one) for one in rows]))))
        return ties


def _add_parameters(
    cost: NodeCost, blocks: Sequence[Block], setting: Setting, buckets: Buckets
) -> None:
    """Add gradient sums, the optimizer and what is held for blocks of parameters.

    Those that are not trained are only held.
    """
    for block in blocks:
        cost.block_bytes += block.elements * setting.itemsize
    blocks = [block for block in blocks if block.parameter.trained]
    if not blocks:
        return
    total = sum((block.elements for block in blocks), np.zeros_like(cost.sync))
    held = total * setting.itemsize
    sharers = np.max([block.sharers for block in blocks], axis=0).astype(np.float64)
    for block in blocks:
        _add_sum(cost, block, setting, buckets)
    cost.optimizer += memory_s(setting.machine, held * (3 + 2 * setting.states))
    cost.trained_bytes += held
    largest = np.max([block.elements for block in blocks], axis=0) * setting.itemsize
    # while a gradient is summed there is a copy of it, and afterwards the optimizer's temporaries
    copies = np.maximum(TEMPORARIES[setting.optimizer], sharers > 1)
    cost.copy_bytes[:] = np.maximum(cost.copy_bytes, copies * largest)


def _add_sum(cost: NodeCost, block: Block, setting: Setting, buckets: Buckets) -> None:
    """Add the sum of a gradient, or its share of what is summed together."""
    name, ranks = str(block.parameter.source), block.sharers.astype(np.float64)
    summed = np.where(ranks > 1, (block.elements + 1) * setting.itemsize, 0.0)
    # samples and space are the slowest axes, so whoever shares a block reaches over all devices
    span = np.where(ranks > 1, float(setting.devices), 1.0)
    alone = (block.elements * setting.itemsize >= ALONE_BYTES) & (name in buckets.alone)
    together = np.where(alone, summed, np.maximum(summed, buckets.small_bytes))
    share = summed / np.maximum(together, 1.0)
    seconds = sum_s(setting.machine, together, ranks, span) * share
    cost.sync += seconds
    hidden = 0.0 if name in buckets.late else setting.machine.overlap_sums
    cost.waiting += seconds * (1.0 - hidden)


def lie_alike(blocks: Collection[Block]) -> list[Ints]:
    """Number the candidates of calls that use one parameter, by where its blocks lie.

    Numbers are equal where every rank needs the same block, for whatever results.
    """
    rest = [replace(one.layouts, partial=np.ones_like(one.layouts.partial)) for one in blocks]
    _, labels = Layouts.joined(rest).distinct()
    return _split(labels, [len(one) for one in rest])


def apart(blocks: Collection[Block]) -> bool:
    """Whether calls need a parameter in different blocks, whichever candidates are chosen."""
    if len(blocks) < 2:
        return False
    first, *others = (set(labels.tolist()) for labels in lie_alike(blocks))
    return not first.intersection(*others)


def _split(labels: Ints, lengths: Sequence[int]) -> list[Ints]:
    return np.split(labels, np.cumsum(lengths)[:-1])


def _whole(
    uses: Mapping[str, Block], costs: Costs, setting: Setting, buckets: Buckets
) -> dict[str, Block]:
    """Return a parameter's blocks where every rank holds all of it, and charge what moves.

    A call copies its block from what its rank holds. The gradients of all blocks go to all ranks;
    those of a call that needs all of it are summed like any other.
    """
    found: dict[str, Block] = {}
    summed: set[int] = set()
    for name, block in uses.items():
        value, layouts = block.parameter, block.layouts
        direct = (layouts.parts == 1).all(1)
        elements = np.full(len(layouts), float(prod(value.shape)))
        sharers = np.where(direct, block.sharers, 1)
        found[name] = Block(value, elements, sharers, layouts)
        costs[name].saved_bytes += np.where(direct, 0.0, block.elements) * setting.itemsize
        if not value.trained:
            continue
        source = Layouts.of_layouts([Layout.replicated(value.shape, ranks=layouts.ranks)])
        targets, where = layouts.distinct()
        moves = MoveCosts(value, source, targets, setting, True)
        back = moves.pairs(np.zeros_like(where), where).backward
        costs[name].exchange_backward += np.where(direct, 0.0, back)
        same = direct.all() and set(sharers.tolist()) <= summed
        if len(found) > 1 and not same:  # the first call's sum is charged with its other ones
            _add_sum(costs[name], found[name], setting, buckets)
        summed.update(sharers[direct].tolist())
    return found
