"""Moves between covers, run for all ranks in plain Python and compared with their definition."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing import WORLDS, covers, layouts
from tilewise.errors import LayoutError
from tilewise.layout import PARTIAL, REPLICA, Axis, Block, Cover, Layout, Move, Transfer

Index = tuple[int, ...]
Slabs = list[dict[Index, int]]
MANY = settings(max_examples=300, deadline=None)


def keeps(cover: Cover, rank: int) -> list[tuple[Index, Index]]:
    """List the (local, global) positions of what a rank keeps."""
    dims = [
        [
            (piece.at + step, piece.start + step)
            for piece in cover.block(rank, dim).pieces
            for step in range(piece.stop - piece.start)
        ]
        for dim in range(len(cover.shape))
    ]
    return [(tuple(at for at, _ in one), tuple(g for _, g in one)) for one in product(*dims)]


def holder(cover: Cover, rank: int) -> int:
    """Return the first of the replicas of what a rank keeps."""
    digits = cover.axes.digits(rank)
    return cover.axes.rank(
        [0 if axis.dim == REPLICA else digit for axis, digit in zip(cover.axes, digits)]
    )


def box(transfer: Transfer, side: str) -> list[Index]:
    slices = transfer.source if side == "source" else transfer.target
    return list(product(*(range(one.start, one.stop) for one in slices)))


def values(cover: Cover) -> Slabs:
    """Give every rank numbers, replicas the same."""
    out: Slabs = []
    for rank in range(cover.ranks):
        numbers = random.Random(holder(cover, rank))
        out.append({at: numbers.randrange(1, 1000) for at, _ in keeps(cover, rank)})
    return out


def definition(move: Move, slabs: Slabs) -> Slabs:
    """Add, for each element of the target, what the distinct holders keep of it."""
    totals: Counter[Index] = Counter()
    for rank in range(move.source.ranks):
        if holder(move.source, rank) == rank:
            for at, element in keeps(move.source, rank):
                totals[element] += slabs[rank][at]
    return [
        {at: totals[element] for at, element in keeps(move.target, rank)}
        for rank in range(move.target.ranks)
    ]


def deliver(move: Move, slabs: Slabs) -> Slabs:
    """Add what the messages bring, where they bring it."""
    out = []
    for rank in range(move.target.ranks):
        mine = dict.fromkeys((at for at, _ in keeps(move.target, rank)), 0)
        for message in move.receives(rank):
            for transfer in message.transfers:
                for a, b in zip(box(transfer, "source"), box(transfer, "target"), strict=True):
                    mine[b] += slabs[message.peer][a]
        out.append(mine)
    return out


@st.composite
def moves(draw: st.DrawFn) -> Move:
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    ranks = draw(st.sampled_from(WORLDS))
    return Move(draw(covers(shape, ranks)), draw(covers(shape, ranks)))


@MANY
@given(moves())
def test_messages_bring_what_the_definition_says(move: Move) -> None:
    slabs = values(move.source)
    assert deliver(move, slabs) == definition(move, slabs)


@MANY
@given(moves())
def test_sends_and_receives_match(move: Move) -> None:
    ranks = range(move.source.ranks)
    sent = [{m.peer: m.transfers for m in move.sends(rank)} for rank in ranks]
    received = [{m.peer: m.transfers for m in move.receives(rank)} for rank in ranks]
    for a, b in product(ranks, ranks):
        assert sent[a].get(b) == received[b].get(a)
    for rank in ranks:
        assert len(sent[rank]) == len(move.sends(rank)), "one message to each peer"
        assert len(received[rank]) == len(move.receives(rank)), "one message from each peer"


@MANY
@given(moves())
def test_no_message_is_empty_and_every_box_fits(move: Move) -> None:
    for rank in range(move.source.ranks):
        for message in move.receives(rank):
            assert message.elements == sum(t.elements for t in message.transfers)
            assert all(transfer.elements > 0 for transfer in message.transfers)
            held = {at for at, _ in keeps(move.source, message.peer)}
            needed = {at for at, _ in keeps(move.target, rank)}
            for transfer in message.transfers:
                assert held.issuperset(box(transfer, "source"))
                assert needed.issuperset(box(transfer, "target"))


@MANY
@given(moves())
def test_what_a_rank_holds_comes_from_itself(move: Move) -> None:
    for rank in range(move.source.ranks):
        for message in move.receives(rank):
            same = holder(move.source, message.peer) == holder(move.source, rank)
            assert not same or message.peer == rank


def matrix(move: Move) -> Counter[tuple[int, Index, int, Index]]:
    """Return the move among distinct holders as (target rank, position, source rank, position)."""
    entries: Counter[tuple[int, Index, int, Index]] = Counter()
    for rank in range(move.target.ranks):
        if holder(move.target, rank) != rank:
            continue
        for message in move.receives(rank):
            peer = holder(move.source, message.peer)
            for transfer in message.transfers:
                for a, b in zip(box(transfer, "source"), box(transfer, "target"), strict=True):
                    entries[rank, b, peer, a] += 1
    return entries


@MANY
@given(moves())
def test_the_adjoint_is_the_transpose(move: Move) -> None:
    transposed = {(c, d, a, b): count for (a, b, c, d), count in matrix(move).items()}
    assert matrix(move.adjoint) == transposed


@MANY
@given(moves())
def test_replicas_of_the_target_receive_alike(move: Move) -> None:
    """The same boxes from holders of the same, in the same order: sums are bitwise equal."""

    def order(rank: int) -> list[tuple[int, tuple[Transfer, ...]]]:
        return [(holder(move.source, m.peer), m.transfers) for m in move.receives(rank)]

    for rank in range(move.target.ranks):
        assert order(rank) == order(holder(move.target, rank))


def flattened(cover: Cover) -> Iterator[tuple[int, Index, Index]]:
    return ((rank, *one) for rank in range(cover.ranks) for one in keeps(cover, rank))


@MANY
@given(st.data())
def test_a_local_move_changes_nothing(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=2))
    source = data.draw(covers(shape, data.draw(st.sampled_from(WORLDS))))
    axes = source.axes.relabel({PARTIAL: data.draw(st.sampled_from([PARTIAL, REPLICA]))})
    move = Move(source, Cover(source.shape, axes, source.blocks))
    slabs = values(source)
    if move.local:
        assert definition(move, slabs) == slabs
    elif move.stays:
        assert source.partial
        assert list(flattened(source)) == list(flattened(move.target))


@given(st.data())
def test_layouts_that_cut_alike_need_no_messages(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    layout = data.draw(layouts(shape, data.draw(st.sampled_from(WORLDS))))
    assert Move(Cover.of(layout), Cover.of(layout)).local


def test_overlapping_blocks_add_up_even_where_they_stay() -> None:
    layout = Layout((6,), [Axis(2, 0)])
    wide = Cover.on(layout, {0: lambda a, b: Block.clipped(a - 1, b + 1, 6)})
    move = Move(wide, wide)
    assert not move.local
    assert not move.stays
    ones = [{(at,): 1 for at in range(1, 5)}, {(at,): 1 for at in range(4)}]
    assert deliver(move, ones)[0] == {(1,): 1, (2,): 1, (3,): 2, (4,): 2}


def test_a_halo_reaches_beyond_the_neighbour() -> None:
    layout = Layout((4,), [Axis(4, 0)])
    wide = Cover.on(layout, {0: lambda a, b: Block.clipped(a - 3, b + 3, 4)})
    assert [m.peer for m in Move(Cover.of(layout), wide).receives(3)] == [0, 1, 2, 3]


def test_circular_blocks_take_several_boxes_from_one_peer() -> None:
    layout = Layout((4,), [Axis(2, 0)])
    around = Cover.on(layout, {0: lambda a, b: Block.circular(a - 3, b + 3, 4)})
    from_self, from_peer = Move(Cover.of(layout), around).receives(0)
    assert (from_self.peer, from_self.elements, len(from_self.transfers)) == (0, 4, 3)
    assert (from_peer.peer, from_peer.elements, len(from_peer.transfers)) == (1, 4, 2)


def test_moves_say_what_is_wrong() -> None:
    a = Cover.of(Layout((4, 4), [Axis(2, 0)]))
    for b in (Layout((4, 5), [Axis(2, 0)]), Layout((4, 4), [Axis(3, 0)])):
        with pytest.raises(LayoutError, match="must be the same tensor and the same ranks"):
            Move(a, Cover.of(b))
