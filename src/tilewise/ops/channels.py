"""How a layer with weights deals out its channels, filters and ranks.

Channels of every activation are cut into c·f balanced parts. A layer gathers x over `f`, applies
its weight block, and reduce-scatters y over `c`:

    x  part ci·f+fi ──gather over f──▶ input channels of ci
    w  block (filters of fi) × (channels of ci)
    y  filters of fi, partial over c ──reduce-scatter over c──▶ part ci·f+fi

A layer with groups is cut along whole groups and needs neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from tilewise.errors import OperatorError
from tilewise.layout import Axes, Axis, Block, Degrees, block
from tilewise.layout.cover import balanced

NAMES = {"n": "sample", "d": "depth", "h": "height", "w": "width"}


@dataclass(frozen=True)
class Channels:
    """The input channels and filters of one layer, cut by c and f."""

    channels: int
    filters: int
    degrees: Degrees
    groups: int = 1

    @property
    def grouped(self) -> bool:
        return self.groups > 1

    @property
    def inputs(self) -> tuple[Block, ...]:
        """The channels each part of the work reads."""
        if self.grouped:
            return self._whole_groups(self.channels)
        return balanced(self.channels, self.degrees.c)

    @property
    def outputs(self) -> tuple[Block, ...]:
        """The filters each part of the work computes."""
        if self.grouped:
            return self._whole_groups(self.filters)
        return _scattered(self.filters, self.degrees.c, self.degrees.f)

    def local_groups(self, local_channels: int) -> int:
        """Return how many groups that many input channels make up."""
        return local_channels * self.groups // self.channels if self.grouped else 1

    def adds_bias(self, rank: int, ranks: int) -> bool:
        """Whether this rank's partial sum of y carries the bias: one along `c` does."""
        below = self.degrees.f * self.degrees.replicas(ranks)
        return self.grouped or rank // below % self.degrees.c == 0

    def _whole_groups(self, size: int) -> tuple[Block, ...]:
        parts = self.degrees.c * self.degrees.f
        step = size // self.groups
        cuts = [block(self.groups, parts, index) for index in range(parts)]
        return tuple(Block.of(start * step, stop * step) for start, stop in cuts)


@lru_cache(maxsize=512)
def _scattered(filters: int, c: int, f: int) -> tuple[Block, ...]:
    """Return the filters of each fi: its parts ci·f+fi; the same are asked for several times."""
    return tuple(
        Block.union([block(filters, c * f, ci * f + fi) for ci in range(c)]) for fi in range(f)
    )


def deal(degrees: Degrees, ranks: int, at: Mapping[str, int]) -> Axes:
    """Return the axes of an operand whose dim `at[name]` each degree cuts; the rest replicates."""
    axes = [Axis(size, at[name]) for name, size in degrees.items() if name in at]
    return Axes([*axes, Axis(degrees.replicas(ranks))])


def check_degrees(degrees: Degrees, dims: str, shape: Sequence[int], layer: str) -> None:
    """Raise unless the input has a dim for every degree; `dims` are its names."""
    for name, size in degrees.items():
        if size > 1 and name in NAMES and name not in dims:
            usable = [one for one in "dhwn" if one in dims] + ["c", "f"]
            raise OperatorError(
                f"{layer}: has no {NAMES[name]} to cut by {name}{size} (input "
                f"{'×'.join(map(str, shape))}); use {', '.join(usable[:-1])} or {usable[-1]}"
            )
