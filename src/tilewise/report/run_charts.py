"""Charts of training runs: what was lost and learnt, and how long steps took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from statistics import mean, median
from typing import Any

from tilewise.report.charts import Bar, Chart, Series, slug

BESIDE = {"step", "epoch", "kind", "seconds"}
SHARES = {"redistribution": "exchange", "move": "exchange"}
TITLES = {
    "loss": "Loss",
    "lr": "Learning rate",
    "grad_norm": "Norm of the gradients",
    "samples_per_s": "Samples a second",
}
MOST_POINTS = 1000


def run_view(label: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page's table says of a run."""
    steps = [record for record in data["records"] if record.get("kind", "train") == "train"]
    times = [record["seconds"] for record in steps if "seconds" in record]
    last: dict[str, float] = {}
    for record in data["records"]:
        kind = record.get("kind", "train")
        if kind != "train":
            last |= {f"{kind} {name}": value for name, value in _numbers(record).items()}
    recipe = data.get("recipe") or {}
    view: dict[str, Any] = {
        "label": label,
        "steps": max(record["step"] for record in data["records"]),
        "last": last,
        "plan": _plan_text(data),
        "layers": data.get("measured") or {},
    }
    if steps and "loss" in steps[-1]:
        view["loss"] = steps[-1]["loss"]
    if times:
        view["step_seconds"] = median(times[1:] or times)
    if isinstance(recipe.get("model"), dict):
        view["model"] = recipe["model"].get("name")
    return view


def _plan_text(data: Mapping[str, Any]) -> str:
    plan = data.get("plan") or {}
    splits = dict.fromkeys(plan.get("layers", {}).values())
    return ", ".join(splits)


def run_charts(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[Chart]:
    """Yield one chart for the loss and one for every metric, all runs together."""
    found: dict[str, list[Series]] = {}
    for label, data in runs:
        points: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for record in data["records"]:
            kind = record.get("kind", "train")
            for name, value in _numbers(record).items():
                points.setdefault((kind, name), []).append((record["step"], value))
        for (kind, name), some in points.items():
            text = f"{label}: {kind}"
            found.setdefault(name, []).append(Series(text, thinned(some)))
    if bars := [bar for label, data in runs for bar in _shares(label, data)]:
        yield Chart("run-shares", "Where the time of a step goes", "loss", kind="bars",
                    x_label="step", x_unit="s", bars=bars)  # fmt: skip
    order = sorted(found, key=lambda name: (name != "loss", name))
    for name in order:
        values = [y for one in found[name] for _, y in one.points]
        wide = min(values) > 0 and max(values) > 50 * min(values)
        yield Chart(
            f"run-{slug(name)}",
            TITLES.get(name, name),
            "loss",
            x_label="optimizer step",
            y_label=name,
            log_y=wide,
            zero_y=False,
            series=found[name],
        )  # fmt: skip


def _shares(label: str, data: Mapping[str, Any]) -> Iterator[Bar]:
    """Yield the mean seconds of a step by what they were spent on, without the first step."""
    steps = [one for one in data["records"] if isinstance(one.get("shares"), dict)]
    steps = steps[1:] or steps
    now = 0.0
    for kind in steps[0]["shares"] if steps else ():
        seconds = mean(one["shares"].get(kind, 0.0) * one["seconds"] for one in steps)
        yield Bar(label, now, now + seconds, SHARES.get(kind, kind), note=kind)
        now += seconds


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if name not in BESIDE
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
        and isfinite(value)
    }


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most about MOST_POINTS of many points: the lowest and highest of each stretch."""
    if len(points) <= MOST_POINTS:
        return points
    size = -(-2 * len(points) // MOST_POINTS)
    kept = []
    for begin in range(0, len(points), size):
        stretch = points[begin : begin + size]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
