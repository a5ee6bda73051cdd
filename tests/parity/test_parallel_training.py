"""Training a parallel model equals training on one device: steps, gradients, clipping."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilewise as tw
from tilewise import Mesh, ParallelModel
from tilewise.errors import PlanError
from tilewise.graph import Graph, sync
from tilewise.testing import ranks
from tilewise.testing.compare import assert_close
from twins import (
    Small,
    assert_grads,
    assert_state,
    build,
    captured,
    classes,
    draw,
    split,
)

SHAPE = (4, 3, 9, 8)
PLANS = ["n2 h2", "c2 f2", "h2 f2", "n4", "f4"]


def graph() -> Graph:
    return captured(Small, SHAPE, F.cross_entropy)


def batches(count: int, shape: tuple[int, ...] = SHAPE) -> list[tuple[Tensor, Tensor]]:
    return [
        (draw(*shape, seed=7 + step), classes(5, shape[0], seed=70 + step)) for step in range(count)
    ]


def serial_loss(model: nn.Module, x: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(model(x), t)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
}


def step_alike(mesh: Mesh, graph: Graph, plan: str, names: list[str]) -> None:
    for name in names:
        serial, model = build(Small), split(mesh, build(Small), graph, plan)
        one, many = OPTIMIZERS[name](serial.parameters()), OPTIMIZERS[name](model.parameters())
        for x, t in batches(4):
            train(serial, model, x, t)
            one.step()
            many.step()
            one.zero_grad()
            many.zero_grad()
        assert_state(model, serial, tolerance=1e-8)


def train(serial: nn.Module, model: ParallelModel, x: Tensor, t: Tensor) -> None:
    """Run both forward and backward, and compare the losses."""
    expected = serial_loss(serial, x, t)
    found = model.loss(*model.scatter(x, t))
    assert_close(found, expected, "loss")
    expected.backward()
    found.backward()


@pytest.mark.parametrize("plan", PLANS)
def test_steps_equal_one_devices(plan: str) -> None:
    ranks(4, step_alike, graph(), plan, [*OPTIMIZERS] if plan == "h2 f2" else ["AdamW"])


# -- optimizers that need whole tensors -----------------------------------------------------------

WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon([one for one in p if one.dim() == 2], 0.01),
}


def refuse(mesh: Mesh, graph: Graph) -> list[str]:
    model = split(mesh, build(Small), graph, "f2")
    said = []
    for make in WHOLE.values():
        optimizer = make(model.parameters())
        with pytest.raises(PlanError) as caught:
            optimizer.step(lambda: model.loss(*model.scatter(*batches(1)[0])))
        said.append(str(caught.value))
    return said


def test_optimizers_that_need_whole_tensors_are_refused_where_parameters_are_cut() -> None:
    found = ranks(2, refuse, graph())
    assert found[0] == found[1]
    assert "LBFGS: cannot step the parameter stem.0.weight" in found[0][0]
    assert "line search" in found[0][0]
    assert "row and column statistics" in found[0][1]
    assert "Muon: cannot step the parameter head.weight" in found[0][2]


def step_whole(mesh: Mesh, graph: Graph) -> None:
    for name, make in WHOLE.items():
        serial, model = build(Small), split(mesh, build(Small), graph, "n2 h2")
        one, many = make(serial.parameters()), make(model.parameters())
        for x, t in batches(2):
            one.step(closure(one, lambda x=x, t=t, net=serial: serial_loss(net, x, t)))
            many.step(closure(many, lambda x=x, t=t, net=model: net.loss(*net.scatter(x, t))))
        # Muon orthogonalises in bfloat16
        assert_state(model, serial, tolerance=1e-2 if name == "Muon" else 1e-7)


def closure(optimizer: torch.optim.Optimizer, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        optimizer.zero_grad()
        found = loss()
        found.backward()
        return found

    return run


def test_optimizers_that_need_whole_tensors_work_where_none_is_cut() -> None:
    ranks(4, step_whole, graph())


class Odd(torch.optim.SGD):
    pass


def warn(mesh: Mesh, graph: Graph) -> None:
    class Fancy(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            pass

    model = split(mesh, build(Small), graph, "c2")
    with pytest.warns(UserWarning, match="Fancy: not known to be element-wise"):
        Fancy(model.parameters(), {}).step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Odd(model.parameters(), 0.1).step()


def test_an_unknown_optimizer_warns_once_and_a_kind_of_sgd_does_not() -> None:
    ranks(2, warn, graph())


# -- gradients ------------------------------------------------------------------------------------


def overlap(mesh: Mesh, graph: Graph) -> list[tuple[str, str]]:
    size, sync.BUCKET_BYTES = sync.BUCKET_BYTES, 1
    try:
        serial, model = build(Small), split(mesh, build(Small), graph, "n2 h2")
        x, t = batches(1)[0]
        loss = model.loss(*model.scatter(x, t))
        with mesh.trace.record() as events:
            loss.backward()
        serial_loss(serial, x, t).backward()
        assert_grads(model, serial)
    finally:
        sync.BUCKET_BYTES = size
    return [(event.operation, event.layer) for event in events]


def test_sums_of_late_layers_start_before_messages_of_early_ones() -> None:
    for events in ranks(4, overlap, graph()):
        head = events.index(("sum", "gradients of head.weight"))
        halo = events.index(("send", "conv (backward)"))
        assert head < halo, events
        assert events.index(("sum", "gradients of stem.0.weight")) > halo


def buckets(mesh: Mesh, graph: Graph) -> list[tuple[str, tuple[int, ...]]]:
    model = split(mesh, build(Small), graph, "h2 f2")
    loss = model.loss(*model.scatter(*batches(1)[0]))
    with mesh.trace.record() as events:
        loss.backward()
    return [(e.layer, e.ranks) for e in events if e.layer.startswith("gradients")]


def test_blocks_are_summed_in_buckets_over_the_ranks_that_share_them_only() -> None:
    for rank, sums in enumerate(ranks(4, buckets, graph())):
        assert [group for _, group in sums] == [(rank % 2, rank % 2 + 2)], sums


def accumulate(mesh: Mesh, graph: Graph, plan: str, last: bool) -> None:
    """Sum after each micro-batch, or after the last one only; twice, onto what is there."""
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    for _ in range(2):
        micro = [*batches(2), *batches(1, (2, *SHAPE[1:])), *batches(1)]
        for i, (x, t) in enumerate(micro):
            aside = last and i < len(micro) - 1
            size = x.shape[0]
            with model.no_sync() if aside else nullcontext(), mesh.trace.record() as events:
                model.loss(*model.scatter(x, t, batch=size), batch=size).backward()
            summed = [event for event in events if event.layer.startswith("gradients")]
            assert bool(summed) == (not aside)
            serial_loss(serial, x, t).backward()
        assert_grads(model, serial)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("plan", ["n2 h2", "h2 f2"])
def test_gradients_accumulate_over_micro_batches_of_any_size(plan: str, last: bool) -> None:
    ranks(4, accumulate, graph(), plan, last)


class Heads(nn.Module):
    """Two heads, the second only in training, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, padding=1)
        self.main = nn.Conv2d(4, 2, 1)
        self.side = nn.Conv2d(4, 2, 1)
        self.idle = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(x))
        if self.training:
            return self.main(x).mean((2, 3)), self.side(x).mean((2, 3))
        return (self.main(x).mean((2, 3)),)


def leave_out(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Heads), split(mesh, build(Heads), graph, plan)
    x = draw(*SHAPE)
    for used in (0, 1):
        model.gather(model(model.scatter(x)))[used].square().sum().backward()
        serial(x)[used].square().sum().backward()
        assert_grads(model, serial)
        if used == 0:
            assert model.side.weight.grad is None
    assert model.idle.weight.grad is None


@pytest.mark.parametrize("plan", ["n2 h2", "f2"])
def test_parameters_without_a_gradient_have_none(plan: str) -> None:
    ranks(4, leave_out, captured(Heads, SHAPE), plan)


def left_by_another_program(mesh: Mesh, graph: Graph) -> None:
    """The pass that sums need not be of the program whose gradients wait."""
    serial, model = build(Heads), split(mesh, build(Heads), graph, "n2")
    x = draw(*SHAPE)
    with model.no_sync():
        sum(y.square().sum() for y in model.gather(model(model.scatter(x)))).backward()
    model.eval()
    model.gather(model(model.scatter(x)))[0].square().sum().backward()
    sum(y.square().sum() for y in serial(x)).backward()
    serial.eval()(x)[0].square().sum().backward()
    assert_grads(model, serial)


def test_gradients_not_summed_yet_are_summed_by_whatever_pass_comes_next() -> None:
    ranks(2, left_by_another_program, captured(Heads, SHAPE))


def ask(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    x, t = batches(1)[0]
    slab, target = model.scatter(x, t)
    slab.requires_grad_()
    x.requires_grad_()
    named = dict(serial.named_parameters())
    expected = torch.autograd.grad(serial_loss(serial, x, t), [x, *named.values()])
    with model.no_sync():  # has no say here: nothing is accumulated
        found = torch.autograd.grad(model.loss(slab, target), [slab, *model.parameters()])
    layout = model.input_layouts[0]
    assert_close(found[0], expected[0][layout.slab(mesh.rank)], "input")
    for name, one, other in zip(named, found[1:], expected[1:]):
        assert_close(model.gather_held(name, one), other, name, largest=1.0)
    assert all(p.grad is None for p in model.parameters())
    with mesh.trace.record() as events:
        (only,) = torch.autograd.grad(model.loss(slab, target), [slab])
    assert_close(only, found[0], "input alone")
    assert not [event for event in events if event.layer.startswith("gradients")]
    # what is not summed yet is not lost to somebody who asks for other gradients
    with model.no_sync():
        model.loss(slab, target).backward()
    torch.autograd.grad(model.loss(slab, target), [slab])
    torch.autograd.grad(model.loss(slab, target), [model.head.weight])
    model.loss(slab, target).backward()
    for _ in range(2):
        serial_loss(serial, x, t).backward()
    assert_grads(model, serial)


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_autograd_grad_gives_whole_gradients(plan: str) -> None:
    ranks(4, ask, graph(), plan)


def use_twice(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    (x, t), (x2, t2) = batches(2)
    found = model.loss(*model.scatter(x, t)) + model.loss(*model.scatter(x2, t2))
    found.backward(retain_graph=True)
    expected = serial_loss(serial, x, t) + serial_loss(serial, x2, t2)
    expected.backward(retain_graph=True)
    assert_grads(model, serial)
    found.backward()
    expected.backward()
    assert_grads(model, serial)
    assert_state(model, serial)


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_two_passes_share_one_backward_and_backward_runs_twice(plan: str) -> None:
    ranks(4, use_twice, graph(), plan)


def freeze(mesh: Mesh, graph: Graph, plan: str) -> None:
    serial, model = build(Small), split(mesh, build(Small), graph, plan)
    (x, t), (x2, t2) = batches(2)
    for one in (serial, model):
        one.stem.requires_grad_(False)
        one.norm.requires_grad_(False)
        one.get_parameter("conv.weight").requires_grad_(False)
    train(serial, model, x, t)
    assert_grads(model, serial)
    assert model.get_parameter("conv.weight").grad is None
    for one in (serial, model):
        one.requires_grad_(True)
        one.head.requires_grad_(False)
    train(serial, model, x2, t2)
    assert_grads(model, serial)


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2"])
def test_parameters_are_frozen_and_thawed_after_the_split(plan: str) -> None:
    ranks(4, freeze, graph(), plan)


def clip(mesh: Mesh, graph: Graph, plan: str) -> None:
    for kind in (2.0, 1.0, float("inf")):
        for limit in (0.01, 1e6):
            serial, model = build(Small), split(mesh, build(Small), graph, plan)
            train(serial, model, *batches(1)[0])
            expected = nn.utils.clip_grad_norm_(serial.parameters(), limit, kind)
            found = tw.clip_grad_norm_(model, limit, kind)
            assert_close(found, expected, f"norm {kind}")
            assert_grads(model, serial)
    model.get_parameter("head.bias").grad.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="is nan"):
        tw.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    model.zero_grad()
    assert tw.clip_grad_norm_(model, 1.0) == 0.0


@pytest.mark.parametrize("plan", ["n2 h2", "c2 f2", "h2 f2", "f4"])
def test_clipping_equals_torchs(plan: str) -> None:
    ranks(4, clip, graph(), plan)


def overflow(mesh: Mesh, fused: bool) -> list[float]:
    """The last filter's gradient overflows in the second step: only one rank holds it."""
    one, x = nn.Conv2d(3, 4, 3, padding=1, bias=False), draw(2, 3, 8, 8, dtype=torch.float32)
    nn.init.constant_(one.weight, 0.1)
    model = tw.parallelize(one, x, "f2", mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=fused)
    scaler = tw.GradScaler(model, growth_interval=2)
    scales = []
    for size in (1.0, 1e36, 1.0, 1.0):
        before = model.get_parameter("weight").detach().clone()
        optimizer.zero_grad()
        weight = torch.tensor([1.0, 1.0, 1.0, size]).view(1, 4, 1, 1)
        loss = (model.gather(model(model.scatter(x))) * weight).sum()
        scaler.scale(loss).backward()
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, model.get_parameter("weight"))
        assert moved == (size == 1.0)
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_leave_out_a_step_that_overflows_on_one(fused: bool) -> None:
    half = 2.0**15
    assert ranks(2, overflow, fused) == [[2 * half, half, half, 2 * half]] * 2


class Skip(nn.Module):
    """A branch whose end lies otherwise than its beginning, beside a long way through."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Conv2d(3, 4, 1)
        self.between = nn.Conv2d(4, 4, 3, padding=1)
        self.end = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        return torch.add(x, self.end(self.between(x)))


def start_early(mesh: Mesh, graph: Graph) -> list[tuple[str, int]]:
    serial = build(Skip)
    plan = {"*": "h2", "end": "w2", "#add": "w2"}
    model = split(mesh, build(Skip), graph, plan)
    x = draw(*SHAPE)
    with mesh.trace.record() as events:
        y = model(model.scatter(x))
        forward = len(events)
        y.square().sum().backward()
    serial(x).square().sum().backward()
    assert_grads(model, serial)
    return [(event.layer, index < forward) for index, event in enumerate(events)]


def test_a_move_starts_when_its_source_is_there() -> None:
    """It is sent before the layers in between send, in backward as soon as its gradient is."""
    events = ranks(2, start_early, captured(Skip, SHAPE))[0]
    forward = [layer for layer, is_forward in events if is_forward]
    backward = [layer for layer, is_forward in events if not is_forward]
    assert forward.index("#add") < forward.index("between")
    assert backward.index("#add (backward)") < backward.index("between (backward)")
