"""Group normalisation, channels cut anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import OperatorError
from tilewise.layout import PARTIAL, Axes, Block, Cover, Layout, block, overlap
from tilewise.ops.constants import numbers
from tilewise.ops.norm import channel_needs, per_channel, scale
from tilewise.ops.operation import Need, Operation, tied_zeros
from tilewise.ops.summary import Summary, combine, combine_into, moments, shifted


def group_norm(
    x: Layout,
    groups: int,
    *,
    weight: bool = True,
    bias: bool = True,
    eps: float = 1e-5,
    axes: Axes | None = None,
    rank: int,
    layer: str = "group_norm",
) -> Operation:
    """Plan a group norm; operands are x[, weight][, bias]. Channels may be cut inside a group.

    Layout: x any → y cut as `axes` say or as x is; weights cut as the channels are.
    Communication: none where every group of a sample lies on one rank; otherwise mean and squared
        deviations of each piece of a group, one message to each rank that shares it.
    Adjoint: their gradients, one message back. The gradients of weight and bias are partial over
        all that does not cut channels.
    """
    if len(x.shape) < 2 or groups < 1 or x.shape[1] % groups:
        raise OperatorError(
            f"{layer}: the channels of the input {x.shape} must be divisible by groups (={groups})"
        )
    if prod(x.shape) == groups:
        raise OperatorError(
            f"{layer}: needs more than 1 value per group, the input {x.shape} has {groups} groups; "
            "use fewer groups or a larger input"
        )
    work = Layout(x.shape, x.axes if axes is None else axes)
    pieces = _Pieces(work, groups)
    summary = Summary(work, tuple(range(2, len(x.shape))))
    split = summary.split or not pieces.whole
    local = _Local(pieces, summary, work.coords(rank)[1], weight, bias, eps, plain=not split)
    weights, _ = channel_needs(work)
    needs = (Need.of(work), *[weights] * weight, *[weights] * bias)
    inner = (pieces.ends(summary),) if split else ()
    return Operation(needs, local, (Cover.of(work),), (work,), inner)


class _Local:
    """The group norm of one rank."""

    def __init__(
        self,
        pieces: _Pieces,
        summary: Summary,
        part: int,
        weight: bool,
        bias: bool,
        eps: float,
        *,
        plain: bool,
    ) -> None:
        self.summary, self.weight, self.bias, self.eps = summary, weight, bias, eps
        self.plain = plain
        self.groups = len(pieces.groups(part))
        self.member = tuple(pieces.member(part))
        self.channels, self.target = map(tuple, pieces.shared(part))
        self.count = float(pieces.size * prod(summary.work.shape[2:]))

    def __call__(self, inner: list[Any], x: Tensor, *operands: Tensor) -> Tensor:
        given = list(operands)
        weight = given.pop(0) if self.weight else None
        bias = given.pop(0) if self.bias else None
        if not self.plain:
            return self.joint(inner, x, weight, bias)
        if not x.numel():
            return tied_zeros(x.shape, x, *operands)
        return torch.group_norm(x, self.groups, weight, bias, self.eps)

    def joint(
        self, inner: list[Any], x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Normalise by statistics that ranks share: channels → pieces → groups → channels."""
        space = self.summary.dims
        flat = [1] * len(space)
        member = numbers(self.member, torch.long, x.device)
        found, x = moments(x, space)
        sizes = found.new_full([1, x.shape[1], *flat], prod(x.shape[2:]))
        rows = inner[0](torch.stack(combine_into(found, sizes, member, self.groups)))
        target = numbers(self.target, torch.long, x.device)
        counts = numbers(self.channels, rows.dtype, rows.device).view(1, -1, *flat)
        counts = counts * self.summary.counts(rows.device)
        joined = torch.stack(combine(rows, counts, space))
        total = counts.sum(space, keepdim=True) if space else counts
        mean, m2 = combine_into(joined, total, target, self.groups)
        var = m2 / self.count
        mean, var = mean.index_select(1, member), var.index_select(1, member)
        return scale(x, mean, var, per_channel(weight, x), per_channel(bias, x), self.eps)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of groups that the parts of the channels hold.

    6 channels in 2 groups, 3 parts     channels  0 1|2 3|4 5
                                        groups    0 0|0 1|1 1
                                        pieces    0  |1 2|3
    """

    work: Layout
    count: int

    @property
    def parts(self) -> range:
        return range(self.work.degrees[1])

    @property
    def size(self) -> int:
        """How many channels a group has."""
        return self.work.shape[1] // self.count

    @property
    def whole(self) -> bool:
        """Whether every group lies in one part."""
        return sum(len(self.groups(part)) for part in self.parts) == self.count

    def member(self, part: int) -> list[int]:
        """List, for each channel of a part, which of the part's groups it belongs to."""
        start, stop = block(self.work.shape[1], len(self.parts), part)
        return [channel // self.size - start // self.size for channel in range(start, stop)]

    def groups(self, part: int) -> range:
        """Return the groups of which a part holds anything."""
        start, stop = block(self.work.shape[1], len(self.parts), part)
        return range(start // self.size, (stop - 1) // self.size + 1) if start < stop else range(0)

    def listed(self) -> list[tuple[int, int, int]]:
        """List all pieces as (part, group, number of channels)."""
        found = []
        for part in self.parts:
            held = block(self.work.shape[1], len(self.parts), part)
            for group in self.groups(part):
                common = overlap(held, (group * self.size, (group + 1) * self.size))
                assert common is not None
                found.append((part, group, common[1] - common[0]))
        return found

    def shared(self, part: int) -> tuple[list[int], list[int]]:
        """List channels and group (among the part's) of all pieces of the part's groups."""
        groups = self.groups(part)
        found = [(size, group - groups[0]) for _, group, size in self.listed() if group in groups]
        return [size for size, _ in found], [group for _, group in found]

    def ends(self, summary: Summary) -> tuple[Cover, Cover]:
        """Return source and target of the exchange of the pieces' moments."""
        listed = self.listed()
        held, wanted = [], []
        for part in self.parts:
            mine = [i for i, (holder, _, _) in enumerate(listed) if holder == part]
            groups = self.groups(part)
            needed = [i for i, (_, group, _) in enumerate(listed) if group in groups]
            held.append(Block.union(_runs(mine)))
            wanted.append(Block.union(_runs(needed)))
        shape = (2, self.work.shape[0], len(listed), *summary.shape[2:])
        source = Layout(shape, shifted(self.work.axes, len(self.work.shape)))
        roles = {dim + 1: PARTIAL for dim in summary.dims}
        target = Layout(shape, source.axes.relabel(roles))
        return _with_blocks(source, tuple(held)), _with_blocks(target, tuple(wanted))


def _with_blocks(layout: Layout, blocks: tuple[Block, ...]) -> Cover:
    cover = Cover.of(layout)
    return Cover(cover.shape, cover.axes, (*cover.blocks[:2], blocks, *cover.blocks[3:]))


def _runs(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Join neighbouring positions into intervals."""
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs
