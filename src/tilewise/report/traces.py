"""Read what layers really took from the traces of a profiled run.

Forward, a layer is a span of its own. Autograd numbers what it records: an operator inside of a
span and the node that runs backward for it have the same number, so they belong to one layer.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tilewise.report.errors import ReportError

NUMBER, RECORDED_BY = "Sequence number", "Fwd thread id"
NODE = "autograd::engine::evaluate_function"
PHASES = ("forward_s", "backward_s")


def measured_layers(folder: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of each layer, forward and backward, as far as they are known.

    They are the median of its steps on the slowest rank. Layers that are computed again in backward
    are part of other nodes, and have no backward of their own.
    """
    slowest: dict[str, dict[str, float]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (ValueError, KeyError) as error:
            raise ReportError(f"report: {path} is not a trace: {error}") from error
        for name, spans in _spans(events).items():
            row = slowest.setdefault(name, {})
            for phase in PHASES:
                taken = [span[phase] for span in spans if span[phase] > 0]
                if taken:
                    row[phase] = max(row.get(phase, 0.0), median(taken))
    return slowest


def _spans(events: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """Return the seconds of every time that each layer ran."""
    ran = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event.get("ph") == "X"
    )
    found = [{"forward_s": (end - start) * 1e-6, "backward_s": 0.0} for start, end, _ in ran]
    starts = [start for start, _, _ in ran]
    made: dict[int, tuple[float, int]] = {}
    nodes: list[tuple[int, float]] = []
    for event in events:
        about = event.get("args") or {}
        number = about.get(NUMBER)
        if number is None or event.get("ph") != "X":
            continue
        if event["name"].startswith(NODE):
            nodes.append((number, event["dur"] * 1e-6))
            continue
        if about.get(RECORDED_BY):  # what runs inside of a node
            continue
        place = bisect_right(starts, event["ts"]) - 1
        if place < 0 or event["ts"] > ran[place][1]:
            place = -1
        # of those that saw one number, the last one took it
        made[number] = max(made.get(number, (0.0, -1)), (event["ts"], place))
    for number, seconds in nodes:
        _, place = made.get(number, (0.0, -1))
        if place >= 0:
            found[place]["backward_s"] += seconds
    spans: dict[str, list[dict[str, float]]] = {}
    for (_, _, name), one in zip(ran, found, strict=True):
        spans.setdefault(name, []).append(one)
    return spans
