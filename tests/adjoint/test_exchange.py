"""⟨Ax, y⟩ = ⟨x, A'y⟩ for all that an exchange can be."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from drawing import WORLDS, covers, layouts, many
from tilewise.comm import Chain, Exchange, Mesh, Posted, joint
from tilewise.layout import PARTIAL, REPLICA, Axes, Axis, Block, Cover, Layout, Move
from tilewise.testing import RanksError, assert_adjoint, ranks

SHAPES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def check(mesh: Mesh, source: Layout | Cover, target: Layout | Cover) -> None:
    assert_adjoint(mesh, source, target)


def widened(layout: Layout, dims: dict[int, tuple[int, int]], *, circular: bool = False) -> Cover:
    """Give each block a halo (before, after) along some dims."""
    rule = Block.circular if circular else Block.clipped

    def wide(dim: int, before: int, after: int) -> object:
        return lambda a, b: rule(a - before, b + after, layout.shape[dim])

    return Cover.on(layout, {dim: wide(dim, *width) for dim, width in dims.items()})  # type: ignore[misc]


def summed(layout: Layout) -> Cover:
    """Use replicas for different results: their gradients add up."""
    axes = layout.axes.relabel({REPLICA: PARTIAL})
    return Cover(layout.shape, axes, Cover.of(layout).blocks)


@many(150)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_any_move(shape: list[int], world: int, data: st.DataObject) -> None:
    ranks(world, check, data.draw(covers(shape, world)), data.draw(covers(shape, world)))


@many(60)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_redistribution(shape: list[int], world: int, data: st.DataObject) -> None:
    ranks(world, check, data.draw(layouts(shape, world)), data.draw(layouts(shape, world)))


@pytest.mark.parametrize("circular", [False, True])
@many(60)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_halo(circular: bool, shape: list[int], world: int, data: st.DataObject) -> None:
    """Also wider than the neighbour's slab, than the tensor, and from another layout."""
    layout = data.draw(layouts(shape, world))
    width = st.tuples(st.integers(0, 4), st.integers(0, 4))
    halos = data.draw(st.dictionaries(st.integers(0, len(shape) - 1), width))
    source = layout if data.draw(st.booleans()) else data.draw(layouts(shape, world))
    ranks(world, check, source, widened(layout, halos, circular=circular))


@many(40)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_gather_with_copies_or_with_summed_gradients(
    shape: list[int], world: int, data: st.DataObject
) -> None:
    layout = data.draw(layouts(shape, world))
    whole = layout.uncut(*data.draw(st.sets(st.integers(0, len(shape) - 1))))
    ranks(world, check, layout, whole)
    ranks(world, check, layout, summed(whole))


@many(40)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_sums_to_parts_and_to_copies(shape: list[int], world: int, data: st.DataObject) -> None:
    """Reduce-scatter and all-reduce."""
    layout = data.draw(layouts(shape, world))
    partial = summed(layout.uncut(*data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    ranks(world, check, partial, layout)
    axes = partial.axes.relabel({PARTIAL: REPLICA})
    ranks(world, check, partial, Cover(partial.shape, axes, partial.blocks))


@pytest.mark.parametrize("world", WORLDS)
def test_copies_forward_and_sums_backward(world: int) -> None:
    copies = Layout.replicated((5, 3), ranks=world)
    ranks(world, check, copies, summed(copies))
    ranks(world, check, summed(copies), summed(copies))


def unbalanced(mesh: Mesh) -> None:
    """Pretend that the way back forgets the messages of others."""
    layout = Layout((8,), [Axis(2, 0)])
    wide = Cover(layout.shape, Axes(layout.axes), (((Block.of(0, 5)), Block.of(3, 8)),))
    original = Exchange.start_adjoint

    def forgetful(self: Exchange, grad: object) -> object:
        self.back.receives = [m for m in self.back.receives if m.peer == mesh.rank]
        self.back.sends = []
        return original(self, grad)  # type: ignore[arg-type]

    Exchange.start_adjoint = forgetful  # type: ignore[assignment, method-assign]
    try:
        assert_adjoint(mesh, layout, wide)
    finally:
        Exchange.start_adjoint = original  # type: ignore[method-assign]


def test_a_wrong_adjoint_is_found() -> None:
    with pytest.raises(RanksError, match="differs from"):
        ranks(2, unbalanced)


def apart(mesh: Mesh, source: Layout, target: Layout) -> None:
    """Start two exchanges before either ends, and compare both directions with one in a piece."""
    exchange, other = (Exchange(mesh, source, target, layer="test") for _ in range(2))
    slab = source.slab(mesh.rank)
    x = torch.arange(float(prod(source.shape)), dtype=torch.float64).reshape(source.shape)[slab]
    found = []
    for way in ("apart", "at once"):
        a, b = (x.clone().requires_grad_() for _ in range(2))
        chain = Chain()
        chain.start()
        if way == "apart":
            first = Posted.start([exchange], a, chain)
            second = Posted.start([other], b * b, chain)
            outs = [start.finish(tie, chain) for start, tie in first + second]
        else:
            outs = [exchange(a, chain), other(b * b, chain)]
        (outs[0] * outs[1]).sum().backward()
        found.append([*outs, a.grad, b.grad])
    for left, right in zip(*found):
        assert torch.equal(left, right)


@many(40)
@given(SHAPES, st.sampled_from(WORLDS), st.data())
def test_start_and_end_apart(shape: list[int], world: int, data: st.DataObject) -> None:
    source, target = data.draw(layouts(shape, world)), data.draw(layouts(shape, world))
    assume(source != target)
    ranks(world, apart, source, target)


def joined(mesh: Mesh, source: Layout, targets: list[Cover], small: int, bundles: bool) -> None:
    """Move one tensor to several covers at once, and compare with one after the other."""
    mesh.bundles = bundles
    exchanges = [Exchange(mesh, source, target, layer="test", fill=2.0) for target in targets]
    x = torch.arange(float(prod(source.shape)), dtype=torch.float64).reshape(source.shape)
    found: list[list[torch.Tensor]] = []
    sent: list[list[tuple[int, int]]] = []
    noted = []
    start = mesh._start

    def counted(how: Any, buffer: torch.Tensor, peer: int, tag: int) -> Any:
        work = start(how, buffer, peer, tag)
        if how is dist.isend and not isinstance(work, joint.Part):
            sent[-1].append((peer, buffer.numel()))
        return work

    for at_once in (True, False):
        slab = x[source.slab(mesh.rank)].clone().requires_grad_()
        chain = Chain()
        chain.start()
        sent.append([])
        with pytest.MonkeyPatch.context() as patch, mesh.trace.record() as events:
            patch.setattr(joint, "SMALL_BYTES", 8 * small)
            patch.setattr(mesh, "_start", counted)
            if at_once:
                started = Posted.start(exchanges, slab, chain)
                outs = [one.finish(tie, chain) for one, tie in started]
            else:
                outs = [exchange(slab, chain) for exchange in exchanges]
        noted.append(sorted((event.layer, event.ranks, event.bytes) for event in events))
        weights = [float(place + 1) * out.detach() for place, out in enumerate(outs)]
        sum((out * weight).sum() for out, weight in zip(outs, weights)).backward()
        found.append([*outs, slab.grad])
    for left, right in zip(*found):
        assert torch.equal(left, right)
    assert noted[0] == noted[1]  # bytes are those of each move
    for peer in range(mesh.size):
        together, single = ([size for to, size in one if to == peer] for one in sent)
        expected: list[int] = []
        few: list[int] = []
        for size in single:
            if size > small:
                expected.append(size)
                continue
            if sum(few) + size > small:
                expected.append(sum(few))
                few = []
            few.append(size)
        assert sorted(together) == sorted(expected + ([sum(few)] if few else []))


@many(60)
@given(SHAPES, st.sampled_from(WORLDS[1:]), st.sampled_from((0, 6, 10_000)), st.data())
def test_small_messages_of_moves_that_start_at_once_travel_as_one(
    shape: list[int], world: int, small: int, data: st.DataObject
) -> None:
    source = data.draw(layouts(shape, world))
    drawn = [data.draw(covers(shape, world)) for _ in range(3)]
    targets = [to for to in drawn if not Move(Cover.of(source), to).local]
    assume(len(targets) > 1)
    ranks(world, joined, source, targets, small, data.draw(st.booleans()))
