"""A layer's split is six integers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tilewise.errors import LayoutError

_TERM = re.compile(r"([a-z])([0-9]+)")


@dataclass(frozen=True, slots=True)
class Degrees:
    """How many parts each of sample, depth, height, width, channel and filter is cut into.

    Written `n2 h4` or `c2 f4`; `1` or an empty string is not split. The fields stand in rank
    order, slowest to fastest.
    """

    n: int = 1
    d: int = 1
    h: int = 1
    w: int = 1
    c: int = 1
    f: int = 1

    def __post_init__(self) -> None:
        for name, value in self.items():
            if not isinstance(value, int) or value < 1:
                raise LayoutError(
                    f"degrees: {name} (={value!r}) must be a whole number of at least 1"
                )

    @classmethod
    def parse(cls, text: str | Degrees) -> Degrees:
        """Read degrees such as `n2 h4`; the order of the terms does not matter."""
        if isinstance(text, Degrees):
            return text
        found: dict[str, int] = {}
        for term in text.split():
            if term == "1":
                continue
            match = _TERM.fullmatch(term)
            if match is None or match[1] not in "ncfdhw":
                raise LayoutError(
                    f"degrees: {term!r} in {text!r} is not one of n c f d h w followed by a "
                    "number, such as 'n2 h4'"
                )
            if match[1] in found:
                raise LayoutError(f"degrees: {match[1]} stands twice in {text!r}")
            found[match[1]] = int(match[2])
        return cls(**found)

    @property
    def product(self) -> int:
        """The number of ranks that hold distinct work."""
        return self.n * self.d * self.h * self.w * self.c * self.f

    def items(self) -> tuple[tuple[str, int], ...]:
        """Return (name, degree) in rank order, slowest to fastest."""
        # spelled out: planners ask for this some hundred thousand times
        return (
            ("n", self.n), ("d", self.d), ("h", self.h), ("w", self.w), ("c", self.c), ("f", self.f)
        )  # fmt: skip

    def replicas(self, ranks: int) -> int:
        """Return how many replicas `ranks` ranks hold of each part."""
        if ranks % self.product:
            raise LayoutError(
                f"degrees '{self}': their product (={self.product}) must divide the number of "
                f"ranks (={ranks})"
            )
        return ranks // self.product

    def with_(self, **changes: int) -> Degrees:
        """Return a copy with some degrees replaced."""
        return replace(self, **changes)

    def __str__(self) -> str:
        return " ".join(f"{name}{value}" for name, value in self.items() if value > 1) or "1"
