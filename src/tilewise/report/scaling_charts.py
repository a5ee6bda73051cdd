"""Strong and weak scaling: what is measured, simulated or planned, the ideal, and the papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewise.report.charts import Chart, Series
from tilewise.report.published import published


def scaling_charts(found: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Iterator[Chart]:
    """Yield a chart for each kind of scaling; `found` has (label, strong or weak, data)."""
    for scaling in ("strong", "weak"):
        some = [(label, data) for label, kind, data in found if kind == scaling]
        series = [one for label, data in some for one in _curves(label, data)]
        if not series:
            continue
        cited = []
        for model, edges in _models(some).items():
            for one in published(model, scaling, edges):
                series.append(Series(one.label, list(one.points), "published"))
                cited.append(f"{one.label}: {one.source}")
        counts = sorted({x for one in series if one.look == "line" for x, _ in one.points})
        first = counts[0]
        ideal = Series("ideal", [(x, x / first) for x in counts], "ideal")
        yield Chart(
            f"scaling-{scaling}",
            f"{scaling.capitalize()} scaling",
            "scaling",
            x_label="devices",
            y_label="speed over the fewest devices",
            y_unit="x",
            log_x=True,
            log_y=True,
            series=[*series, ideal],
            notes=["Published points are relative to the first device count of their own curve."]
            if cited else [],
            sources=cited,
        )  # fmt: skip


def _curves(label: str, data: Mapping[str, Any]) -> Iterator[Series]:
    """Yield curves relative to their fewest devices."""
    if data["points"] and "forward_s" in data["points"][0]:
        yield from _bench_curves(label, data)
        return
    for key, text in (("step_seconds", label), ("planned_step_seconds", "planned")):
        some = [one for one in data["points"] if one.get(key)]
        points = [(float(one["devices"]), one["inputs"][0][0] / one[key]) for one in some]
        if points:
            name = label if text == label else f"{label.removesuffix(': simulated')}: {text}"
            yield Series(name, _relative(sorted(points)))


def _bench_curves(label: str, data: Mapping[str, Any]) -> Iterator[Series]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in data["points"]:
        letters = "".join(sign for sign in one["degrees"] if not sign.isdigit()).strip()
        key = f"{one['layer']} by {letters}" if letters != "1" and letters else str(one["layer"])
        for phase in ("forward", "backward"):
            name = f"{label}: {key}, {phase}"
            curves.setdefault(name, []).append((one["ranks"], one[f"{phase}_ratio"]))
    for name, points in curves.items():
        yield Series(name, sorted(points))


def _relative(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return samples a second over those of the fewest devices."""
    base = points[0][1]
    return [(count, speed / base) for count, speed in points]


def _models(some: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, set[int]]:
    """Return the networks that are shown, with the extents of their inputs."""
    found: dict[str, set[int]] = {}
    for _, data in some:
        model = str(data.get("model", ""))
        shapes = [shape for one in data["points"] for shape in one.get("inputs", ())]
        edges = {shape[-1] for shape in shapes if shape and isinstance(shape[-1], int)}
        if model:
            found.setdefault(model, set()).update(edges)
    return found
