"""One rank's slab of what a layer reads, with its halo, for files: a plane or a cube."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewise.layout import Axes, Axis, Layout, block

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Picture

Span = tuple[float, float]
MINE, HALO, WHOLE = "#2549c7", "#0b9488", "#eceff4"
WIDEST = {2: 0.03, 3: 0.05}
"""Halos are drawn at least as wide as this share of the extent."""


def slab_layer(layers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the layer of most compute that has a halo in a plane or a volume, if any does."""
    some = [layer for layer in layers if layer.get("operands") and _halo(layer["operands"][0])]
    return max(some, key=lambda layer: float(layer.get("compute_s", 0.0)), default=None)


def _halo(operand: Mapping[str, Any]) -> bool:
    dims = _space(operand)
    return len(dims) > 1 and any(str(dim) in operand["reach"] for dim in dims)


def _space(operand: Mapping[str, Any]) -> list[int]:
    return [dim for dim, letter in enumerate(operand["dims"]) if letter in "dhw"]


def draw_slab(picture: Picture, layer: Mapping[str, Any]) -> str:
    """Draw the slab of a rank in the middle; returns what is seen."""
    operand = layer["operands"][0]
    layout = Layout(operand["shape"], (Axis(size, dim) for size, dim in operand["axes"]))
    rank = middle(layout.axes)
    dims = _space(operand)
    shape = [layout.shape[dim] for dim in dims]
    mine = [layout.intervals(rank)[dim] for dim in dims]
    least = WIDEST.get(len(dims), 0.05)
    reach = [_reach(operand, layout, rank, dim, least) for dim in dims]
    cuts = [
        [block(layout.shape[dim], layout.degrees[dim], k)[0] for k in range(1, layout.degrees[dim])]
        for dim in dims
    ]
    (_plane if len(dims) == 2 else _cube)(picture, shape, cuts, mine, reach)
    picture.set_aspect("equal")
    picture.set_axis_off()
    extents = " × ".join(map(str, layout.shape))
    return f"rank {rank} of {layout.ranks}: {extents} by {layer['degrees']}"


def middle(axes: Axes) -> int:
    """Return a rank in the middle of a layout, where halos are on all sides."""
    return axes.rank([axis.size // 2 for axis in axes])


def _reach(operand: Mapping[str, Any], layout: Layout, rank: int, dim: int, least: float) -> Span:
    start, stop = layout.intervals(rank)[dim]
    pieces = operand["reach"].get(str(dim))
    if pieces is None or not pieces[layout.coords(rank)[dim]]:
        return start, stop
    some = pieces[layout.coords(rank)[dim]]
    first, last = min(a for a, _ in some), max(b for _, b in some)
    extent = layout.shape[dim]
    low = max(0.0, min(first, start - least * extent)) if first < start else start
    high = min(float(extent), max(last, stop + least * extent)) if last > stop else stop
    return low, high


def _plane(
    picture: Picture,
    shape: Sequence[int],
    cuts: Sequence[Sequence[int]],
    mine: Sequence[Span],
    reach: Sequence[Span],
) -> None:
    def sheet(spans: Sequence[Span], **look: Any) -> None:
        (top, bottom), (left, right) = spans
        picture.fill([left, right, right, left], [-top, -top, -bottom, -bottom], **look)

    sheet([(0, shape[0]), (0, shape[1])], facecolor=WHOLE, edgecolor="#525b6b")
    sheet(reach, facecolor="white", edgecolor=HALO, hatch="////", linewidth=0.8, zorder=4)
    for at in cuts[0]:
        picture.plot([0, shape[1]], [-at, -at], color="#525b6b", linewidth=0.6)
    for at in cuts[1]:
        picture.plot([at, at], [0, -shape[0]], color="#525b6b", linewidth=0.6)
    sheet(mine, facecolor=MINE, edgecolor="white", linewidth=0.6, zorder=5)


def _cube(
    picture: Picture,
    shape: Sequence[int],
    cuts: Sequence[Sequence[int]],
    mine: Sequence[Span],
    reach: Sequence[Span],
) -> None:
    depth, height, width = shape

    def at(d: float, h: float, w: float) -> tuple[float, float]:
        return (w - d) * 0.866, -(w + d) * 0.5 - h

    def box(spans: Sequence[Span], colours: Sequence[str], **look: Any) -> None:
        (d0, d1), (h0, h1), (w0, w1) = spans
        faces = (
            (at(d0, h0, w0), at(d0, h0, w1), at(d1, h0, w1), at(d1, h0, w0)),
            (at(d1, h0, w0), at(d1, h0, w1), at(d1, h1, w1), at(d1, h1, w0)),
            (at(d0, h0, w1), at(d1, h0, w1), at(d1, h1, w1), at(d0, h1, w1)),
        )
        for face, colour in zip(faces, colours, strict=True):
            picture.fill(*zip(*face, strict=True), facecolor=colour, **look)

    def bend(*points: tuple[float, float]) -> None:
        picture.plot(*zip(*points, strict=True), color="#525b6b", linewidth=0.6)

    box([(0, depth), (0, height), (0, width)], [WHOLE] * 3, edgecolor="#525b6b", linewidth=0.8)
    for d in cuts[0]:
        bend(at(d, 0, 0), at(d, 0, width), at(d, height, width))
    for h in cuts[1]:
        bend(at(depth, h, 0), at(depth, h, width), at(0, h, width))
    for w in cuts[2]:
        bend(at(0, 0, w), at(depth, 0, w), at(depth, height, w))
    box(reach, ["#ffffffb0"] * 3, edgecolor=HALO, hatch="////", linewidth=0.8, zorder=4)
    box(mine, (MINE, "#1f3da8", "#19318a"), edgecolor="white", linewidth=0.6, zorder=5)
