"""What a convolution hands to torch.distributed, counted there, against closed formulas."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import pytest
import torch

from tilewise.comm import Mesh
from tilewise.layout import PARTIAL, REPLICA, Cover, Degrees, Layout
from tilewise.ops.conv import ConvSpec, conv
from tilewise.testing import ranks
from wire import sent, wire


class Counted(NamedTuple):
    """Elements sent by one rank, and its sums as (ranks, elements)."""

    forward: int
    backward: int
    sums: list[tuple[tuple[int, ...], int]]


def count(
    mesh: Mesh, shape: Sequence[int], weight: Sequence[int], degrees: str, arguments: dict[str, Any]
) -> tuple[int, int, list[tuple[tuple[int, ...], int]]]:
    """Run one convolution on x cut as its degrees say, and weight blocks where they are needed."""
    dims = "nc" + "dhw"[5 - len(shape) :]
    x = Layout.of(shape, dims, degrees, ranks=mesh.size)
    spec = ConvSpec.of(weight, **arguments)
    operation = conv(x, weight, spec, degrees=Degrees.parse(degrees), rank=mesh.rank)
    need = operation.needs[1].cover
    blocks = Cover(need.shape, need.axes.relabel({PARTIAL: REPLICA}), need.blocks)
    bound = operation.bind(mesh, [x, blocks], layer="conv")
    operands = [
        torch.ones(x.local_shape(mesh.rank), requires_grad=True),
        torch.ones(need.local_shape(mesh.rank), requires_grad=True),
    ]
    with wire() as forth, mesh.trace.record() as events:
        y = bound(*operands)
    with wire() as back, mesh.trace.record() as later:
        y.backward(torch.ones_like(y))
    for heard, recorded in ((forth, events), (back, later)):
        handed = [packet for packet in heard if packet.operation != "irecv"]
        assert [event.bytes for event in recorded] == [packet.bytes for packet in handed]
    sums = [(event.ranks, event.bytes // 4) for event in later if event.operation == "sum"]
    return sent(forth), sent(back), sums


def counted(world: int, *args: Any) -> list[Counted]:
    """Count on `world` ranks."""
    return [Counted(*found) for found in ranks(world, count, *args)]


SPACES = {1: (24,), 2: (8, 6), 3: (4, 4, 6)}


def shapes(ndim: int, stride: int) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return the shapes of x and w, and the elements of all of x and all of y."""
    n, channels, filters = 2, 16, 32
    x = (n, channels, *SPACES[ndim])
    y = (n, filters, *(extent // stride for extent in SPACES[ndim]))
    return x, (filters, channels, *[3] * ndim), prod(x), prod(y)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_stationary_x_moves_y(p: int, ndim: int, stride: int) -> None:
    x, w, _, of_y = shapes(ndim, stride)
    for found in counted(p, x, w, f"c{p}", {"padding": 1, "stride": stride}):
        assert found.forward + found.backward == 2 * (p - 1) * of_y // p
        assert found.sums == []


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_stationary_y_moves_x(p: int, ndim: int, stride: int) -> None:
    x, w, of_x, _ = shapes(ndim, stride)
    for found in counted(p, x, w, f"f{p}", {"padding": 1, "stride": stride}):
        assert found.forward + found.backward == 2 * (p - 1) * of_x // p
        assert found.sums == []


@pytest.mark.parametrize(("c", "f"), [(2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_stationary_w_moves_parts_of_both(c: int, f: int, ndim: int) -> None:
    x, w, of_x, of_y = shapes(ndim, 2)
    gathered = (f - 1) * of_x // (f * c)
    scattered = (c - 1) * of_y // (c * f)
    for found in counted(c * f, x, w, f"c{c} f{f}", {"padding": 1, "stride": 2}):
        assert found.forward == found.backward == gathered + scattered
        assert found.sums == []


# kernel, stride, padding, dilation, and the rows of x needed before and after one's own
HALOS = [
    (1, 1, 0, 1, 0, 0),
    (1, 2, 0, 1, 0, 0),
    (2, 2, 0, 1, 0, 0),
    (3, 1, 1, 1, 1, 1),
    (3, 2, 1, 1, 1, 0),
    (5, 1, 2, 1, 2, 2),
    (5, 2, 2, 1, 2, 1),
    (7, 2, 3, 1, 3, 2),
    (3, 1, 2, 2, 2, 2),
]


@pytest.mark.parametrize("halo", HALOS, ids=str)
@pytest.mark.parametrize("parts", [2, 4])
def test_halos_of_one_dim(halo: tuple[int, ...], parts: int) -> None:
    """Forward, a rank sends its neighbours' halos; backward, its own halo's gradients."""
    kernel, stride, padding, dilation, before, after = halo
    arguments = {"padding": padding, "stride": stride, "dilation": dilation}
    n, channels, width = 2, 3, 8
    cross = n * channels * width
    found = counted(
        parts,
        (n, channels, 32, width),
        (4, channels, kernel, kernel),
        f"h{parts}",
        arguments,
    )
    for rank, one in enumerate(found):
        follows, precedes = rank > 0, rank < parts - 1
        assert one.forward == cross * (after * follows + before * precedes)
        assert one.backward == cross * (before * follows + after * precedes)
        assert one.sums == [(tuple(range(parts)), 4 * channels * kernel**2)]


@pytest.mark.parametrize("halo", HALOS[2:], ids=str)
def test_halos_of_two_dims_have_corners(halo: tuple[int, ...]) -> None:
    kernel, stride, padding, dilation, before, after = halo
    arguments = {"padding": padding, "stride": stride, "dilation": dilation}
    n, channels, depth, height, width = 1, 3, 16, 12, 6
    found = counted(
        4,
        (n, channels, depth, height, width),
        (2, channels, *[kernel] * 3),
        "d2 h2",
        arguments,
    )
    for rank, one in enumerate(found):
        of_d, of_h = (before, after)[rank // 2], (before, after)[rank % 2]
        rows = of_d * (height // 2) + (depth // 2) * of_h + of_d * of_h
        assert one.forward == n * channels * width * rows
        back_d, back_h = before + after - of_d, before + after - of_h
        rows = back_d * (height // 2) + (depth // 2) * back_h + back_d * back_h
        assert one.backward == n * channels * width * rows


@pytest.mark.parametrize("degrees", ["n4", "h4", "n2 w2", "d2 h2 w2"])
def test_a_convolution_by_one_sends_nothing(degrees: str) -> None:
    world = Degrees.parse(degrees).product
    for found in counted(world, (4, 3, 8, 8, 8), (5, 3, 1, 1, 1), degrees, {}):
        assert (found.forward, found.backward) == (0, 0)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_depthwise_convolutions_send_no_channels(ndim: int) -> None:
    shape = (2, 8, *SPACES[ndim])
    for found in counted(4, shape, (16, 1, *[3] * ndim), "c2 f2", {"groups": 8, "padding": 1}):
        assert found == Counted(0, 0, [])


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(4, "n4"), (8, "n2 h2 c2"), (8, "n2 c2 f2"), (8, "h2 w2 f2"), (4, "h2"), (8, "w2 c2")],
)
def test_weight_gradients_are_summed_over_samples_and_space_only(world: int, degrees: str) -> None:
    cut = Degrees.parse(degrees)
    replicas, blocks = cut.replicas(world), cut.c * cut.f
    found = counted(world, (4, 8, 8, 8), (16, 8, 3, 3), degrees, {"padding": 1})
    for rank, one in enumerate(found):
        # ranks of one weight block and one replica: equal in all that is faster than w
        fast = blocks * replicas
        group = tuple(range(rank % fast, world, fast))
        assert one.sums == [(group, 16 * 8 * 9 // blocks)]
        assert len(group) == cut.n * cut.d * cut.h * cut.w
