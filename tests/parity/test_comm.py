"""Exchanges and meshes: what arrives, in how many messages, among which ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, covers, layouts, many
from tilewise.comm import Chain, Exchange, Mesh
from tilewise.errors import CommError, MismatchError
from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Block, Cover, Layout
from tilewise.testing import ranks
from wire import sent, wire

SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]


def holder(cover: Cover, rank: int) -> int:
    """Return the first of the replicas of what a rank keeps."""
    digits = cover.axes.digits(rank)
    return cover.axes.rank([0 if a.dim == REPLICA else d for a, d in zip(cover.axes, digits)])


def slab(cover: Cover, rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return whole numbers, the same on replicas; past the edge as well."""
    generator = torch.Generator().manual_seed(holder(cover, rank))
    return torch.randint(0, 8, cover.local_shape(rank), generator=generator).to(dtype)


def places(cover: Cover, rank: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the local and the global indices of what a rank keeps."""
    dims: list[list[tuple[int, int]]] = [
        [
            (piece.at + step, piece.start + step)
            for piece in cover.block(rank, dim).pieces
            for step in range(piece.stop - piece.start)
        ]
        for dim in range(len(cover.shape))
    ]
    found = [
        torch.meshgrid(
            *(torch.tensor([one[side] for one in dim], dtype=torch.int64) for dim in dims),
            indexing="ij",
        )
        for side in (0, 1)
    ]
    return found[0], found[1]


def expected(source: Cover, target: Cover, rank: int, fill: float) -> Tensor:
    """Return what the definition of an exchange says."""
    total = torch.zeros(source.shape, dtype=torch.float64)
    for other in range(source.ranks):
        if holder(source, other) == other:
            local, element = places(source, other)
            total.index_put_(element, slab(source, other)[local], accumulate=True)
    out = torch.full(target.local_shape(rank), fill, dtype=torch.float64)
    local, element = places(target, rank)
    out[local] = total[element]
    return out


def check_exchange(
    mesh: Mesh, source: Layout | Cover, target: Layout | Cover, fill: float = 0.0
) -> None:
    source = Cover.of(source) if isinstance(source, Layout) else source
    target = Cover.of(target) if isinstance(target, Layout) else target
    exchange = Exchange(mesh, source, target, layer="test", fill=fill)
    with wire() as heard, mesh.trace.record() as events:
        found = exchange.start(slab(source, mesh.rank)).finish()
    assert torch.equal(found, expected(source, target, mesh.rank, fill))
    assert found.is_contiguous()
    assert {packet.operation for packet in heard} <= {"isend", "irecv", "all_reduce"}
    assert all(packet.bytes > 0 for packet in heard)
    out = [packet for packet in heard if packet.operation != "irecv"]
    for event, packet in zip(events, out, strict=True):
        assert event.layer == "test"
        assert event.bytes == packet.bytes
        if packet.operation == "isend":
            (peer,) = event.ranks
            assert (event.operation, mesh.world_ranks[peer]) == ("send", packet.peer)
            assert peer != mesh.rank
        else:
            assert event.operation == "sum"
            assert mesh.rank in event.ranks
    for operation in ("isend", "irecv"):
        peers = [packet.peer for packet in heard if packet.operation == operation]
        assert len(peers) == len(set(peers)), "one message for each peer"
    assert exchange.forth.elements_sent == sum(packet.elements for packet in out)


@many(150)
@given(SHAPES, st.sampled_from(WORLDS), st.sampled_from([0.0, -1.0, float("-inf")]), st.data())
def test_any_exchange_brings_what_the_definition_says(
    shape: list[int], world: int, fill: float, data: st.DataObject
) -> None:
    source, target = data.draw(covers(shape, world)), data.draw(covers(shape, world))
    ranks(world, check_exchange, source, target, fill)


@many(60)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_redistribution(shape: list[int], world: int, data: st.DataObject) -> None:
    ranks(world, check_exchange, data.draw(layouts(shape, world)), data.draw(layouts(shape, world)))


def unread(mesh: Mesh) -> float:
    """Bring back gradients of a tensor of which some rows are read by nobody."""
    layout = Layout((4096, 8), [Axis(mesh.size, 0)])
    sparse = Cover.on(layout, {0: lambda a, b: Block.of(a, b - 1)})
    exchange = Exchange(mesh, layout, sparse, layer="test")
    for _ in range(5):  # leave something other than zeros in memory that is used again
        torch.full(layout.local_shape(mesh.rank), 7.0, dtype=torch.float64)
        grad = exchange.start_adjoint(torch.ones(sparse.local_shape(mesh.rank)).double()).finish()
        assert grad[:-1].eq(1).all()
        assert grad[-1].eq(0).all()
    return float(grad.sum())


def test_what_nobody_reads_has_zero_gradient() -> None:
    ranks(4, unread)


def wide(layout: Layout, *dims: int, circular: bool = False) -> Cover:
    rule = Block.circular if circular else Block.clipped
    return Cover.on(
        layout,
        {dim: lambda a, b, e=layout.shape[dim]: rule(a - 1, b + 1, e) for dim in dims},
    )


def count(mesh: Mesh, source: Layout, target: Cover) -> tuple[int, int]:
    exchange = Exchange(mesh, source, target, layer="halo")
    with wire() as heard:
        exchange.start(slab(Cover.of(source), mesh.rank)).finish()
    return sum(packet.operation == "isend" for packet in heard), sent(heard)


@pytest.mark.parametrize(
    ("degrees", "circular", "messages", "elements"),
    [
        ("h4", False, [1, 2, 2, 1], [12, 24, 24, 12]),
        ("h2 w2", False, [3] * 4, [6 + 6 + 1] * 4),
        ("h2", True, [1] * 2, [2 * 12] * 2),
        ("h2 w2", True, [3] * 4, [2 * 6 + 2 * 6 + 4] * 4),
    ],
)
def test_all_faces_and_corners_for_a_peer_are_one_message(
    degrees: str, circular: bool, messages: list[int], elements: list[int]
) -> None:
    world = len(messages)
    layout = Layout.of((1, 1, 12, 12), "nchw", degrees, ranks=world)
    cut = [dim for dim, parts in enumerate(layout.degrees) if parts > 1]
    found = ranks(world, count, layout, wide(layout, *cut, circular=circular))
    assert found == list(zip(messages, elements))


def test_all_faces_edges_and_corners_for_a_peer_are_one_message() -> None:
    layout = Layout.of((1, 1, 8, 8, 8), "ncdhw", "d2 h2 w2", ranks=8)
    assert ranks(8, count, layout, wide(layout, 2, 3, 4)) == [(7, 3 * 16 + 3 * 4 + 1)] * 8


def check_dtype(mesh: Mesh, dtype: torch.dtype) -> None:
    layout = Layout.of((1, 6, 8), "ncw", f"w{mesh.size}", ranks=mesh.size)
    whole = (torch.arange(48).view(1, 6, 8) % 5).to(dtype)
    gather = Exchange(mesh, layout, Layout.replicated(layout.shape, ranks=mesh.size), layer="test")
    found = gather.start(whole[layout.slab(mesh.rank)]).finish()
    assert found.dtype == dtype
    assert torch.equal(found, whole)
    ones = torch.ones(3, 4).to(dtype)
    partial = Layout(ones.shape, [Axis(mesh.size, PARTIAL)])
    for target in (
        Layout.replicated(ones.shape, ranks=mesh.size),
        Layout(ones.shape, [Axis(mesh.size, 0)]),
    ):
        total = Exchange(mesh, partial, target, layer="test").start(ones).finish()
        assert total.dtype == dtype
        number = torch.tensor(float(mesh.size)).to(dtype)
        assert total.eq(number).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_dtypes(world: int, dtype: torch.dtype) -> None:
    ranks(world, check_dtype, dtype)


def check_format(mesh: Mesh, ndim: int) -> None:
    format = torch.channels_last if ndim == 2 else torch.channels_last_3d
    shape = (2, 4, 6, 5, 3)[: ndim + 2]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    layout = Layout(shape, [Axis(mesh.size, 2)])
    parts = whole[layout.slab(mesh.rank)]
    copies = Layout.replicated(shape, ranks=mesh.size)
    sums = Layout(shape, [Axis(mesh.size, PARTIAL)])
    for source, target, tensor in (
        (layout, wide(layout, 2), parts),
        (layout, Layout(shape, [Axis(mesh.size, 1)]), parts),
        (layout, copies, parts),
        (sums, copies, whole),
        (copies, sums, whole),
    ):
        exchange = Exchange(mesh, source, target, layer="test")
        plain = exchange(tensor.contiguous())
        last = exchange(tensor.contiguous(memory_format=format))
        assert plain.is_contiguous()
        assert last.is_contiguous(memory_format=format)
        assert torch.equal(plain, last)
        # ranks need not agree about the format
        mixed = exchange(tensor.contiguous() if mesh.rank else tensor.to(memory_format=format))
        assert torch.equal(plain, mixed)


@pytest.mark.parametrize("ndim", [2, 3])
def test_memory_format_is_kept(ndim: int) -> None:
    ranks(2, check_format, ndim)


def replicas(mesh: Mesh, source: Axes, target: Axes) -> list[float]:
    """Add numbers whose sum depends on the order."""
    cover = Cover.of(Layout((2, 3, 5), source))
    generator = torch.Generator().manual_seed(holder(cover, mesh.rank))
    tensor = torch.randn(cover.local_shape(mesh.rank), generator=generator)
    exchange = Exchange(mesh, cover, Layout(cover.shape, target), layer="test")
    out: list[float] = exchange.start(tensor).finish().flatten().tolist()
    return out


@pytest.mark.parametrize("members", [range(8), (5, 3, 2, 7, 0, 6, 1, 4)])
@pytest.mark.parametrize("target", [REPLICA, 0, 2])
def test_replicas_are_bitwise_equal(members: tuple[int, ...], target: int) -> None:
    found = ranks(
        tuple(members),
        replicas,
        Axes([Axis(2, REPLICA), Axis(4, PARTIAL)]),
        Axes([Axis(2, REPLICA), Axis(4, target)]),
    )
    assert found[:4] == found[4:]


@pytest.mark.parametrize("members", [(3, 5, 6), (5, 3), (6, 2, 7, 0), (4,)])
def test_meshes_over_part_of_the_world(members: tuple[int, ...]) -> None:
    world = len(members)
    layout = Layout((7, 4), [Axis(world, 0)])
    copies = Layout.replicated((7, 4), ranks=world)
    sums = Layout((7, 4), [Axis(world, PARTIAL)])
    ranks(members, check_exchange, layout, Layout((7, 4), [Axis(world, 1)]))
    ranks(members, check_exchange, layout, copies)
    ranks(members, check_exchange, sums, copies)
    assert ranks(members, place) == list(enumerate(members))


def place(mesh: Mesh) -> tuple[int, int]:
    return mesh.rank, torch.distributed.get_rank()


def many_meshes(mesh: Mesh) -> None:
    """Use overlapping meshes, and groups on them, at once; each rank knows only its own."""
    me = mesh.rank
    members = [(0, 1, 2), (2, 3), (1, 2, 3, 5), (4, 3), (0, 1, 2), (7, 0, 3)]
    mine = [Mesh(some) for some in members if me in some]
    pending = []
    for one in mine:
        layout = Layout((6, 5), [Axis(one.size, 0)])
        source, target = Cover.of(layout), Cover.of(layout.uncut(0))
        exchange = Exchange(one, source, target, layer="test")
        pending.append((one, source, target, exchange.start(slab(source, one.rank))))
    for one, source, target, under_way in reversed(pending):
        assert torch.equal(under_way.finish(), expected(source, target, one.rank, 0.0))
    for one in mine:
        for some in ((0, 1), (1, 2)):
            if one.size > 2 and one.rank in some:
                total = torch.ones(1)
                group = one.group(some)
                assert one.group(some) is group
                one.sum(total, group, layer="test")
                assert total.item() == 2
    for one in mine:
        one.close()


def test_several_meshes_at_once() -> None:
    ranks(8, many_meshes)
    ranks(8, many_meshes)


def twins(mesh: Mesh) -> None:
    """Start exchanges of two meshes of the same ranks in opposite orders."""
    layout = Layout((4,), [Axis(2, 0)])
    copies = Layout.replicated((4,), ranks=2)
    two = [Mesh(mesh.world_ranks), Mesh(mesh.world_ranks)]
    exchanges = [Exchange(one, layout, copies, layer="test") for one in two]
    values = [torch.full((2,), 10.0 * i + mesh.rank) for i in (0, 1)]
    order = (0, 1) if mesh.rank else (1, 0)
    pending = {i: exchanges[i].start(values[i]) for i in order}
    for i in order:
        assert pending[i].finish().tolist() == [10.0 * i, 10.0 * i, 10.0 * i + 1, 10.0 * i + 1]
    for one in two:
        one.close()


def test_messages_of_one_mesh_never_meet_those_of_another() -> None:
    ranks(2, twins)
    ranks(range(8), whole_world_twins)


def whole_world_twins(mesh: Mesh) -> None:
    """Send in the world's group while the mesh has the same peers and tags."""
    other = Mesh()
    layout = Layout((8,), [Axis(8, 0)])
    exchanges = [
        Exchange(one, layout, layout.uncut(0), layer="test") for one in (mesh, other, other)
    ]
    order = (0, 1, 2) if mesh.rank % 2 else (2, 1, 0)
    pending = {i: exchanges[i].start(torch.tensor([10.0 * i + mesh.rank])) for i in order}
    for i in order:
        assert pending[i].finish().tolist() == [10.0 * i + rank for rank in range(8)]
    other.close()


def overlapping(mesh: Mesh) -> None:
    """Compute while messages travel; keep several under way, of one exchange too."""
    layout = Layout((2, 3, 16), [Axis(mesh.size, 2)])
    source, target = Cover.of(layout), wide(layout, 2)
    exchange = Exchange(mesh, source, target, layer="test")
    tensor = slab(source, mesh.rank)
    first, second = exchange.start(tensor), exchange.start(tensor * 2)
    busy = sum(float((tensor * step).sum()) for step in range(50))
    assert busy == float(tensor.sum()) * 1225
    want = expected(source, target, mesh.rank, 0.0)
    assert torch.equal(first.finish(), want)
    assert torch.equal(second.finish(), want * 2)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_start_compute_finish(world: int) -> None:
    ranks(world, overlapping)


def misuse(mesh: Mesh, what: str) -> str:
    layout = Layout((4, 6), [Axis(mesh.size, 0)])
    exchange = Exchange(mesh, layout, layout.uncut(0), layer="conv1")
    tensor = torch.zeros(2, 6)
    try:
        if what == "shape":
            exchange.start(torch.zeros(3, 6))
        pending = exchange.start(tensor)
        if what == "changed":
            tensor.relu_()
        pending.finish()
        if what == "twice":
            pending.finish()
    except CommError as error:
        return str(error)
    return "nothing raised"


def test_misuse_is_named() -> None:
    assert ranks(2, misuse, "shape") == [
        f"exchange of conv1: rank {rank} brings a slab of shape (3, 6), its layout says (2, 6)"
        for rank in (0, 1)
    ]
    for text in ranks(2, misuse, "changed"):
        assert "exchange of conv1: its slab was changed in place on rank" in text
    for text in ranks(2, misuse, "twice"):
        assert text == "exchange of conv1: finished twice; start it again"
    assert ranks(2, misuse, "nothing") == ["nothing raised"] * 2


def agreed(mesh: Mesh, facts: list[Any], errors: list[str | None]) -> str:
    try:
        mesh.agree("plan", facts[mesh.rank], error=errors[mesh.rank])
    except MismatchError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("members", [(0, 1, 2), (5, 3, 6)])
def test_agreement_names_ranks_and_values(members: tuple[int, ...]) -> None:
    def say(facts: list[Any], errors: list[str | None] | None = None) -> str:
        found = ranks(members, agreed, facts, errors or [None] * 3)
        assert len(set(found)) == 1, found
        return str(found[0])

    assert say([{"h": 2}] * 3) == "agreed"
    assert say([4, 4, 8]) == "plan: ranks disagree: 4 on ranks 0, 1; 8 on rank 2"
    assert say([1, 2, 3]) == "plan: ranks disagree: 1 on rank 0; 2 on rank 1; 3 on rank 2"
    assert say(["a", "b", "a"]) == "plan: ranks disagree: 'a' on ranks 0, 2; 'b' on rank 1"
    assert say([1, 1, 1], [None, "no such file", None]) == "plan: rank 1: no such file"
    assert say([1, 1, 1], ["bad", "bad", "bad"]) == "plan: ranks 0, 1, 2: bad"
    assert say([1, 2, 1], ["", None, None]) == "plan: rank 0: "


def test_agreement_of_one_rank() -> None:
    assert ranks(1, agreed, [3], [None]) == ["agreed"]
    assert ranks(1, agreed, [3], ["no such file"]) == ["plan: no such file"]
    alone = Mesh()
    assert (alone.rank, alone.size) == (0, 1)
    alone.agree("plan", 3)
    total = torch.ones(2)
    alone.sum(total, alone.group(), layer="test")
    assert total.tolist() == [1, 1]


def wrong_members(mesh: Mesh, members: tuple[int, ...]) -> str:
    with pytest.raises(MismatchError) as caught:
        Mesh(members)
    return str(caught.value)


def test_meshes_say_what_is_wrong() -> None:
    (text,) = ranks(1, wrong_members, (1, 2))
    assert text == "mesh: rank 0 builds a mesh of (1, 2) that it is not part of"
    for members in ((0, 0), (0, 99)):
        (text,) = ranks(1, wrong_members, members)
        assert text == f"mesh: ranks {members} must be distinct ranks of the world of 8"
    with pytest.raises(MismatchError, match=r"need torch\.distributed; call init_process_group"):
        Mesh((0, 1))


def chained(mesh: Mesh) -> None:
    """Bring labels and values along one chain; labels have no gradient, and send none."""
    layout = Layout((6,), [Axis(mesh.size, 0)])
    exchange = Exchange(mesh, layout, layout.uncut(0), layer="test")
    chain = Chain()
    chain.start()
    labels = exchange(torch.arange(6)[layout.slab(mesh.rank)], chain)
    values = torch.arange(6.0)[layout.slab(mesh.rank)].requires_grad_()
    whole = exchange(values, chain)
    assert torch.equal(labels, torch.arange(6))
    assert not labels.requires_grad
    with wire() as heard:
        (whole * labels).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, torch.arange(6.0)[layout.slab(mesh.rank)])
    assert heard == []


def test_labels_need_no_way_back() -> None:
    ranks(2, chained)


def unused(mesh: Mesh) -> list[float]:
    """Leave a brought tensor out of one rank's loss: the chain still answers its peers."""
    layout = Layout((4,), [Axis(mesh.size, 0)])
    summed = Layout((4,), [Axis(mesh.size, PARTIAL)])
    exchange = Exchange(mesh, layout, summed, layer="test")
    chain = Chain()
    chain.start()
    values = torch.ones(2, requires_grad=True)
    whole = exchange(values, chain)
    other = torch.ones(1, requires_grad=True)
    assert chain.token is not None
    loss = other.sum() + 0.0 * chain.token + (whole.sum() if mesh.rank == 0 else 0)
    loss.backward()
    assert values.grad is not None
    found: list[float] = values.grad.tolist()
    return found


def test_a_rank_that_ignores_a_branch_still_answers() -> None:
    assert ranks(2, unused) == [[1, 1], [1, 1]]


def detached(mesh: Mesh) -> bool:
    layout = Layout((4,), [Axis(mesh.size, 0)])
    exchange = Exchange(mesh, layout, layout.uncut(0), layer="test")
    return exchange.start(torch.ones(2, requires_grad=True)).finish().requires_grad


def test_start_is_outside_of_autograd() -> None:
    assert ranks(2, detached) == [False, False]
