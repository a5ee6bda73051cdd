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
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node
from tilewise.graph.sync import ALONE_BYTES, BUCKET_BYTES
from tilewise.layout import Layout
from tilewise.planner.cost import (
    Block,
    Buckets,
    NodeCost,
    Setting,
    add_parameters,
    add_sum,
)
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.layouts import Layouts
from tilewise.planner.moves import MoveCosts
from tilewise.planner.solve import Tie

Ints = NDArray[np.int64]
Costs = Mapping[str, NodeCost]


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
            add_parameters(costs[name], blocks, setting, buckets)
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
            add_sum(costs[name], found[name], setting, buckets)
        summed.update(sharers[direct].tolist())
    return found
