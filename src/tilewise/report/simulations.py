"""Simulations: the step as it was laid on streams, and what every layer took in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tilewise.report.charts import Bar, Chart, Mark, Series, slug

STREAMS = {"compute": "compute", "messages": "messages", "sync": "gradient sums"}
KEPT = ("model", "inputs", "devices", "machine", "step_seconds", "peak_bytes", "agreement", "plan")
TIMES = ("compute_s", "halo_s", "exchange_s")


def simulation_view(label: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page says of a simulation, with the seconds of each layer by kind."""
    sync = _sync(data)
    layers = {
        row["name"]: {key: row[key] for key in TIMES} | {"sync_s": sync.get(row["name"], 0.0)}
        for row in data["layers"]
    }
    kept = {key: data[key] for key in KEPT if key in data}
    return {"label": label, "layers": layers, "ranks": len(data.get("ranks", ())), **kept}


def simulated_rows(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the layers of a simulation as those of a plan; followers have degrees too."""
    sync, rows, degrees = _sync(data), [], "1"
    for row in data["layers"]:
        degrees = row["degrees"] or degrees
        times = {key: row[key] for key in TIMES}
        name = row["name"]
        rows.append({"name": name, "kind": row["kind"], "degrees": degrees, **times,
                     "sync_s": sync.get(name, 0.0)})  # fmt: skip
    return rows


def _sync(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of the gradient sums that begin after each layer."""
    found: dict[str, float] = {}
    for bar in data["timeline"]:
        if bar["stream"] == "sync":
            found[bar["layer"]] = found.get(bar["layer"], 0.0) + bar["end_s"] - bar["start_s"]
    return found


def simulation_charts(label: str, data: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield the timeline of a simulated step, and the memory of its fullest rank."""
    yield Chart(
        f"timeline-{slug(label)}",
        f"{label}: the step as it was simulated",
        "timeline",
        subject=label,
        kind="timeline",
        x_label="time",
        x_unit="s",
        bars=[
            Bar(STREAMS[bar["stream"]], bar["start_s"], bar["end_s"], _kind(bar), bar["layer"],
                bar["phase"])
            for bar in data["timeline"]
        ],
        marks=[Mark("x", data["step_seconds"], "step")],
        notes=["Halos are drawn whole, beside the compute that hides them."],
    )  # fmt: skip
    held = []
    for span in data.get("memory", ()):
        held += [(span["start_s"], span["peak_bytes"]), (span["end_s"], span["end_bytes"])]
    if held:
        planned = (data.get("agreement") or {}).get("planned_peak_bytes")
        yield Chart(
            f"memory-{slug(label)}",
            f"{label}: memory of the fullest simulated rank",
            "memory",
            x_label="time",
            y_label="memory held",
            x_unit="s",
            y_unit="bytes",
            series=[Series("simulated", held)],
            marks=[Mark("y", planned, "the planner's peak")] if planned else [],
        )


def _kind(bar: Mapping[str, Any]) -> str:
    return "sync" if bar["kind"] == "gradients" else str(bar["kind"])
