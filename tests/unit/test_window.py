"""Which inputs an output needs, against an enumeration of the taps; and blocks of covers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.errors import LayoutError
from tilewise.layout import Axes, Axis, Block, Cover, Layout, Piece, Window, block


def taps(window: Window, extent: int) -> set[tuple[int, int]]:
    """List all (output, input) that a tap joins, with inputs past the edges for a convolution."""
    outputs = window.outputs(extent)
    if window.transposed:
        reached = {
            (i * window.stride - window.before + k * window.dilation, i)
            for i, k in product(range(extent), range(window.kernel))
        }
        return {(o, i) for o, i in reached if 0 <= o < outputs}
    return {
        (o, o * window.stride - window.before + k * window.dilation)
        for o, k in product(range(outputs), range(window.kernel))
    }


@st.composite
def windows(draw: st.DrawFn, transposed: bool) -> Window:
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 4, 3))
    before, after = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    if transposed:
        after -= draw(st.integers(0, max(stride, dilation) - 1))
    return Window(kernel, stride, dilation, before, after, transposed)


@given(windows(False), st.integers(1, 14))
def test_outputs_are_those_whose_taps_all_fit(window: Window, extent: int) -> None:
    padded = extent + window.before + window.after
    starts = [
        at
        for at in range(0, padded, window.stride)
        if at + window.dilation * (window.kernel - 1) < padded
    ]
    assert max(window.outputs(extent), 0) == len(starts)


@given(windows(True), st.integers(1, 14))
def test_outputs_of_a_transposed_window_end_with_the_last_tap(window: Window, extent: int) -> None:
    last = (extent - 1) * window.stride + (window.kernel - 1) * window.dilation
    assert window.outputs(extent) == last + 1 - window.before - window.after


@given(st.booleans().flatmap(windows), st.integers(1, 14), st.data())
def test_inputs_cover_the_taps(window: Window, extent: int, data: st.DataObject) -> None:
    outputs = window.outputs(extent)
    if outputs < 1:
        return
    start = data.draw(st.integers(0, outputs))
    stop = data.draw(st.integers(start, outputs))
    needed = sorted({i for o, i in taps(window, extent) if start <= o < stop})
    first, last = window.inputs(start, stop)
    assert first <= last
    if start == stop:
        assert first == last
    assert set(needed) <= set(range(first, last))
    if not window.transposed and needed:
        assert (first, last) == (needed[0], needed[-1] + 1)
    if window.transposed and window.dilation == 1:
        inside = [i for i in range(first, last) if 0 <= i < extent]
        assert inside == needed


@given(st.booleans().flatmap(windows), st.integers(1, 14), st.data())
def test_readers_are_the_outputs_that_see_an_input(
    window: Window, extent: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, extent))
    stop = data.draw(st.integers(start, extent))
    readers = sorted({o for o, i in taps(window, extent) if start <= i < stop})
    first, last = window.readers(start, stop)
    assert set(readers) <= set(range(first, last))
    inside = [o for o in range(first, last) if 0 <= o < window.outputs(extent)]
    if window.dilation == 1 and not window.transposed:
        assert inside == readers
    if window.transposed and start < stop:
        assert first == start * window.stride - window.before
        assert last == (stop - 1) * window.stride - window.before + window.reach


def halo(needed: tuple[int, int], own: tuple[int, int]) -> tuple[int, int]:
    return max(own[0] - needed[0], 0), max(needed[1] - own[1], 0)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "of_x", "of_dy"),
    [
        (1, 1, 0, 1, (0, 0), (0, 0)),
        (1, 2, 0, 1, (0, 0), (0, 0)),
        (2, 2, 0, 1, (0, 0), (0, 0)),
        (3, 1, 1, 1, (1, 1), (1, 1)),
        (3, 2, 1, 1, (1, 0), (0, 1)),
        (5, 1, 2, 1, (2, 2), (2, 2)),
        (5, 2, 2, 1, (2, 1), (1, 1)),
        (7, 2, 3, 1, (3, 2), (1, 2)),
        (3, 1, 2, 2, (2, 2), (2, 2)),
    ],
)
def test_halo_widths(
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    of_x: tuple[int, int],
    of_dy: tuple[int, int],
) -> None:
    """An output belongs to the owner of x[j·stride]; the middle rank of three."""
    window = Window(kernel, stride, dilation, padding, padding)
    x, y = block(24, 3, 1), block(24 // stride, 3, 1)
    assert window.outputs(24) == 24 // stride
    assert halo(window.inputs(*y), x) == of_x
    assert halo(window.readers(*x), y) == of_dy


def positions(one: Block) -> dict[int, int]:
    """Map local positions to global ones."""
    return {
        piece.at + step: piece.start + step
        for piece in one.pieces
        for step in range(piece.stop - piece.start)
    }


@given(st.integers(-12, 20), st.integers(-12, 20), st.integers(0, 8))
def test_clipped_and_circular_blocks(start: int, stop: int, extent: int) -> None:
    wanted = dict(enumerate(range(start, stop)))
    clipped = Block.clipped(start, stop, extent)
    assert clipped.size == len(wanted)
    assert positions(clipped) == {at: g for at, g in wanted.items() if 0 <= g < extent}
    assert clipped.filled == (positions(clipped).keys() == wanted.keys())
    around = Block.circular(start, stop, extent)
    assert around.size == len(wanted)
    assert positions(around) == ({at: g % extent for at, g in wanted.items()} if extent else {})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4))
def test_union_keeps_intervals_side_by_side(intervals: list[tuple[int, int]]) -> None:
    united = Block.union(intervals)
    wanted = [position for start, stop in intervals for position in range(start, stop)]
    assert united.size == len(wanted)
    assert positions(united) == dict(enumerate(wanted))
    assert united.filled


def test_a_cover_follows_its_rule() -> None:
    layout = Layout((9, 4), [Axis(3, 0), Axis(2, 1)])
    cover = Cover.on(layout, {0: lambda a, b: Block.clipped(a - 1, b + 1, 9)})
    assert cover.local_shape(2) == (5, 2)
    assert cover.block(0, 0) == Block(5, (Piece(0, 4, 1),))
    assert not cover.disjoint
    assert not cover.plain
    plain = Cover.of(layout)
    assert plain.disjoint
    assert plain.plain
    assert plain.same_blocks(Cover.of(layout))
    assert not plain.same_blocks(cover)


def test_covers_say_what_is_wrong() -> None:
    whole = (Block.of(0, 4),)
    with pytest.raises(LayoutError, match="dim 1 has 1 blocks for 2 parts"):
        Cover((4, 4), Axes([Axis(2, 1)]), (whole, whole))
    with pytest.raises(LayoutError, match="blocks for 1 dims of a tensor \\(4, 4\\)"):
        Cover((4, 4), Axes([]), (whole,))
