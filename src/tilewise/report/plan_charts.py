"""Charts of plans: against what people use, time against memory, the step as it goes by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilewise.report.charts import Bar, Chart, Mark, Series, slug

BASELINES = {
    "data": "data parallel",
    "spatial": "spatial only",
    "model": "channels only",
    "owt": "linear layers split",
    "uniform": "best uniform",
}
MOST_LAYERS = 12
STREAMS = ("compute", "messages", "gradient sums")


def plan_charts(views: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    """Yield the charts of all plans; a frontier for those of one network together."""
    for view in views:
        if view["known"]["costs"]:
            yield _dearest(view)
    for view in views:
        if view.get("baselines"):
            yield _baselines(view)
    yield from _frontiers(views)
    for view in views:
        if view.get("step"):
            yield _timeline(view)
            yield _memory(view)


def _dearest(view: Mapping[str, Any]) -> Chart:
    """Show the layers that take the most time, by kind."""
    kinds = ("compute", "halo", "exchange")
    rows = sorted(view["layers"], key=lambda row: -sum(row[f"{kind}_s"] for kind in kinds))
    bars = []
    for row in rows[:MOST_LAYERS]:
        now = 0.0
        for kind in kinds:
            seconds = row[f"{kind}_s"]
            if seconds > 0:
                lane, note = f"{row['name']}", f"{kind}, {row['degrees']}"
                bars.append(Bar(lane, now, now + seconds, kind, row["name"], note))
            now += seconds
    return Chart(
        f"layers-{slug(view['label'])}",
        f"{view['label']}: the layers that take most of a step",
        "network",
        subject=view["label"],
        kind="bars",
        x_label="forward, backward and optimizer",
        x_unit="s",
        bars=bars,
    )


def _baselines(view: Mapping[str, Any]) -> Chart:
    bars = [Bar("this plan", 0.0, view["step_seconds"], "chosen")]
    for name, one in view["baselines"].items():
        kind = "fits" if one["fits"] else "too large"
        ratio = one["step_seconds"] / view["step_seconds"]
        note = f"{ratio:.2f} × the plan's step" + ("" if one["fits"] else ", does not fit")
        bars.append(Bar(BASELINES.get(name, name), 0.0, one["step_seconds"], kind, note=note))
    return Chart(
        f"baselines-{slug(view['label'])}",
        f"{view['label']}: a step",
        "plans",
        kind="bars",
        x_label="step",
        x_unit="s",
        bars=bars,
    )


def _frontiers(views: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    models: dict[str, list[Mapping[str, Any]]] = {}
    for view in views:
        if view.get("frontier") or view.get("baselines"):
            models.setdefault(str(view.get("model", view["label"])), []).append(view)
    for model, some in models.items():
        series: list[Series] = []
        for view in some:
            points = [(one["peak_bytes"], one["step_seconds"]) for one in view.get("frontier", ())]
            if points:
                series.append(Series(f"{view['label']}: frontier", _lower(points), "stairs"))
            names = ["this plan"]
            points = [(view["peak_bytes"], view["step_seconds"])]
            for name, one in view["baselines"].items():
                names.append(BASELINES.get(name, name))
                points.append((one["peak_bytes"], one["step_seconds"]))
            series.append(Series(f"{view['label']}: plans", points, "points", names))
        limits = {view["memory_bytes"] for view in some if "memory_bytes" in view}
        worth = max(p[0] for one in series for p in one.points)
        yield Chart(
            f"frontier-{slug(model)}",
            f"{model}: time against memory",
            "frontier",
            x_label="memory of the fullest device",
            y_label="step",
            x_unit="bytes",
            y_unit="s",
            log_x=True,
            log_y=True,
            series=series,
            marks=[Mark("x", limit, "a device's memory") for limit in limits if limit < 4 * worth],
            notes=[] if any(one.look == "stairs" for one in series) else [
                "tilewise plan --pareto adds the frontier to a plan file."
            ],
        )  # fmt: skip


def _lower(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep what no other point beats in both memory and time, by memory."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _timeline(view: Mapping[str, Any]) -> Chart:
    bars, _ = lay(view["step"])
    return Chart(
        f"timeline-{slug(view['label'])}",
        f"{view['label']}: the step as the planner sees it",
        "timeline",
        subject=view["label"],
        kind="timeline",
        x_label="time",
        x_unit="s",
        bars=bars,
        marks=[Mark("x", view["step_seconds"], "the planner's step")],
        notes=[
            "Halos are drawn as far as they do not hide behind compute. Gradient sums are drawn "
            "from when each gradient is there; the planner lets them hide behind all of backward, "
            "so the last may end later here."
        ],
    )


def lay(step: Sequence[Mapping[str, Any]]) -> tuple[list[Bar], list[tuple[float, float]]]:
    """Lay the layers of a step one after another; returns bars, and bytes held over time."""
    bars: list[Bar] = []
    held: list[tuple[float, float]] = []
    now = synced = 0.0
    for phase, rows in (("forward", step), ("backward", list(reversed(step)))):
        for row in rows:
            compute, halo, exchange = row[f"{phase}_s"]
            held.append((now, row[f"{phase}_bytes"]))
            for kind, seconds in (("halo", halo), ("exchange", exchange), (phase, compute)):
                if seconds > 0:
                    lane = STREAMS[0] if kind == phase else STREAMS[1]
                    bars.append(Bar(lane, now, now + seconds, kind, row["name"], phase))
                    now += seconds
            held.append((now, row[f"{phase}_bytes"]))
            if phase == "backward" and row["sync_s"] > 0:
                begin = max(now, synced)
                synced = begin + row["sync_s"]
                bars.append(Bar(STREAMS[2], begin, synced, "sync", row["name"], phase))
    now = max(now, synced)
    for row in step:
        if row["optimizer_s"] > 0:
            end = now + row["optimizer_s"]
            bars.append(Bar(STREAMS[0], now, end, "optimizer", row["name"], "optimizer"))
            held += [(now, row["optimizer_bytes"]), (end, row["optimizer_bytes"])]
            now = end
    return bars, held


def _memory(view: Mapping[str, Any]) -> Chart:
    _, held = lay(view["step"])
    marks = [Mark("y", view["peak_bytes"], "peak")]
    limit = view.get("memory_bytes")
    if limit and limit < 4 * view["peak_bytes"]:
        marks.append(Mark("y", limit, "a device's memory"))
    return Chart(
        f"memory-{slug(view['label'])}",
        f"{view['label']}: memory of the fullest device",
        "memory",
        x_label="time",
        y_label="memory held",
        x_unit="s",
        y_unit="bytes",
        series=[Series("predicted", held)],
        marks=marks,
    )
