"""Fill the page: all data, styles and scripts go into one file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from math import isfinite
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from tilewise.report.bench_charts import bench_charts
from tilewise.report.charts import Chart
from tilewise.report.errors import ReportError
from tilewise.report.plan_charts import plan_charts
from tilewise.report.plans import borrowed_view, plan_view, same_plan
from tilewise.report.run_charts import run_charts, run_view
from tilewise.report.scaling_charts import scaling_charts
from tilewise.report.simulations import simulation_charts, simulation_view
from tilewise.report.sources import Source, unique_labels

SCRIPTS = ("format.js", "charts.js", "slabs.js", "network.js", "layer.js", "compare.js", "page.js")
SECTIONS = {
    "network": ("Network", "Network"),
    "compare": ("Compare", "Compare two plans"),
    "plans": ("Baselines", "Against what people use"),
    "frontier": ("Frontier", "Time against memory"),
    "scaling": ("Scaling", "Strong and weak scaling"),
    "timeline": ("Timeline", "Timeline of a step"),
    "memory": ("Memory", "Memory over a step"),
    "loss": ("Training", "Training"),
    "benches": ("Benches", "Benches"),
}
"""Each section's name in the navigation, and its title."""


class Contents:
    """What the sources hold, as views for the page and charts for page and files."""

    def __init__(self, sources: Sequence[Source]) -> None:
        if not sources:
            raise ReportError("report: there is nothing to report on")
        labels = unique_labels(list(sources))
        named = list(zip(labels, sources, strict=True))
        try:
            self._read(named)
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            files = ", ".join(str(source.path) for source in sources)
            raise ReportError(
                f"report: something is missing in {files} ({error!r}); was it written by this "
                "version of tilewise?"
            ) from error

    def _read(self, named: Sequence[tuple[str, Source]]) -> None:
        def of(kind: str) -> list[tuple[str, Source]]:
            return [(label, source) for label, source in named if source.kind == kind]

        self.plans = [plan_view(source, label) for label, source in of("plan")]
        simulations, runs = of("simulation"), of("run")
        self.simulations = [simulation_view(label, s.data) for label, s in simulations]
        self.runs = [run_view(label, source.data) for label, source in runs]
        for view, (label, source) in zip(self.simulations, simulations, strict=True):
            view["plans"] = self._plans_of(source, label, view.get("plan") or {})
        for view, (label, source) in zip(self.runs, runs, strict=True):
            own = (source.data.get("plan") or {}).get("layers") or {}
            view["plans"] = self._plans_of(source, label, own)
        swept = [
            (f"{label}: simulated", kind, dict(s.data) | {"points": s.data[kind]})
            for label, s in simulations
            for kind in ("strong", "weak")
            if s.data.get(kind)
        ]
        self.charts: list[Chart] = [
            *plan_charts([view for view in self.plans if view["origin"] == "plan"]),
            *scaling_charts([*((label, s.about, s.data) for label, s in of("scaling")), *swept]),
            *(c for label, s in simulations for c in simulation_charts(label, s.data)),
            *run_charts([(label, source.data) for label, source in runs]),
            *(c for label, s in of("bench") for c in bench_charts(label, s.about, s.data)),
        ]  # fmt: skip

    def _plans_of(self, source: Source, label: str, own: Mapping[str, str]) -> list[int]:
        """Return the numbers of the plans that a simulation or run had; else add its own."""
        found = [number for number, view in enumerate(self.plans) if same_plan(view, own)]
        if not found and (view := borrowed_view(source, label)) is not None:
            self.plans.append(view)
            found = [len(self.plans) - 1]
        return found

    @property
    def sections(self) -> dict[str, tuple[str, str]]:
        """The sections that have something to show."""
        groups = {chart.group for chart in self.charts}
        shown = groups | ({"network"} if self.plans else set())
        shown |= {"compare"} if len(self.plans) > 1 else set()
        shown |= {"loss"} if self.runs else set()
        return {name: texts for name, texts in SECTIONS.items() if name in shown}

    def as_dict(self) -> dict[str, Any]:
        return {
            "plans": self.plans,
            "simulations": self.simulations,
            "runs": self.runs,
            "charts": [chart.as_dict() for chart in self.charts],
        }


def render(sources: Sequence[Source], *, title: str = "tilewise report") -> str:
    """Return the page as text."""
    contents = Contents(sources)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True,
                              lstrip_blocks=True)  # fmt: skip
    template = environment.from_string(_asset("page.html"))
    return template.render(
        title=title,
        version=metadata.version("tilewise"),
        sections=contents.sections,
        contents=contents,
        style=Markup(_asset("style.css")),
        script=Markup("\n".join(_asset(name) for name in SCRIPTS)),
        data=Markup(_embedded(contents.as_dict())),
    )


def _asset(name: str) -> str:
    return resources.files("tilewise.report").joinpath("assets", name).read_text("utf-8")


def _finite(data: Any) -> Any:
    """Return the data with nothing in place of numbers that JSON does not have."""
    if isinstance(data, float):
        return data if isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return data


def _embedded(data: Any) -> str:
    """Return JSON that may stand inside a script element whatever its strings hold."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
