"""Losses against torch on one device, however predictions and targets are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from drawing import WORLDS, layouts, many
from tilewise.comm import Chain, Mesh
from tilewise.errors import OperatorError
from tilewise.layout import Axis, Layout
from tilewise.ops.cross_entropy import cross_entropy, nll_loss
from tilewise.ops.loss import KINDS, elementwise_loss, soft_dice
from tilewise.ops.operation import Operation
from tilewise.testing import assert_close, assert_matches_serial, ranks

FLOATS = st.sampled_from([torch.float64, torch.float64, torch.float32, torch.bfloat16])
REDUCTIONS = st.sampled_from(["mean", "sum", "none"])


def numbers(shape: Any, seed: int, dtype: torch.dtype, *, positive: bool = False) -> Tensor:
    """Return random numbers; positive ones lie between 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if positive else torch.randn
    return draw(tuple(shape), generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def cases(draw: st.DrawFn, low: int = 1, high: int = 5) -> dict[str, Any]:
    """Draw a shape, how prediction and target lie and how to compute on them."""
    world = draw(st.sampled_from(WORLDS))
    ndim = draw(st.integers(low, high))
    shape = [draw(st.integers(1, 7 if ndim < 4 else 4)) for _ in range(ndim)]
    work = draw(st.one_of(st.none(), layouts(shape, world)))
    spatial = (*shape[:1], *shape[2:])
    return {
        "world": world,
        "x": draw(layouts(shape, world)),
        "target": draw(layouts(shape, world)),
        "indices": draw(layouts(spatial, world)),
        "axes": None if work is None else work.axes,
        "dtype": draw(FLOATS),
        "reduction": draw(REDUCTIONS),
    }


def without_weight_gradients(operation: Operation) -> Operation:
    """Weights are constants: torch refuses ones that want gradients."""

    def local(inner: Any, x: Tensor, target: Tensor, *weights: Tensor) -> Any:
        return operation.local(inner, x, target, *(w.detach() for w in weights))

    return replace(operation, local=local)


def tolerance(case: dict[str, Any]) -> float:
    """Gradients of a softmax are differences: bfloat16 itself is off by some per cent."""
    return 0.1 if case["dtype"] == torch.bfloat16 else 0.0


# losses of elements


def run_elementwise(
    mesh: Mesh, case: dict[str, Any], kind: str, knee: float, shapes: dict[str, tuple[int, ...]]
) -> None:
    x, dtype, reduction = case["x"], case["dtype"], case["reduction"]
    operation = elementwise_loss(
        x,
        x.shape,
        kind,
        reduction=reduction,
        knee=knee,
        axes=case["axes"],
        rank=mesh.rank,
        **shapes,
    )
    shares = kind.startswith("bce")
    operands = [
        numbers(x.shape, 0, dtype, positive=kind == "bce"),
        numbers(x.shape, 1, dtype, positive=shares),
        *(numbers(shape, 2 + i, dtype, positive=True) for i, shape in enumerate(shapes.values())),
    ]
    options = {"smooth_l1": {"beta": knee}, "huber": {"delta": knee}}.get(kind, {})

    def serial(x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        given = dict(zip(shapes, (w.detach() for w in weights)))
        return KINDS[kind](x, target, reduction=reduction, **options, **given)

    assert_matches_serial(
        mesh,
        without_weight_gradients(operation),
        serial,
        operands,
        [x, case["target"], *(Layout.replicated(s, ranks=mesh.size) for s in shapes.values())],
    )


@many(60)
@given(cases(), st.sampled_from(list(KINDS)), st.sampled_from([0.5, 1.0]), st.data())
def test_elementwise(case: dict[str, Any], kind: str, knee: float, data: st.DataObject) -> None:
    names = {"bce": ["weight"], "bce_with_logits": ["weight", "pos_weight"]}.get(kind, [])
    shape = case["x"].shape
    shapes = {}
    for name in names:
        if data.draw(st.booleans()):
            kept = data.draw(st.integers(0, len(shape)))
            shapes[name] = tuple(
                extent if data.draw(st.booleans()) else 1 for extent in shape[len(shape) - kept :]
            )
    ranks(case["world"], run_elementwise, case, kind, knee, shapes)


# losses of classes


def run_classes(
    mesh: Mesh, case: dict[str, Any], weight: bool, ignore: int, smoothing: float, logs: bool
) -> None:
    x, dtype, reduction = case["x"], case["dtype"], case["reduction"]
    options: dict[str, Any] = {"ignore_index": ignore, "reduction": reduction}
    if not logs:
        options["label_smoothing"] = smoothing
    plan, function = (nll_loss, F.nll_loss) if logs else (cross_entropy, F.cross_entropy)
    operation = plan(
        x, case["indices"].shape, weight=weight, axes=case["axes"], rank=mesh.rank, **options
    )
    generator = torch.Generator().manual_seed(3)
    target = torch.randint(x.shape[1], case["indices"].shape, generator=generator)
    skip = torch.rand(target.shape, generator=generator) < 0.2
    operands = [numbers(x.shape, 0, dtype), target.masked_fill(skip, ignore)]
    operands += [numbers(x.shape[1:2], 2, dtype, positive=True)] * weight

    def serial(x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        return function(x, target, *(w.detach() for w in weights), **options)

    assert_matches_serial(
        mesh,
        without_weight_gradients(operation),
        serial,
        operands,
        [x, case["indices"], *[Layout.replicated(x.shape[1:2], ranks=mesh.size)] * weight],
        tolerance=tolerance(case),
    )


@many(80)
@given(
    cases(low=2),
    st.booleans(),
    st.sampled_from([-100, 0, 2, 255]),
    st.sampled_from([0.0, 0.1]),
    st.booleans(),
)
def test_class_indices(
    case: dict[str, Any], weight: bool, ignore: int, smoothing: float, logs: bool
) -> None:
    ranks(case["world"], run_classes, case, weight, ignore, smoothing, logs)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_smoothing_over_cut_classes(weight: bool, reduction: str) -> None:
    case = {
        "x": Layout((2, 6, 5), [Axis(4, 1)]),
        "indices": Layout((2, 5), [Axis(2, 0), Axis(2, 1)]),
        "axes": None,
        "dtype": torch.float64,
        "reduction": reduction,
    }
    ranks(4, run_classes, case, weight, 2, 0.1, False)


def run_probabilities(mesh: Mesh, case: dict[str, Any], weight: bool, smoothing: float) -> None:
    x, dtype = case["x"], case["dtype"]
    options = {"reduction": case["reduction"], "label_smoothing": smoothing}
    operation = cross_entropy(
        x, x.shape, weight=weight, axes=case["axes"], rank=mesh.rank, **options
    )
    operands = [numbers(x.shape, 0, dtype), numbers(x.shape, 1, dtype).softmax(1)]
    operands += [numbers(x.shape[1:2], 2, dtype, positive=True)] * weight

    def serial(x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
        return F.cross_entropy(x, target, *weights, **options)

    assert_matches_serial(
        mesh,
        operation,
        serial,
        operands,
        [x, case["target"], *[Layout.replicated(x.shape[1:2], ranks=mesh.size)] * weight],
        tolerance=tolerance(case),
    )


@many(60)
@given(cases(low=2), st.booleans(), st.sampled_from([0.0, 0.1]))
def test_class_probabilities(case: dict[str, Any], weight: bool, smoothing: float) -> None:
    ranks(case["world"], run_probabilities, case, weight, smoothing)


def run_ignored(mesh: Mesh, dim: int, smoothing: float) -> None:
    """A batch without targets: NaN, with gradients of zero."""
    x = Layout((2, 4, 3), [Axis(2, dim)])
    operation = cross_entropy(x, (2, 3), label_smoothing=smoothing, rank=mesh.rank)
    indices = Layout((2, 3), [Axis(2)])
    slab = numbers(x.shape, 0, torch.float32)[x.slab(mesh.rank)].clone().requires_grad_()
    found = operation.bind(mesh, [x, indices], layer="test")(slab, torch.full((2, 3), -100))
    found.backward()
    assert found.isnan()
    assert slab.grad is not None
    assert slab.grad.eq(0).all()


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored(dim: int, smoothing: float) -> None:
    ranks(2, run_ignored, dim, smoothing)


def run_wrong_target(mesh: Mesh, dim: int, wrong: int) -> None:
    """Give a wrong target to the last rank only where the samples are cut."""
    x = Layout((3, 4), [Axis(3, dim)])
    target = Layout((3,), [Axis(3, 0 if dim == 0 else -1)])
    for plan in (cross_entropy, nll_loss):
        for reduction in ("mean", "sum", "none"):
            operation = plan(x, (3,), reduction=reduction, rank=mesh.rank)
            bound = operation.bind(mesh, [x, target], layer="test")
            with pytest.raises(OperatorError, match="neither a class 0 … 3 nor ignore_index"):
                bound(
                    torch.zeros(x.local_shape(mesh.rank)),
                    torch.tensor([1, 2, wrong])[target.slab(mesh.rank)],
                )


@pytest.mark.parametrize("wrong", [4, -1])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_wrong_target_of_one_rank_raises_on_all(dim: int, wrong: int) -> None:
    ranks(3, run_wrong_target, dim, wrong)


# Dice


def serial_dice(p: Tensor, t: Tensor, smooth: float, samples: bool) -> Tensor:
    if not t.is_floating_point():
        t = F.one_hot(t, p.shape[1]).movedim(-1, 1).to(p.dtype)
    dims = [*([0] if samples else []), *range(2, p.dim())]
    if dims:
        both, each = (p * t).sum(dims), (p + t).sum(dims)
    else:
        both, each = p * t, p + t
    return 1 - ((2 * both + smooth) / (each + smooth)).mean()


def run_dice(mesh: Mesh, case: dict[str, Any], indices: bool, smooth: float, samples: bool) -> None:
    x, dtype = case["x"], case["dtype"]
    target = case["indices"] if indices else case["target"]
    operation = soft_dice(
        x, target.shape, smooth=smooth, samples=samples, axes=case["axes"], rank=mesh.rank
    )
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randint(x.shape[1], case["indices"].shape, generator=generator)
    if not indices:
        wanted = F.one_hot(wanted, x.shape[1]).movedim(-1, 1).to(dtype)
    assert_matches_serial(
        mesh,
        operation,
        lambda p, t: serial_dice(p, t, smooth, samples),
        [numbers(x.shape, 0, dtype).softmax(1), wanted],
        [x, target],
        tolerance=tolerance(case),
    )


@many(60)
@given(cases(low=2), st.booleans(), st.sampled_from([1.0, 1e-5]), st.booleans())
def test_soft_dice(case: dict[str, Any], indices: bool, smooth: float, samples: bool) -> None:
    ranks(case["world"], run_dice, case, indices, smooth, samples)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_soft_dice_of_each_sample(dim: int) -> None:
    case = {
        "x": Layout((3, 4, 5), [Axis(4, dim)]),
        "indices": Layout((3, 5), [Axis(2, 0), Axis(2, 1)]),
        "axes": None,
        "dtype": torch.float64,
    }
    ranks(4, run_dice, case, True, 1.0, False)


# what all have in common


def run_counted(mesh: Mesh, name: str, dim: int) -> tuple[list[str], list[str]]:
    """Return the messages of one loss forward and backward."""
    x = Layout((4, 6, 4), [Axis(2, dim)])
    spatial = Layout((4, 4), [Axis(2, {0: 0, 1: -1, 2: 1}[dim])])
    indices = torch.zeros(spatial.local_shape(mesh.rank), dtype=torch.long)
    same = numbers(x.local_shape(mesh.rank), 1, torch.float32, positive=True)
    operation, target, layout = {
        "mse": (elementwise_loss(x, x.shape, "mse", rank=mesh.rank), same, x),
        "none": (
            elementwise_loss(x, x.shape, "mse", reduction="none", rank=mesh.rank),
            same,
            x,
        ),
        "entropies": (
            cross_entropy(x, (4, 4), reduction="none", rank=mesh.rank),
            indices,
            spatial,
        ),
        "cross_entropy": (cross_entropy(x, (4, 4), rank=mesh.rank), indices, spatial),
        "nll": (nll_loss(x, (4, 4), rank=mesh.rank), indices, spatial),
        "dice": (soft_dice(x, (4, 4), rank=mesh.rank), indices, spatial),
    }[name]
    slab = numbers(x.local_shape(mesh.rank), 0, torch.float32).requires_grad_()
    chain = Chain()
    chain.start()
    with mesh.trace.record() as forward:
        loss = operation.bind(mesh, [x, layout], layer="test")(slab, target, chain=chain)
    assert chain.token is not None
    with mesh.trace.record() as backward:
        (loss.sum() + 0.0 * chain.token).backward()
    return [event.operation for event in forward], [event.operation for event in backward]


@pytest.mark.parametrize(
    ("name", "dim", "forward", "backward"),
    [
        ("mse", 2, ["sum"], []),
        ("none", 2, [], []),
        ("entropies", 2, ["sum"], []),
        ("cross_entropy", 2, ["sum"], []),
        ("cross_entropy", 1, ["send", "sum"], ["sum"]),
        ("nll", 0, ["sum"], []),
        ("nll", 1, ["sum"], []),
        ("dice", 2, ["sum"], []),
        ("dice", 1, ["sum"], []),
    ],
)
def test_messages(name: str, dim: int, forward: list[str], backward: list[str]) -> None:
    assert ranks(2, run_counted, name, dim) == [(forward, backward)] * 2


def test_illegal_arguments() -> None:
    x = Layout((2, 3, 4), [])
    for plan, text in [
        (lambda: elementwise_loss(x, (2, 3), "mse", rank=0), "shape of the prediction"),
        (lambda: elementwise_loss(x, x.shape, "hinge", rank=0), "must be one of mse"),
        (lambda: elementwise_loss(x, x.shape, "l1", reduction="max", rank=0), "reduction"),
        (lambda: elementwise_loss(x, x.shape, "l1", weight=(4,), rank=0), "takes no weight"),
        (lambda: elementwise_loss(x, x.shape, "bce", weight=(2, 2, 3, 4), rank=0), "broadcast"),
        (lambda: cross_entropy(x, (2, 3), rank=0), "without its class dim"),
        (lambda: cross_entropy(x, x.shape, ignore_index=1, rank=0), "holds probabilities"),
        (lambda: cross_entropy(x, (2, 4), label_smoothing=2.0, rank=0), "between 0 and 1"),
        (lambda: cross_entropy(Layout((3,), []), (), rank=0), "add a batch"),
        (lambda: nll_loss(x, x.shape, rank=0), "without its class dim"),
        (lambda: soft_dice(x, (2, 3), rank=0), "without the class dim"),
    ]:
        with pytest.raises(OperatorError, match=text):
            plan()


def run_replicas(mesh: Mesh) -> float:
    """Return the loss; replicas and ranks with nothing at all agree to the last bit."""
    x = Layout((3, 5), [Axis(4, 0), Axis(2)])
    whole, target = numbers(x.shape, 0, torch.float32), numbers(x.shape, 1, torch.float32)
    operation = elementwise_loss(x, x.shape, "huber", rank=mesh.rank)
    slab = x.slab(mesh.rank)
    found = operation.bind(mesh, [x, x], layer="test")(whole[slab], target[slab])
    assert_close(found, F.huber_loss(whole, target), "loss")
    return float(found)


def test_replicas_agree() -> None:
    assert len(set(ranks(8, run_replicas))) == 1
