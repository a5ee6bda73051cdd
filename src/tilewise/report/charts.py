"""What a figure shows, apart from how: the page and the figure files draw the same charts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points with a name; `look` is `line`, `stairs`, `points`, `ideal` or `published`.

    `names` tell single points apart where they have names of their own.
    """

    label: str
    points: list[Point]
    look: str = "line"
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """A line across the figure at a value of `axis`."""

    axis: str
    value: float
    label: str


@dataclass(frozen=True)
class Bar:
    """A piece of a stacked bar, or of a lane of a timeline, from `start` to `end`."""

    lane: str
    start: float
    end: float
    kind: str
    layer: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """One figure: `lines` of series, or `bars` on lanes.

    Units are `s`, `bytes`, `x` (a ratio) or none. `group` is the section of the page, `subject` the
    plan, simulation or run that it is about, `sources` what is to be cited.
    """

    id: str
    title: str
    group: str
    subject: str = ""
    kind: str = "lines"
    x_label: str = ""
    y_label: str = ""
    x_unit: str = ""
    y_unit: str = ""
    log_x: bool = False
    log_y: bool = False
    zero_y: bool = True
    series: list[Series] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def slug(text: str) -> str:
    """Return a name that a file and an HTML element may have."""
    kept = "".join(sign if sign.isalnum() else "-" for sign in text.lower())
    return "-".join(part for part in kept.split("-") if part) or "figure"
