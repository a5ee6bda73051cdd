"""A plan: which layer is split how."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from tilewise.errors import PlanError, meant
from tilewise.layout import Degrees

FORMAT = 1
DETAILS = "details"
"""What a planner writes about its plan into the plan's file, for reports; loading skips it."""
SHOWN = 30
WORDS = {"n": "samples", "d": "depth", "h": "height", "w": "width", "c": "channels", "f": "filters"}


@dataclass(frozen=True, slots=True)
class Layer:
    """What a plan needs to know of a layer.

    `extents` holds the degrees' letters that the layer has, with how far each can be cut. A layer
    that only follows its producer has none. `shares` names what ties its channel cuts to other
    layers': the parameters it uses.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    extents: Mapping[str, int]
    shares: tuple[str, ...] = ()
    parameters: int = 0
    flops: int = 0

    def word(self, letter: str) -> str:
        """Return what a letter cuts; channels and filters of a grouped convolution: its groups."""
        grouped = letter in "cf" and "cf" in self.extents and self.kind.startswith("conv")
        return "groups" if grouped else WORDS[letter]


class Layers(Protocol):
    """A captured graph, as far as a plan looks at it."""

    @property
    def layers(self) -> Iterable[Layer]: ...


@dataclass(frozen=True)
class Plan:
    """Degrees for layers by name; a layer that is not named follows its producer.

    Args:
        layers: degrees by layer name.
        notes: what was reduced and why.
        recompute: names or patterns of layers whose activations are computed again in backward;
            one entry may hold several, separated by spaces.
        statistics: what batch norm averages over: `global`, `spatial` or `local`.
        io_channels: whether the network's inputs and outputs are cut along channels too.
    """

    layers: Mapping[str, Degrees] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    statistics: str = "global"
    io_channels: bool = False

    def __post_init__(self) -> None:
        if self.statistics not in ("global", "spatial", "local"):
            raise PlanError(
                f"plan: statistics (={self.statistics!r}) must be 'global', 'spatial' or 'local'"
            )

    @classmethod
    def uniform(cls, graph: Layers, degrees: str | Degrees, **options: Any) -> Plan:
        """Give each layer these degrees as far as it can use them; `notes` say what was reduced."""
        wanted = Degrees.parse(degrees)
        layers: dict[str, Degrees] = {}
        notes: list[str] = []
        for layer in graph.layers:
            if not layer.extents:
                continue
            layers[layer.name], reduced = _fit(layer, wanted)
            notes += reduced
        _align_shared(graph, layers, notes)
        return cls(layers, tuple(notes), **options)

    @classmethod
    def of(cls, graph: Layers, patterns: Mapping[str, str | Degrees], **options: Any) -> Plan:
        """Give degrees by pattern of layer names; the last pattern that matches wins.

        A pattern that matches no layer, and degrees that a layer does not have, are errors.
        """
        if not isinstance(patterns, Mapping):
            raise PlanError(
                f"plan: Plan.of takes degrees by pattern, such as {{'features.*': {patterns!r}}}; "
                "Plan.uniform gives every layer the same degrees"
            )
        parsed = {pattern: Degrees.parse(text) for pattern, text in patterns.items()}
        layers: dict[str, Degrees] = {}
        unused = set(parsed)
        for layer in graph.layers:
            for pattern, degrees in parsed.items():
                if layer.name != pattern and not fnmatchcase(layer.name, pattern):
                    continue
                unused.discard(pattern)
                if layer.extents:
                    _require(layer, degrees)
                    layers[layer.name] = degrees
                elif layer.name == pattern:
                    raise PlanError(
                        f"plan: {layer.name} ({layer.kind}) has no split of its own, it follows "
                        "its producer; name the layer before it"
                    )
        if unused:
            raise PlanError(f"plan: {_unmatched(sorted(unused), graph)}")
        plan = cls(layers, **options)
        _check_shared(graph, plan)
        return plan

    def check(self, ranks: int) -> None:
        """Raise unless every layer's degrees fit a mesh of so many ranks."""
        for name, degrees in self.layers.items():
            if ranks % degrees.product:
                raise PlanError(
                    f"plan: {name} is split '{degrees}', whose product (={degrees.product}) must "
                    f"divide the number of ranks (={ranks}); it may be {_divisors(ranks)}"
                )

    def recomputes(self, name: str) -> str | None:
        """Return the first entry by which the layer is computed again in backward, if any.

        Neighbouring layers of one entry are computed again together.
        """
        return next((entry for entry in self.recompute if _names(entry, name)), None)

    def to_json(self) -> str:
        """Return the plan as JSON text with a format version."""
        return json.dumps(
            {
                "format": FORMAT,
                "layers": {name: str(degrees) for name, degrees in self.layers.items()},
                "recompute": list(self.recompute),
                "statistics": self.statistics,
                "io_channels": self.io_channels,
                "notes": list(self.notes),
            },
            indent=1,
            ensure_ascii=False,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that `to_json` wrote."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"plan: this is not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else None
            raise PlanError(f"plan: this is not a plan: its format (={found!r}) must be {FORMAT}")
        unknown = set(data) - {f.name for f in fields(cls)} - {"format", DETAILS}
        if unknown or not isinstance(data.get("layers"), dict):
            raise PlanError(
                f"plan: unknown keys {sorted(unknown)}" if unknown else "plan: 'layers' is missing"
            )
        return cls(
            {name: Degrees.parse(degrees) for name, degrees in data["layers"].items()},
            tuple(data.get("notes", ())),
            tuple(data.get("recompute", ())),
            data.get("statistics", "global"),
            bool(data.get("io_channels", False)),
        )

    def told(self) -> str:
        """Say how many layers have which degrees."""
        counts = Counter(str(degrees) for degrees in self.layers.values())
        each = ", ".join(f"{degrees} for {count}" for degrees, count in counts.most_common())
        return f"{each} layers"

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"plan: {path} cannot be read: {error}") from error
        except PlanError as error:
            raise PlanError(f"{error} (in {path})") from error

    def __str__(self) -> str:
        return "\n".join(f"{name}: {degrees}" for name, degrees in self.layers.items()) or "1"


def _names(entry: str, name: str) -> bool:
    """Whether an entry of `recompute` names a layer."""
    return any(name == p or fnmatchcase(name, p) for p in (entry, *entry.split()))


def _fit(layer: Layer, wanted: Degrees) -> tuple[Degrees, list[str]]:
    """Reduce degrees to what the layer has and its extents allow."""
    fitted: dict[str, int] = {}
    notes = []
    room = dict(layer.extents)
    for name, size in wanted.items():
        extent = room.get(name, 1)
        fits = max(k for k in range(1, size + 1) if size % k == 0 and k <= max(extent, 1))
        fitted[name] = fits
        if name in "cf" and layer.extents.get("cf"):
            room["c"] = room["f"] = layer.extents["cf"] // (fitted.get("c", 1) * fits)
        if fits != size and name in layer.extents:
            notes.append(
                f"{layer.name}: {name}{size} reduced to {name}{fits}, the extent of "
                f"{layer.word(name)} is {extent}"
            )
    return Degrees(**fitted), notes


def _unmatched(patterns: Sequence[str], graph: Layers) -> str:
    """Say which patterns match no layer, and what may have been meant."""
    names = [layer.name for layer in graph.layers if layer.extents]
    groups = {f"{'.'.join(path[:end])}.*": None for path in (name.split(".") for name in names)
              for end in range(1, len(path))}  # fmt: skip
    guess = "".join(meant(one, groups if "*" in one and groups else names) for one in patterns)
    shown = names if len(names) <= SHOWN else [*names[:SHOWN], f"… ({len(names)} in all)"]
    return f"no layer matches {', '.join(map(repr, patterns))}; {guess}layers: {', '.join(shown)}"


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def _require(layer: Layer, degrees: Degrees) -> None:
    for name, size in degrees.items():
        if size > 1 and name not in layer.extents:
            have = ", ".join(letter for letter in "ncfdhw" if letter in layer.extents)
            raise PlanError(
                f"plan: {layer.name} has no {WORDS[name]} to cut by {name}{size} (output "
                f"{'×'.join(map(str, layer.shape))}); use {have}"
            )


def _sharing(graph: Layers) -> dict[str, list[Layer]]:
    found: dict[str, list[Layer]] = {}
    for layer in graph.layers:
        for name in layer.shares:
            found.setdefault(name, []).append(layer)
    return {name: layers for name, layers in found.items() if len(layers) > 1}


def _weight_cut(layer: Layer, degrees: Degrees) -> tuple[int, int]:
    """Return the parts of a weight's first two dims: filters and channels, or the other way round.

    Where only the product of c and f counts, the first dim alone is cut.
    """
    if "cf" in layer.extents:
        return degrees.c * degrees.f, 1
    return (degrees.c, degrees.f) if "transpose" in layer.kind else (degrees.f, degrees.c)


def _with_weight_cut(layer: Layer, degrees: Degrees, cut: tuple[int, int]) -> Degrees:
    first, second = cut
    if "cf" in layer.extents or "transpose" in layer.kind:
        return degrees.with_(c=first, f=second)
    return degrees.with_(c=second, f=first)


def _align_shared(graph: Layers, layers: dict[str, Degrees], notes: list[str]) -> None:
    """Cut layers that share a parameter so that it is cut alike, as the one that cuts it least."""
    for sharers in _sharing(graph).values():
        mine = [layer for layer in sharers if layer.name in layers]
        cuts = {_weight_cut(layer, layers[layer.name]) for layer in mine}
        if len(cuts) > 1:
            cut = min(cuts, key=lambda pair: pair[0] * pair[1])
            for layer in mine:
                layers[layer.name] = _with_weight_cut(layer, layers[layer.name], cut)
            split = ", ".join(f"{one.name} '{layers[one.name]}'" for one in mine)
            notes.append(f"{split}: they share a parameter, so it is cut alike")


def _check_shared(graph: Layers, plan: Plan) -> None:
    for parameter, sharers in _sharing(graph).items():
        named = [layer for layer in sharers if layer.name in plan.layers]
        cuts = {_weight_cut(layer, plan.layers[layer.name]): layer.name for layer in named}
        if len(cuts) > 1:
            split = " and ".join(f"{name} '{plan.layers[name]}'" for name in cuts.values())
            turned = len({"transpose" in layer.kind for layer in named}) > 1
            equal = "one's c must be the other's f" if turned else "their c and f must be equal"
            raise PlanError(f"plan: {split} share the parameter {parameter}, so {equal}")
