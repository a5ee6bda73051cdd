"""What a layer needs and sends under any degrees, from its rule under one degree at a time.

A rule cuts every dim by itself: what a rank needs is the product of what it needs along each dim,
and so is what it holds already. So the rule is asked once for each letter and degree (c and f
together), and products of these answers give all candidates at once:

    need(n2 h4) / all  =  need(n2) / all · need(h4) / all

All numbers are shares of the whole tensor. Sums over ranks are exact, uneven cuts included. What
the busiest rank receives is that of the rank that is the busiest along every dim, which is exact
unless cuts are so uneven that the largest slab and the largest halo lie on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node, Value, replace_values
from tilewise.graph.held import at_rest
from tilewise.graph.rule import REGISTRY, Lowered, Site
from tilewise.layout import PARTIAL, REPLICA, Cover, Degrees, Layout
from tilewise.ops.draws import Draws
from tilewise.planner.candidates import LETTERS
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.overlaps import Overlaps
from tilewise.planner.reach import Reach, reach
from tilewise.planner.traffic import coords

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
GROUPS = ("n", "d", "h", "w", "cf")
JOINS = ("cat", "concat", "concatenate")


class Lane(NamedTuple):
    """One exchange of a layer under degrees of one group, as shares of the tensor.

    Of the rank that receives most: `wanted` is what it must have, `own` what it has of that,
    `parts` from how many ranks it comes, itself included. `all_wanted` and `all_own` are sums over
    the ranks.
    """

    wanted: float = 1.0
    own: float = 1.0
    parts: float = 1.0
    all_wanted: float = 1.0
    all_own: float = 1.0


def still(cover: Cover) -> tuple[Lane, Lane]:
    """Return the exchange of what already lies right: every rank has what it wants."""
    share = _share(cover)
    copies = cover.ranks / prod(cover.axes.parts(dim) for dim in range(len(cover.shape)))
    lane = Lane(share, share, 1.0, copies, copies)
    return lane, lane


def lanes(source: Cover, target: Cover) -> tuple[Lane, Lane]:
    """Return the exchange from source to target and the one back (see planner/traffic.py)."""
    whole = prod(source.shape)
    ranks = np.arange(source.ranks)
    here, there = coords(source, ranks), coords(target, ranks)
    own = np.ones(len(ranks))
    forth, back = np.full(len(ranks), _partial(source)), np.full(len(ranks), _partial(target))
    forth_parts, back_parts = forth.copy(), back.copy()
    for dim in range(len(source.shape)):
        overlaps = Overlaps(source.blocks[dim], target.blocks[dim])
        s, t = here[:, dim], there[:, dim]
        own *= overlaps.of(s, t)
        forth *= overlaps.by_target[t]
        back *= overlaps.by_source[s]
        if len(source.blocks[dim]) * len(target.blocks[dim]) > 1:
            forth_parts *= overlaps.target_counts[t]
            back_parts *= overlaps.source_counts[s]
    return _lane(forth, own, forth_parts, whole), _lane(back, own, back_parts, whole)


def _lane(wanted: Floats, own: Floats, parts: Floats, whole: int) -> Lane:
    fullest = np.lexsort((-wanted, own - wanted))[0]
    return Lane(
        wanted[fullest] / whole,
        own[fullest] / whole,
        max(float(parts[fullest] + (own[fullest] == 0)), 1.0),
        wanted.sum() / whole,
        own.sum() / whole,
    )


def _partial(cover: Cover) -> float:
    return float(prod(axis.size for axis in cover.axes if axis.dim == PARTIAL))


@dataclass(frozen=True)
class Answer:
    """What a rule says under degrees of one group.

    Args:
        need: the share of each operand that the fullest rank needs, padding included.
        give: the share of each result that it computes.
        out: the share of each result that it is left with.
        bring, bring_back: the exchange of each operand from its home, and back.
        finish, finish_back: the exchange of each result to where it is left, and back.
        roles: the dim of each operand that each letter cuts, PARTIAL or REPLICA.
    """

    need: tuple[float, ...]
    give: tuple[float, ...]
    out: tuple[float, ...]
    bring: tuple[Lane, ...]
    bring_back: tuple[Lane, ...]
    finish: tuple[Lane, ...]
    finish_back: tuple[Lane, ...]
    roles: tuple[Mapping[str, int], ...]


class Lanes:
    """An exchange of all candidates in shares of the tensor, as Lane has it of one.

    `by_group` are the parts along each group of letters.
    """

    def __init__(
        self, product: Floats, by_group: Mapping[str, Floats], table: Ints, devices: int
    ) -> None:
        columns: Sequence[Floats] = list(product)
        self.wanted, self.own, _, self.all_wanted, self.all_own = columns
        self.by_group, self._table, self._devices = by_group, table, devices
        self._reach: dict[int, Reach] = {}

    def reach(self, node: int) -> Reach:
        """Return how far its messages reach with nodes of so many devices."""
        if node not in self._reach:
            self._reach[node] = reach(self.by_group, self._table, self._devices, node)
        return self._reach[node]


@dataclass(frozen=True)
class Swap:
    """An exchange of all candidates: elements of the fullest rank and of all.

    `lanes` are the same in shares of the tensor, with its messages.
    """

    lanes: Lanes
    elements: int
    total: Floats

    @property
    def received(self) -> Floats:
        return self.lanes.wanted * self.elements - self.lanes.own * self.elements

    @property
    def parts(self) -> Mapping[str, Floats]:
        """From how many ranks along each group of letters it comes."""
        return self.lanes.by_group

    @property
    def all_own(self) -> Floats:
        """The share of the tensor that all ranks together have of what they want."""
        return self.lanes.all_own

    def reach(self, node: int) -> Reach:
        """Return how far its messages reach with nodes of so many devices."""
        return self.lanes.reach(node)


@dataclass
class Known:
    """What rules have said before: networks repeat themselves, and widths often differ only.

    `answers` are by the outline of the call; `columns` hold what was made of them, by outline and
    table of candidates.
    """

    answers: dict[str, dict[Degrees, Answer]] = field(default_factory=dict)
    columns: dict[tuple[str, bytes], Columns] = field(default_factory=dict)


class Columns:
    """The answers to a table of candidates, group by group, and products of them."""

    def __init__(self, table: Ints, devices: int, ask: Callable[[str, Degrees], Answer]) -> None:
        self.table, self.devices = table, devices
        self.answers: dict[str, list[Answer]] = {}
        self.at: dict[str, Ints] = {}
        pairs = {
            "n": table[:, :1], "d": table[:, 1:2], "h": table[:, 2:3], "w": table[:, 3:4],
            "cf": table[:, 4:],
        }  # fmt: skip
        for group, columns in pairs.items():
            first, self.at[group] = distinct_rows(columns)
            self.answers[group] = [
                ask(group, Degrees(**dict(zip(group, map(int, row))))) for row in columns[first]
            ]
        self._uncut = ask("cf", Degrees())
        self._shares: dict[tuple[str, int, tuple[str, ...]], Floats] = {}
        self._lanes: dict[tuple[str, int], Lanes] = {}

    def share(self, name: str, index: int, groups: tuple[str, ...]) -> Floats:
        """Multiply `need`, `give` or `out` of one operand or result over groups of letters.

        Every answer has all padding, which counts once: in the product over all groups.
        """
        key = (name, index, groups)
        if key not in self._shares:
            uncut = getattr(self._uncut, name)[index] or 1.0
            found = np.full(len(self.table), uncut if groups == GROUPS else 1.0)
            for group in groups:
                column = np.array([getattr(answer, name)[index] for answer in self.answers[group]])
                found *= column[self.at[group]] / uncut
            found.flags.writeable = False
            self._shares[key] = found
        return self._shares[key]

    def lanes(self, name: str, index: int) -> Lanes:
        """Multiply the exchanges of one operand or result over all groups."""
        key = (name, index)
        if key not in self._lanes:
            self._lanes[key] = self._multiplied(name, index)
        return self._lanes[key]

    def _multiplied(self, name: str, index: int) -> Lanes:
        product = np.ones((len(Lane._fields), len(self.table)))
        parts = {}
        for group in GROUPS:
            some = [getattr(answer, name)[index] for answer in self.answers[group]]
            columns = np.array(some).T[:, self.at[group]]
            product *= columns
            parts[group] = columns[Lane._fields.index("parts")]
        return Lanes(product, parts, self.table, self.devices)


class Form:
    """A node's rule for a table of candidates."""

    def __init__(
        self, node: Node, labels: Mapping[Value, str], table: Ints, devices: int, known: Known
    ) -> None:
        self.node, self.labels, self.table, self.devices = node, labels, table, devices
        alone = lower_alone(node, labels, Degrees())
        self.operands: Sequence[Value] = alone.operands
        self.fused = alone.operation.fused
        self._known, self._texts = known.answers, {0: outline(node, labels, 1, cut=False)}
        key = (outline(node, labels, devices), table.tobytes())
        if key not in known.columns:
            known.columns[key] = Columns(table, devices, self._ask)
        self.columns = known.columns[key]

    def _ask(self, group: str, degrees: Degrees) -> Answer:
        # channels are in as many parts as the product says, or not cut
        parts = degrees.product if group == "cf" else 0
        if parts not in self._texts:
            self._texts[parts] = outline(self.node, self.labels, parts)
        known = self._known.setdefault(self._texts[parts], {})
        if degrees not in known:
            known[degrees] = self._answer(degrees)
        return known[degrees]

    def _answer(self, degrees: Degrees) -> Answer:
        lowered = lower_alone(self.node, self.labels, degrees)
        operation = lowered.operation
        brings = []
        for value, need in zip(lowered.operands, operation.needs, strict=True):
            home = Cover.of(need.home)
            right = value.held or home.blocks == need.cover.blocks
            brings.append(still(home) if right else lanes(home, at_rest(need.cover)))
        ends = [(g, Cover.of(o)) for g, o in zip(operation.gives, operation.outs, strict=True)]
        finishes = [still(o) if g == o else lanes(g, o) for g, o in ends]
        return Answer(
            tuple(_share(need.cover) for need in operation.needs),
            tuple(_share(give) for give, _ in ends),
            tuple(_share(out) for _, out in ends),
            tuple(forth for forth, _ in brings),
            tuple(back for _, back in brings),
            tuple(forth for forth, _ in finishes),
            tuple(back for _, back in finishes),
            tuple(_roles(need.cover, degrees) for need in operation.needs),
        )

    def share(self, name: str, index: int, groups: tuple[str, ...] = GROUPS) -> Floats:
        """Multiply `need`, `give` or `out` of one operand or result over groups of letters."""
        return self.columns.share(name, index, groups)

    def swap(self, name: str, index: int, elements: int) -> Swap:
        """Return an exchange of one operand or result that has so many elements."""
        lanes = self.columns.lanes(name, index)
        replicas = self.devices / self.table.prod(1)
        total = np.rint((lanes.all_wanted - lanes.all_own) * elements * replicas)
        return Swap(lanes, elements, total)

    def rim(self) -> NDArray[np.bool_]:
        """Return where a fused call receives what surrounds its slab of the first operand.

        Then it keeps the slab as it lies and the rim apart, and puts them together twice: to run
        forward, and for the gradient of the weight.
        """
        if not self.fused:
            return np.zeros(len(self.table), bool)
        found = self.swap("bring", 0, 1)
        # none where a rank does not need all of its own slab: windows that step over rows
        return (found.received > 0) & np.isclose(found.all_own, 1.0)

    def roles(self, index: int) -> dict[str, int]:
        """Return the dim of an operand that each letter cuts; PARTIAL or REPLICA where none."""
        found = dict.fromkeys(LETTERS, REPLICA)
        for answers in self.columns.answers.values():
            for answer in answers:
                found |= answer.roles[index]
        return found

    def sharers(self, index: int) -> Ints:
        """Return how many ranks share each block of an operand: those that its work is over."""
        roles = self.roles(index)
        columns = [i for i, letter in enumerate(LETTERS) if roles[letter] == PARTIAL]
        return self.table[:, columns].prod(1) if columns else np.ones(len(self.table), np.int64)


def signature(node: Node, labels: Mapping[Value, str]) -> str:
    """Return a text that is the same for calls whose rules say the same."""

    def described(value: Value) -> str:
        return f"{value.origin} {value.shape} {value.dtype} {labels.get(value)}"

    args = replace_values((node.args, node.kwargs), described)
    return f"{node.kind} {args} {[described(out) for out in node.outs]}"


def outline(node: Node, labels: Mapping[Value, str], parts: int, *, cut: bool = True) -> str:
    """Return a text that is the same for calls whose rules give the same shares.

    All degrees divide `parts`. Channels that these divide are cut into equal parts, of which
    a convolution or pooling takes the same share however many they are. Channels that are not cut
    are not told apart.
    """
    weighted = node.kind.startswith("conv") or "_pool" in node.kind
    if not weighted and (cut or node.kind not in JOINS):
        return signature(node, labels)

    def channels(extent: int) -> str | int:
        if not cut:
            return "any"
        return extent if extent % parts else "even"

    def described(value: Value) -> str:
        # a weight's channels and filters come first
        text = labels.get(value, "cc" if value.held else "")
        shape = [
            channels(extent) if text[dim : dim + 1] == "c" else extent
            for dim, extent in enumerate(value.shape)
        ]
        return f"{value.origin} {shape} {value.dtype} {labels.get(value)}"

    args = replace_values((node.args, node.kwargs), described)
    return f"{node.kind} {args} {[described(out) for out in node.outs]}"


def lower_alone(
    node: Node,
    labels: Mapping[Value, str],
    degrees: Degrees,
    *,
    ranks: int | None = None,
    rank: int = 0,
) -> Lowered:
    """Plan one call as if all its operands lay as its degrees say; without replicas by default."""
    ranks = degrees.product if ranks is None else ranks
    layouts = {
        value: Layout.of(value.shape, labels[value], degrees, ranks=ranks)
        for value in node.values()
        if not value.held
    }
    site = Site(node, layouts, dict(labels), degrees, ranks, rank, Draws(0))
    return REGISTRY[node.kind].apply(site)


def _roles(cover: Cover, degrees: Degrees) -> dict[str, int]:
    """Return which dim each letter above 1 cuts, read off the axes, slowest first."""
    letters = [(letter, size) for letter, size in degrees.items() if size > 1]
    rest = [(axis.dim, axis.size) for axis in cover.axes]
    found: dict[str, int] = {}
    for letter, size in letters:
        dim, left = rest[0]
        found[letter] = dim
        rest = [(dim, left // size), *rest[1:]] if left > size else rest[1:]
    return found


def _share(cover: Cover) -> float:
    """Return the largest local size as a share of the tensor."""
    sizes = [max(one.size for one in blocks) for blocks in cover.blocks]
    return prod(sizes) / max(prod(cover.shape), 1)
