"""State dicts and checkpoints: saved under one plan and world size, loaded under another."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise import Mesh, ParallelModel
from tilewise.errors import PlanError
from tilewise.graph import Block, Graph
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import Small, assert_state, build, captured, classes, draw, split

SHAPE = (4, 3, 9, 8)


class Dropping(Small):
    """Small, whose strided layer has 10 filters, with dropout."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3)


def graph() -> Graph:
    return captured(Dropping, SHAPE, F.cross_entropy)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, betas=(0.8, 0.95)),
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.5, weight_decay=0.1),
}


def train(model: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, t = draw(*SHAPE, seed=step), classes(5, 4, seed=step)
        optimizer.zero_grad()
        loss = model.loss(*model.scatter(x, t))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def states(model: ParallelModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": tw.optimizer_state_dict(model, optimizer)}


def start(mesh: Mesh, graph: Graph, plan: str, kind: str) -> tuple[ParallelModel, Any]:
    model = split(mesh, build(Dropping), graph, plan)
    return model, OPTIMIZERS[kind](model.parameters())


def group(mesh: Mesh) -> dict[str, Any]:
    return {"process_group": mesh.group().handle} if mesh.size > 1 else {"no_dist": True}


def save(mesh: Mesh, graph: Graph, plan: str, kind: str, path: Path, steps: range) -> list[float]:
    model, optimizer = start(mesh, graph, plan, kind)
    losses = train(model, optimizer, steps)
    dcp.save(states(model, optimizer), checkpoint_id=path, **group(mesh))
    return losses


def load(mesh: Mesh, graph: Graph, plan: str, kind: str, path: Path, steps: range) -> list[float]:
    """Load into a model and an optimizer that are elsewhere by now, and go on."""
    torch.manual_seed(11)
    model = split(mesh, Dropping().double(), graph, plan)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for group_ in optimizer.param_groups:
        group_["lr"] = 0.5
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=path, **group(mesh))
    model.load_state_dict(state["model"])
    tw.load_optimizer_state_dict(model, optimizer, state["optimizer"])
    return train(model, optimizer, steps)


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_training_goes_on_under_other_plans_as_if_never_interrupted(
    kind: str, tmp_path: Path
) -> None:
    """10 filters over f4, then over f3, then on one device."""
    whole = ranks(1, save, graph(), "1", kind, tmp_path / "unused", range(6))[0]
    found = ranks(4, save, graph(), "f4", kind, tmp_path / "a", range(2))[0]
    path = tmp_path / "a"
    found += ranks(3, load, graph(), "f3", kind, path, range(2, 4))[0]
    assert found == pytest.approx(whole[:4], rel=1e-9)
    for world, plan in ((1, "1"), (4, "c2 f2"), (4, "n2 h2"), (6, "h2 f3")):
        again = ranks(world, load, graph(), plan, kind, path, range(2, 6))[0]
        assert again == pytest.approx(whole[2:], rel=1e-9), plan


def load_plain(mesh: Mesh, path: Path) -> dict[str, Tensor]:
    """Read a checkpoint without tilewise."""
    plain = Dropping().double()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    plain.load_state_dict(state["model"])
    return plain.state_dict()


def whole_state(mesh: Mesh, graph: Graph, plan: str, kind: str) -> dict[str, Tensor]:
    model, optimizer = start(mesh, graph, plan, kind)
    train(model, optimizer, range(2))
    return tw.full_state_dict(model)


def test_a_plain_model_loads_the_checkpoint(tmp_path: Path) -> None:
    ranks(4, save, graph(), "f4", "AdamW", tmp_path, range(2))
    expected = ranks(4, whole_state, graph(), "f4", "AdamW")
    found = ranks(1, load_plain, tmp_path)[0]
    for name, tensor in expected[3].items():
        assert torch.equal(found[name], tensor), name
        assert torch.equal(expected[0][name], tensor), name


def refuse(mesh: Mesh, graph: Graph, path: Path) -> None:
    class Wider(Small):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(6, 12, 3, stride=2)
            self.head = nn.Linear(12, 5)

    model = tw.parallelize(Wider().double(), draw(*SHAPE), "f2", mesh=mesh)
    with pytest.raises(dcp.api.CheckpointException, match="down"):
        dcp.load({"model": model.state_dict()}, checkpoint_id=path, **group(mesh))


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path: Path) -> None:
    ranks(2, save, graph(), "f2", "AdamW", tmp_path, range(1))
    torch.manual_seed(0)
    ranks(2, refuse, graph(), tmp_path)


# -- fresh and partly known optimizers ------------------------------------------------------------


class Idle(nn.Module):
    """One of its layers gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x).mean((2, 3))
        return out


def idle(mesh: Mesh, graph: Graph, kind: str) -> None:
    """State that was not there before is not there after, and old state is replaced."""
    model = split(mesh, build(Idle), graph, "f2")
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    fresh = copy.deepcopy(tw.optimizer_state_dict(model, optimizer))
    assert not optimizer.state
    before = {name: p.clone() for name, p in model.named_parameters()}
    for _ in range(2):
        model(model.scatter(draw(*SHAPE))).square().sum().backward()
        optimizer.step()
        schedule.step()
    after = copy.deepcopy(tw.optimizer_state_dict(model, optimizer))
    assert list(after) == list(fresh)
    key = next(key for key in after if key.startswith("state.used.weight.") and "step" not in key)
    assert isinstance(after[key], Block)
    assert after[key].shape == (4, 3, 3, 3)
    rate = optimizer.param_groups[0]["lr"]
    tw.load_optimizer_state_dict(model, optimizer, fresh)
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == rate * 4
    tw.load_optimizer_state_dict(model, optimizer, after)
    assert set(optimizer.state) == {model.used.weight, model.used.bias}
    assert optimizer.param_groups[0]["lr"] == rate
    assert isinstance(optimizer.param_groups[0].get("betas", ()), tuple)
    assert torch.equal(before["idle.weight"], model.idle.weight)
    with pytest.raises(PlanError, match="was it saved from another optimizer"):
        tw.load_optimizer_state_dict(model, torch.optim.RMSprop(model.parameters()), after)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    with pytest.raises(PlanError, match="is not the model's"):
        tw.optimizer_state_dict(model, stranger)


@pytest.mark.parametrize("kind", [*OPTIMIZERS])
def test_optimizer_state_is_as_complete_as_it_was(kind: str) -> None:
    ranks(2, idle, captured(Idle, SHAPE), kind)


def unsavable(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Idle), graph, "n2")
    with pytest.raises(PlanError, match="LBFGS: its state cannot be saved by parameter"):
        tw.optimizer_state_dict(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_whose_state_is_not_by_parameter_says_so() -> None:
    ranks(2, unsavable, captured(Idle, SHAPE))


def regroup(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Idle), graph, "n2")
    first, *rest = model.parameters()
    two = torch.optim.Adam([{"params": [first], "lr": 0.5}, {"params": rest}])
    one = torch.optim.Adam(model.parameters(), 0.3)
    for saved, loading in ((two, one), (one, two)):
        with pytest.raises(PlanError, match="parameter groups were saved, the Adam has"):
            tw.load_optimizer_state_dict(model, loading, tw.optimizer_state_dict(model, saved))
    assert one.param_groups[0]["lr"] == 0.3


def test_another_number_of_parameter_groups_is_refused() -> None:
    ranks(2, regroup, captured(Idle, SHAPE))


# -- full state dicts -----------------------------------------------------------------------------


class Tied(nn.Module):
    """Two names for one weight, a buffer that is not saved, and one that nothing cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm2d(4)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("secret", torch.tensor(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.first(x)) * self.scale * self.secret)
        out: Tensor = self.second(x)
        return out


def handle(mesh: Mesh, graph: Graph) -> None:
    """A block can be kept, moved and copied, but not computed with."""
    model = split(mesh, build(Tied), graph, "f2")
    found = model.state_dict()["first.weight"]
    assert isinstance(found, Block)
    assert found.shape == (4, 4, 3, 3)
    for kept in (
        copy.deepcopy(found),
        pickle.loads(pickle.dumps(found)),
        found.detach().clone(),
        found.to(torch.float32).double(),
    ):
        assert isinstance(kept, Block)
        assert kept.local.data_ptr() != found.local.data_ptr()
        assert torch.allclose(kept.local, model.first.weight)
    with pytest.raises(PlanError, match="only for saving and loading; use full_state_dict"):
        found + 1
    assert repr(found) == f"Block((2, 4, 3, 3) of (4, 4, 3, 3) on rank {mesh.rank})"


def test_blocks_are_kept_moved_and_copied() -> None:
    ranks(2, handle, captured(Tied, (4, 4, 7, 6)))


def full(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Tied), split(mesh, build(Tied), graph, plan)
    x = draw(4, 4, 7, 6)
    optimizers = [torch.optim.SGD(one.parameters(), 0.01) for one in (serial, model)]
    for _ in range(2):
        serial(x).square().mean().backward()
        model.mean(model(model.scatter(x)).square()).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert_state(model, serial)
    saved, theirs = tw.full_state_dict(model), serial.state_dict()
    assert list(saved) == list(theirs)
    assert type(saved) is type(theirs)
    assert saved._metadata.keys() == theirs._metadata.keys()  # type: ignore[attr-defined]
    assert saved["first.weight"] is saved["second.weight"] or torch.equal(
        saved["first.weight"], saved["second.weight"]
    )
    fresh = Tied().double()
    fresh.load_state_dict(saved)
    assert_close(fresh.eval()(x), serial.eval()(x), "loaded on one device")

    torch.manual_seed(1)
    other = split(mesh, Tied().double(), graph, plan)
    missing = other.load_state_dict(theirs)
    assert not missing.missing_keys
    assert not missing.unexpected_keys
    assert_state(other, serial)
    assert other.first.weight is other.second.weight
    assert_close(other.eval().gather(other(other.scatter(x))), serial(x), "loaded on the plan")
    other.load_state_dict(model.state_dict())  # blocks of the same plan

    nested = nn.ModuleDict({"net": other, "more": nn.Linear(2, 2)})
    state = nested.state_dict()
    assert isinstance(state["net.first.weight"], Block) == model.held.is_cut("first.weight")
    assert isinstance(state["more.weight"], Tensor)
    nested.load_state_dict(state)
    nested.load_state_dict(
        {f"net.{name}": tensor for name, tensor in theirs.items()}
        | {name: tensor for name, tensor in state.items() if name.startswith("more")}
    )
    assert_state(other, serial)

    if model.held.is_cut("first.weight"):
        with pytest.raises(PlanError, match=r"has shape \(5, 4, 3, 3\), the model's has"):
            other.load_state_dict(theirs | {"first.weight": torch.zeros(5, 4, 3, 3)})
        elsewhere = split(mesh, build(Tied), graph, "n2")
        with pytest.raises(PlanError, match="a block of another plan"):
            elsewhere.load_state_dict(model.state_dict())
        optimizer = torch.optim.LBFGS(other.parameters())
        other.load_state_dict(theirs, assign=True)
        optimizer = torch.optim.LBFGS(other.parameters())
        with pytest.raises(PlanError, match="LBFGS: cannot step"):
            optimizer.step(lambda: 0.0)


@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2", "c2 f2"])
def test_full_state_dicts_are_one_devices_and_load(plan: str) -> None:
    ranks(4, full, captured(Tied, (4, 4, 7, 6)), plan)
