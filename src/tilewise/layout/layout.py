"""A layout says which slab of a tensor each rank holds.

Ranks are counted in mixed radix over a list of axes, slowest first. An axis cuts one dim of the
tensor, or none: then the ranks along it hold replicas, or (inside an operator only) partial sums.

    shape (6, 8), axes  2 → dim 0, 2 → dim 1, 2 → replica

             0 1 2 3   4 5 6 7
      0 1 2   ranks     ranks
               0 1       2 3
      3 4 5   ranks     ranks
               4 5       6 7
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from tilewise.errors import LayoutError
from tilewise.layout.blocks import Interval, block
from tilewise.layout.degrees import Degrees

REPLICA = -1
PARTIAL = -2


@dataclass(frozen=True, slots=True)
class Axis:
    """`size` ranks that cut dim `dim`, or hold replicas or partial sums of it."""

    size: int
    dim: int = REPLICA


class Axes(tuple[Axis, ...]):
    """Axes from slowest to fastest in normal form: no axis of size 1, equal neighbours merged."""

    def __new__(cls, axes: Iterable[Axis]) -> Axes:
        merged: list[Axis] = []
        for axis in axes:
            if axis.size == 1:
                continue
            if merged and merged[-1].dim == axis.dim:
                merged[-1] = Axis(merged[-1].size * axis.size, axis.dim)
            else:
                merged.append(axis)
        return super().__new__(cls, merged)

    @property
    def ranks(self) -> int:
        return prod(axis.size for axis in self)

    def parts(self, dim: int) -> int:
        """Return how many parts `dim` is cut into."""
        found = 1
        for axis in self:
            if axis.dim == dim:
                found *= axis.size
        return found

    def digits(self, rank: int) -> tuple[int, ...]:
        """Return the rank's position along each axis."""
        out = []
        for axis in reversed(self):
            rank, digit = divmod(rank, axis.size)
            out.append(digit)
        return tuple(reversed(out))

    def rank(self, digits: Sequence[int]) -> int:
        """Return the rank at these positions."""
        rank = 0
        for axis, digit in zip(self, digits):
            rank = rank * axis.size + digit
        return rank

    def coords(self, rank: int, ndim: int) -> tuple[int, ...]:
        """Return the index of the rank's block along each of `ndim` dims."""
        out = [0] * ndim
        for axis, digit in zip(self, self.digits(rank)):
            if axis.dim >= 0:
                out[axis.dim] = out[axis.dim] * axis.size + digit
        return tuple(out)

    def choices(self, coords: Sequence[int], free: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Return, for each axis, the digits that ranks with these block coordinates may have.

        `free` maps an axis' position to its choices where it cuts no dim.
        """
        rest = list(coords)
        out: list[list[int]] = []
        for position in reversed(range(len(self))):
            axis = self[position]
            if axis.dim >= 0:
                rest[axis.dim], digit = divmod(rest[axis.dim], axis.size)
                out.append([digit])
            else:
                out.append(list(free.get(position, range(axis.size))))
        return out[::-1]

    def ranks_at(self, coords: Sequence[int]) -> list[int]:
        """Return all ranks whose block has these coordinates, in order."""
        return [self.rank(digits) for digits in product(*self.choices(coords, {}))]

    def relabel(self, mapping: dict[int, int]) -> Axes:
        """Return these axes with dims renamed; a dim that is not named keeps its name."""
        return Axes(Axis(axis.size, mapping.get(axis.dim, axis.dim)) for axis in self)


@dataclass(frozen=True)
class Layout:
    """A global shape and the axes that cut it into balanced blocks."""

    shape: tuple[int, ...]
    axes: Axes

    def __init__(self, shape: Sequence[int], axes: Iterable[Axis] = ()) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in shape))
        object.__setattr__(self, "axes", Axes(axes))
        for axis in self.axes:
            if axis.dim >= len(self.shape):
                raise LayoutError(
                    f"layout: axis of size {axis.size} cuts dim {axis.dim} of a tensor that has "
                    f"{len(self.shape)} dims {self.shape}"
                )

    @classmethod
    def of(cls, shape: Sequence[int], dims: str, degrees: Degrees | str, *, ranks: int) -> Layout:
        """Cut a tensor whose dims are called `dims`, such as `nchw`, by degrees.

        A degree whose dim the tensor does not have leaves replicas in its place, and so do the
        ranks that are left over. A dot in `dims` is a dim that no degree cuts. Channels are cut
        into c·f parts.
        """
        degrees = Degrees.parse(degrees)
        if len(dims) != len(shape):
            raise LayoutError(
                f"layout: dims {dims!r} name {len(dims)} dims, the shape "
                f"{tuple(shape)} has {len(shape)}"
            )
        at = {name: dim for dim, name in enumerate(dims) if name != "."}
        at["f"] = at.get("c", REPLICA)
        axes = [Axis(size, at.get(name, REPLICA)) for name, size in degrees.items()]
        return cls(shape, [*axes, Axis(degrees.replicas(ranks))])

    @classmethod
    def replicated(cls, shape: Sequence[int], *, ranks: int) -> Layout:
        """Give every rank the whole tensor."""
        return cls(shape, [Axis(ranks)])

    @property
    def ranks(self) -> int:
        return self.axes.ranks

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        """The number of parts along each dim."""
        return tuple(self.axes.parts(dim) for dim in range(len(self.shape)))

    def coords(self, rank: int) -> tuple[int, ...]:
        """Return the index of the rank's block along each dim."""
        return self.axes.coords(rank, len(self.shape))

    def intervals(self, rank: int) -> tuple[Interval, ...]:
        """Return the rank's slab as (start, stop) for each dim."""
        return tuple(
            block(extent, parts, index)
            for extent, parts, index in zip(self.shape, self.degrees, self.coords(rank))
        )

    def slab(self, rank: int) -> tuple[slice, ...]:
        """Return the rank's slab as slices of the global tensor."""
        return tuple(slice(start, stop) for start, stop in self.intervals(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the rank's slab."""
        return tuple(stop - start for start, stop in self.intervals(rank))

    def with_shape(self, shape: Sequence[int]) -> Layout:
        """Return the same cuts on another shape of as many dims."""
        return Layout(shape, self.axes)

    def uncut(self, *dims: int) -> Layout:
        """Return this layout with replicas in place of the cuts of `dims`."""
        return Layout(self.shape, self.axes.relabel(dict.fromkeys(dims, REPLICA)))

    def __str__(self) -> str:
        cuts = [
            f"{extent}/{parts}" if parts > 1 else f"{extent}"
            for extent, parts in zip(self.shape, self.degrees)
        ]
        return "×".join(cuts) or "scalar"
