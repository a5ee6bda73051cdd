"""Any batch and shape at run time, and every mode: train, eval, no_grad, inference, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise import Mesh, Plan
from tilewise.errors import MismatchError, PlanError
from tilewise.graph import Graph
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close, error
from twins import (
    Small,
    assert_grads,
    assert_state,
    build,
    captured,
    classes,
    draw,
    split,
    whole_grads,
)

SHAPE = (4, 3, 9, 8)


def graph() -> Graph:
    return captured(Small, SHAPE, F.cross_entropy)


# -- shapes ---------------------------------------------------------------------------------------


def vary_batch(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    for batch in (7, 4, 2, 1):
        x, t = draw(batch, *SHAPE[1:], seed=batch), classes(5, batch)
        slab, target = model.scatter(x, t, batch=batch)
        expected = F.cross_entropy(serial(x), t)
        found = model.loss(slab, target, batch=batch)
        assert_close(found, expected, f"loss of {batch}")
        expected.backward()
        found.backward()
        assert_grads(model, serial)
        with torch.no_grad():
            assert_close(
                model.gather(model(slab, batch=batch), batch=batch), serial(x), f"output of {batch}"
            )
    assert_state(model, serial)


@pytest.mark.parametrize("plan", ["n4", "n2 h2", "n2 f2"])
def test_any_batch_even_one_smaller_than_the_sample_degree(plan: str) -> None:
    ranks(4, vary_batch, graph(), plan)


def vary_shape(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    for shape in ((2, 3, 6, 5), (3, 3, 3, 17)):
        x, t = draw(*shape), classes(5, shape[0])
        for there in (model.at(shape), model.at(shape, (shape[0],))):
            slab, target = there.scatter(x, t)
            assert slab.shape == there.input_layouts[0].local_shape(mesh.rank)
            assert there.input_layouts[1].shape == (shape[0],)
            assert there.output_layouts[0].shape == (shape[0], 5)
            expected = F.cross_entropy(serial(x), t)
            found = there.loss(slab, target)
            assert_close(found, expected, f"loss at {shape}")
            expected.backward()
            found.backward()
            assert_close(there.gather(there(there.scatter(x))), serial(x), f"output at {shape}")
    assert_grads(model, serial)
    assert_state(model, serial)
    with pytest.raises(PlanError, match="fewer shapes than the 1 inputs"):
        model.at()
    with pytest.raises(PlanError, match="3 shapes for 1 inputs and 1 targets"):
        model.at((1, 3, 9, 9), (1,), (2,))


@pytest.mark.parametrize("plan", ["h2 w2", "h2 f2"])
def test_any_other_shape_with_the_same_parameters(plan: str) -> None:
    ranks(4, vary_shape, graph(), plan)


# -- modes ----------------------------------------------------------------------------------------


class Dropping(Small):
    def __init__(self) -> None:
        super().__init__(dropout=0.4)


def switch_modes(mesh: Mesh, graph: Graph, plan: str) -> None:
    """Compare with the same graph on one rank, which draws the same numbers."""
    serial = split(Mesh.alone(), build(Dropping), graph, "1")
    model = split(mesh, build(Dropping), graph, plan)
    x = draw(*SHAPE)
    seen = []
    for step in range(6):
        for one in (serial, model):
            one.train(step not in (2, 3))
            if step >= 4:
                one.norm.eval()
        expected, found = serial(x), model.gather(model(model.scatter(x)))
        assert_close(found, expected, f"output {step}")
        seen.append(expected.detach())
        for one in (expected, found):
            one.square().sum().backward()
        assert_grads(model, serial)  # type: ignore[arg-type]
    assert_state(model, serial)
    assert torch.equal(seen[2], seen[3])
    assert not torch.allclose(seen[0], seen[1])
    assert not torch.allclose(seen[4], seen[5])


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_modes_may_change_between_passes_and_differ_between_modules(plan: str) -> None:
    ranks(4, switch_modes, captured(Dropping, SHAPE), plan)


def one_frozen_norm(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    x = draw(*SHAPE)
    for one in (serial, model):
        one.train()
        one.norm.eval()
    for _ in range(2):
        expected, found = serial(x), model.gather(model(model.scatter(x)))
        assert_close(found, expected, "output")
        found.square().sum().backward()
        expected.square().sum().backward()
    assert_grads(model, serial)
    assert_state(model, serial)
    assert model.norm.num_batches_tracked == 0
    assert model.stem[1].num_batches_tracked == 2


@pytest.mark.parametrize("plan", ["n2 h2", "f2"])
def test_a_frozen_norm_keeps_its_statistics_while_the_rest_trains(plan: str) -> None:
    ranks(4, one_frozen_norm, graph(), plan)


class Guarded(Small):
    """Small, of which one layer never learns."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.stem(x)
        x = F.relu(self.down(self.norm(self.conv(x))))
        out: Tensor = self.head(F.interpolate(x, scale_factor=2.0, mode="bilinear").mean((2, 3)))
        return out


def without_gradients(mesh: Mesh, graph: Graph, plan: str) -> None:
    """The first pass of a shape must not leave its modes to later ones."""
    serial, model = build(Guarded), split(mesh, build(Guarded), graph, plan)
    for size, mode in ((5, torch.no_grad), (6, torch.inference_mode)):
        x = draw(size, *SHAPE[1:])
        for training in (False, True):
            serial.train(training)
            model.train(training)
            with mode():
                expected = serial(x)
                y = model(model.scatter(x, batch=size), batch=size)
                assert not y.requires_grad
                found = model.gather(y, batch=size)
            assert_close(found, expected, f"output under {mode.__name__}")
            slab = model.scatter(x, batch=size)
            found, expected = model.gather(model(slab, batch=size), batch=size), serial(x)
            assert_close(found, expected, f"output after {mode.__name__}")
            found.square().sum().backward()
            expected.square().sum().backward()
            assert_grads(model, serial)
    assert_state(model, serial)


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_no_grad_and_inference_mode(plan: str) -> None:
    ranks(4, without_gradients, captured(Guarded, SHAPE), plan)


class Shared(nn.Module):
    """One batch norm for two layers that are split differently, and one with momentum None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.mean = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)))
        out: Tensor = self.mean(self.norm(F.relu(self.second(x))))
        return out


def share_a_norm(mesh: Mesh, graph: Graph, recompute: tuple[str, ...]) -> None:
    names = {layer.name: layer for layer in graph.layers if layer.extents}
    wanted = {name: "n4 c2" if name in ("first", "#relu", "norm") else "h2 c2" for name in names}
    plan = Plan.of(graph, wanted, recompute=recompute)
    serial, model = build(Shared), split(mesh, build(Shared), graph, plan)
    assert model.cover("norm.running_mean").local_shape(mesh.rank) == (4,)
    for step in range(3):
        x = draw(4, 3, 6, 5, seed=step)
        found, expected = model.gather(model(model.scatter(x))), serial(x)
        assert_close(found, expected, "output")
        found.square().sum().backward()
        expected.square().sum().backward()
        assert_grads(model, serial)
        assert_state(model, serial)
    x = draw(4, 3, 6, 5)
    assert_close(model.eval().gather(model(model.scatter(x))), serial.eval()(x), "evaluation")


@pytest.mark.parametrize("recompute", [(), ("*",)])
def test_a_norm_shared_by_layers_of_different_splits_keeps_its_statistics(
    recompute: tuple[str, ...],
) -> None:
    ranks(8, share_a_norm, captured(Shared, (4, 3, 6, 5)), recompute)


# -- autocast -------------------------------------------------------------------------------------


VOLUME = (2, 2, 6, 6, 8)


class Mixed(nn.Module):
    """What autocast treats in different ways: products, norms, 3-D averages, transposed layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm3d(6)
        self.last = nn.Conv3d(6, 4, 3, padding=1)
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool3d(F.relu(self.norm(self.first(x))), 2)
        x = self.up(F.relu(self.last(x)))
        half = [extent // 2 for extent in x.shape[2:]]
        x = F.max_pool3d(x, 2) * F.interpolate(F.avg_pool3d(x, 4), size=half)
        out: Tensor = self.head(x.mean((2, 3, 4)))
        return out


class Kinds(torch.overrides.TorchFunctionMode):
    """Note the dtype of what convolutions and linear layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, torch.dtype]] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "conv" in getattr(func, "__name__", "") or func is F.linear:
            self.seen.add((func.__name__, out.dtype))
        return out


def cast(mesh: Mesh, graph: Graph, plan: str, recompute: tuple[str, ...]) -> set[str]:
    """Autocast costs as much precision as it does on one device, and no more."""
    exact, serial = build(Mixed, torch.float32), build(Mixed, torch.float32)
    uniform = Plan.uniform(graph, plan, recompute=recompute)
    whole = split(mesh, build(Mixed, torch.float32), graph, uniform)
    model = whole.at(VOLUME)
    x = draw(*VOLUME, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, slab = serial(x), model.scatter(x)
        with Kinds() as kinds:
            found = model.gather(model(slab))
    program = whole.runs.find(model.examples).planned.program
    assert {value.dtype for node in program.nodes for value in node.outs} <= {
        torch.float32,
        torch.int64,
    }
    assert {dtype for _, dtype in kinds.seen} == {torch.bfloat16}
    assert found.dtype == rough.dtype
    fine = exact(x)
    assert_close(found, fine, "output", tolerance=2 * error(rough, fine) + 1e-2)
    for output in (fine, rough, found):
        output.float().square().sum().backward()
    grads = whole_grads(whole)
    largest = max(p.grad.abs().max().item() for p in exact.parameters())  # type: ignore[union-attr]
    for name, parameter in exact.named_parameters():
        expected, found, rough = parameter.grad, grads[name], serial.get_parameter(name).grad
        assert expected is not None
        assert found is not None
        assert rough is not None
        assert found.dtype == torch.float32
        limit = 1.5 * error(rough, expected, largest) + 2e-2
        assert_close(found, expected, name, largest=largest, tolerance=limit)
    # without autocast the same model is exact
    assert_close(model.gather(model(model.scatter(x))).detach(), exact(x), "float32")
    return {name for name, _ in kinds.seen}


@pytest.mark.parametrize("plan", ["n2 d2", "c2 f2", "w2 f2"])
def test_autocast_to_bfloat16(plan: str) -> None:
    for called in ranks(4, cast, captured(Mixed, VOLUME, None, torch.float32), plan, ()):
        assert called >= {"convolution", "conv_transpose3d", "linear"}


@pytest.mark.parametrize("recompute", [(), ("*",)])
def test_autocast_with_empty_slabs(recompute: tuple[str, ...]) -> None:
    """Ranks without a slab bring the dtype that their peers bring."""
    ranks(8, cast, captured(Mixed, (2, 2, 32, 6, 8), None, torch.float32), "d8", recompute)


def convert_some(mesh: Mesh, graph: Graph) -> None:
    x = draw(*SHAPE, dtype=torch.float32)
    serial, model = (build(Normed, torch.float32) for _ in range(2))
    model = split(mesh, model, graph, "n2")
    for _ in range(2):
        for one in (serial, model):
            one.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = one(x) if one is serial else model.gather(model(model.scatter(x)))
            y.float().square().mean().backward()
        # bfloat16 has 8 bits; a sum left out is off by half
        assert_grads(model, serial, tolerance=0.1)
        for one in (serial, model):
            one.conv.bfloat16()  # the norm stays as it is


class Normed(nn.Module):
    """A layer that is converted, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(self.norm(x))
        return out


def test_parameters_are_converted_one_by_one_between_passes() -> None:
    ranks(2, convert_some, captured(Normed, SHAPE, dtype=torch.float32))


class Flat(nn.Module):
    """Rows that are flattened with their columns: cut where they are even, else whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x).flatten(1)
        return out


def average(mesh: Mesh, graph: Graph) -> None:
    serial, model = build(Flat), split(mesh, build(Flat), graph, "h2")
    for rows in (6, 7, 8, 3):
        x = draw(1, 3, rows, 6)
        there = model.at(tuple(x.shape))
        y = there(there.scatter(x))
        found, expected = there.mean(y.square()), serial(x).square().mean()
        assert_close(found, expected, "mean")
        found.backward()
        expected.backward()
        assert_grads(model, serial)
        wrong = {6: None, 7: "are not cut as", 8: "are not cut as", 3: "which are cut differently"}
        if wrong[rows] is None:
            model.mean(y.square())
            continue
        with pytest.raises(MismatchError, match=wrong[rows]):
            model.mean(y.square())
    x = draw(3, 3, 6, 6)
    found = model.mean(model(model.scatter(x, batch=3), batch=3).square(), batch=3)
    expected = serial(x).square().mean()
    assert_close(found, expected, "mean")
    found.backward()
    expected.backward()
    assert_grads(model, serial)


def test_means_are_of_the_shape_that_ran() -> None:
    ranks(2, average, captured(Flat, (1, 3, 6, 6)))
