"""What it costs to bring a tensor from where it lies to where its readers want it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node, Value
from tilewise.planner.bills import Between, Bill
from tilewise.planner.cost import Setting
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.layouts import Layouts, smallest
from tilewise.planner.places import Place
from tilewise.planner.price import bill_s
from tilewise.planner.solve import Moves
from tilewise.planner.solve.problem import at_places

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

EXACT_WORK = 20_000_000
"""Up to so many (layout pair, rank, dim)s, uneven moves are counted rank by rank."""

AT_ONCE = 1 << 15
"""How many moves to price at once."""

WHOLE_TABLE = 1 << 20
"""Up to so many pairs of layouts, all moves of a tensor are priced at once."""


@dataclass
class Reader:
    """A call of another variable that reads a tensor.

    `keeps` tells whether backward needs the operand, `halo` for which candidates the call makes a
    copy of it with neighbours' rows, or pools such a copy and keeps nothing. `rim` tells for which
    it leaves its slab as it lies and keeps beside it what others send; `joins`, for which of these
    the move has to count that both are put together for a while (see Form.rim).
    """

    node: Node
    variable: int
    wants: Layouts
    keeps: bool
    halo: Bools
    rim: Bools
    joins: Bools


Both = tuple[Floats, Floats]
"""Something of moves there and back, by source and target."""

Of = Callable[[Bill, Ints], Floats]

Table = tuple[Floats, Floats, Ints]
"""Something of all moves: there, back, and which column of those there each target has."""


@dataclass
class Tables:
    """What is known of all moves of a tensor, by what tells them from others'.

    `between` holds bills, which tensors share that are cut alike and differ in size only.
    """

    found: dict[Any, Table] = field(default_factory=dict)
    between: dict[Any, Between] = field(default_factory=dict)


class MoveCosts:
    """What moves of one tensor cost, by rows of source and of target layouts.

    `held` are the bytes that a moved copy keeps, for each target. Of a tensor that several
    variables read, labels tell more: a source's beyond its rows, that the tensor is not kept where
    it was made, and a target's beyond its rows, that the reader is computed again, and so is the
    move. Then the tensor itself is kept until backward, and `shared_bytes` of a moved copy
    that several read: one of them makes it, the others keep what they read.

    `wants` are the labels that each reader's candidates want, `holds` those of which a copy stays
    for them: readers that keep nothing share moves with others, but no copy stays for their sake.
    """

    def __init__(
        self,
        value: Value,
        sources: Layouts,
        targets: Layouts,
        setting: Setting,
        grads: bool,
        held: Floats | None = None,
        tables: Tables | None = None,
    ) -> None:
        self.tables = Tables() if tables is None else tables
        self.sources, self.targets, scale = smallest(sources, targets)
        self.setting, self.grads = setting, grads
        self.itemsize = setting.size(value) * scale
        self.held = np.zeros(len(targets)) if held is None else held
        self.wants: list[Ints] = []
        self.holds: list[Ints] = []
        self.leaves: Ints = np.zeros(0, np.int64)
        self.copies = False
        self.shared_bytes = np.zeros(len(targets))
        self.rims = np.zeros(len(targets), bool)
        self.joined_bytes = np.zeros(len(targets))
        self._whole: dict[str, Table] = {}
        self._ones: dict[tuple[int, int], tuple[Moves, float, float]] = {}
        even = sources.even() and targets.even()
        work = len(sources) * len(targets) * setting.devices * max(len(value.shape), 1)
        scattered = sources.index is not None or targets.index is not None
        self.by_rank = not even and (work <= EXACT_WORK or scattered)

    @classmethod
    def shared(
        cls,
        value: Value,
        place: Place,
        readers: list[Reader],
        setting: Setting,
        grads: bool,
        kept: Bools,
        again: list[Bools],
        tables: Tables,
    ) -> MoveCosts:
        """Number what all readers want in one list; equal layouts have equal numbers.

        `kept` tells for which of the source's candidates the tensor is kept where it was made,
        `again` for which of each reader's candidates that one is computed again.
        """
        targets, where = Layouts.joined([reader.wants for reader in readers]).distinct()
        held = np.zeros(len(targets))
        ends = np.cumsum([len(reader.wants) for reader in readers])
        wants = np.split(where, ends[:-1])
        local = targets.local() * setting.size(value)
        copies = bool(kept.any())
        for reader, labels_ in zip(readers, wants, strict=True):
            if copies and reader.keeps:
                plain = labels_[~reader.halo]
                held[plain] = local[plain]
        found = cls(value, place.layouts, targets, setting, grads, held, tables)
        found.copies = copies
        several = np.sum([np.isin(np.arange(len(targets)), one) for one in wants], axis=0) > 1
        found.shared_bytes = np.where(several, local, 0.0)
        for reader, labels_ in zip(readers, wants, strict=True):
            # what several want alike is moved by itself, and whole
            found.rims[labels_[reader.rim & ~several[labels_]]] = True
            joins = labels_[reader.joins & ~several[labels_]]
            found.joined_bytes[joins] = local[joins]
        found.wants = [one + len(targets) * flag for one, flag in zip(wants, again, strict=True)]
        found.holds = [
            np.where(flag | (copies & reader.keeps & ~reader.halo), one, found.nothing)
            for reader, one, flag in zip(readers, found.wants, again, strict=True)
        ]
        found.leaves = place.where + len(place.layouts) * (copies & ~kept)
        return found

    @property
    def nothing(self) -> int:
        """The label among `holds` of candidates for which no copy stays."""
        return 2 * len(self.targets)

    @cached_property
    def keeps_copies(self) -> bool:
        """Whether any move leaves bytes that are kept."""
        return any((holds != self.nothing).any() for holds in self.holds)

    def copies_kept(self, sources: Ints, holds: Ints) -> Ints:
        """Return the bytes that stay of copies, by labels among `leaves` and `holds`."""
        rows, columns = sources % len(self.sources), holds % len(self.targets)
        moved = self._looked_up(self._seconds, rows, columns, both=False)[0]
        held = self._all_held(sources, holds % self.nothing, moved)
        return np.where(holds == self.nothing, 0, held)

    def __call__(self, sources: Ints, targets: Ints) -> Moves:
        """Return tables of shape (sources, targets)."""
        moves = self.seconds(sources, targets)
        if not self.keeps_copies:
            return moves
        held = self._all_held(sources, targets, moves.forward)
        return Moves(moves.forward, moves.backward, held)

    def _all_held(self, sources: Ints, targets: Ints, forward: Floats) -> Ints:
        """Return the bytes that moved copies keep, of as many at once as stay in the cache."""
        held = np.empty(forward.shape, np.int64)
        step = max(AT_ONCE // max(len(targets), 1), 1)
        for start in range(0, len(sources), step):
            some = slice(start, start + step)
            held[some] = self._held(sources[some], targets, forward[some])
        return held

    def seconds(self, sources: Ints, targets: Ints) -> Moves:
        """Return tables of shape (sources, targets), without the bytes that copies hold."""
        again, columns = np.divmod(targets, len(self.targets))
        rows, within = sources % len(self.sources), self.setting.step.moves
        forward, backward = self._looked_up(self._seconds, rows, columns)
        if within != 1.0:
            forward, backward = within * forward, within * backward
        if again.any():
            backward = backward + again * forward
        return Moves.holding_nothing(forward, backward)

    def _held(self, sources: Ints, targets: Ints, forward: Floats) -> Floats:
        """Return the bytes that moved copies keep; `forward` is zero where nothing moves."""
        gone, rows = np.divmod(sources, len(self.sources))
        again, columns = np.divmod(targets, len(self.targets))
        held = np.where((forward > 0) | (gone[:, None] > 0), self.held[columns], 0.0)
        apart = self._apart(rows, columns)
        if apart is not None:  # the slab is kept where it was made, if it still is there
            own = (self._local[rows] * self.itemsize * (gone == 0))[:, None]
            held = np.where(apart, np.maximum(held - own, 0.0), held)
        if again.any():
            source = self._local[rows] * self.itemsize
            kept = 0.0 if self.copies else source
            source = np.where(gone > 0, source, kept)
            moved_too = np.where(forward > 0, self.shared_bytes[columns], 0.0)
            held = np.where(again > 0, source[:, None] + moved_too, held)
        return held

    def passing(self, sources: Ints, targets: Ints) -> Both:
        """Return the bytes that are there only while moves run, forward and backward.

        Forward that is the tensor as it lies, backward its gradient when it is home again; and what
        comes and, as much again, what goes. A reader that leaves its slab where it lies joins it
        with what has come: forward when all has come, backward while gradients travel.
        """
        rows, columns = sources % len(self.sources), targets % len(self.targets)
        there, back = self._looked_up(self._passing, rows, columns)
        apart = self._apart(rows, columns)
        if apart is None:
            return there, back
        own, joined = (self._local[rows] * self.itemsize)[:, None], self.joined_bytes[columns]
        there = np.where(apart & (there > 0), np.maximum(there - own, joined), there)
        back = np.where(apart & (back > 0), back - own + joined, back)
        return there, back

    def one(self, source: int, target: int) -> tuple[Moves, float, float]:
        """Return a single move, and what passes there and back; known the next time."""
        key = source, target
        if key not in self._ones:
            pair = np.array([source]), np.array([target])
            there, back = self.passing(*pair)
            self._ones[key] = self(*pair), float(there[0, 0]), float(back[0, 0])
        return self._ones[key]

    def beside(self, sources: Ints, targets: Ints) -> Both:
        """Return the seconds there and back from each of some sources to the target beside it."""
        again, columns = np.divmod(targets, len(self.targets))
        rows, within = sources % len(self.sources), self.setting.step.moves
        if self._many:
            moves = self.pairs(rows, columns)
            forward, backward = moves.forward, moves.backward
        else:
            there, back, where = self._table(self._seconds)
            forward, backward = there[rows, where[columns]], back[rows, columns]
        return within * forward, within * (backward + again * forward)

    def pairs(self, sources: Ints, targets: Ints) -> Moves:
        """Return the moves from each of some rows to the row beside it, by themselves."""
        first, where = distinct_rows(np.stack([sources, targets], 1))
        some, others = sources[first], targets[first]
        forward, backward, _ = self._each(
            self._seconds, some, others, grads=self.grads, paired=True
        )
        return Moves(forward[where, 0], backward[where, 0], np.zeros(len(where), np.int64))

    def _apart(self, rows: Ints, columns: Ints) -> Bools | None:
        """Return for which moves a reader keeps what comes beside its slab; None if for none.

        It does where all of its slab is a part of what it wants, and no other rank's.
        """
        source, target = self.sources, self.targets
        rims = self.rims[columns]
        if not rims.any() or source.index is not None or target.index is not None:
            return None
        blocks = target.parts[columns].prod(1) * target.partial[columns]
        found: Bools = rims & (source.parts[rows].prod(1)[:, None] == blocks)
        for here, there, within in self._nested:
            found &= within[here[rows]][:, there[columns]]
        return found

    @cached_property
    def _nested(self) -> list[tuple[Ints, Ints, Bools]]:
        """For each dim the cut of each source and target, and by these whether one is a part."""
        source, target, found = self.sources, self.targets, []
        for dim in range(len(source.shape)):
            (some, here), (others, there) = source.cuts(dim), target.cuts(dim)
            parts, wants = source.parts[some, dim, None], target.parts[others, dim]
            alike = source.outer[some, dim, None] == target.outer[others, dim]
            found.append((here, there, (wants == 1) | (alike & (parts % wants == 0))))
        return found

    def _looked_up(self, of: Of, rows: Ints, columns: Ints, *, both: bool = True) -> Both:
        """Return something of moves from some rows to some columns; if not of `both`, only there.

        Then what is returned of those back means nothing.
        """
        # counted rank by rank, a single move takes nearly as long as all, whose bills are kept
        single = len(rows) * len(columns) == 1 and not (self.by_rank and self._whole)
        if of.__name__ not in self._whole and (self._many or single):
            there, back, where = self._each(of, rows, columns, grads=self.grads and both)
            return at_places(there, where, 1), back
        there, back, where = self._table(of)
        some = at_places(there, rows, 0), at_places(back, rows, 0)
        return at_places(some[0], where[columns], 1), at_places(some[1], columns, 1)

    @property
    def _many(self) -> bool:
        """Whether there are too many moves to know something of all of them."""
        return len(self.sources) * len(self.targets) > WHOLE_TABLE

    def _table(self, of: Of) -> Table:
        """Return something of all moves; tensors that are alike share it."""
        name, known = of.__name__, self.tables.found
        if name not in self._whole:
            key = (name, self.sources.key, self.targets.key, self.itemsize, self.grads)
            if key not in known:
                rows, columns = np.arange(len(self.sources)), np.arange(len(self.targets))
                few = self.by_rank or len(rows) * len(columns) <= AT_ONCE
                known[key] = (
                    self._billed(of, rows)
                    if few
                    else self._each(of, rows, columns, grads=self.grads)
                )
            self._whole[name] = known[key]
        return self._whole[name]

    def _billed(self, of: Of, rows: Ints) -> Table:
        """Find something of all moves there and back, from bills that are kept."""
        bill, where = self._between.every_forth
        there = of(bill, rows)
        where = np.arange(there.shape[1]) if where is None else where
        shape = len(rows), len(where)
        back = of(self._between.every_back, rows) if self.grads else np.zeros(shape)
        return there, back, where

    def _each(
        self, of: Of, rows: Ints, columns: Ints, *, grads: bool, paired: bool = False
    ) -> Table:
        """Find something of moves there and, with `grads`, back; as many at once as fit a cache."""
        width = 1 if paired else len(columns)
        # those that differ only in who sums their gradients cost the same on the way there
        alike = None if paired or self.by_rank else self._between.alike(columns)
        where = np.arange(width) if alike is None else alike[1]
        there = np.empty((len(rows), width if alike is None else len(alike[0])))
        back = np.empty((len(rows), width)) if grads else np.zeros((len(rows), width))
        step = max(len(rows) if self.by_rank else AT_ONCE // max(width, 1), 1)
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            beside = columns[some] if paired else columns
            few = beside if alike is None else alike[0]
            there[some] = of(self._between.forth(rows[some], few, paired=paired), rows[some])
            if grads:
                bill = self._between.back(rows[some], beside, paired=paired, alike=alike)
                back[some] = of(bill, rows[some])
        return there, back, where

    def _seconds(self, bill: Bill, rows: Ints) -> Floats:
        return bill_s(self.setting.machine, bill, self.itemsize)

    def _passing(self, bill: Bill, rows: Ints) -> Floats:
        """Return the bytes that are there while a tensor moves, its own among them."""
        travels = bill.near + bill.far + bill.summed
        own = self._local[rows][:, None]
        return np.where(travels > 0, own + 2 * travels, 0.0) * self.itemsize

    @cached_property
    def _local(self) -> Floats:
        return self.sources.local()

    @cached_property
    def _between(self) -> Between:
        key, known = (self.sources.key, self.targets.key), self.tables.between
        if key not in known:
            node = self.setting.node
            known[key] = Between(self.sources, self.targets, node, by_rank=self.by_rank)
        return known[key]
