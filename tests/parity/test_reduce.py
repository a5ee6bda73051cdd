"""Reductions and softmax against torch on one device, however the input is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawing import WORLDS, layouts, many
from tilewise.comm import Chain, Mesh
from tilewise.errors import OperatorError
from tilewise.layout import REPLICA, Axis, Layout
from tilewise.ops.reduce import KINDS, PICKS, reduce
from tilewise.ops.softmax import log_softmax, softmax
from tilewise.testing import assert_matches_serial, ranks

FLOATS = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])


def values(shape: Any, dtype: torch.dtype, *, ties: bool = False, last: bool = False) -> Tensor:
    """Return random numbers, with `ties` a few whole ones that recur."""
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    out = (out.round() if ties else out).to(dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return out.contiguous(memory_format=formats[len(shape)]) if last and len(shape) > 3 else out


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a shape, how it lies and how to compute on it."""
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(1, 5))
    shape = [draw(st.integers(1, 9 if ndim < 4 else 4)) for _ in range(ndim)]
    work = draw(st.one_of(st.none(), layouts(shape, world)))
    return {
        "world": world,
        "x": draw(layouts(shape, world)),
        "axes": None if work is None else work.axes,
        "dtype": draw(FLOATS),
        "last": draw(st.booleans()),
    }


def serial_reduce(x: Tensor, kind: str, dims: Any, keepdim: bool, correction: float) -> Any:
    if kind in PICKS:
        return getattr(torch, kind)(x, dims, keepdim=keepdim)
    extra = {"correction": correction} if kind in ("var", "std") else {}
    return getattr(torch, kind)(x, dims, keepdim=keepdim, **extra)


def run_reduce(
    mesh: Mesh, case: dict[str, Any], kind: str, dims: Any, keepdim: bool, correction: float
) -> None:
    x = case["x"]
    operation = reduce(
        x, kind, dims, keepdim, correction=correction, axes=case["axes"], rank=mesh.rank
    )
    whole = values(x.shape, case["dtype"], ties=kind not in ("var", "std"), last=case["last"])
    assert_matches_serial(
        mesh,
        operation,
        lambda t: serial_reduce(t, kind, dims, keepdim, correction),
        [whole],
        [x],
    )


@many(120)
@given(cases(), st.sampled_from(KINDS), st.booleans(), st.sampled_from([0.0, 1.0]), st.data())
@pytest.mark.filterwarnings("ignore:var.. degrees of freedom")
def test_reduce(
    case: dict[str, Any], kind: str, keepdim: bool, correction: float, data: st.DataObject
) -> None:
    ndim = len(case["x"].shape)
    if kind in PICKS:
        dims: Any = data.draw(st.integers(-ndim, ndim - 1))
    else:
        dims = data.draw(st.lists(st.integers(0, ndim - 1), unique=True, min_size=1))
    ranks(case["world"], run_reduce, case, kind, dims, keepdim, correction)


def run_integers(mesh: Mesh) -> None:
    """Whole numbers stay exact, however large."""
    x = Layout((3, 5), [Axis(mesh.size, 1)])
    whole = torch.arange(15).reshape(3, 5) + 2**60
    for kind in ("sum", "amax", "max", "argmin"):
        operation = reduce(x, kind, 1, rank=mesh.rank)
        assert_matches_serial(
            mesh, operation, lambda t, kind=kind: serial_reduce(t, kind, 1, False, 0), [whole], [x]
        )


def test_integers() -> None:
    ranks(4, run_integers)


def run_special(mesh: Mesh) -> None:
    """NaN, infinities and empty slabs: 3 elements on 4 ranks."""
    x = Layout((2, 3), [Axis(4, 1)])
    for kind, row in [
        ("amax", [1.0, torch.nan, 3.0]),
        ("max", [1.0, torch.nan, 3.0]),
        ("max", [-torch.inf] * 3),
        ("min", [torch.inf] * 3),
        ("sum", [torch.inf, 1.0, 2.0]),
    ]:
        whole = torch.tensor([row, [1.0, 1.0, 0.0]], dtype=torch.float64)
        operation = reduce(x, kind, 1, rank=mesh.rank)
        (found, *index), (expected, *expected_index) = (
            [r] if isinstance(r, Tensor) else list(r)
            for r in (
                operation.bind(mesh, [x], layer="test")(whole[x.slab(mesh.rank)]),
                serial_reduce(whole, kind, 1, False, 0),
            )
        )
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        assert [i.tolist() for i in index] == [i.tolist() for i in expected_index]


def run_constant(mesh: Mesh) -> None:
    """A standard deviation of nothing has gradients of nothing."""
    x = Layout((2, 6), [Axis(4, 1)])
    whole = torch.tensor([[2.0] * 6, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.float64)
    operation = reduce(x, "std", 1, rank=mesh.rank)
    assert_matches_serial(mesh, operation, lambda t: t.std(1), [whole], [x])


def test_constant() -> None:
    ranks(4, run_constant)


def test_special_values() -> None:
    ranks(4, run_special)


def test_illegal_arguments() -> None:
    x = Layout((2, 0, 3), [])
    for kind, dims, text in [
        ("median", 0, "must be one of"),
        ("sum", 3, "must be dims"),
        ("sum", [0, -3], "stands twice"),
        ("max", [0, 1], "along one dim"),
        ("amax", [1], "empty"),
    ]:
        with pytest.raises(OperatorError, match=text):
            reduce(x, kind, dims, rank=0)
    with pytest.raises(OperatorError, match="must be a dim"):
        softmax(x, 3, rank=0)


def run_softmax(mesh: Mesh, case: dict[str, Any], dim: int, log: bool, far: bool) -> None:
    x = case["x"]
    plan = log_softmax if log else softmax
    whole = values(x.shape, case["dtype"], last=case["last"]) + (1000 if far else 0)
    assert_matches_serial(
        mesh,
        plan(x, dim, axes=case["axes"], rank=mesh.rank),
        lambda t: (torch.log_softmax if log else torch.softmax)(t, dim),
        [whole],
        [x],
    )


@many(80)
@given(cases(), st.data(), st.booleans(), st.booleans())
def test_softmax(case: dict[str, Any], data: st.DataObject, log: bool, far: bool) -> None:
    ndim = len(case["x"].shape)
    dim = data.draw(st.integers(-ndim, ndim - 1))
    ranks(case["world"], run_softmax, case, dim, log, far)


def run_infinite(mesh: Mesh) -> None:
    """A slab of −∞ has no share; a row of nothing else is NaN."""
    x = Layout((3, 4), [Axis(2, 1)])
    rows = [[-torch.inf, -torch.inf, 1.0, 2.0], [-torch.inf] * 4, [0.0, 1.0, 2.0, 3.0]]
    whole = torch.tensor(rows)
    found = softmax(x, 1, rank=mesh.rank).bind(mesh, [x], layer="test")(whole[x.slab(mesh.rank)])
    expected = torch.softmax(whole, 1)[x.slab(mesh.rank)]
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_infinite_logits() -> None:
    ranks(2, run_infinite)


def run_counted(mesh: Mesh, kind: str, dim: int) -> tuple[list[str], list[str]]:
    """Return the messages of one reduction forward and backward."""
    x = Layout((4, 6), [Axis(2, dim)])
    plans = {"softmax": softmax, "log_softmax": log_softmax}
    if kind in plans:
        operation = plans[kind](x, 1, rank=mesh.rank)
    else:
        operation = reduce(x, kind, 1, rank=mesh.rank)
    slab = values(x.shape, torch.float32)[x.slab(mesh.rank)].clone().requires_grad_()
    chain = Chain()
    chain.start()
    with mesh.trace.record() as forward:
        found = operation.bind(mesh, [x], layer="test")(slab, chain=chain)
    first = found if isinstance(found, Tensor) else found[0]
    assert chain.token is not None
    with mesh.trace.record() as backward:
        (first.sum() + 0.0 * chain.token).backward()
    return [event.operation for event in forward], [event.operation for event in backward]


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        ("sum", ["sum"], []),
        ("mean", ["sum"], []),
        ("amax", ["send"], []),
        ("max", ["send"], []),
        ("var", ["send"], []),
        ("softmax", ["send"], ["sum"]),
        ("log_softmax", ["send"], ["sum"]),
    ],
)
def test_messages(kind: str, forward: list[str], backward: list[str]) -> None:
    assert ranks(2, run_counted, kind, 1) == [(forward, backward)] * 2
    for dim in (0, REPLICA):
        assert ranks(2, run_counted, kind, dim) == [([], [])] * 2


def run_saved(mesh: Mesh, log: bool) -> None:
    """A softmax keeps its result alone."""
    x = Layout((4, 64), [Axis(2, 1)])
    slab = values(x.shape, torch.float32)[x.slab(mesh.rank)].clone().requires_grad_()
    operation = softmax(x, 1, log=log, rank=mesh.rank)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = operation.bind(mesh, [x], layer="test")(slab)
    large = {t.untyped_storage().data_ptr() for t in kept if t.numel() >= slab.numel()}
    assert large == {y.untyped_storage().data_ptr()}


@pytest.mark.parametrize("log", [False, True])
def test_softmax_keeps_its_result_alone(log: bool) -> None:
    ranks(2, run_saved, log)
