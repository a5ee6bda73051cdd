"""What a parallel model is to its user: names, blocks, values, structures, layouts, subgroups."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tilewise import Mesh
from tilewise.errors import MismatchError, PlanError
from tilewise.graph import Graph
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import Dense, Small, assert_grads, assert_state, build, captured, draw, split

SHAPE = (4, 3, 9, 8)


# -- names, blocks, values ------------------------------------------------------------------------


def keep_names(mesh: Mesh, graph: Graph, plan: str) -> dict[str, tuple[int, ...]]:
    plain = build(Small)
    model = split(mesh, plain, graph, plan)
    for method in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(model, method)()), dict(getattr(plain, method)())
        assert list(mine) == list(theirs)
        for name, tensor in theirs.items():
            assert type(mine[name]) is type(tensor)
            assert mine[name].shape == model.cover(name).local_shape(mesh.rank)
            assert mine[name].untyped_storage().nbytes() == mine[name].nbytes
    children = dict(model.named_modules())
    assert {name: type(m) for name, m in children.items() if name} == {
        name: type(m) for name, m in plain.named_modules() if name
    }
    assert list(model.state_dict()) == list(plain.state_dict())
    assert_state(model, plain, tolerance=1e-300)
    assert model.down is children["down"]
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2", "f4"])
def test_names_classes_and_values_are_the_models(plan: str) -> None:
    found = ranks(4, keep_names, captured(Small, SHAPE), plan)
    if plan == "f4":
        filters = [shapes["down.weight"][0] for shapes in found]
        assert filters == [2, 3, 2, 3]
        assert all(shapes["down.weight"][1:] == (6, 3, 3) for shapes in found)
    if plan == "n2 h2":
        assert all(shapes["down.weight"] == (10, 6, 3, 3) for shapes in found)


class Taken(nn.Module):
    """Its modules and parameters have the names of a parallel model's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.Conv2d(3, 4, 3, padding=1)
        self.mean = nn.BatchNorm2d(4)
        self.plan = nn.Sequential(nn.Conv2d(4, 2, 1))
        self.held = nn.Parameter(torch.randn(2, 1, 1))
        self.register_buffer("mesh", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.plan(F.relu(self.mean(self.loss(x)))) * self.held * self.mesh
        return out


def take_names(mesh: Mesh, graph: Graph) -> None:
    serial = build(Taken)
    model = split(mesh, build(Taken), graph, "h2 f2")
    x = draw(*SHAPE)
    found, expected = model.gather(model(model.scatter(x))), serial(x)
    assert_close(found, expected, "output")
    found.square().sum().backward()
    expected.square().sum().backward()
    assert_grads(model, serial)
    assert_state(model, serial)
    model.load_state_dict(build(Taken).state_dict())
    assert_state(model, build(Taken))
    assert set(dict(model.named_modules())) == set(dict(serial.named_modules()))


def test_modules_may_have_the_names_of_our_methods() -> None:
    ranks(4, take_names, captured(Taken, SHAPE))


def differ(mesh: Mesh, graph: Graph) -> str:
    torch.manual_seed(mesh.rank)
    with pytest.raises(MismatchError) as caught:
        split(mesh, Small().double(), graph, "n2")
    return str(caught.value)


def test_models_with_other_values_on_some_rank_are_refused() -> None:
    found = ranks(2, differ, captured(Small, SHAPE))
    assert found[0] == found[1]
    assert "the model must have the same values on every rank; seed all ranks alike" in found[0]


# -- built on the meta device ---------------------------------------------------------------------


class Scaled(nn.Module):
    """Small with a parameter of its own, tied convolutions, and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.again = self.second
        self.gain = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(self.again(self.second(self.first(x))) * self.gain)
        return out


def initialise(module: nn.Module) -> None:
    if isinstance(module, Scaled):
        nn.init.normal_(module.gain)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


class Largest(TorchDispatchMode):
    """Note the most bytes that a call returned."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return out


class Constant(nn.Module):
    """A parameter without values beside tensors that have some, one of them cut by c and f."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.conv.weight = nn.Parameter(torch.ones(4, 3, 3, 3, device="cpu"))
        self.gain = nn.Parameter(torch.empty(4))
        self.register_buffer("scale", torch.full((4,), 0.5, device="cpu"))

    def reset_parameters(self) -> None:
        self.gain.data.copy_(self.scale).mul_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) * (self.gain * self.scale).view(1, -1, 1, 1)
        return out


def build_rest(mesh: Mesh, plan: str) -> None:
    with torch.device("meta"):
        empty = Constant()
    model = tw.parallelize(empty, torch.empty(SHAPE, device="meta"), plan, mesh=mesh)
    found = tw.full_state_dict(model.materialize(seed=5))
    assert (found["conv.weight"] == 1.0).all()
    assert (found["scale"] == 0.5).all()
    assert (found["gain"] == 1.5).all()
    torch.manual_seed(5)
    assert torch.equal(found["conv.bias"], nn.Conv2d(3, 4, 3).bias)


@pytest.mark.parametrize("plan", ["n2", "f2", "c2"])
def test_tensors_that_have_values_keep_them(plan: str) -> None:
    ranks(2, build_rest, plan)


def build_late(mesh: Mesh, plan: str) -> None:
    with torch.device("meta"):
        empty = Scaled()
    model = tw.parallelize(empty, torch.empty(SHAPE, device="meta"), plan, mesh=mesh)
    slab = model.scatter(draw(*SHAPE, dtype=torch.float32))
    with pytest.raises(MismatchError, match="has no values yet; call materialize"):
        model(slab)
    with pytest.raises(PlanError, match="gain belongs to a Scaled, which has no reset_parameters"):
        model.materialize()
    state = torch.get_rng_state()
    with Largest() as largest:
        assert model.materialize(initialise, seed=5) is model
    assert torch.equal(torch.get_rng_state(), state)
    assert largest.bytes == 10 * 6 * 9 * 4  # the largest tensor of the largest module

    serial = Scaled()
    torch.manual_seed(5)
    serial.apply(initialise)
    assert_state(model, serial, tolerance=1e-300)
    assert model.first.weight is model.second.weight
    assert_close(model.gather(model(slab)), serial(draw(*SHAPE, dtype=torch.float32)), "output")


@pytest.mark.parametrize("plan", ["n2", "f2"])
def test_a_model_from_the_meta_device_gets_its_values_after_the_split(plan: str) -> None:
    ranks(2, build_late, plan)


# -- inputs, outputs, layouts ---------------------------------------------------------------------


class Pair(NamedTuple):
    logits: Tensor
    maps: Tensor


class Structured(nn.Module):
    """Two inputs, one of them in a dict; outputs of every structure."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 4, 3, padding=1)
        self.extra = nn.Conv2d(2, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Any:
        y = F.relu(self.image(x) + self.extra(more["extra"]))
        logits = self.head(y.mean((2, 3)))
        return {"pair": Pair(logits, y), "list": [y.amax((2, 3)), (logits * 2,)], "none": None}


def structures(mesh: Mesh, plan: str) -> None:
    serial = build(Structured)
    x, more = draw(*SHAPE), {"extra": draw(4, 2, 9, 8, seed=4)}
    model = tw.parallelize(build(Structured), (x, more), plan, mesh=mesh)
    slabs = model.scatter(x, more)
    assert isinstance(slabs, tuple)
    assert [tuple(t.shape) for t in (slabs[0], slabs[1]["extra"])] == [
        layout.local_shape(mesh.rank) for layout in model.input_layouts
    ]
    out = model(*slabs)
    assert isinstance(out["pair"], Pair)
    assert isinstance(out["list"][1], tuple)
    assert out["none"] is None
    assert out["pair"].maps.shape == model.output_layouts[1].local_shape(mesh.rank)
    found, expected = model.gather(out), serial(x, more)
    assert_close(found["pair"].logits, expected["pair"].logits, "logits")
    assert_close(found["pair"].maps, expected["pair"].maps, "maps")
    assert_close(found["list"][0], expected["list"][0], "maxima")
    assert_close(found["list"][1][0], expected["list"][1][0], "twice the logits")
    for one in (found, expected):
        (one["pair"].maps.square().sum() + one["list"][1][0].sum()).backward()
    assert_grads(model, serial)


@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2"])
def test_inputs_and_outputs_keep_their_structure(plan: str) -> None:
    ranks(4, structures, plan)


def describe(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Dense), graph, "n2 h2")
    (inputs,), (outputs,) = model.input_layouts, model.output_layouts
    assert (inputs.shape, inputs.degrees) == ((4, 2, 7, 6), (2, 1, 2, 1))
    assert (outputs.shape, outputs.degrees) == ((4, 3, 7, 6), (2, 1, 2, 1))
    assert str(model.plan.layers["first"]) == "n2 h2"
    x = draw(4, 2, 7, 6)
    assert torch.equal(model.scatter(x), x[inputs.slab(mesh.rank)])
    assert isinstance(model.gather(model(model.scatter(x))), Tensor)
    with pytest.raises(PlanError, match="not the global inputs"):
        model.scatter(x[:3])
    with pytest.raises(PlanError, match="2 tensors for the 1 outputs"):
        model.gather((x, x))
    with pytest.raises(PlanError, match="without a loss"):
        model.loss(x, x)


def test_layouts_and_plan_describe_the_split() -> None:
    ranks(4, describe, captured(Dense, (4, 2, 7, 6)))


def ask_alone(mesh: Mesh, graph: Graph) -> None:
    """Looking at layouts is local: ranks that do not look stay in step with those that do."""
    model = split(mesh, build(Dense), graph, "n2 h2")
    x = draw(6, 2, 7, 6)
    if mesh.rank == 0:
        assert model.at((6, 2, 5, 5)).input_layouts[0].shape == (6, 2, 5, 5)
        model.scatter(x, batch=6)
        model.eval()
        assert model.output_layouts[0].shape == (4, 3, 7, 6)
        model.train()
    x = draw(4, 2, 7, 6)
    assert_close(model.gather(model(model.scatter(x))), build(Dense)(x), "output")


def test_one_rank_may_look_at_layouts() -> None:
    ranks(4, ask_alone, captured(Dense, (4, 2, 7, 6)))


def average(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Dense), split(mesh, build(Dense), graph, plan)
    x, t = draw(4, 2, 7, 6), draw(4, 3, 7, 6, seed=5)
    target = t[model.output_layouts[0].slab(mesh.rank)]
    found = model.mean((model(model.scatter(x)) - target).square())
    expected = (serial(x) - t).square().mean()
    assert_close(found, expected, "mean")
    found.backward()
    expected.backward()
    assert_grads(model, serial)
    ones = torch.ones(model.output_layouts[0].local_shape(mesh.rank), dtype=torch.bfloat16)
    assert model.mean(ones).item() == 1.0


@pytest.mark.parametrize("plan", ["n2 h2", "w4", "c2", "n2 h4"])
def test_mean_is_that_of_one_device_and_so_is_its_gradient(plan: str) -> None:
    ranks(8, average, captured(Dense, (4, 2, 7, 6)), plan)


def refuse_means(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Dense), graph, "h2")
    y = model(model.scatter(draw(4, 2, 7, 6)))
    model.mean(y.mean(1))  # channels are not cut
    for values in (y > 0, y.long()):
        with pytest.raises(RuntimeError, match=r"mean: ranks 0, 1: values of torch.* have no mean"):
            model.mean(values)
    for values in (y.mean(2), y.sum(), y[:, :, : mesh.rank + 1]):
        with pytest.raises(MismatchError, match=r"are not cut as the output \(4, 3, 7, 6\) is"):
            model.mean(values)


def test_what_has_no_mean_raises_on_all_ranks() -> None:
    ranks(2, refuse_means, captured(Dense, (4, 2, 7, 6)))


# -- what a parallel model is not -----------------------------------------------------------------


def replace(mesh: Mesh, graph: Graph) -> None:
    model = split(mesh, build(Small), graph, "n2")
    slab = model.scatter(draw(*SHAPE))
    for parent, name, new in (
        (model, "conv", nn.Conv2d(6, 6, 3, padding=1)),
        (model.stem, "1", nn.Identity()),
    ):
        old = getattr(parent, name)
        setattr(parent, name, new)
        with pytest.raises(MismatchError, match=f"{name} is not the module that was split"):
            model(slab)
        setattr(parent, name, old)
    model(slab)
    for refuse in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PlanError, match=r"full_state_dict\(\) into a plain model"):
            refuse(model)


def test_modules_cannot_be_replaced_nor_the_model_copied() -> None:
    ranks(2, replace, captured(Small, SHAPE))


# -- two models at a time -------------------------------------------------------------------------


def interleave(mesh: Mesh, graph: Graph) -> None:
    """Train on all ranks and on some of them in turns."""
    outer, serial = split(mesh, build(Dense), graph, "n2 h2"), build(Dense)
    some = None
    if mesh.rank in (1, 3):
        some = split(Mesh([mesh.world_ranks[1], mesh.world_ranks[3]]), build(Dense), graph, "f2")
    beside = build(Dense)
    x = draw(4, 2, 7, 6)
    for _ in range(2):
        y = outer(outer.scatter(x))
        if some is not None:
            z = some(some.scatter(x))
            some.mean(z.square()).backward()
            beside(x).square().mean().backward()
        outer.mean(y.square()).backward()
        serial(x).square().mean().backward()
        assert_grads(outer, serial)
        if some is not None:
            assert_grads(some, beside)


def test_a_second_model_on_some_ranks_works_beside_the_first() -> None:
    ranks(4, interleave, captured(Dense, (4, 2, 7, 6)))
