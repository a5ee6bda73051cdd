"""Train a model on one device and split, on the same numbers, and compare everything."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tilewise.auto import read_plan
from tilewise.comm import Exchange, Mesh
from tilewise.comm.pool import exhausted
from tilewise.errors import CaptureError
from tilewise.graph import Graph, ParallelModel, capture, full_state_dict
from tilewise.layout import Axis, Layout
from tilewise.plan import Plan
from tilewise.testing.compare import error

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
RANDOM = ("dropout", "bernoulli", "rand", "normal", "uniform")


def mse(output: Any, *targets: Tensor) -> Tensor:
    """Sum the mean squared errors of all outputs."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    total = F.mse_loss(leaves[0], targets[0])
    for leaf, target in zip(leaves[1:], targets[1:]):
        total = total + F.mse_loss(leaf, target)
    return total


def cross_entropy(output: Any, *targets: Tensor) -> Tensor:
    """Sum the cross-entropies of all outputs."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    total = F.cross_entropy(leaves[0], targets[0])
    for leaf, target in zip(leaves[1:], targets[1:]):
        total = total + F.cross_entropy(leaf, target)
    return total


LOSSES: dict[str, Callable[..., Tensor]] = {"mse": mse, "cross_entropy": cross_entropy}


@dataclass
class Result:
    """The largest error of each kind, and the tensor that has the largest of all.

    `drift` is how far the losses of one device move when its input changes in the last bit; it is
    found out where the losses differ by more than the tolerance.
    """

    max_error: dict[str, float] = field(default_factory=dict)
    worst_layer: str = ""
    worst: float = -1.0
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    losses: list[tuple[float, float]] = field(default_factory=list)
    drift: float | None = None
    tolerance: float = 0.0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(value <= self.tolerance for value in self.max_error.values())

    def note(self, kind: str, name: str, value: float) -> None:
        """Keep an error if it is the largest of its kind; one that is no number is infinite."""
        value = value if value == value else float("inf")
        self.max_error[kind] = max(self.max_error.get(kind, 0.0), value)
        if value > self.worst:
            self.worst, self.worst_layer = value, name


def verify(
    mesh: Mesh,
    model: nn.Module,
    inputs: Sequence[Tensor],
    plan: str | Mapping[str, str] | Plan,
    *,
    loss: str = "mse",
    steps: int = 5,
    lr: float | None = None,
    graph: Graph | None = None,
) -> Result:
    """Compare one training run of the model with the same run split over the mesh.

    Output, input gradients, parameter gradients and buffers are compared after the first pass,
    the losses of `steps` optimizer steps after it. The first rank of the mesh compares. `graph`
    saves capturing the model where it was captured with the same loss and targets before. Unless
    `lr` says otherwise, a step changes the weights by a hundred-thousandth: deep networks on few
    samples magnify rounding, and after five large steps the losses of one device alone differ by
    more than the tolerance when its weights change in the last bit.
    """
    stages = verify_in_stages(mesh, model, inputs, plan, loss=loss, steps=steps, lr=lr, graph=graph)
    result: Result = exhausted(stages, lambda _: None)
    return result


def verify_in_stages(
    mesh: Mesh,
    model: nn.Module,
    inputs: Sequence[Tensor],
    plan: str | Mapping[str, str] | Plan,
    *,
    loss: str = "mse",
    steps: int = 5,
    lr: float | None = None,
    graph: Graph | None = None,
) -> Generator[str, None, Result]:
    """Do as `verify`; yields what comes next, after each of `stage_count(steps)` stages."""
    start = time.monotonic()
    result = Result(tolerance=TOLERANCE[inputs[0].dtype])
    targets = draw_targets(model, inputs, loss)
    if graph is None:
        graph = capture(model, tuple(inputs), LOSSES[loss], targets=targets)
    chosen = read_plan(graph, plan, mesh, model=model)
    split = ParallelModel(copy.deepcopy(model), graph, chosen, mesh)
    result.fallbacks, result.notes = split.fallbacks, split.plan.notes
    serial = _serial(model, inputs, LOSSES[loss], split) if mesh.rank == 0 else None
    yield "first pass"
    found = _compare_first_pass(mesh, split, serial, inputs, targets, result)
    yield "steps" if steps else "done"
    lr = found if lr is None else lr
    yield from _compare_steps(mesh, split, serial, inputs, targets, result, steps, lr)
    if serial is not None and result.max_error.get("loss", 0.0) > result.tolerance:
        again = _serial(model, inputs, LOSSES[loss], split)
        result.drift = _drift(again, inputs, targets, [e for _, e in result.losses], lr)
    result.seconds = time.monotonic() - start
    return result


def stage_count(steps: int) -> int:
    """Return in how many stages a run with so many steps is compared."""
    return 2 + steps


def _serial(
    model: nn.Module,
    inputs: Sequence[Tensor],
    loss: Callable[..., Tensor],
    split: ParallelModel,
) -> _Serial:
    """Return the run on one device: the model itself, or its graph where it draws at random."""
    random = any(word in node.kind for node in split.graph.training.nodes for word in RANDOM)
    if not random:
        plain = copy.deepcopy(model)
        return _Serial(plain, plain, lambda *t: loss(plain(*t[: len(inputs)]), *t[len(inputs) :]))
    alone = ParallelModel(
        copy.deepcopy(model), split.graph, Plan.uniform(split.graph, "1"), Mesh.alone()
    )
    return _Serial(alone, alone, alone.loss)


@dataclass
class _Serial:
    model: nn.Module
    forward: Callable[..., Any]
    loss: Callable[..., Tensor]


def draw_targets(model: nn.Module, inputs: Sequence[Tensor], loss: str) -> tuple[Tensor, ...]:
    """Draw targets for every output of the model."""
    mode = model.training
    try:
        with torch.no_grad():
            outputs = copy.deepcopy(model)(*inputs)
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = [tuple(one.shape) for one in inputs]
        raise CaptureError(
            f"model: {type(model).__name__} cannot be run on inputs {shapes}: {error}"
        ) from error
    model.train(mode)
    generator = torch.Generator().manual_seed(17)
    found = []
    for output in (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)):
        if loss == "cross_entropy":
            shape = (output.shape[0], *output.shape[2:])
            found.append(torch.randint(output.shape[1], shape, generator=generator))
        else:
            drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            found.append(drawn.to(output.dtype))
    return tuple(found)


def _compare_first_pass(
    mesh: Mesh,
    split: ParallelModel,
    serial: _Serial | None,
    inputs: Sequence[Tensor],
    targets: tuple[Tensor, ...],
    result: Result,
) -> float:
    """Compare all that one pass gives; returns a learning rate for small steps after it."""
    slabs = _slabs(split, mesh, inputs, targets)
    with torch.no_grad():
        gathered = tree_leaves(split.gather(split(*slabs[: len(inputs)])))
    tracked = [slab.requires_grad_(slab.is_floating_point()) for slab in slabs[: len(inputs)]]
    found_loss = split.loss(*tracked, *slabs[len(inputs) :])
    found_loss.backward()
    input_grads = [
        None if slab.grad is None else _whole(mesh, slab.grad, layout)
        for slab, layout in zip(tracked, split.input_layouts)
    ]
    grads = _whole_grads(split)
    names = {name for name, _ in split.named_buffers()}
    state = full_state_dict(split)
    buffers = {name: one for name, one in state.items() if name in names}
    gathered_all = [*gathered, *input_grads, *grads.values(), *buffers.values()]
    if not _replicas_agree(mesh, gathered_all):
        result.note("output", "replicas that should be equal", float("inf"))
    lr = _small_step(state, grads)
    if serial is None:
        return lr
    with torch.no_grad():
        outputs = tree_leaves(serial.forward(*inputs))
    whole = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    serial.loss(*whole, *targets).backward()
    largest = _largest(outputs)
    for i, (found, expected) in enumerate(zip(gathered, outputs, strict=True)):
        result.note("output", f"output {i}", error(found, expected, largest))
    for i, (found, tensor) in enumerate(zip(input_grads, whole)):
        if tensor.grad is not None and found is not None:
            result.note("input_grad", f"input {i}", error(found, tensor.grad))
    expected_grads = {n: p.grad for n, p in serial.model.named_parameters()}
    largest = _largest([g for g in expected_grads.values() if g is not None])
    for name, expected_grad in expected_grads.items():
        found_grad = grads.get(name)
        if (expected_grad is None) != (found_grad is None):
            result.note("param_grad", name, float("inf"))
        elif expected_grad is not None and found_grad is not None:
            result.note("param_grad", name, error(found_grad, expected_grad, largest))
    expected_buffers = {n: b for n, b in serial.model.named_buffers() if n in buffers}
    largest = _largest([b for b in expected_buffers.values() if b.is_floating_point()])
    for name, buffer in expected_buffers.items():
        result.note("buffers", name, error(buffers[name], buffer, largest))
    return lr


def _small_step(state: Mapping[str, Tensor], grads: Mapping[str, Tensor | None]) -> float:
    """Return the learning rate that changes the weights by a hundred-thousandth of their norm."""
    pairs = [(state[name], grad) for name, grad in grads.items() if grad is not None]
    weights = sum(float(weight.double().square().sum()) for weight, _ in pairs)
    slope = sum(float(grad.double().square().sum()) for _, grad in pairs)
    return 1e-5 * (weights / slope) ** 0.5 if slope and weights else 1e-5


def _compare_steps(
    mesh: Mesh,
    split: ParallelModel,
    serial: _Serial | None,
    inputs: Sequence[Tensor],
    targets: tuple[Tensor, ...],
    result: Result,
    steps: int,
    lr: float,
) -> Generator[str, None, None]:
    """Compare the losses of optimizer steps; yields what comes next after each."""
    slabs = [slab.detach() for slab in _slabs(split, mesh, inputs, targets)]
    optimizer = torch.optim.SGD(split.parameters(), lr=lr, momentum=0.9)
    reference = None
    if serial is not None:
        reference = torch.optim.SGD(serial.model.parameters(), lr=lr, momentum=0.9)
    for step in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        found = split.loss(*slabs)
        found.backward()
        if serial is not None and reference is not None:
            reference.step()
            reference.zero_grad()
            expected = serial.loss(*inputs, *targets)
            expected.backward()
            result.losses.append((found.item(), expected.item()))
            result.note("loss", f"loss of step {step + 1}", error(found, expected))
        yield "steps" if step + 1 < steps else "done"


def _drift(
    serial: _Serial,
    inputs: Sequence[Tensor],
    targets: tuple[Tensor, ...],
    losses: Sequence[float],
    lr: float,
) -> float:
    """Return how far the losses of one device move when its input changes in the last bit."""
    generator = torch.Generator().manual_seed(0)
    nudged = [
        x
        * (
            1
            + torch.finfo(x.dtype).eps
            * torch.randn(x.shape, generator=generator, dtype=x.dtype).sign()
        )
        if x.is_floating_point()
        else x
        for x in inputs
    ]
    optimizer = torch.optim.SGD(serial.model.parameters(), lr=lr, momentum=0.9)
    with torch.no_grad():  # as in the run that is compared with, which draws at random in turn
        serial.forward(*nudged)
    serial.loss(*nudged, *targets).backward()
    largest = 0.0
    for expected in losses:
        optimizer.step()
        optimizer.zero_grad()
        loss = serial.loss(*nudged, *targets)
        loss.backward()
        largest = max(largest, abs(loss.item() - expected) / max(abs(expected), 1e-300))
    return largest


def _slabs(
    split: ParallelModel, mesh: Mesh, inputs: Sequence[Tensor], targets: Sequence[Tensor]
) -> list[Tensor]:
    return [
        tensor[layout.slab(mesh.rank)].clone()
        for tensor, layout in zip((*inputs, *targets), split.input_layouts, strict=True)
    ]


def _whole(mesh: Mesh, slab: Tensor, layout: Layout) -> Tensor:
    target = Layout.replicated(layout.shape, ranks=mesh.size)
    return Exchange(mesh, layout, target, layer="verify").start(slab.detach()).finish()


def _replicas_agree(mesh: Mesh, tensors: Sequence[Tensor | None]) -> bool:
    """Whether every rank gathered the same numbers, each from the replicas nearest to it."""
    sums = [t.double().sum() for t in tensors if t is not None]
    mine = torch.stack(sums).unsqueeze(0)
    split = Layout((mesh.size, len(sums)), [Axis(mesh.size, 0)])
    everyone = _whole(mesh, mine, split)
    return bool(((everyone == everyone[:1]) | everyone.isnan()).all())


def _whole_grads(split: ParallelModel) -> dict[str, Tensor | None]:
    """Gather the gradients of all parameters."""
    found: dict[str, Tensor | None] = {}
    for name, parameter in split.named_parameters():
        found[name] = None if parameter.grad is None else split.gather_held(name, parameter.grad)
    return found


def _largest(tensors: Sequence[Any]) -> float:
    return max(
        (t.detach().abs().max().item() for t in tensors if isinstance(t, Tensor) and t.numel()),
        default=0.0,
    )
