"""Who decides how a call is split, and how its results lie under each of that one's candidates.

A layer with weights or windows, and one that joins several tensors, has candidates of its own; all
others follow the one that made their largest operand. A network's input lies as its first reader
with candidates wants it, but for the channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.captured import Graph
from tilewise.graph.graph import Node, Program, Value
from tilewise.graph.labels import labels
from tilewise.graph.lower import first_named, followed, input_layout
from tilewise.layout import REPLICA, Degrees, Layout
from tilewise.plan import Layer, Plan
from tilewise.planner.candidates import LETTERS, Candidates, candidates
from tilewise.planner.layouts import Layouts

Ints = NDArray[np.int64]

FOLLOWERS = {
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "softmax", "log_softmax", "dropout",
    "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "to", "type_as", "to_copy",
    "prelu",
}  # fmt: skip
ADAPTIVE = "adaptive_"


@dataclass(frozen=True)
class Place:
    """How a tensor lies: under candidate k of variable `owner` as row `where[k]` of `layouts`."""

    owner: int
    layouts: Layouts
    where: Ints

    @property
    def local(self) -> NDArray[np.float64]:
        """The elements that the fullest rank holds, for each candidate."""
        return self.layouts.local()[self.where]


@dataclass
class Choices:
    """The variables of a program: the nodes with candidates, and who follows whom."""

    program: Program
    labels: Mapping[Value, str]
    devices: int
    names: list[str] = field(default_factory=list)
    candidates: list[Candidates] = field(default_factory=list)
    variable: dict[str, int] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    places: dict[Value, Place] = field(default_factory=dict)
    stretches: list[tuple[str, ...]] = field(default_factory=list)

    def again(self, name: str) -> NDArray[np.bool_]:
        """Return for which candidates of its owner a call is computed again in backward."""
        owner = self.owner[name]
        flags = self.candidates[owner].again
        return flags if name in self.stretches[owner] else np.zeros_like(flags)


def chooses(node: Node, layer: Layer) -> bool:
    """Whether a call has candidates of its own."""
    if not layer.extents or node.kind in FOLLOWERS or node.kind.startswith(ADAPTIVE):
        return False
    if weighted(node):
        return True
    operands = [value for value in node.values() if not value.held]
    return len(operands) > 1 or _has_window(node)


def weighted(node: Node) -> bool:
    """Whether a call is a convolution or a linear layer."""
    return node.kind.startswith("conv") or node.kind == "linear"


def _has_window(node: Node) -> bool:
    return any(word in node.kind for word in ("pool", "upsample", "pad", "pixel"))


def choices(
    graph: Graph, named: Mapping[Value, str], devices: int, pins: Mapping[str, Degrees]
) -> Choices:
    """Find the variables of the training program and their candidates."""
    program = graph.training
    layers = {layer.name: layer for layer in graph.layers}
    found = Choices(program, named, devices)
    for node in program.nodes:
        layer = layers[node.name]
        if chooses(node, layer) or (node.name in pins and layer.extents):
            found.variable[node.name] = len(found.names)
            found.names.append(node.name)
            found.candidates.append(candidates(layer, devices, pin=pins.get(node.name)))
    return found


def decided(graph: Graph, plan: Plan) -> dict[str, Degrees]:
    """Return the degrees of all layers that the planner chooses, or that a plan cuts differently.

    Those that a plan does not name are cut as the layer that they follow, as they run.
    """
    return _decided(graph, plan)[0]


def resolved(graph: Graph, plan: Plan) -> dict[str, Degrees]:
    """Return the degrees of every layer, named by a plan or not."""
    return _decided(graph, plan)[1]


def _decided(graph: Graph, plan: Plan) -> tuple[dict[str, Degrees], dict[str, Degrees]]:
    """Return what of the layers is decided, and the degrees of every one (see graph/lower.py).

    Layers with weights follow the degrees of the layer before them; where there is none but an
    input, they are not cut. All others follow how their operand lies, inputs included.
    """
    program, named = graph.training, labels(graph.training)
    layers = {layer.name: layer for layer in graph.layers}
    made_by: dict[Value, Degrees] = {}
    lies = {value: _input_degrees(value, program, plan, named) for value in program.inputs}
    found: dict[str, Degrees] = {}
    every: dict[str, Degrees] = {}
    for node in program.nodes:
        layer, degrees = layers[node.name], plan.layers.get(node.name)
        before, operand = followed(node, made_by), largest(node, lies)
        like = Degrees() if operand is None else lies[operand]
        like = before if weighted(node) else like
        usable = Degrees(**{k: v for k, v in like.items() if k in layer.extents})
        if node.kind.startswith(ADAPTIVE):
            # dims of which one place is left are pooled where they lie
            left = Degrees(**{k: v for k, v in like.items() if layer.extents.get(k, 1) > 1})
            like = left if degrees == left else like
        if chooses(node, layer):
            found[node.name] = usable if degrees is None else degrees
        elif degrees is not None and degrees != like:
            found[node.name] = degrees
        every[node.name] = found.get(node.name, like)
        made_by.update(dict.fromkeys(node.outs, degrees or before))
        lies.update(dict.fromkeys(node.outs, every[node.name]))
    return found, every


def _input_degrees(
    value: Value, program: Program, plan: Plan, named: Mapping[Value, str]
) -> Degrees:
    """Return the degrees that an input is cut by, of those that a plan gives to its reader."""
    first = first_named(value, program, plan.layers)
    kept = set(named[value]) - {"."} if plan.io_channels else set(named[value]) - {".", "c"}
    kept |= {"f"} if "c" in kept else set()
    degrees = Degrees() if first is None else plan.layers[first]
    return Degrees(**{letter: size for letter, size in degrees.items() if letter in kept})


def input_layouts(graph: Graph, plan: Plan, devices: int) -> dict[Value, Layout]:
    """Return how a plan cuts the inputs, where some layer that it names decides that."""
    program, named = graph.training, labels(graph.training)
    found = {v: input_layout(v, program, plan, named, devices) for v in program.inputs}
    return {value: layout for value, layout in found.items() if layout is not None}


def letter_roles(text: str) -> dict[str, int]:
    """Return the dim that each letter cuts of a tensor with these labels."""
    found = dict.fromkeys(LETTERS, REPLICA)
    found |= {letter: dim for dim, letter in enumerate(text) if letter in "ndhwc"}
    return found | {"f": found["c"]}


def first_reader(value: Value, program: Program, variable: Mapping[str, int]) -> int | None:
    """Return the variable that decides how an input lies: the first one that it reaches."""
    name = first_named(value, program, variable)
    return None if name is None else variable[name]


def place_of(
    value: Value, owner: int, found: Candidates, text: str, devices: int, *, channels: bool = True
) -> Place:
    """Return how a tensor lies that is cut by its owner's degrees."""
    roles = letter_roles(text)
    if not channels:
        roles |= {"c": REPLICA, "f": REPLICA}
    layouts, where = Layouts.of_degrees(value.shape, devices, found.table, roles).distinct()
    return Place(owner, layouts, where)


def largest(node: Node, places: Collection[Value]) -> Value | None:
    """Return the largest operand that lies somewhere, the first on ties."""
    operands = [value for value in node.values() if value in places]
    return max(operands, key=lambda value: prod(value.shape), default=None)
