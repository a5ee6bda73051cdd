"""Time single layers: on one rank, the rank's own share, and split.

All three are measured in turn in every round, so that their ratios hold on a noisy machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.auto import parallelize
from tilewise.auto.tell import slowest
from tilewise.bench.timing import spread, until_all_are_done
from tilewise.comm import Mesh
from tilewise.comm.heap import freed_returned
from tilewise.graph import ParallelModel
from tilewise.layout import Degrees
from tilewise.ops.conv_run import ConvRun
from tilewise.ops.operation import Bound


@dataclass(frozen=True)
class LayerCase:
    """A convolution to measure: input shape, filters, kernel, and the degrees that fit it."""

    name: str
    shape: tuple[int, ...]
    filters: int
    kernel: int
    stride: int = 1
    degrees: tuple[str, ...] = ("h",)

    def build(self) -> nn.Module:
        kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        torch.manual_seed(0)
        return kinds[len(self.shape) - 3](
            self.shape[1], self.filters, self.kernel, self.stride, self.kernel // 2, bias=False
        )


VOLUME = ("d",)
CHANNELS = ("c", "f")
CASES = (
    LayerCase("conv2d_64_256", (4, 64, 256, 256), 64, 3, degrees=("n", "h")),
    LayerCase("conv3d_16_64", (1, 16, 64, 64, 64), 32, 3, degrees=VOLUME),
    LayerCase("resnet_conv1", (2, 3, 224, 224), 64, 7, 2, degrees=("n", "h")),
    LayerCase("resnet_res3b_branch2a", (2, 512, 28, 28), 128, 1, degrees=("n", "h", "c")),
    LayerCase("mesh_conv1_1", (1, 18, 512, 512), 128, 5, 2),
    LayerCase("mesh_conv6_1", (1, 384, 64, 64), 128, 3, 2),
    LayerCase("cosmoflow_conv1", (1, 4, 64, 64, 64), 16, 3, degrees=VOLUME),
    LayerCase("cosmoflow_conv2", (1, 16, 32, 32, 32), 32, 3, degrees=VOLUME),
    LayerCase("cosmoflow_conv3", (1, 32, 16, 16, 16), 64, 3, degrees=VOLUME),
    LayerCase("cosmoflow_conv4", (1, 64, 8, 8, 8), 128, 3, 2, degrees=VOLUME),
    LayerCase("unet_first", (1, 32, 64, 64, 64), 64, 3, degrees=VOLUME),
    LayerCase("unet_last", (1, 64, 32, 32, 32), 64, 3, degrees=VOLUME),
    LayerCase("wrn_conv3", (2, 256, 28, 28), 256, 3, degrees=("n", *CHANNELS)),
    LayerCase("wrn_conv5", (2, 1024, 7, 7), 1024, 3, degrees=("n", *CHANNELS)),
)


@dataclass
class Row:
    """One layer under one split; times are medians in seconds, of rounds until all ranks are done.

    `local_s` is the share of each rank, all of them computing at once without any message, in the
    way that is the fastest for it.
    """

    layer: str
    degrees: str
    ranks: int
    serial_s: float
    serial_spread: float
    local_s: float
    split_s: float
    forward_s: float
    backward_s: float
    efficiency: float
    speedup: float
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(mesh: Mesh, case: LayerCase, letter: str, rounds: int) -> Row:
    """Measure one layer split along one degree over all ranks of the mesh."""
    torch.set_num_threads(1)
    degrees = f"{letter}{mesh.size}" if mesh.size > 1 else "1"
    model = case.build()
    x = torch.randn(case.shape, generator=torch.Generator().manual_seed(1))
    split = parallelize(model, x, degrees, mesh=mesh)
    x_slab = _slab(split, x)
    whole = x.clone().requires_grad_()
    serial: list[float] = []
    forward: list[float] = []
    backward: list[float] = []
    _pass(split, x_slab)
    shares = _own_work(case, split, mesh, Degrees.parse(degrees))
    alone = _tuned(split, x_slab)
    local: list[list[float]] = [[] for _ in range(len(shares) + 1)]
    with mesh.trace.record() as events:
        _pass(split, x_slab)
    sent = sum(event.bytes for event in events)
    for _ in range(rounds):
        mesh.agree("bench")
        if mesh.rank == 0:
            with freed_returned():
                _pass(model, whole)  # its memory is taken anew
                serial.append(sum(_pass(model, whole)))
        mesh.agree("bench")
        _pass(split, x_slab)
        for found, (layer, share) in zip(local[1:], shares):
            mesh.agree("bench")
            found.append(sum(_pass(layer, share)))
        mesh.agree("bench")
        local[0].append(alone())
        mesh.agree("bench")
        there, back = _pass(split, x_slab)
        forward.append(there)
        backward.append(back)
    both = [there + back for there, back in zip(forward, backward)]
    serial = serial or [0.0] * rounds
    times = until_all_are_done(mesh, [serial, both, forward, backward, *local])
    serial_s, split_s, forward_s, backward_s, *shares_s = map(median, times)
    local_s = min(shares_s)
    return Row(
        case.name,
        degrees,
        mesh.size,
        serial_s,
        spread(times[0]),
        local_s,
        split_s,
        forward_s,
        backward_s,
        local_s / split_s,
        serial_s / split_s,
        int(slowest(mesh, [float(sent)])[0]),
    )


def _slab(split: ParallelModel, x: Tensor) -> Tensor:
    """Return a rank's slab in the memory format that it has inside a network of such layers."""
    slab: Tensor = split.scatter(x).requires_grad_()
    split(slab)
    return split.formatted(slab.detach())[0].requires_grad_()


def measure_layers(
    mesh: Mesh, work: Sequence[tuple[LayerCase, str]], rounds: int
) -> Generator[int, None, list[Row]]:
    """Measure layers one after the other; yields after each."""
    rows = []
    for case, letter in work:
        rows.append(measure(mesh, case, letter, rounds))
        yield 1
    return rows


def _tuned(split: ParallelModel, x: Tensor) -> Callable[[], float]:
    """Return what does this rank's share as the split run does it, but for its messages.

    All results stay until it is done, and gradients until the next time, as in a pass: memory that
    is used again at once would still lie in the cache.
    """
    (weight,) = split.parameters()
    executable = split.runs.find(split.at(split.input_layouts[0].shape).examples).executable
    assert executable is not None
    steps = [step.run for stretch in executable.stretches for step in stretch]
    (bound,) = (run for run in steps if isinstance(run, Bound))  # beside it, the output may move
    conv = bound.fused
    assert isinstance(conv, ConvRun)
    operands = conv.pretend(x.detach(), weight.detach())

    kept: list[Any] = []

    def alone() -> float:
        kept.clear()
        start = time.perf_counter()
        kept.extend(conv.alone(*operands))
        seconds = time.perf_counter() - start
        del kept[0]
        return seconds

    return alone


def _own_work(
    case: LayerCase, split: ParallelModel, mesh: Mesh, degrees: Degrees
) -> list[tuple[Callable[[Tensor], Tensor], Tensor]]:
    """Return the ways to do this rank's share of the arithmetic without any message.

    As torch does it: its slab with zeros around it; for a spatial split also its slab with the
    halo's rows there.
    """
    rank = mesh.rank
    slab = list(split.input_layouts[0].local_shape(rank))
    channels = case.shape[1]
    filters = case.filters
    if degrees.c > 1:
        slab[1] = channels // degrees.c
    filters //= degrees.f
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(case.shape) - 3]
    padding = [case.kernel // 2] * (len(case.shape) - 2)
    ways: list[tuple[Callable[[Tensor], Tensor], Tensor]] = []

    def add(shape: list[int], pads: list[int]) -> None:
        layer = kind(slab[1], filters, case.kernel, case.stride, tuple(pads), bias=False)
        ways.append((layer, torch.randn(shape).requires_grad_()))

    add(slab, padding)
    for dim, letter in enumerate("dhw"[5 - len(case.shape) :], start=2):
        if getattr(degrees, letter) > 1 and case.kernel > 1:
            extended, pads = list(slab), list(padding)
            outputs = split.output_layouts[0].local_shape(rank)[dim]
            extended[dim] = (outputs - 1) * case.stride + case.kernel
            pads[dim - 2] = 0
            add(extended, pads)
    return ways


def _pass(layer: Callable[[Tensor], Tensor], x: Tensor) -> tuple[float, float]:
    """Run forward and backward; returns the seconds of each."""
    x.grad = None
    if isinstance(layer, nn.Module):
        layer.zero_grad()
    start = time.perf_counter()
    y = layer(x)
    middle = time.perf_counter()
    y.backward(y.detach())
    end = time.perf_counter()
    return middle - start, end - middle
