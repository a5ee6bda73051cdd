"""Hypothesis strategies that the tests share."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st

from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Block, Cover, Degrees, Layout, block

WORLDS = (1, 2, 3, 4, 6, 8)
THOROUGH = bool(os.environ.get("TILEWISE_THOROUGH"))


def many(examples: int) -> settings:
    """Draw so many examples when TILEWISE_THOROUGH is set, and a third of them otherwise."""
    return settings(max_examples=examples if THOROUGH else max(examples // 3, 15), deadline=None)


@st.composite
def factors(draw: st.DrawFn, number: int) -> list[int]:
    """Draw an ordered factorisation of `number`."""
    out = []
    while number > 1:
        factor = draw(st.sampled_from([k for k in range(2, number + 1) if number % k == 0]))
        out.append(factor)
        number //= factor
    return out


@st.composite
def layouts(
    draw: st.DrawFn, shape: Sequence[int], ranks: int, dims: Sequence[int] | None = None
) -> Layout:
    """Draw a layout that cuts any of `dims` (all by default), with replicas among the cases."""
    choices = [*(range(len(shape)) if dims is None else dims), REPLICA]
    axes = [Axis(size, draw(st.sampled_from(choices))) for size in draw(factors(ranks))]
    return Layout(shape, axes)


@st.composite
def degrees(draw: st.DrawFn, ranks: int, names: str) -> Degrees:
    """Draw degrees over `names` whose product divides `ranks`."""
    found = dict.fromkeys(names, 1)
    for size in draw(factors(ranks)):
        name = draw(st.sampled_from([*names, "-"]))
        if name != "-":
            found[name] *= size
    return Degrees(**found)


@st.composite
def covers(draw: st.DrawFn, shape: Sequence[int], ranks: int) -> Cover:
    """Draw a cover: halos, blocks around the edge or past it, unions, gaps, partial sums."""
    choices = [*range(len(shape)), REPLICA, PARTIAL]
    axes = Axes(Axis(size, draw(st.sampled_from(choices))) for size in draw(factors(ranks)))
    kinds = ["balanced", "any", "circular", "clipped", "union"]
    dims = []
    for dim, extent in enumerate(shape):
        kind = draw(st.sampled_from(kinds))
        parts = axes.parts(dim)
        dims.append(tuple(draw(_blocks(kind, extent, parts, index)) for index in range(parts)))
    return Cover(tuple(shape), axes, tuple(dims))


@st.composite
def _blocks(draw: st.DrawFn, kind: str, extent: int, parts: int, index: int) -> Block:
    start, stop = block(extent, parts, index)
    if kind == "balanced":
        return Block.of(start, stop)
    if kind == "any":
        first = draw(st.integers(0, extent))
        return Block.of(first, draw(st.integers(first, extent)))
    if kind == "union":
        return Block.union([(at, at + 1) for at in range(extent) if at % parts == index])
    before, after = draw(st.integers(-1, 4)), draw(st.integers(-1, 4))
    rule = Block.clipped if kind == "clipped" else Block.circular
    return rule(start - before, stop + after, extent)
