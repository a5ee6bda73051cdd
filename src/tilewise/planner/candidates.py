"""The ways to split a layer: all degrees whose product divides the number of devices.

Those that a layer cannot use are left out, with the reason. So are those that leave some devices
empty parts, unless a pin asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tilewise.errors import PlanError
from tilewise.layout import Degrees
from tilewise.plan import Layer
from tilewise.plan.plan import WORDS
from tilewise.planner.distinct import distinct_rows

LETTERS = "ndhwcf"
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Dropped:
    """Degrees that were left out, and why; many of them share a `rule`.

    With `recompute` only the layer that is computed again in backward was left out.
    """

    degrees: Degrees
    reason: str
    rule: str
    recompute: bool = False


@dataclass(frozen=True)
class Candidates:
    """The degrees of one layer to choose from: one row each, in the order of LETTERS.

    Those of which `again` is set compute the layer's stretch again in backward.
    """

    layer: Layer
    devices: int
    table: Ints
    again: Bools

    def __len__(self) -> int:
        return len(self.table)

    def degrees(self, index: int) -> Degrees:
        """Return one candidate."""
        return Degrees(*(int(value) for value in self.table[index]))

    def column(self, letter: str) -> Ints:
        """Return the degree of one letter of every candidate."""
        return self.table[:, LETTERS.index(letter)]

    def has(self, degrees: Degrees) -> bool:
        """Whether degrees are among the candidates."""
        row = [value for _, value in _joint(self.layer, degrees).items()]
        return bool((self.table == row).all(1).any())

    def index(self, degrees: Degrees, *, again: bool = False) -> int:
        """Return where degrees stand; c and f may be exchanged where only their product counts."""
        degrees = _joint(self.layer, degrees)
        row = [value for _, value in degrees.items()]
        found = np.flatnonzero((self.table == row).all(1) & (self.again == again))
        if not len(found):
            reason = why_not(self.layer, degrees, self.devices) or "it was left out"
            raise PlanError(f"plan: {self.layer.name} cannot be split '{degrees}': {reason}")
        return int(found[0])

    def nearest(self, wanted: Ints) -> Ints:
        """Reduce degrees to their largest divisors that the layer can use, as Plan.uniform does."""
        fitted = np.ones_like(wanted)
        joint = self.layer.extents.get("cf")
        room = np.full(len(wanted), 0 if joint is None else joint)
        for column, letter in enumerate(LETTERS):
            extent = np.full(len(wanted), max(self.layer.extents.get(letter, 1), 1))
            if joint is not None and letter in "cf":
                extent = room
            for size in np.unique(wanted[:, column]):
                divisors = np.array([k for k in range(1, size + 1) if size % k == 0])
                rows = wanted[:, column] == size
                at = np.searchsorted(divisors, extent[rows], side="right") - 1
                fitted[rows, column] = divisors[np.maximum(at, 0)]
            room = room // fitted[:, column] if letter == "c" else room
        if joint is not None:
            fitted[:, 4] *= fitted[:, 5]
            fitted[:, 5] = 1
        table = self.table[~self.again]
        first, where = distinct_rows(np.concatenate((table, fitted)))
        at = first[where[len(table) :]]
        return np.where(at < len(table), at, 0)  # a pinned layer has one candidate only

    def twice(self) -> Candidates:
        """Return all candidates, and behind them the same to be computed again in backward."""
        table = np.concatenate((self.table, self.table))
        again = np.arange(len(table)) >= len(self)
        return Candidates(self.layer, self.devices, table, again)

    def dropped(self) -> Iterator[Dropped]:
        """Yield all degrees whose product divides the devices and that are not candidates."""
        kept = {tuple(row) for row in self.table.tolist()}
        for row in all_degrees(self.devices).tolist():
            degrees = Degrees(*row)
            if tuple(row) in kept:
                continue
            found = _why_not(self.layer, degrees, self.devices)
            if found is not None:
                yield Dropped(degrees, *found)
            else:
                pinned = f"the layer is pinned to '{self.degrees(0)}'"
                yield Dropped(degrees, pinned, pinned)


def candidates(layer: Layer, devices: int, *, pin: Degrees | None = None) -> Candidates:
    """List the degrees a layer can be given; with `pin`, those only, empty parts or not."""
    if pin is not None:
        row = np.array([[value for _, value in _pinned(layer, pin, devices).items()]], np.int64)
        return Candidates(layer, devices, row, np.zeros(1, bool))
    table = all_degrees(devices)
    for position, letter in enumerate(LETTERS):
        table = table[table[:, position] <= _extent(layer, letter)]
    if "cf" in layer.extents:
        # such a layer's channels are cut into c·f parts whichever of the two cuts them
        table = table[(table[:, 5] == 1) & (table[:, 4] <= layer.extents["cf"])]
    return Candidates(layer, devices, table, np.zeros(len(table), bool))


def _pinned(layer: Layer, pin: Degrees, devices: int) -> Degrees:
    """Return the degrees that a pin means; raise where no run has them."""
    degrees = _joint(layer, pin)
    found = _impossible(layer, degrees, devices)
    if found is not None:
        raise PlanError(f"plan: {layer.name} cannot be split '{degrees}': {found[0]}")
    return degrees


def _joint(layer: Layer, degrees: Degrees) -> Degrees:
    """Return degrees with c alone where only the product of c and f counts."""
    return degrees.with_(c=degrees.c * degrees.f, f=1) if "cf" in layer.extents else degrees


def why_not(layer: Layer, degrees: Degrees, devices: int) -> str | None:
    """Return why a layer is not split in a way, or None where it may be."""
    found = _why_not(layer, degrees, devices)
    return None if found is None else found[0]


def _impossible(layer: Layer, degrees: Degrees, devices: int) -> tuple[str, str] | None:
    """Return why no run splits a layer in a way, and the rule that says so of others, too."""
    if devices % degrees.product:
        return (
            f"the product (={degrees.product}) does not divide {devices} devices",
            f"the product must divide {devices} devices",
        )
    for letter, size in degrees.items():
        if size > 1 and letter not in layer.extents:
            none = f"the layer has no {WORDS[letter]} to cut by {letter}"
            return f"{none}{size}", none
    return None


def _why_not(layer: Layer, degrees: Degrees, devices: int) -> tuple[str, str] | None:
    """Return why a layer is not split in a way, and the rule that says so of others, too."""
    found = _impossible(layer, degrees, devices)
    if found is not None:
        return found
    for letter, size in degrees.items():
        word, extent = layer.word(letter), _extent(layer, letter)
        if size > extent:
            reason = f"{letter}{size} cuts {layer.extents[letter]} {word} into empty parts"
            return reason, f"{letter} is at most {extent}, the layer's {word}"
    return _joint_why_not(layer, degrees) if "cf" in layer.extents else None


def _joint_why_not(layer: Layer, degrees: Degrees) -> tuple[str, str] | None:
    """Return why a layer whose channels are cut into c·f parts is not split in a way."""
    c, f, room, word = degrees.c, degrees.f, layer.extents["cf"], layer.word("c")
    if c * f > room:
        reason = f"c{c} f{f} cut {room} {word} into empty parts"
        return reason, f"c times f is at most {room}, the layer's {word}"
    if f > 1:
        counts = "only the product of c and f counts"
        return f"the same as c{c * f}: {counts}", f"the same with c alone: {counts}"
    return None


def _extent(layer: Layer, letter: str) -> int:
    return max(layer.extents.get(letter, 1), 1)


@lru_cache(maxsize=32)
def all_degrees(devices: int) -> Ints:
    """Return all six degrees whose product divides the devices, one row each."""
    divisors = [k for k in range(1, devices + 1) if devices % k == 0]
    rows: list[tuple[int, ...]] = [()]
    products = [1]
    for _ in LETTERS:
        grown = [
            ((*row, k), product * k)
            for row, product in zip(rows, products)
            for k in divisors
            if devices % (product * k) == 0
        ]
        rows, products = [row for row, _ in grown], [product for _, product in grown]
    return np.array(rows, np.int64)
