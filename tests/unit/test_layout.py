"""Blocks, degrees and layouts: who holds what."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawing import WORLDS, layouts
from tilewise.errors import LayoutError
from tilewise.layout import (
    REPLICA,
    Axes,
    Axis,
    Block,
    Degrees,
    Layout,
    Piece,
    block,
    block_of,
    overlap,
)

EXTENTS = st.integers(0, 40)
PARTS = st.integers(1, 12)


@given(EXTENTS, PARTS)
def test_blocks_are_balanced_and_cover_the_extent(extent: int, parts: int) -> None:
    cuts = [block(extent, parts, index) for index in range(parts)]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == extent
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    sizes = [stop - start for start, stop in cuts]
    assert min(sizes) >= 0
    assert max(sizes) - min(sizes) <= 1


@given(EXTENTS, PARTS, st.integers(1, 6))
def test_blocks_nest(extent: int, parts: int, finer: int) -> None:
    """Block k of p is blocks k·q … k·q+q−1 of p·q."""
    for index in range(parts):
        start, stop = block(extent, parts, index)
        assert start == block(extent, parts * finer, index * finer)[0]
        assert stop == block(extent, parts * finer, index * finer + finer - 1)[1]


@given(st.integers(1, 40), PARTS)
def test_block_of_finds_the_holder(extent: int, parts: int) -> None:
    for position in range(extent):
        start, stop = block(extent, parts, block_of(extent, parts, position))
        assert start <= position < stop


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_overlap_is_the_common_part(a: int, b: int, c: int, d: int) -> None:
    common = sorted(set(range(a, b)) & set(range(c, d)))
    assert overlap((a, b), (c, d)) == ((common[0], common[-1] + 1) if common else None)


@given(st.builds(Degrees, *[st.integers(1, 12)] * 6), st.randoms())
def test_degrees_round_trip(degrees: Degrees, random: object) -> None:
    assert Degrees.parse(str(degrees)) == degrees
    terms = str(degrees).split()
    random.shuffle(terms)  # type: ignore[attr-defined]
    assert Degrees.parse(" ".join(terms)) == degrees
    assert degrees.product == degrees.n * degrees.d * degrees.h * degrees.w * degrees.c * degrees.f
    assert degrees.replicas(degrees.product * 3) == 3


def test_degrees_text() -> None:
    assert str(Degrees()) == "1"
    assert Degrees.parse("") == Degrees.parse("1") == Degrees()
    assert str(Degrees.parse("f4 n2 c2")) == "n2 c2 f4"
    assert Degrees.parse("h4").with_(w=2) == Degrees(h=4, w=2)
    assert [name for name, _ in Degrees().items()] == list("ndhwcf")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n2 x4", "degrees: 'x4' in 'n2 x4' is not one of n c f d h w followed by a number"),
        ("h", "degrees: 'h' in 'h' is not one of"),
        ("n2h2", "degrees: 'n2h2' in 'n2h2' is not one of"),
        ("2", "degrees: '2' in '2' is not one of"),
        ("n-2", "degrees: 'n-2' in 'n-2' is not one of"),
        ("n2 n4", "degrees: n stands twice in 'n2 n4'"),
        ("h0", "degrees: h (=0) must be a whole number of at least 1"),
    ],
)
def test_degrees_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Degrees.parse(text)
    assert message in str(caught.value)


def test_degrees_must_divide_the_ranks() -> None:
    with pytest.raises(LayoutError) as caught:
        Degrees.parse("n2 h2").replicas(6)
    assert str(caught.value) == (
        "degrees 'n2 h2': their product (=4) must divide the number of ranks (=6)"
    )
    with pytest.raises(LayoutError, match=r"h \(=1\.5\) must be a whole number"):
        Degrees(h=1.5)  # type: ignore[arg-type]


@given(st.data())
def test_rank_order(data: st.DataObject) -> None:
    """n, d, h, w, c, f, replica count from slowest to fastest."""
    sizes = data.draw(st.tuples(*[st.integers(1, 3)] * 7))
    degrees = Degrees(*sizes[:6])
    layout = Layout.of((7, 9, 5, 6, 8), "ncdhw", degrees, ranks=degrees.product * sizes[6])
    for rank, digits in enumerate(product(*map(range, sizes))):
        n, d, h, w, c, f, _ = digits
        assert layout.coords(rank) == (n, c * degrees.f + f, d, h, w)
        assert layout.slab(rank) == tuple(
            slice(*block(extent, parts, index))
            for extent, parts, index in zip(layout.shape, layout.degrees, layout.coords(rank))
        )


@given(st.data())
def test_every_element_is_held_by_as_many_ranks_as_there_are_replicas(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
    layout = data.draw(layouts(shape, data.draw(st.sampled_from(WORLDS))))
    held: Counter[tuple[int, ...]] = Counter()
    for rank in range(layout.ranks):
        held.update(product(*(range(*interval) for interval in layout.intervals(rank))))
        assert layout.local_shape(rank) == tuple(b - a for a, b in layout.intervals(rank))
    replicas = layout.axes.parts(REPLICA)
    assert held == dict.fromkeys(product(*map(range, shape)), replicas)


@given(st.data())
def test_ranks_at_is_the_inverse_of_coords(data: st.DataObject) -> None:
    layout = data.draw(layouts((4, 4, 4), data.draw(st.sampled_from(WORLDS))))
    for rank in range(layout.ranks):
        assert layout.axes.rank(layout.axes.digits(rank)) == rank
        same = [r for r in range(layout.ranks) if layout.coords(r) == layout.coords(rank)]
        assert layout.axes.ranks_at(layout.coords(rank)) == same


def test_empty_slabs_and_extents_of_one() -> None:
    layout = Layout.of((1, 3, 2), "ncw", "n2 w4", ranks=8)
    sizes = [layout.local_shape(rank) for rank in range(8)]
    assert sizes == [(n, 3, w) for n in (0, 1) for w in (0, 1, 0, 1)]


def test_degrees_that_a_tensor_has_not_leave_replicas_in_place() -> None:
    assert Layout.of((6,), "n", "n2 h2 f2", ranks=16).axes == (Axis(2, 0), Axis(8, REPLICA))
    assert Layout.of((6, 4), "nc", "n2 h2 c2", ranks=8).axes == (
        Axis(2, 0),
        Axis(2, REPLICA),
        Axis(2, 1),
    )
    assert Layout.of((6, 4), ".c", "n2 c2", ranks=4).axes == (Axis(2, REPLICA), Axis(2, 1))
    assert Layout.replicated((3, 4), ranks=6).local_shape(5) == (3, 4)


def test_axes_are_in_normal_form() -> None:
    assert Axes([Axis(1, 0), Axis(2, 1), Axis(3, 1), Axis(1), Axis(2)]) == (Axis(6, 1), Axis(2))
    assert Layout((8, 8), [Axis(2, 0), Axis(2, 0)]) == Layout((8, 8), [Axis(4, 0)])


def test_layout_copies() -> None:
    layout = Layout.of((8, 6, 4), "ncw", "n2 c3", ranks=12)
    assert layout.with_shape((5, 5, 5)).local_shape(0) == (2, 1, 5)
    assert layout.uncut(1).degrees == (2, 1, 1)
    assert layout.uncut(1).ranks == 12
    assert str(layout) == "8/2×6/3×4"
    assert str(Layout((), [])) == "scalar"


def test_layouts_say_what_is_wrong() -> None:
    with pytest.raises(LayoutError, match="axis of size 2 cuts dim 3 of a tensor that has 2 dims"):
        Layout((4, 4), [Axis(2, 3)])
    with pytest.raises(LayoutError, match="dims 'nchw' name 4 dims, the shape \\(4, 4\\) has 2"):
        Layout.of((4, 4), "nchw", "n2", ranks=2)
    with pytest.raises(LayoutError, match="must divide the number of ranks"):
        Layout.of((4, 4), "nc", "n3", ranks=2)


def test_intervals_that_go_on_are_one_piece() -> None:
    assert Block.union([(0, 3), (3, 3), (3, 6)]) == Block.of(0, 6)
    assert Block.union([(4, 6), (6, 7), (0, 2)]) == Block(5, (Piece(4, 7, 0), Piece(0, 2, 3)))
    assert Block.union([]) == Block.of(2, 2)
