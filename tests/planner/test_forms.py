"""The closed forms of the search against the rules themselves, candidate by candidate."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import numpy as np
import pytest
import torch
from torch import nn

import tilewise as tw
from plans import graph_of
from tilewise.graph.graph import Node, Value
from tilewise.graph.held import at_rest
from tilewise.graph.labels import labels
from tilewise.graph.rule import REGISTRY, Lowered, Site
from tilewise.layout import PARTIAL, REPLICA, Block, Cover, Degrees, Layout, Move
from tilewise.layout.cover import balanced
from tilewise.ops.draws import Draws
from tilewise.plan import Layer
from tilewise.planner.bills import Between
from tilewise.planner.candidates import all_degrees, candidates
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.forms import GROUPS, Form, Known
from tilewise.planner.layouts import Layouts, smallest
from tilewise.planner.overlaps import Overlaps, overlap_matrix
from tilewise.planner.places import chooses, letter_roles
from tilewise.planner.traffic import Traffic, traffic


def lower(node: Node, named: dict[Value, str], degrees: Degrees, devices: int) -> Lowered:
    layouts = {
        value: Layout.of(value.shape, named[value], degrees, ranks=devices)
        for value in node.values()
        if not value.held
    }
    return REGISTRY[node.kind].apply(Site(node, layouts, named, degrees, devices, 0, Draws(0)))


@pytest.mark.parametrize("name", ["small", "dense", "joined", "unet"])
@pytest.mark.parametrize("devices", [4, 6, 8])
def test_products_over_letters_are_what_rules_say(name: str, devices: int) -> None:
    """Sums over ranks, local sizes and the fullest rank's share, uneven cuts included."""
    graph = graph_of(name)
    named = labels(graph.training)
    rng = random.Random(devices)
    known = Known()
    for layer, node in zip(graph.layers, graph.training.nodes):
        if not chooses(node, layer):
            continue
        some = candidates(layer, devices)
        form = Form(node, named, some.table, devices, known)
        for row in rng.sample(range(len(some)), min(6, len(some))):
            lowered = lower(node, named, some.degrees(row), devices)
            operation = lowered.operation
            for i, (value, need) in enumerate(zip(lowered.operands, operation.needs)):
                local = max(prod(need.cover.local_shape(rank)) for rank in range(devices))
                assert round(form.share("need", i)[row] * prod(value.shape)) == local
                if value.held:
                    assert form.sharers(i)[row] == len(need.cover.sharers(0))
                    continue
                home, target = Cover.of(need.home), at_rest(need.cover)
                same(form, row, ("bring", i, value), traffic(Move(home, target), 1))
                same(form, row, ("bring_back", i, value), traffic(Move(target, home), 1))
            for i, value in enumerate(node.outs):
                give, out = operation.gives[i], Cover.of(operation.outs[i])
                same(form, row, ("finish", i, value), traffic(Move(give, out), 1))
                same(form, row, ("finish_back", i, value), traffic(Move(out, give), 1))


class Widths(nn.Module):
    """Convolutions, poolings and concatenations of several widths, some of which share answers."""

    def __init__(self) -> None:
        super().__init__()
        widths = ((12, 24), (24, 36), (36, 60), (60, 26), (86, 24))
        self.convs = nn.ModuleList(nn.Conv2d(c, f, 3, padding=1) for c, f in widths)
        self.grouped = nn.Conv2d(24, 24, 3, padding=1, groups=2)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth, last = self.convs
        x = second(self.pool(first(x)))
        y = third(x)
        z = last(torch.cat([fourth(y), y], 1))
        return self.pool(torch.cat([self.grouped(z), x, y], 1))


@pytest.mark.parametrize("devices", [4, 6, 8, 12])
def test_calls_that_share_answers_would_give_the_same(devices: int) -> None:
    """What calls of other widths were told is what they are told, to the last bit."""
    with torch.device("meta"):
        graph = tw.capture(Widths(), torch.empty(6, 12, 14, 10))
    named, known, alone = labels(graph.training), Known(), 0
    for layer, node in zip(graph.layers, graph.training.nodes):
        table, apart = candidates(layer, devices).table, Known()
        shared = Form(node, named, table, devices, known)
        own = Form(node, named, table, devices, apart)
        alone += sum(map(len, apart.answers.values()))
        for index, value in enumerate(own.operands):
            assert (shared.share("need", index) == own.share("need", index)).all()
            assert shared.roles(index) == own.roles(index)
            if not value.held:
                identical(shared, own, ("bring", "bring_back"), index)
        assert (shared.share("give", 0) == own.share("give", 0)).all()
        identical(shared, own, ("finish", "finish_back"), 0)
    assert sum(map(len, known.answers.values())) < alone


def identical(form: Form, other: Form, names: Sequence[str], index: int) -> None:
    for name in names:
        one, two = form.swap(name, index, 1), other.swap(name, index, 1)
        assert (one.received == two.received).all()
        assert (one.total == two.total).all()
        assert all((one.parts[group] == two.parts[group]).all() for group in GROUPS)


def same(form: Form, row: int, which: tuple[str, int, Value], found: Traffic) -> None:
    name, index, value = which
    swap = form.swap(name, index, prod(value.shape))
    assert round(swap.total[row]) == found.elements
    assert round(swap.received[row]) == found.received.max()


@pytest.mark.parametrize(
    ("devices", "shape", "text"),
    [
        (16, (16, 64, 16, 16), "nchw"),
        (32, (32, 32, 32), "ncw"),
        (16, (5, 48, 7, 7), "nchw"),
        (12, (12, 24, 13), "ncw"),
        (8, (8, 8, 4, 4, 4), "ncdhw"),
    ],
)
def test_moves_between_all_layouts(devices: int, shape: tuple[int, ...], text: str) -> None:
    """The worst rank receives what it really would; from which node, where nodes nest."""
    table = candidates(_layer(shape, text), devices).table
    layouts, _ = Layouts.of_degrees(shape, devices, table, letter_roles(text)).distinct()
    even = layouts.even()
    every = np.arange(len(layouts))
    between = Between(layouts, layouts, 4, by_rank=not even)
    bill = between.forth(every, every)
    rng = random.Random(0)
    for _ in range(150):
        a, b = rng.randrange(len(layouts)), rng.randrange(len(layouts))
        move = Move(Cover.of(layouts.layout_at(a)), Cover.of(layouts.layout_at(b)))
        real = traffic(move, 4)
        assert bill.near[a, b] + bill.far[a, b] == real.received.max()
        if even:
            assert bill.far[a, b] == real.far.max()
            messages = real.near_messages + real.far_messages
            assert bill.near_messages[a, b] + bill.far_messages[a, b] == messages.max()
        pair = between.forth(np.array([a]), np.array([b]), paired=True)
        assert pair.far[0, 0] == bill.far[a, b]


def test_gradients_come_back_from_ranks_that_share_blocks() -> None:
    """Of all pairs at once, of each by itself, and of those whose blocks stay where they are."""
    table, roles = all_degrees(16), letter_roles("nchw") | {"d": REPLICA}
    here, _ = Layouts.of_degrees((16, 64, 16, 16), 16, table, roles).distinct()
    there, _ = Layouts.of_degrees((16, 64, 16, 16), 16, table, roles | {"f": PARTIAL}).distinct()
    assert (there.partial > 1).any()
    between = Between(here, there, 4)
    rows, columns = np.arange(len(here)), np.arange(len(there))
    bill = between.back(rows, columns, alike=between.alike(columns))
    plain = between.back(rows, columns)
    home = Between(there, here, 4).forth(columns, rows)
    rng = random.Random(1)
    for _ in range(300):
        a, b = rng.randrange(len(here)), rng.randrange(len(there))
        pair = between.back(np.array([a]), np.array([b]), paired=True)
        for name in ("near", "far", "near_messages", "far_messages", "summed"):
            one = np.broadcast_to(getattr(bill, name), bill.near.shape)[a, b]
            assert one == getattr(pair, name).item() == getattr(plain, name)[a, b]
        if there.partial[b] == 1:
            assert bill.near[a, b] + bill.far[a, b] == home.near[b, a] + home.far[b, a]
        elif not bill.summed[a, b]:
            mine, own = here.local()[a], here.local()[a] - home.near[b, a] - home.far[b, a]
            assert bill.near[a, b] + bill.far[a, b] == there.partial[b] * mine - own


def _layer(shape: tuple[int, ...], text: str) -> Layer:
    extents = dict(zip(text, shape))
    return Layer("x", "relu", shape, extents | {"f": extents["c"], "cf": extents["c"]})


@pytest.mark.parametrize(("shape", "text"), [((12, 24, 7, 10), "nchw"), ((6, 5, 36), "nch")])
def test_moves_of_a_larger_tensor_are_those_of_a_smaller_one(
    shape: tuple[int, ...], text: str
) -> None:
    """Extents that all cuts divide only scale what is moved."""
    devices = 6
    table = all_degrees(devices)
    table = table[(table[:, 1] == 1) & (table[:, 5] == 1)]
    roles = letter_roles(text)
    here = Layouts.of_degrees(shape, devices, table, roles).distinct()[0]
    there = Layouts.of_degrees(shape, devices, table, roles | {"h": PARTIAL}).distinct()[0]
    fewer, others, scale = smallest(here, there)
    assert scale > 1
    assert prod(fewer.shape) * scale == prod(shape)
    large, small = (Between(*both, 2, by_rank=True) for both in ((here, there), (fewer, others)))
    ways = ((large.every_forth[0], small.every_forth[0]), (large.every_back, small.every_back))
    for one, other in ways:
        for name in ("near", "far", "summed"):
            assert (getattr(one, name) == scale * getattr(other, name)).all()
        for name in ("near_messages", "far_messages", "sharers", "span"):
            assert (getattr(one, name) == getattr(other, name)).all()
    rows, columns = np.arange(len(here)), np.arange(len(there))
    alone, (shared, where) = large.forth(rows, columns), large.every_forth
    assert where is not None
    assert (alone.near == shared.near[:, where]).all()
    assert (large.back(rows, columns).far == large.every_back.far).all()


def test_rows_are_told_apart_whatever_their_numbers() -> None:
    rng = np.random.default_rng(0)
    for wide in (3, 1 << 20, 1 << 40):
        table = rng.integers(-wide, wide, (4, 7))[rng.integers(0, 4, 50)]
        rows, first, where = np.unique(table, axis=0, return_index=True, return_inverse=True)
        found = distinct_rows(table)
        assert (table[found[0]] == rows).all()
        assert (found[0] == first).all()
        assert (found[1] == where.reshape(-1)).all()
    assert not len(distinct_rows(np.zeros((0, 3), np.int64))[0])


def test_overlaps_are_those_of_all_pairs_of_blocks() -> None:
    rng = np.random.default_rng(0)

    def blocks() -> tuple[Block, ...]:
        """Cut a dim of 24 in some way: with gaps, halos, scattered or empty blocks."""
        cuts = [sorted(rng.choice(25, 2 * int(rng.integers(0, 4)), replace=False)) for _ in "12345"]
        parts = int(rng.integers(1, 30))
        return (
            balanced(24, parts)
            if rng.random() < 0.3
            else tuple(
                Block.union([(int(a), int(b)) for a, b in zip(cut[::2], cut[1::2], strict=True)])
                for cut in cuts
            )
        )

    for _ in range(100):
        source, target = blocks(), blocks()
        held = [{p for x in one.pieces for p in range(x.start, x.stop)} for one in source]
        wanted = [{p for x in one.pieces for p in range(x.start, x.stop)} for one in target]
        table = np.array([[len(one & other) for other in wanted] for one in held])
        assert (overlap_matrix(source, target) == table).all()
        found = Overlaps(source, target)
        s, t = (one.reshape(-1) for one in np.indices(table.shape))
        assert (found.of(s, t) == table[s, t]).all()
        assert (found.by_source == table.sum(1)).all()
        assert (found.by_target == table.sum(0)).all()
        assert (found.source_counts == (table > 0).sum(1)).all()
        assert (found.target_counts == (table > 0).sum(0)).all()
