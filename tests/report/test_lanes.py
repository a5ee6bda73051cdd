"""Where layers are drawn."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drawing import many
from tilewise.report.lanes import draw


@st.composite
def graphs(make: st.DrawFn) -> dict[str, list[str]]:
    count = make(st.integers(1, 14))
    found: dict[str, list[str]] = {}
    for k in range(count):
        some = make(st.sets(st.integers(0, k - 1), max_size=3)) if k else set()
        found[str(k)] = [str(j) for j in sorted(some)]
    return found


@many(200)
@given(graphs())
def test_places_and_edges(reads: dict[str, list[str]]) -> None:
    drawing = draw(reads)
    assert set(drawing.places) == set(reads)
    assert len(set(drawing.places.values())) == len(reads)
    edges = {(edge.source, edge.target) for edge in drawing.edges}
    assert edges == {(source, name) for name, sources in reads.items() for source in sources}
    for edge in drawing.edges:
        assert drawing.places[edge.source][0] < drawing.places[edge.target][0]
    assert all(row < drawing.rows and lane < drawing.lanes for row, lane in drawing.places.values())


@many(200)
@given(graphs())
def test_nothing_runs_through_a_node(reads: dict[str, list[str]]) -> None:
    """Straight stretches of edges have their lane, or their gutter, to themselves."""
    drawing = draw(reads)
    nodes = {place: name for name, place in drawing.places.items()}
    gutters: dict[int, list[tuple[int, int]]] = {}
    for edge in drawing.edges:
        (a, p), (b, q) = drawing.places[edge.source], drawing.places[edge.target]
        if edge.way == "skip":
            gutters.setdefault(edge.slot, []).append((a, b - 1))
            continue
        lane = q if edge.way == "branch" else p
        assert all((row, lane) not in nodes for row in range(a + 1, b)), edge
    for spans in gutters.values():
        spans.sort()
        assert all(first[1] < second[0] for first, second in pairwise(spans))


def test_a_residual_block() -> None:
    reads = {"a": [], "short": ["a"], "b": ["a"], "c": ["b"], "add": ["short", "c"], "d": ["add"],
             "add2": ["add", "d"]}  # fmt: skip
    drawing = draw(reads)
    lanes = {name: lane for name, (_, lane) in drawing.places.items()}
    assert [lanes[name] for name in ("a", "b", "c", "add", "d", "add2")] == [0] * 6
    assert lanes["short"] == 1
    ways = {(edge.source, edge.target): edge.way for edge in drawing.edges}
    assert ways["a", "short"] == "branch"
    assert ways["short", "add"] == "merge"
    assert ways["add", "add2"] == "skip"
