"""Whatever ranks do with a model, none waits for ever, and all of them learn what went wrong."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import failing_models
from tilewise import Mesh, ParallelModel, capture, parallelize
from tilewise.errors import MismatchError
from tilewise.graph import Graph
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import (
    Dense,
    Small,
    assert_grads,
    assert_state,
    build,
    captured,
    draw,
    split,
)
from worlds import meet

SHAPE = (4, 3, 9, 8)


# -- branches that some ranks do not need ---------------------------------------------------------


class Branches(nn.Module):
    """Three outputs; one branch is detached in the middle, one is frozen by whoever builds it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.main = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.side = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.gate = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.still = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        gate = torch.sigmoid(self.gate(y).detach())
        with torch.no_grad():
            still = self.still(x)
        return self.main(y) * gate, self.side(y) + still, still


def ignore(mesh: Mesh, graph: Graph, plan: str) -> None:
    """The first half of the ranks uses one output, the others another; both have gradients."""
    serial, model = build(Branches), split(mesh, build(Branches), graph, plan)
    for one in (serial, model):
        one.still.requires_grad_(False)
    x = draw(*SHAPE)
    mine = 0 if mesh.rank < mesh.size // 2 else 1
    outputs = model(model.scatter(x))
    outputs[mine].square().sum().backward()
    total = torch.zeros((), dtype=torch.float64)
    for i, output in enumerate(serial(x)[:2]):
        weight = torch.zeros_like(output)
        for rank in range(mesh.size):
            if i == (0 if rank < mesh.size // 2 else 1):
                weight[model.output_layouts[i].slab(rank)] = 1.0
        total = total + (output.square() * weight).sum()
    total.backward()
    assert_grads(model, serial)
    assert_state(model, serial)
    assert model.get_parameter("gate.0.weight").grad is None


@pytest.mark.parametrize("plan", ["n2 h2", "h4", "n4"])
def test_ranks_may_ignore_different_outputs(plan: str) -> None:
    ranks(4, ignore, captured(Branches, SHAPE), plan)


def use_some(mesh: Mesh, graph: Graph, plan: str) -> None:
    """What no rank uses has no gradient, as on one device."""
    for used in (0, 1):
        serial, model = build(Branches), split(mesh, build(Branches), graph, plan)
        x = draw(*SHAPE)
        found, expected = model(model.scatter(x)), serial(x)
        assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
        model.gather(found)[used].square().sum().backward()
        expected[used].square().sum().backward()
        assert_grads(model, serial)
        assert (model.get_parameter("side.0.weight").grad is None) == (used == 0)


@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2", "c4"])
def test_unused_detached_and_frozen_branches(plan: str) -> None:
    ranks(4, use_some, captured(Branches, SHAPE), plan)


class Two(nn.Module):
    """Two inputs; what comes of the first one is moved while the second one is worked on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 1)
        self.b = nn.Conv2d(2, 4, (1, 3), padding=(0, 1))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        moved = self.a(x)
        return self.b(z) + F.max_pool2d(moved, (3, 1), 1, (1, 0))


def ask_for_one(mesh: Mesh, graph: Graph) -> None:
    """Ask for the gradient of an input that the moved tensor does not depend on, then go on."""
    serial, model = build(Two), split(mesh, build(Two), graph, "h2 w2")
    x, z = draw(2, 2, 8, 6), draw(2, 2, 8, 6)
    slabs = model.scatter(x, z)
    for some in (slabs[1], z):
        some.requires_grad_(True)
    for _ in range(2):
        (found,) = torch.autograd.grad(model(*slabs).square().sum(), [slabs[1]])
        (expected,) = torch.autograd.grad(serial(x, z).square().sum(), [z])
        assert_close(found, expected[model.input_layouts[1].slab(mesh.rank)], "dz")
        model(*slabs).square().sum().backward()
        serial(x, z).square().sum().backward()
        assert_grads(model, serial)


def test_gradients_may_be_asked_for_that_a_move_under_way_has_no_part_in() -> None:
    shapes = (torch.zeros(2, 2, 8, 6).double(), torch.zeros(2, 2, 8, 6).double())
    ranks(4, ask_for_one, capture(build(Two), shapes))


HEADS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(8, 6), (4, 8)),
    "conv": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 2, 2), (2, 4, 5, 5)),
}


def tune_biases(mesh: Mesh, name: str) -> None:
    """Train the bias alone, which only one of the ranks along c adds."""
    make, shape = HEADS[name]
    serial = build(make)
    serial.weight.requires_grad_(False)
    model = parallelize(build(make), draw(*shape), f"c{mesh.size}", mesh=mesh)
    model.get_parameter("weight").requires_grad_(False)
    x = draw(*shape)
    for _ in range(2):
        model.gather(model(model.scatter(x))).square().sum().backward()
        serial(x).square().sum().backward()
        assert_grads(model, serial)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_bias_may_be_all_that_is_trained(name: str, count: int) -> None:
    ranks(count, tune_biases, name)


class Single(Branches):
    """Only one output, beside a detached branch that has messages of its own."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)[0]


def one_output(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Single), split(mesh, build(Single), graph, plan)
    x = draw(*SHAPE)
    for _ in range(2):
        model.gather(model(model.scatter(x))).square().sum().backward()
        serial(x).square().sum().backward()
        assert_grads(model, serial)
    assert model.get_parameter("gate.0.weight").grad is None
    y = model(model.scatter(x))
    y.mul_(2.0)  # the only output may be changed in place
    model.gather(y).sum().backward()


@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2", "f4"])
def test_parameters_behind_a_detach_have_no_gradient(plan: str) -> None:
    ranks(4, one_output, captured(Single, SHAPE), plan)


def empty(mesh: Mesh, graph: Graph, plan: str) -> None:
    """Fewer rows and samples than ranks: some have nothing to compute and nothing to lose."""
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    x = draw(1, 3, 3, 3)
    there = model.at(tuple(x.shape))
    slab = there.scatter(x).requires_grad_()
    x.requires_grad_()
    found = there(slab)
    expected = serial(x)
    assert_close(there.gather(found), expected, "output")
    there.gather(found).square().sum().backward()
    expected.square().sum().backward()
    assert_grads(model, serial)
    assert slab.grad is not None
    assert x.grad is not None
    assert_close(slab.grad, x.grad[there.input_layouts[0].slab(mesh.rank)], "input gradient")
    loss = F.mse_loss(found.detach().requires_grad_(), torch.zeros_like(found))
    loss.backward()


@pytest.mark.parametrize("plan", ["h8", "n2 h4", "n8", "w4 f2"])
def test_ranks_without_a_slab_take_part(plan: str) -> None:
    ranks(8, empty, captured(Small, SHAPE), plan)


# -- ranks that disagree --------------------------------------------------------------------------


def slab_of_another_shape(model: ParallelModel, x: Tensor) -> Tensor:
    return model(x[:, :, :3] if model.mesh.rank == 1 else model.scatter(x))


def another_dtype(model: ParallelModel, x: Tensor) -> Tensor:
    return model(model.scatter(x).float() if model.mesh.rank == 1 else model.scatter(x))


def another_batch(model: ParallelModel, x: Tensor) -> Tensor:
    batch = 3 if model.mesh.rank == 1 else 4
    return model(model.scatter(x[:batch], batch=batch), batch=batch)


def another_mode(model: ParallelModel, x: Tensor) -> Tensor:
    model.train(model.mesh.rank != 1)
    return model(model.scatter(x))


def one_module_in_eval(model: ParallelModel, x: Tensor) -> Tensor:
    model.norm.train(model.mesh.rank != 1)
    return model(model.scatter(x))


def frozen_on_one(model: ParallelModel, x: Tensor) -> Tensor:
    model.norm.requires_grad_(model.mesh.rank != 1)
    return model(model.scatter(x))


def input_gradient_on_one(model: ParallelModel, x: Tensor) -> Tensor:
    return model(model.scatter(x).requires_grad_(model.mesh.rank == 1))


def no_gradients_on_one(model: ParallelModel, x: Tensor) -> Tensor:
    with torch.no_grad() if model.mesh.rank == 1 else nullcontext():
        return model(model.scatter(x))


def no_sync_on_one(model: ParallelModel, x: Tensor) -> Tensor:
    with model.no_sync() if model.mesh.rank == 1 else nullcontext():
        return model(model.scatter(x))


def autocast_on_one(model: ParallelModel, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=model.mesh.rank == 1):
        return model(model.scatter(x))


DISAGREE = {
    slab_of_another_shape: "do not fit, this rank holds [(4, 2, 4, 6)] of the global",
    another_dtype: "torch.float32",
    another_batch: "(3, 2, 7, 6)",
    another_mode: "'training': False",
    one_module_in_eval: "'but for': ['norm']",
    frozen_on_one: "'frozen': ['norm.weight', 'norm.bias']",
    input_gradient_on_one: "'inputs with gradients': [0]",
    no_gradients_on_one: "'gradients': False",
    no_sync_on_one: "'no_sync': True",
    autocast_on_one: "'autocast': 'torch.bfloat16'",
}


def disagree(mesh: Mesh, graph: Graph) -> dict[str, str]:
    model = split(mesh, build(Dense), graph, "h2")
    x = draw(4, 2, 7, 6)
    said = {}
    for scenario in DISAGREE:
        with mesh.trace.record() as events, pytest.raises(MismatchError) as caught:
            scenario(model, x)
        assert not events
        said[scenario.__name__] = str(caught.value)
        model.train().requires_grad_(True)
    # all ranks go on together afterwards
    serial = build(Dense)
    model.mean(model(model.scatter(x)).square()).backward()
    serial(x).square().mean().backward()
    assert_grads(model, serial)
    return said


def test_disagreement_is_the_same_error_on_all_ranks_before_any_message() -> None:
    first, second = ranks(2, disagree, captured(Dense, (4, 2, 7, 6)))
    assert first == second
    for scenario, text in DISAGREE.items():
        assert text in first[scenario.__name__], first[scenario.__name__]
        assert "rank 1" in first[scenario.__name__]


def other_plans(mesh: Mesh, graph: Graph) -> str:
    with pytest.raises(MismatchError) as caught:
        split(mesh, build(Dense), graph, "h2" if mesh.rank else "w2")
    return str(caught.value)


def test_plans_must_be_the_same_on_all_ranks() -> None:
    first, second = ranks(2, other_plans, captured(Dense, (4, 2, 7, 6)))
    assert first == second
    assert "parallelize: ranks disagree" in first


# -- ranks that fail ------------------------------------------------------------------------------

FAILURES = {
    "forward": "no answer from rank 1",
    "backward": "no answer from rank 1",
    "recomputed_backward": "no answer from rank 1",
    "no_forward": "agree of forward: no answer from rank 1",
    "no_backward": "no answer from rank 1",
    "death": "no answer from rank 1",
}


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    scenarios = [getattr(failing_models, name) for name in FAILURES]
    return meet(scenarios, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("failure", FAILURES)
def test_an_exception_on_one_rank_is_an_error_on_the_others(
    failure: str, met: dict[str, str]
) -> None:
    text = met[failure]
    assert text.startswith("CommError"), text
    assert FAILURES[failure] in text
