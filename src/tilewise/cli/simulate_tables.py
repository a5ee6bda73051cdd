"""The tables of `tilewise simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from tilewise.cli.plan_tables import WAITING, between, compact, explain, milliseconds
from tilewise.simulate import Point, Simulation
from tilewise.simulate.plain import layers, peers
from tilewise.units import size


def show_layers(found: Simulation, console: Console, model: str) -> None:
    """Show stretches of layers with equal degrees: seconds, operations and bytes of a rank."""
    title = f"{model} on {found.devices} devices of {found.machine.name}, "
    title += "the slowest rank's milliseconds and bytes"
    numbers = ("compute", "halo", "exchange", "GFLOP", "messages", "sent")
    table = compact(title, ("layers", "degrees"), numbers)
    rows = _followed(layers(found))
    for degrees, group in groupby(rows, key=lambda row: row["degrees"]):
        stretch = list(group)
        named = between([row["name"] for row in stretch])
        table.add_row(named, degrees, *_figures(stretch))
    table.add_section()
    table.add_row("all", "", *_figures(rows), style="bold")
    console.print(table)
    explain(WAITING, console)


def _followed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give layers without degrees of their own those of the layer before."""
    last = "1"
    out = []
    for row in rows:
        last = row["degrees"] or last
        out.append(row | {"degrees": last})
    return out


def _figures(rows: Sequence[dict[str, Any]]) -> list[str]:
    total = {key: sum(row[key] for row in rows) for key in rows[0] if key not in _TEXTS}
    return [
        *(milliseconds(total[f"{kind}_s"]) for kind in ("compute", "halo", "exchange")),
        f"{total['flops'] / 1e9:.3g}" if total["flops"] else "–",
        str(total["messages"] or "–"),
        size(total["sent_bytes"]) if total["sent_bytes"] else "–",
    ]


_TEXTS = ("name", "kind", "degrees")


def show_ranks(found: Simulation, console: Console) -> None:
    """Show what each simulated rank computes, sends and holds."""
    table = Table(title="simulated ranks")
    for name in ("rank", "peers", "messages", "sent", "sums", "GFLOP", "peak", "alone (ms)"):
        table.add_column(name, justify="right")
    for run in found.runs:
        rows = peers(run)
        table.add_row(
            str(run.rank),
            str(len({row["peer"] for row in rows})),
            str(sum(row["messages"] for row in rows)),
            size(sum(row["sent_bytes"] for row in rows)),
            size(sum(one.bytes for _, one in run.sums)),
            f"{run.flops / 1e9:.4g}",
            size(run.peak_bytes),
            milliseconds(found.timelines[run.rank].step_seconds),
        )
    console.print(table)


def show_summary(found: Simulation, console: Console) -> None:
    """Show the step's time and memory, and whether the planner says the same."""
    timeline, agreement = found.timeline, found.agreement
    console.print(
        f"step {milliseconds(timeline.step_seconds)} ms: forward "
        f"{milliseconds(timeline.forward_s)}, backward {milliseconds(timeline.backward_s)}, "
        f"optimizer {milliseconds(timeline.optimizer_s)}, gradient sums "
        f"{milliseconds(timeline.sync_s)}, of which {milliseconds(timeline.tail_s)} at the end "
        "do not hide behind backward"
    )
    fullest = found.fullest
    console.print(
        f"memory {size(fullest.peak_bytes)} on rank {fullest.rank}: parameters "
        f"{size(fullest.block_bytes)}, optimizer {size(fullest.state_bytes)}, buffers and inputs "
        f"{size(fullest.other_bytes)}, the rest at the fullest moment"
    )
    if agreement.bytes_equal:
        console.print("[green]bytes are the planner's, layer by layer[/]")
    for one in agreement.differences[:10]:
        console.print(
            f"[red]rank {one.rank}, {one.layer}: {one.simulated_bytes} B received, the planner "
            f"says {one.planned_bytes}[/]"
        )
    if agreement.step_ratio is not None and agreement.peak_ratio is not None:
        console.print(
            f"the step is {agreement.step_ratio:.3f} times the planner's, the "
            f"memory {agreement.peak_ratio:.3f} times"
        )
    else:
        console.print("the planner has no price: the model has no layer with weights or windows")


def show_sweep(name: str, points: Sequence[Point], console: Console) -> None:
    """Show how a step scales with the devices."""
    table = Table(title=f"{name} scaling, each with its best plan")
    columns = ("devices", "batch", "step (ms)", "samples/s", "speed-up", "efficiency", "memory")
    for column in columns:
        table.add_column(column, justify="right")
    first = points[0]
    for point in points:
        ratio = point.samples_per_second / first.samples_per_second
        share = point.simulation.devices / first.simulation.devices
        table.add_row(
            str(point.simulation.devices),
            str(point.shapes[0][0]),
            milliseconds(point.simulation.step_seconds),
            f"{point.samples_per_second:.4g}",
            f"{ratio:.2f}",
            f"{ratio / share:.0%}",
            size(point.simulation.peak_bytes),
        )
    console.print(table)
