"""Random operators: the same numbers whatever the split, and good ones."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, layouts, many
from tilewise.comm import Mesh
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axes, Axis, Layout
from tilewise.ops.random import (
    SELU_LIMIT,
    Draws,
    alpha_dropout,
    bernoulli,
    bernoulli_like,
    dropout,
    feature_alpha_dropout,
    feature_dropout,
    normal,
    rand_like,
    randn_like,
    uniform,
    uniform_bits,
)
from tilewise.testing import assert_matches_serial, ranks

WORD = 1 << 64


# ---- the numbers


def mixed(word: int) -> int:
    word %= WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB % WORD
    return word ^ word >> 31


@pytest.mark.parametrize(
    "shape", [(), (1,), (5,), (70_001,), (2, 70_001), (300, 1000), (2000, 3, 2), (3, 2, 5, 7, 11)]
)
def test_bits_are_those_of_the_formula(shape: tuple[int, ...]) -> None:
    draws = Draws(seed=3, step=-2)
    bits = uniform_bits(draws, 9, Layout(shape), 0).flatten()
    count = len(bits)
    for index in {0, 1, count // 3, count // 2, 65_535 % count, 65_536 % count, count - 1}:
        if index < count:
            wanted = mixed(index * 0x9E3779B97F4A7C15 + draws.key(9))
            assert bits[index].item() % WORD == wanted


@many(150)
@given(st.data())
def test_every_slab_draws_its_part_of_the_whole(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from(WORLDS))
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 5, 8, 40]), max_size=3))
    layout = data.draw(layouts(shape, world))
    draws = Draws(data.draw(st.integers(0, 1 << 64)), data.draw(st.integers(0, 1000)))
    whole = Layout(shape)
    for draw in (uniform_bits, uniform, normal):
        everything = draw(draws, 4, whole, 0)
        for rank in range(world):
            part = draw(draws, 4, layout, rank)
            assert torch.equal(part, everything[layout.slab(rank)])


def sample(seed: int = 0, step: int = 0, stream: int = 0, count: int = 1 << 16) -> Tensor:
    return uniform_bits(Draws(seed, step), stream, Layout((count,)), 0)


def bit_table(bits: Tensor) -> Tensor:
    """Return the 64 bits of each word as a row of ±1."""
    return ((bits[:, None] >> torch.arange(64)) & 1).double() * 2 - 1


def test_each_bit_is_fair_and_independent_of_the_others() -> None:
    table = bit_table(sample())
    correlation = table.T @ table / len(table) - torch.eye(64, dtype=torch.float64)
    # 2,080 numbers of deviation 1/256: five deviations are met by chance once in 1,000 runs.
    assert table.mean(0).abs().max() < 5 / 256
    assert correlation.abs().max() < 5 / 256


@pytest.mark.parametrize("lag", [1, 2, 3, 7, 64, 112, 1024])
def test_neighbours_in_index_are_independent(lag: int) -> None:
    table = bit_table(sample())
    assert (table[lag:].T @ table[:-lag] / len(table)).abs().max() < 5.5 / 256


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"stream": 1}, {"seed": 1 << 40}])
def test_neighbours_in_seed_step_and_stream_are_independent(other: dict[str, int]) -> None:
    table = bit_table(sample()).T @ bit_table(sample(**other)) / (1 << 16)
    assert table.abs().max() < 5.5 / 256


def test_seed_step_and_stream_do_not_stand_for_each_other() -> None:
    keys = {Draws(seed, step).key(stream) for seed, step, stream in product(range(20), repeat=3)}
    assert len(keys) == 8000


def test_bytes_are_even() -> None:
    """Chi-square over 256 values of each byte: 255 degrees of freedom, deviation 22.6."""
    bits = sample(count=1 << 18)
    for byte in range(8):
        counts = torch.bincount((bits >> 8 * byte) & 255, minlength=256).double()
        chi_square = ((counts - 1024) ** 2 / 1024).sum().item()
        assert abs(chi_square - 255) < 4.5 * 22.6


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5, 0.9])
def test_bernoulli_hits_its_probability_in_every_row_and_column(p: float) -> None:
    mask = bernoulli(Draws(5, 6), 7, Layout((512, 512)), 0, p).double()
    deviation = (p * (1 - p) / 512) ** 0.5
    assert abs(mask.mean() - p) < 4 * deviation / 512**0.5
    assert (mask.mean(0) - p).abs().max() < 4.5 * deviation
    assert (mask.mean(1) - p).abs().max() < 4.5 * deviation


def test_moments_of_uniform_and_normal_numbers() -> None:
    layout = Layout((1 << 18,))
    u = uniform(Draws(1), 2, layout, 0, dtype=torch.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * (1 / 12) ** 0.5 / 512
    assert abs(u.var() - 1 / 12) < 4 * (1 / 180) ** 0.5 / 512
    z = normal(Draws(1), 2, layout, 0, dtype=torch.float64)
    for power, moment, deviation in [(1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)]:
        assert abs((z**power).mean() - moment) < 4 * deviation / 512
    assert 4 < z.abs().max() < 6.7


def test_dtypes_are_roundings_of_the_same_numbers() -> None:
    layout = Layout((4096,))
    fine = uniform(Draws(1), 2, layout, 0, dtype=torch.float64)
    for dtype, digits in [(torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)]:
        coarse = uniform(Draws(1), 2, layout, 0, dtype=dtype)
        assert coarse.dtype == dtype
        assert torch.equal(coarse.double(), (fine * 2**digits).floor() / 2**digits)
        z = normal(Draws(1), 2, layout, 0, dtype=dtype)
        assert torch.equal(z, normal(Draws(1), 2, layout, 0, dtype=torch.float64).to(dtype))


# ---- the operators


KINDS = {
    "dropout": dropout,
    "feature_dropout": feature_dropout,
    "alpha_dropout": alpha_dropout,
    "feature_alpha_dropout": feature_alpha_dropout,
}


def reference(x: Tensor, kind: str, p: float, draws: Draws, stream: int) -> Tensor:
    """Compute on one device what torch would with this mask."""
    shape = x.shape[:2] if kind.startswith("feature") else x.shape
    noise = bernoulli(draws, stream, Layout(shape), 0, 1 - p).to(x.dtype)
    noise = noise.view(*shape, *[1] * (x.dim() - len(shape)))
    if "alpha" not in kind:
        return x * noise.div_(1 - p)
    a = 1 / ((SELU_LIMIT**2 * p + 1) * (1 - p)) ** 0.5
    b = noise.sub(1).mul_(SELU_LIMIT * a).add_(SELU_LIMIT * a * p)
    return x * noise.mul_(a) + b


def check_dropout(
    mesh: Mesh, kind: str, x: Layout, axes: Axes | None, p: float, dtype: Any
) -> None:
    draws = Draws(11, 3)
    plan = KINDS[kind](x, p, training=True, draws=draws, stream=8, rank=mesh.rank, axes=axes)
    whole = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # Bit by bit: no rounding differs from one device.
    serial = lambda x: reference(x, kind, p, draws, 8)  # noqa: E731
    assert_matches_serial(mesh, plan, serial, [whole], [x], tolerance=1e-30)


@st.composite
def dropouts(draw: st.DrawFn) -> tuple[int, str, Layout, Axes | None, float, torch.dtype]:
    world = draw(st.sampled_from(WORLDS))
    shape = draw(st.lists(st.integers(1, 6), min_size=2, max_size=4))
    axes = draw(st.none() | layouts(shape, world).map(lambda layout: layout.axes))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
    p = draw(st.sampled_from([0.1, 0.5, 0.8]))
    return world, draw(st.sampled_from(sorted(KINDS))), draw(layouts(shape, world)), axes, p, dtype


@many(100)
@given(dropouts())
def test_dropout(case: tuple[int, str, Layout, Axes | None, float, torch.dtype]) -> None:
    ranks(case[0], check_dropout, *case[1:])


def run(kind: str, x: Tensor, p: float, draws: Draws, *, training: bool = True) -> Tensor:
    layout = Layout(x.shape)
    plan = KINDS[kind](layout, p, training=training, draws=draws, stream=1, rank=0)
    result: Tensor = plan.local([], x)
    return result


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_nothing_everything_and_evaluation(kind: str) -> None:
    x = torch.randn(4, 5, 6, requires_grad=True)
    assert torch.equal(run(kind, x, 0.0, Draws()), x)
    assert torch.equal(run(kind, x, 0.5, Draws(), training=False), x)
    gone = run(kind, x, 1.0, Draws())
    assert not gone.any()
    gone.sum().backward()
    assert x.grad is not None
    assert not x.grad.any()


def test_the_mask_is_the_same_in_every_dtype() -> None:
    x = torch.ones(64, 65)
    masks = [
        run("dropout", x.to(dtype), 0.4, Draws(2)) != 0
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])
    assert 0.55 < masks[0].double().mean() < 0.65


def test_the_step_is_read_when_the_operator_runs() -> None:
    draws = Draws(4)
    layout = Layout((1000,))
    plan = dropout(layout, 0.5, training=True, draws=draws, stream=1, rank=0)
    x = torch.ones(1000)
    first = plan.local([], x)
    assert torch.equal(plan.local([], x), first)
    draws.step += 1
    second = plan.local([], x)
    assert not torch.equal(second, first)
    draws.step -= 1
    assert torch.equal(plan.local([], x), first)


def test_backward_keeps_one_byte_for_each_element() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(40, 50, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run("dropout", x, 0.5, Draws())
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept) <= x.numel() + 8


def test_channels_last_stays() -> None:
    x = torch.randn(2, 8, 5, 6).to(memory_format=torch.channels_last)
    for kind in KINDS:
        assert run(kind, x, 0.5, Draws()).is_contiguous(memory_format=torch.channels_last)


def check_stochastic_depth(mesh: Mesh, x: Layout) -> None:
    """Each sample is kept as a whole, the same on all ranks that hold a part of it."""
    p = 0.6
    draws = Draws(1, 2)
    like = {"draws": draws, "stream": 3, "rank": mesh.rank}
    plan = bernoulli_like(x, p, shape=(x.shape[0], 1, 1), **like)
    assert plan.out == Layout((x.shape[0], 1, 1), x.axes.relabel({1: REPLICA, 2: REPLICA}))
    local = torch.empty(x.local_shape(mesh.rank), dtype=torch.float64)
    noise = plan.bind(mesh, [x], layer="test")(local).div_(p)
    wanted = bernoulli(draws, 3, Layout((x.shape[0], 1, 1)), 0, p).double().div_(p)
    assert torch.equal(noise, wanted[plan.out.slab(mesh.rank)])


@pytest.mark.parametrize("cut", [[Axis(4, 0)], [Axis(2, 0), Axis(2, 2)], [Axis(4, 1)]])
def test_stochastic_depth(cut: list[Axis]) -> None:
    ranks(4, check_stochastic_depth, Layout((6, 4, 4), cut))


def check_like(mesh: Mesh, x: Layout, axes: Axes | None, dtype: torch.dtype) -> None:
    draws = Draws(1, 2)
    like: dict[str, Any] = {"draws": draws, "stream": 3, "rank": mesh.rank, "axes": axes}
    whole = Layout(x.shape)
    local = torch.empty(x.local_shape(mesh.rank), dtype=dtype)
    for plan, draw in [(rand_like(x, **like), uniform), (randn_like(x, **like), normal)]:
        found = plan.bind(mesh, [x], layer="test")(local)
        assert torch.equal(found, draw(draws, 3, whole, 0, dtype=dtype)[plan.out.slab(mesh.rank)])
    ones = bernoulli_like(x, 1.0, dtype=torch.bool, **like).bind(mesh, [x], layer="test")(local)
    assert ones.dtype == torch.bool
    assert ones.all()
    assert not bernoulli_like(x, 0.0, **like).bind(mesh, [x], layer="test")(local).any()


@pytest.mark.parametrize("axes", [None, Axes([Axis(2, 1), Axis(3)])])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_random_tensors(axes: Axes | None, dtype: torch.dtype) -> None:
    ranks(6, check_like, Layout((5, 7, 9), [Axis(3, 0), Axis(2, 2)]), axes, dtype)


def test_illegal_arguments_are_refused() -> None:
    x = Layout((4,))
    rest: dict[str, Any] = {"draws": Draws(), "stream": 0, "rank": 0}
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(OperatorError, match="between 0 and 1"):
            dropout(x, wrong, training=True, **rest)
        with pytest.raises(OperatorError, match="between 0 and 1"):
            bernoulli_like(x, wrong, **rest)
    with pytest.raises(OperatorError, match="samples and channels"):
        feature_dropout(x, 0.5, training=True, **rest)
