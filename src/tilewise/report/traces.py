"""Read what layers really took from the traces of a profiled run."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from tilewise.report.errors import ReportError


def measured_layers(folder: Path) -> dict[str, float]:
    """Return the forward seconds of each layer: the median of its steps on the slowest rank."""
    slowest: dict[str, float] = {}
    for path in sorted(folder.glob("rank-*.json")):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (ValueError, KeyError) as error:
            raise ReportError(f"report: {path} is not a trace: {error}") from error
        spans: dict[str, list[float]] = {}
        for event in events:
            if event.get("cat") == "user_annotation" and event.get("ph") == "X":
                spans.setdefault(event["name"], []).append(event["dur"] * 1e-6)
        for name, seconds in spans.items():
            slowest[name] = max(slowest.get(name, 0.0), median(seconds))
    return slowest
