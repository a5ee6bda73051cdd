"""Time whole training steps: on one thread, on as many threads as ranks, with DDP, and split.

All of them are measured in turn in every round, so that their ratios hold on a noisy machine.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tilewise.auto import parallelize
from tilewise.auto.tell import slowest
from tilewise.bench.memory import LiveBytes
from tilewise.bench.timing import spread, until_all_are_done
from tilewise.comm import Mesh
from tilewise.comm.heap import freed_returned
from tilewise.comm.silent import SilentMesh
from tilewise.graph import ParallelModel
from tilewise.testing.verify import LOSSES, draw_targets

Step = Callable[[], None]


@dataclass
class ModelRow:
    """A model under one plan; times are medians in seconds, of rounds until all ranks are done;
    bytes are those that a step adds.

    Each is the second of two steps in a row. One device and DDP run as torch does by itself;
    `serial_pt_kept_s` and `ddp_kept_s` keep their memory between steps, as the split run does.
    `local_s` is the split step without messages: what the ranks' own arithmetic takes, all of them
    computing at once. `efficiency` is its share of the split step.
    """

    model: str
    plan: str
    ranks: int
    serial_1t_s: float
    serial_pt_s: float
    serial_pt_kept_s: float
    ddp_s: float | None
    ddp_kept_s: float | None
    local_s: float
    split_s: float
    speedup_vs_1t: float
    speedup_vs_pt: float
    speedup_vs_ddp: float | None
    efficiency: float
    peak_bytes_serial: int
    peak_bytes_split: int
    serial_spread: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_model(
    mesh: Mesh, name: str, model: nn.Module, inputs: Sequence[Tensor], plan: Any, rounds: int
) -> Generator[int, None, ModelRow]:
    """Measure training steps of a model; yields the rounds done."""
    torch.set_num_threads(1)
    loss = LOSSES["mse"]
    targets = draw_targets(model, inputs, "mse")
    first = mesh.rank == 0
    serial = _serial_step(copy.deepcopy(model), inputs, targets, loss) if first else None
    with_ddp = _ddp_step(mesh, copy.deepcopy(model), inputs, targets, loss)
    parallel = parallelize(model, tuple(inputs), plan, loss=loss, targets=targets, mesh=mesh)
    split = split_step(mesh, parallel, inputs, targets)
    silent = SilentMesh(mesh.size, mesh.rank)
    same = parallelize(model, tuple(inputs), parallel.plan, loss=loss, targets=targets, mesh=silent)
    local = split_step(silent, same, inputs, targets)
    peaks = [_peak(split), 0]
    if serial is not None:
        peaks[1] = _peak(serial)
    kinds = ("one", "many", "kept", "ddp", "ddp_kept", "local", "split")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}

    def run(kind: str, step: Step | None, *, threads: int = 1) -> None:
        mesh.agree("bench")
        if step is not None:
            torch.set_num_threads(threads)
            step()  # the first step after another kind has to take its memory
            times[kind].append(timed(step)[0])
            torch.set_num_threads(1)

    for done in range(rounds + 1):
        with freed_returned():
            run("one", serial)
            run("many", serial, threads=mesh.size)
            run("ddp", with_ddp)
        run("kept", serial, threads=mesh.size)
        run("ddp_kept", with_ddp)
        run("local", local)
        run("split", split)
        yield done
    rounds_s = until_all_are_done(mesh, [found[1:] or [0.0] * rounds for found in times.values()])
    one, many, kept, ddp, ddp_kept, local_s, split_s = map(median, rounds_s)
    peak_split, peak_serial = slowest(mesh, list(map(float, peaks)))
    return ModelRow(
        name, str(plan), mesh.size, one, many, kept, ddp or None, ddp_kept or None, local_s,
        split_s, one / split_s, many / split_s, ddp / split_s if ddp else None, local_s / split_s,
        int(peak_serial), int(peak_split), spread(rounds_s[0]),
    )  # fmt: skip


def _serial_step(
    model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Any
) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss(model(*inputs), *targets).backward()
        optimizer.step()

    return step


def _ddp_step(
    mesh: Mesh, model: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Any
) -> Step | None:
    """Return a step of torch's DDP on the ranks' share of the batch, if it can be shared out."""
    if inputs[0].shape[0] % mesh.size or mesh.size == 1:
        return None
    each = inputs[0].shape[0] // mesh.size
    part = slice(mesh.rank * each, (mesh.rank + 1) * each)
    wrapped = DistributedDataParallel(model, process_group=mesh.group().handle)
    return _serial_step(wrapped, [x[part] for x in inputs], [t[part] for t in targets], loss)


def split_step(
    mesh: Mesh, split: ParallelModel, inputs: Sequence[Tensor], targets: tuple[Tensor, ...]
) -> Step:
    """Return a training step on this rank's slabs."""
    compute = split_loss(mesh, split, inputs, targets)
    optimizer = torch.optim.SGD(split.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        compute().backward()
        optimizer.step()

    return step


def split_loss(
    mesh: Mesh, split: ParallelModel, inputs: Sequence[Tensor], targets: tuple[Tensor, ...]
) -> Callable[[], Tensor]:
    """Return what computes the loss on this rank's slabs."""
    slabs: list[Tensor] = [
        tensor[layout.slab(mesh.rank)].contiguous()
        for tensor, layout in zip((*inputs, *targets), split.input_layouts, strict=True)
    ]

    def loss() -> Tensor:
        found = split.loss(*slabs)
        slabs[:] = split.formatted(*slabs)
        return found

    return loss


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call something; returns the seconds it took and its result."""
    start = time.perf_counter()
    found = function()
    return time.perf_counter() - start, found


def _peak(step: Step) -> int:
    """Return the bytes that a step adds at most, gradients included, after a first one."""
    step()
    gc.collect()
    live = LiveBytes()
    with live:
        step()
    return live.peak
