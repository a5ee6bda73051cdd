"""The charts of the page as files for papers, drawn by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.report.charts import Chart
from tilewise.report.errors import ReportError
from tilewise.report.page import Contents
from tilewise.report.slab_figure import draw_slab, slab_layer
from tilewise.report.sources import Source

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = {
    "n": "#2f6fde", "d": "#0b7a75", "h": "#2a9d4a", "w": "#86a80f", "c": "#d9730d", "f": "#b8338a",
}  # fmt: skip
KINDS = {
    "compute": "#4c6ef5", "forward": "#4c6ef5", "backward": "#2b3fa8", "optimizer": "#8792b8",
    "halo": "#0b9488", "exchange": "#d9730d", "sync": "#9c36b5", "chosen": "#2b3fa8",
    "fits": "#8792b8", "too large": "#c92a2a", "own share": "#4c6ef5",
    "what splitting adds": "#d9730d", "one device": "#8792b8", "data parallel": "#0b9488",
    "split": "#4c6ef5", "input": "#86a80f",
}  # fmt: skip
PALETTE = ("#2f6fde", "#d9730d", "#0b7a75", "#b8338a", "#6741d9", "#5c7c0f", "#c92a2a", "#495057")
UNITS = {"s": 1e-3, "bytes": 2.0**20}
UNIT_NAMES = {"s": "ms", "bytes": "MiB"}


def save_figures(sources: Sequence[Source], folder: Path) -> list[str]:
    """Write charts, networks and a slab of each as PNG and SVG; returns the files' stems."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ReportError(
            "report: --figures needs matplotlib; pip install 'tilewise[figures]'"
        ) from error
    contents = Contents(sources)
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
                         "axes.spines.right": False, "svg.hashsalt": "tilewise"}):  # fmt: skip
        for chart in contents.charts:
            names.append(_save(_chart_figure(chart), folder, chart.id))
        for view in contents.plans:
            if view["known"]["graph"]:
                name = f"network-{_stem(view['label'])}"
                names.append(_save(_network_figure(view), folder, name))
                if (layer := slab_layer(view["layers"])) is not None:
                    name = f"slab-{_stem(view['label'])}"
                    names.append(_save(_slab_figure(layer), folder, name))
    return names


def _stem(label: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-." else "-" for sign in label)


def _save(figure: Figure, folder: Path, name: str) -> str:
    for ending in ("png", "svg"):
        metadata = {"Date": None} if ending == "svg" else None
        figure.savefig(folder / f"{name}.{ending}", dpi=200, bbox_inches="tight", metadata=metadata)
    return name


def _new(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _chart_figure(chart: Chart) -> Figure:
    if chart.kind == "lines":
        figure, axes = _new(5.2, 3.4)
        _lines(chart, axes)
    else:
        lanes = list(dict.fromkeys(bar.lane for bar in chart.bars))
        figure, axes = _new(7.0, 0.8 + 0.36 * len(lanes))
        _bars(chart, lanes, axes)
    axes.set_title(chart.title, fontsize=10)
    axes.set_xlabel(_axis_label(chart.x_label, chart.x_unit))
    if chart.sources:
        figure.text(0.0, -0.02, "\n".join(chart.sources), fontsize=6, va="top")
    return figure


def _axis_label(label: str, unit: str) -> str:
    return f"{label} ({UNIT_NAMES[unit]})" if unit in UNIT_NAMES else label


def _lines(chart: Chart, axes: Axes) -> None:
    across, up = UNITS.get(chart.x_unit, 1.0), UNITS.get(chart.y_unit, 1.0)
    colours = iter(PALETTE * (1 + len(chart.series) // len(PALETTE)))
    for one in chart.series:
        xs, ys = [x / across for x, _ in one.points], [y / up for _, y in one.points]
        if one.look == "ideal":
            axes.plot(xs, ys, "--", color="#868e96", linewidth=1, label=one.label)
        elif one.look == "published":
            axes.plot(xs, ys, "x:", color=next(colours), linewidth=1, label=one.label)
        elif one.look == "points":
            axes.plot(xs, ys, "o", color=next(colours), markersize=4, label=one.label)
            for x, y, name in zip(xs, ys, one.names):
                axes.annotate(name, (x, y), (4, 3), textcoords="offset points", fontsize=6)
        else:
            style = "steps-post" if one.look == "stairs" else "default"
            marker = "o" if len(xs) <= 40 else ""
            axes.plot(xs, ys, color=next(colours), drawstyle=style, marker=marker, markersize=3,
                      linewidth=1.3, label=one.label)  # fmt: skip
    for mark in chart.marks:
        draw, scale = (axes.axvline, across) if mark.axis == "x" else (axes.axhline, up)
        draw(mark.value / scale, color="#c92a2a", linestyle=":", linewidth=1, label=mark.label)
    if chart.log_x:
        axes.set_xscale("log", base=2)
        if not chart.x_unit:
            values = sorted({x for one in chart.series for x, _ in one.points})
            axes.set_xticks(values[:: max(1, len(values) // 8)])
            axes.minorticks_off()
        axes.xaxis.set_major_formatter(_plain)
    if chart.log_y:
        axes.set_yscale("log")
        for kind in ("major", "minor"):
            getattr(axes.yaxis, f"set_{kind}_formatter")(_plain)
    elif chart.zero_y:
        axes.set_ylim(bottom=0)
    axes.set_ylabel(_axis_label(chart.y_label, chart.y_unit))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=6.5, frameon=False)


def _plain(value: float, _: float) -> str:
    return f"{value:g}"


def _bars(chart: Chart, lanes: Sequence[str], axes: Axes) -> None:
    scale = UNITS.get(chart.x_unit, 1.0)
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for bar in chart.bars:
        span = (bar.start / scale, (bar.end - bar.start) / scale)
        spans.setdefault((bar.lane, bar.kind), []).append(span)
    seen: set[str] = set()
    for (lane, kind), some in spans.items():
        axes.broken_barh(some, (lanes.index(lane) - 0.31, 0.62), linewidth=0,
                         color=KINDS.get(kind, "#868e96"),
                         label=None if kind in seen else kind)  # fmt: skip
        seen.add(kind)
    for mark in chart.marks:
        axes.axvline(mark.value / scale, color="#c92a2a", linestyle=":", linewidth=1)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    if len(seen) > 1:
        axes.legend(fontsize=6.5, frameon=False, bbox_to_anchor=(1, 1), loc="upper left")


def _network_figure(view: Mapping[str, Any]) -> Figure:
    """Draw the folded network from left to right, a bar a layer, stripes for its degrees."""
    drawing = view["drawings"]["folded"]
    layers = {layer["name"]: layer for layer in view["layers"]}
    lanes = drawing["lanes"] + 0.35 * drawing["gutters"]
    figure, axes = _new(min(1.5 + 0.16 * drawing["rows"], 40), 1.2 + 0.55 * lanes)
    places = drawing["places"]
    for source, target, way, slot in drawing["edges"]:
        (a, p), (b, q) = places[source], places[target]
        if way == "skip":
            up = -0.75 - 0.35 * slot
            axes.plot([a, a + 0.5, b - 0.5, b], [p, up, up, q], color="#868e96", linewidth=0.5)
        else:
            bend = (a + 0.6, q) if way == "branch" else (b - 0.6, p)
            axes.plot([a, bend[0], b], [p, bend[1], q], color="#868e96", linewidth=0.6)
    for name, (row, lane) in places.items():
        _stripes(axes, layers[name]["degrees"], row, lane)
    axes.set_ylim(drawing["lanes"] - 0.4, -1.0 - 0.35 * drawing["gutters"])
    axes.set_xlim(-1, drawing["rows"])
    axes.set_axis_off()
    axes.set_title(f"{view['label']}: how every layer is split", fontsize=10, loc="left")
    for letter, colour in LETTERS.items():
        axes.plot([], [], "s", color=colour, label=letter)
    axes.legend(ncols=6, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, -0.25))
    return figure


def _slab_figure(layer: Mapping[str, Any]) -> Figure:
    figure, axes = _new(3.4, 3.4)
    text = draw_slab(axes, layer)
    axes.set_title(f"{layer['name']} reads, with its halo\n{text}", fontsize=8)
    return figure


def _stripes(axes: Axes, degrees: str, row: int, lane: int) -> None:
    terms = [(t[0], int(t[1:])) for t in degrees.split() if t[0] in LETTERS]
    terms = terms or [("", 1)]
    height = 0.7 / len(terms)
    for number, (letter, _) in enumerate(terms):
        axes.bar(row, height, bottom=lane - 0.35 + number * height, width=0.7,
                 color=LETTERS.get(letter, "#adb5bd"), linewidth=0)  # fmt: skip
