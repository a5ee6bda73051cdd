"""Read what other commands wrote: plans, simulations, benches and training runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.report.errors import ReportError
from tilewise.report.traces import measured_layers

METRICS = "metrics.jsonl"
ACCEPTED = (
    "a plan (tilewise plan -o or --json), a simulation (tilewise simulate --json), a bench "
    f"(tilewise bench … --json) or the folder of a training run, with its {METRICS}"
)
BENCHES = {
    "rows": "layers",
    "primitives": "messages",
    "serial_1t_s": "model",
    "whole_samples_s": "input",
}
"""The key by which the JSON of each bench is told."""


@dataclass(frozen=True)
class Source:
    """Something to report on: a `plan`, `simulation`, `scaling`, `bench` or `run`.

    `about` tells benches from each other.
    """

    kind: str
    label: str
    path: Path
    data: dict[str, Any]
    about: str = ""


def read_source(path: Path) -> Source:
    """Read a file or a run's folder, and tell what it is."""
    if path.is_dir():
        return _read_run(path)
    if not path.is_file():
        raise ReportError(f"report: there is no file or folder {path}")
    if path.name == METRICS:
        return _read_run(path.parent)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ReportError(f"report: {path} is not JSON ({error}); give {ACCEPTED}") from error
    if not isinstance(data, dict):
        raise ReportError(f"report: {path} holds a {type(data).__name__}; give {ACCEPTED}")
    kind, about = _kind(data, path)
    return Source(kind, path.stem, path, data, about)


def _kind(data: dict[str, Any], path: Path) -> tuple[str, str]:
    if data.get("kind") == "simulation":
        return "simulation", ""
    if isinstance(data.get("layers"), dict) and "format" in data:
        return "plan", ""
    if isinstance(data.get("layers"), list) and "baselines" in data:
        return "plan", ""
    if isinstance(data.get("points"), list) and data.get("scaling") in ("strong", "weak"):
        return "scaling", str(data["scaling"])
    rows = data.get("rows")
    if isinstance(rows, list) and rows and "predicted_s" in rows[0]:
        return "bench", "plans"
    for key, about in BENCHES.items():
        if key in data:
            return "bench", about
    raise ReportError(f"report: {path} is none of what is known; give {ACCEPTED}")


def _read_run(folder: Path) -> Source:
    path = folder / METRICS
    if not path.is_file():
        raise ReportError(f"report: the folder {folder} has no {METRICS}; give {ACCEPTED}")
    records = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break  # a run that was killed leaves half a line
            raise ReportError(f"report: {path}, line {number} is not JSON: {error}") from error
        if isinstance(record, dict) and "step" in record:
            records.append(record)
    if not records:
        raise ReportError(f"report: {path} has no steps yet; wait for the run's first ones")
    data: dict[str, Any] = {"records": records}
    for name in ("plan", "recipe", "summary"):
        extra = folder / f"{name}.json"
        if extra.is_file():
            try:
                data[name] = json.loads(extra.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ReportError(f"report: {extra} is not JSON: {error}") from error
    data["measured"] = measured_layers(folder / "profile")
    return Source("run", folder.resolve().name, folder, data)


def unique_labels(sources: list[Source]) -> list[str]:
    """Return labels that tell all sources apart, by their folders where names are the same."""
    labels = [source.label for source in sources]
    twice = {label for label in labels if labels.count(label) > 1}
    seen: dict[str, int] = {}
    out = []
    for source, label in zip(sources, labels, strict=True):
        if label in twice:
            label = f"{source.path.resolve().parent.name}/{label}"
        seen[label] = seen.get(label, 0) + 1
        out.append(label if seen[label] == 1 else f"{label} ({seen[label]})")
    return out
