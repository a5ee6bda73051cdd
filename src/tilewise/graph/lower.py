"""Plan a program: choose a split operator for every call, on the layouts that come to it."""

from __future__ import annotations

import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

import torch

from tilewise.errors import PlanError
from tilewise.graph.graph import Node, Program, Value
from tilewise.graph.labels import labels
from tilewise.graph.rule import REGISTRY, Lowered, Site
from tilewise.graph.rules import fallback, whole
from tilewise.layout import REPLICA, Cover, Degrees, Layout
from tilewise.ops.draws import Draws
from tilewise.ops.operation import Need
from tilewise.plan import Plan

FALLBACK_BYTES = 256 * 2**20


@dataclass
class Planned:
    """A program with an operator planned for every call, before anything is bound to a mesh.

    `direct` has the inputs that come as their layer needs them, halo included.
    """

    program: Program
    lowered: list[Lowered]
    layouts: dict[Value, Layout]
    labels: dict[Value, str]
    fallbacks: list[str] = field(default_factory=list)
    direct: dict[Value, Cover] = field(default_factory=dict)


def plan_program(program: Program, plan: Plan, *, ranks: int, rank: int, draws: Draws) -> Planned:
    """Plan every call on the layouts that the calls before it leave."""
    named = labels(program)
    layouts: dict[Value, Layout] = {}
    undecided: set[Value] = set()
    for value in program.inputs:
        found = input_layout(value, program, plan, named, ranks)
        layouts[value] = found or Layout.replicated(value.shape, ranks=ranks)
        if found is None:
            undecided.add(value)
    planned = Planned(program, [], layouts, named)
    made_by: dict[Value, Degrees] = {}
    for node in program.nodes:
        degrees = plan.layers.get(node.name)
        before = followed(node, made_by)
        site = Site(
            node,
            layouts,
            named,
            degrees,
            ranks,
            rank,
            draws,
            stream=_stream(node),
            statistics=plan.statistics,
            followed=before,
        )
        lowered = lower_call(site, planned.fallbacks)
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            if value in undecided:
                layouts[value] = _as_needed(value, need, node, plan, named)
                undecided.discard(value)
        _check_shapes(node, lowered)
        made_by.update(dict.fromkeys(node.outs, degrees or before))
        planned.lowered.append(lowered)
        layouts.update(zip(node.outs, lowered.operation.outs, strict=True))
    return planned


def _check_shapes(node: Node, lowered: Lowered) -> None:
    """Refuse a plan whose results have other shapes than the captured ones: a rule is wrong."""
    for out, layout in zip(node.outs, lowered.operation.outs, strict=True):
        if out.shape != layout.shape:
            raise PlanError(
                f"{node.name}: the rule for {node.op} plans a result of shape {layout.shape}, the "
                f"model makes {out.shape}; this is a bug in the rule for '{node.kind}'"
            )


def followed(node: Node, made_by: Mapping[Value, Degrees]) -> Degrees:
    """Return the degrees of the layer that made the largest operand, the first on ties.

    Nothing made an input: what reads it is not cut by degrees that it does not have.
    """
    operands = [value for value in node.values() if value in made_by]
    largest = max(operands, key=lambda value: torch.Size(value.shape).numel(), default=None)
    return Degrees() if largest is None else made_by[largest]


def _stream(node: Node) -> int:
    """Number a random operator by its layer's name, so that every mode and shape agrees on it."""
    number = 0
    for byte in node.name.encode():
        number = (number * 257 + byte + 1) % (2**61 - 1)
    return number


def lower_call(site: Site, fallbacks: list[str] | None = None) -> Lowered:
    """Plan one call by its rule; `fallbacks` collects the layers that have none."""
    node = site.node
    if all(_is_whole(value, site) for value in node.values()) and not _draws(node):
        return whole(site)
    registered = REGISTRY.get(node.kind)
    if registered is not None:
        return registered.apply(site)
    if _draws(node):
        raise PlanError(
            f"{node.name}: no rule splits the random operator {node.op} at '{node.path}'; ranks "
            "would draw different numbers; use dropout, bernoulli_, rand or randn"
        )
    size = sum(_bytes(value) for value in (*node.values(), *node.outs))
    if size > FALLBACK_BYTES:
        raise PlanError(
            f"{node.name}: no rule splits {node.op} at '{node.path}' on "
            f"{[value.shape for value in node.values()]}, and the undivided tensors (="
            f"{size / 2**20:.0f} MiB) are too large to fall back to; add a rule for "
            f"'{node.kind}' or write the layer with other operators"
        )
    if fallbacks is not None and node.name not in fallbacks:
        fallbacks.append(node.name)
        warnings.warn(
            f"{node.name}: no rule splits {node.op}; it runs on the undivided tensor on every rank",
            stacklevel=2,
        )
    return fallback(site)


def _draws(node: Node) -> bool:
    tags = getattr(node.op, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def draws_numbers(program: Program) -> bool:
    """Whether a pass draws random numbers: dropout does when it trains and drops some."""
    return any(
        _draws(node) and not ("dropout" in node.kind and not all(node.args[1:3]))
        for node in program.nodes
    )


def _is_whole(value: Value, site: Site) -> bool:
    """Whether it is computed from what the model holds alone, or is held itself."""
    return value.held or (
        not site.labels.get(value, "").strip(".")
        and all(axis.dim == REPLICA for axis in site.layouts[value].axes)
    )


def _bytes(value: Value) -> int:
    return int(torch.Size(value.shape).numel()) * value.dtype.itemsize


def input_layout(
    value: Value, program: Program, plan: Plan, named: Mapping[Value, str], ranks: int
) -> Layout | None:
    """Cut an input as its first consumer with degrees is cut, but not along channels."""
    first = first_named(value, program, plan.layers)
    if first is None:
        return None
    dims = named[value] if plan.io_channels else named[value].replace("c", ".")
    return Layout.of(value.shape, dims, plan.layers[first], ranks=ranks)


def first_named(value: Value, program: Program, names: Container[str]) -> str | None:
    """Return the first call of some names that an input reaches: it decides how the input lies."""
    frontier = {value}
    for node in program.nodes:
        if frontier.intersection(node.values()):
            if node.name in names:
                return node.name
            frontier.update(node.outs)
    return None


def _as_needed(value: Value, need: Need, node: Node, plan: Plan, named: dict[Value, str]) -> Layout:
    """Cut an input that no degrees reach, such as a target, as its first reader needs it.

    A dim that is a channel of the reader's other operands is left whole.
    """
    layout = need.home
    if plan.io_channels:
        return layout
    beside = [named[v] for v in node.values() if v is not value and v in named]
    channels = {text.index("c") for text in beside if len(text) == len(value.shape) and "c" in text}
    return layout.uncut(*channels)
