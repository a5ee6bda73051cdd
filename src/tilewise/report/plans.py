"""A plan as the page shows it: layers in order, where they are drawn, and what they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.errors import LayoutError
from tilewise.layout import Degrees
from tilewise.report.errors import ReportError
from tilewise.report.lanes import draw
from tilewise.report.simulations import simulated_rows
from tilewise.report.sources import Source

SHARED = (
    "model", "inputs", "devices", "devices_per_node", "machine", "dtype", "optimizer",
    "memory_bytes", "step_seconds", "peak_bytes", "optimal", "gap", "solve_seconds", "baselines",
    "frontier", "sensitivity", "step", "prices",
)  # fmt: skip


def plan_view(source: Source, label: str) -> dict[str, Any]:
    """Return all that the page shows of a plan's file or JSON."""
    data = {**source.data, **(source.data.get("details") or {})}
    own = _own_degrees(source.data, data)
    rows = data.get("layers")
    return _view(source, label, own, rows if isinstance(rows, list) else None, data)


def borrowed_view(source: Source, label: str) -> dict[str, Any] | None:
    """Return the plan of a simulation or a run, if it says which one it had."""
    plan = source.data.get("plan") or {}
    if source.kind == "simulation":
        return _view(source, label, dict(plan), simulated_rows(source.data), source.data)
    own = dict(plan.get("layers") or {})
    return _view(source, label, own, None, {}) if own else None


def same_plan(view: Mapping[str, Any], own: Mapping[str, str]) -> bool:
    """Whether a view shows layers with these degrees, and only these."""
    mine = {layer["name"]: layer["degrees"] for layer in view["layers"] if layer["own"]}
    return bool(own) and mine == own


def _view(
    source: Source,
    label: str,
    own: Mapping[str, str],
    rows: Sequence[dict[str, Any]] | None,
    data: Mapping[str, Any],
) -> dict[str, Any]:
    if rows is None:
        rows = [{"name": name, "degrees": degrees} for name, degrees in own.items()]
    calls = {call["name"]: call for call in data.get("network", ())}
    layers = []
    for row in rows:
        _check_degrees(row, source)
        layers.append(row | calls.get(row["name"], {}) | {"own": row["name"] in own})
    if not layers:
        raise ReportError(f"report: the plan {source.path} has no layers")
    _link(layers)
    reads = {layer["name"]: layer["reads"] for layer in layers}
    explained = data.get("explain") or []
    explained = explained if isinstance(explained, list) else [explained]
    return {
        "label": label,
        "origin": source.kind,
        "layers": layers,
        "known": {"graph": bool(calls), "costs": "compute_s" in layers[0]},
        "drawings": {"all": _drawn(reads), "folded": _drawn(_folded(layers))},
        "into": _owners(layers),
        "explain": {one["layer"]: one["alternatives"] for one in explained},
        "splits": Counter(layer["degrees"] for layer in layers).most_common(),
        **{key: data[key] for key in SHARED if data.get(key) is not None},
    }


def _own_degrees(plan: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    """Return the degrees of the layers that have some of their own."""
    layers = plan.get("layers")
    if isinstance(layers, dict):
        return dict(layers)
    priced = data.get("prices")
    rows = layers or ()
    return {row["name"]: row["degrees"] for row in rows if not priced or row["name"] in priced}


def _check_degrees(row: Mapping[str, Any], source: Source) -> None:
    try:
        Degrees.parse(row["degrees"])
    except (KeyError, LayoutError) as error:
        raise ReportError(f"report: {source.path}, layer {row.get('name')!r}: {error}") from error


def _link(layers: Sequence[dict[str, Any]]) -> None:
    """Give every layer what it reads; where nothing is known of that, the one before it."""
    known = {layer["name"] for layer in layers}
    before: list[str] = []
    for layer in layers:
        layer.setdefault("kind", "layer")
        if "reads" in layer:
            layer["reads"] = [name for name in layer["reads"] if name in known]
        else:
            layer["reads"] = before
        before = [layer["name"]]


def _folded(layers: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the graph of layers with degrees of their own, and of those that join several."""
    into = _owners(layers)
    found: dict[str, list[str]] = {}
    for layer in layers:
        name = layer["name"]
        if into[name] == name:
            found[name] = list(dict.fromkeys(into[source] for source in layer["reads"]))
    return found


def _owners(layers: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return for each layer the one that it is drawn with when element-wise ones are folded."""
    into: dict[str, str] = {}
    for layer in layers:
        name, reads = layer["name"], layer["reads"]
        alone = layer["own"] or len({into[source] for source in reads}) != 1
        into[name] = name if alone else into[reads[0]]
    return into


def _drawn(reads: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    drawing = draw(reads)
    return {
        "places": drawing.places,
        "edges": [[edge.source, edge.target, edge.way, edge.slot] for edge in drawing.edges],
        "rows": drawing.rows,
        "lanes": drawing.lanes,
        "gutters": drawing.gutters,
    }
