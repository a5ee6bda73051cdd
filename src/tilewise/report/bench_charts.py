"""Charts of benches, one kind a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tilewise.report.charts import Bar, Chart, Series, slug

WAYS = {
    "whole": "rank 0 reads and scatters",
    "slab": "every rank reads its slabs",
    "store": "from memory, own tiles",
    "store_moved": "from memory, tiles change ranks",
}


def bench_charts(label: str, about: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield the charts of one bench."""
    yield from BENCHES[about](label, data)


def _layers(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    bars = []
    for row in data["rows"]:
        lane = f"{row['layer']} {row['degrees']}"
        note = f"efficiency {row['efficiency']:.2f}, speed-up {row['speedup']:.2f}"
        bars.append(Bar(lane, 0.0, row["local_s"], "own share", note=note))
        if row["split_s"] > row["local_s"]:
            bars.append(Bar(lane, row["local_s"], row["split_s"], "what splitting adds", note=note))
    yield Chart(
        f"bench-{slug(label)}",
        f"{label}: layers split, against the time of their own share",
        "benches",
        kind="bars",
        x_label="forward and backward",
        x_unit="s",
        bars=bars,
    )


def _model(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    rows = [
        ("one thread", data["serial_1t_s"], "one device"),
        (f"{data['ranks']} threads", data["serial_pt_s"], "one device"),
        (f"{data['ranks']} threads, memory kept", data.get("serial_pt_kept_s"), "one device"),
        ("DDP", data.get("ddp_s"), "data parallel"),
        ("DDP, memory kept", data.get("ddp_kept_s"), "data parallel"),
        ("split, messages left out", data.get("local_s"), "split"),
        (f"split {data['plan']}", data["split_s"], "split"),
    ]
    yield Chart(
        f"bench-{slug(label)}",
        f"{label}: one step of {data['model']}",
        "benches",
        kind="bars",
        x_label="step",
        x_unit="s",
        bars=[Bar(name, 0.0, seconds, kind) for name, seconds, kind in rows if seconds],
    )


def _messages(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    series = []
    for one in data["primitives"]:
        points = sorted((float(size), seconds) for size, seconds in one["seconds"].items())
        fitted = [(size, one["alpha_s"] + one["beta_s_per_byte"] * size) for size, _ in points]
        series += [
            Series(one["name"], points, "points"),
            Series(f"{one['name']}: α + β·bytes", fitted),
        ]
    yield Chart(
        f"bench-{slug(label)}",
        f"{label}: messages over {data['backend']}, {data['ranks']} ranks",
        "benches",
        x_label="message",
        y_label="time",
        x_unit="bytes",
        y_unit="s",
        log_x=True,
        log_y=True,
        series=series,
    )


def _input(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    yield Chart(
        f"bench-{slug(label)}",
        f"{label}: input, {data['ranks']} ranks",
        "benches",
        kind="bars",
        x_label="samples a second",
        bars=[
            Bar(text, 0.0, data[f"{way}_samples_s"], "input")
            for way, text in WAYS.items()
            if f"{way}_samples_s" in data
        ],
    )


def _plans(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    rows = data["rows"]
    points = [(one["predicted_s"], one["measured_s"]) for one in rows]
    low, high = min(min(p) for p in points), max(max(p) for p in points)
    yield Chart(
        f"bench-{slug(label)}",
        f"{label}: predicted against measured",
        "benches",
        x_label="predicted step",
        y_label="measured step",
        x_unit="s",
        y_unit="s",
        log_x=True,
        log_y=True,
        series=[
            Series("as predicted", [(low, low), (high, high)], "ideal"),
            Series("plans", points, "points", [str(one["plan"]) for one in rows]),
        ],
    )


BENCHES: dict[str, Callable[[str, Mapping[str, Any]], Iterator[Chart]]] = {
    "layers": _layers,
    "model": _model,
    "messages": _messages,
    "input": _input,
    "plans": _plans,
}
