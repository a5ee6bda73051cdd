"""What `tilewise plan` can tell besides the plan, and the same as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from tilewise.cli.naming import InputError
from tilewise.errors import PlanError, meant
from tilewise.graph.captured import Graph
from tilewise.plan import Plan
from tilewise.planner.candidates import Dropped
from tilewise.planner.explain import Alternative, variable_of
from tilewise.planner.search import Found

Explained = tuple[str, list[Alternative], dict[str, list[Dropped]]]
"""A layer, all ways to split it, and those that are left out, by reason."""


def extras(
    found: Found, *, pareto: bool, explain: Iterable[str], other: Plan | None, sensitivity: bool
) -> dict[str, Any]:
    """Compute what was asked for besides the plan."""
    extra: dict[str, Any] = {}
    if pareto:
        extra["frontier"] = found.frontier()
    layers = list(dict.fromkeys(explain))
    for layer in layers:  # a name that is not known is said before any is priced
        variable_of(found.formulation, layer)
    if layers:
        extra["explain"] = [_explained(found, layer) for layer in layers]
    if other is not None:
        try:
            extra["diff"] = found.price(other)
        except PlanError as error:
            raise InputError(f"--diff: {error}") from error
    if sensitivity:
        extra["sensitivity"] = found.sensitivity()
    return extra


def check_layers(graph: Graph, names: Iterable[str]) -> None:
    """Refuse names of layers to explain that there are none of, before any time goes by."""
    known = [layer.name for layer in graph.layers]
    for name in names:
        if name not in known:
            guess, listed = meant(name, known), ", ".join(known)
            raise InputError(f"--explain: there is no layer {name!r}; {guess}layers: {listed}")


def _explained(found: Found, layer: str) -> Explained:
    ways = found.explain(layer)
    return layer, ways, found.left_out(layer, ways)


def plain(extra: dict[str, Any]) -> dict[str, Any]:
    """Return the extras as plain values; of several explained layers a list."""
    out: dict[str, Any] = {}
    if "frontier" in extra:
        out["frontier"] = [
            {
                "step_seconds": one.step_seconds,
                "peak_bytes": one.peak_bytes,
                "optimal": one.optimal,
            }
            for one in extra["frontier"]
        ]
    if "explain" in extra:
        layers = [_plain_layer(one) for one in extra["explain"]]
        out["explain"] = layers if len(layers) > 1 else layers[0]
    if "sensitivity" in extra:
        out["sensitivity"] = [
            asdict(one) | {"survives": one.survives} for one in extra["sensitivity"]
        ]
    if "diff" in extra:
        other = extra["diff"]
        out["diff"] = {
            "step_seconds": other.step_seconds,
            "peak_bytes": other.peak_bytes,
            "fits": other.fits,
            "layers": {name: str(degrees) for name, degrees in other.plan.layers.items()},
            "recompute": other.plan.recompute,
        }
    return out


def _plain_layer(explained: Explained) -> dict[str, Any]:
    layer, alternatives, left_out = explained
    return {
        "layer": layer,
        "alternatives": [_plain_way(one) for one in alternatives],
        "left_out": [_plain_group(rule, some) for rule, some in left_out.items()],
    }


def _plain_way(one: Alternative) -> dict[str, Any]:
    """Return a way to split a layer as plain values; null for what no plan that fits has."""
    values = asdict(one) | {"degrees": str(one.degrees), "decides": one.decides}
    seconds = {key: values[key] for key in ("step_seconds", "alone_seconds")}
    return values | {key: one if isfinite(one) else None for key, one in seconds.items()}


def _plain_group(rule: str, some: Sequence[Dropped]) -> dict[str, Any]:
    """Return ways that one rule leaves out as plain values."""
    ways = [
        {"degrees": str(one.degrees), "recompute": one.recompute, "reason": one.reason}
        for one in some
    ]
    return {"reason": rule, "count": len(ways), "ways": ways}
