"""Measure this machine: what its ranks compute and send in how many seconds.

All ranks compute at once, as they do in training, so what they share (cores, memory, caches) is in
the numbers. Of the calls on rank 0 the time of a fast stretch is taken: others may be using the
machine, and they only ever make calls slower. Sizes are measured in turn, in several rounds, so
that a slow while does not make some of them look slower than others.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.auto.tell import slowest
from tilewise.comm import Exchange, Mesh
from tilewise.host import memory_bytes, resident_bytes
from tilewise.layout import Axis, Layout
from tilewise.ops.kept import machine_name, own_version
from tilewise.planner.fit import (
    Timed,
    arithmetic_error,
    backward_share,
    fit_all_reduce,
    fit_arithmetic,
    fit_call,
    fit_link,
    fit_memory,
    grows,
    peak_of,
)
from tilewise.planner.machine import Compute, Machine

CONDITIONS = "conditions"
"""Under which key of its sources a machine says what its rates depend on."""

SECONDS = 0.25
ROUNDS = 5
TRIES = 4
MOST_RESERVED = 4  # a script may hold much that others do not
HELD = (
    "what a rank held before anything was measured, a quarter of its memory at most: Python, "
    "torch, buffers of the backend, and in a script what that has; what the system and other "
    "programs hold is not known"
)
MESSAGES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
PARTS = 10
ARRAYS = (10_000, 100_000, 1_000_000, 10_000_000, 64_000_000)


@dataclass(frozen=True)
class Case:
    """A layer to time: kind, channels, filters, extent of each dim of space, kernel, samples.

    Convolutions have two samples: with one, torch on one thread takes a slow way for small ones.
    """

    kind: str
    channels: int
    filters: int
    extent: int
    kernel: int = 3
    samples: int = 2
    dtype: str = "float32"

    @property
    def space(self) -> int:
        return {"linear": 0, "conv2d": 2, "conv3d": 3}[self.kind]

    @property
    def flops(self) -> float:
        outputs: int = self.samples * self.extent**self.space
        taps: int = self.kernel**self.space
        return 2.0 * outputs * self.channels * self.filters * taps

    @property
    def mean_channels(self) -> float:
        """The geometric mean of channels and filters."""
        return sqrt(self.channels * self.filters)


BY_FLOPS = {
    "conv2d": [Case("conv2d", 64, 64, extent) for extent in (4, 8, 16, 32, 64, 112)],
    "conv3d": [Case("conv3d", 32, 32, extent) for extent in (2, 4, 8, 16, 32)],
    "linear": [Case("linear", 256, 256, 1, samples=n) for n in (1, 8, 64, 512, 2048)],
}
BY_CHANNELS = {
    "conv2d": [
        Case("conv2d", c, c, extent)
        for c, extent in ((3, 256), (8, 224), (16, 128), (32, 64), (128, 28), (256, 14))
    ],
    "conv3d": [
        Case("conv3d", c, c, extent) for c, extent in ((4, 48), (8, 40), (16, 28), (64, 12))
    ],
    "linear": [Case("linear", c, c, 1, samples=n) for c, n in ((16, 4096), (64, 1024), (1024, 64))],
}


CHECKS = {
    "conv2d": [
        Case("conv2d", 48, 96, 40),
        Case("conv2d", 128, 64, 28, kernel=1, samples=4),
        Case("conv2d", 12, 24, 56, samples=2),
    ],
    "conv3d": [Case("conv3d", 16, 32, 16), Case("conv3d", 4, 16, 32), Case("conv3d", 48, 48, 10)],
    "linear": [Case("linear", 512, 256, 1, samples=32), Case("linear", 128, 2048, 1, samples=8)],
}
"""Layers that no curve is fitted to: they tell how well the fit does on others."""


TINY = Case("linear", 1, 1, 1, samples=1)
TYPES = ("float64", "bfloat16", "float16")
TYPICAL = [
    Case("conv2d", 64, 64, 24),
    Case("conv3d", 32, 32, 8),
    Case("linear", 256, 256, 1, samples=64),
]
"""Layers whose times in other dtypes, relative to float32's, tell the rates of these."""


@dataclass
class Measured:
    """What was measured so far.

    `resident_bytes` is what a rank holds before anything is measured, torch and its buffers among
    it. `touch_s` is a bare call on next to nothing, `call_s` that of a layer that records its
    backward. `hidden` is the share of a sum that passes behind arithmetic. `by_type` has the same
    layers in each dtype.
    """

    by_flops: dict[str, list[Timed]] = field(default_factory=dict)
    by_channels: dict[str, list[Timed]] = field(default_factory=dict)
    checks: dict[str, list[Timed]] = field(default_factory=dict)
    by_type: dict[str, list[Timed]] = field(default_factory=dict)
    arrays: list[float] = field(default_factory=list)
    touch_s: float = 0.0
    call_s: float = 0.0
    messages: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)
    hidden: float = 0.0
    resident_bytes: int = 0


Found = TypeVar("Found")
Run = Callable[..., Any]
"""Calls a function with a mesh and arguments on all ranks, and returns what the first one found."""


def calibrate(found: Measured, run: Run) -> Iterator[tuple[str, int]]:
    """Measure in steps into `found`; yields what comes next, and how many steps there are."""
    steps = 5 + 2 * len(BY_FLOPS)
    yield "memory", steps
    found.resident_bytes = run(resident)
    found.touch_s, found.arrays = run(time_arrays, ARRAYS)
    found.call_s = run(time_layers, [TINY])[0].forward_s
    for kind in BY_FLOPS:
        yield f"{kind} by size", steps
        found.by_flops[kind] = run(time_layers, BY_FLOPS[kind])
        yield f"{kind} by channels", steps
        found.by_channels[kind] = run(time_layers, BY_CHANNELS[kind])
        found.checks[kind] = run(time_layers, CHECKS[kind])
    yield "other dtypes", steps
    for dtype in ("float32", *TYPES):
        found.by_type[dtype] = run(time_layers, [replace(case, dtype=dtype) for case in TYPICAL])
    yield "messages", steps
    found.messages = run(time_messages, MESSAGES)
    yield "sums", steps
    found.sums = run(time_sums, MESSAGES)
    yield "sums behind compute", steps
    found.hidden = run(time_hidden)


def machine_of(
    found: Measured, ranks: int, *, name: str = "local", spread: str | None = None
) -> Machine:
    """Fit a machine to measurements; `spread` is how `hosts` says the ranks lay, else on one."""
    kinds = [*found.by_flops.values(), *found.by_channels.values()]
    call_s = fit_call(found.call_s, [one for some in kinds for one in some])
    peak = peak_of(kinds, call_s)
    arithmetic = {
        kind: fit_arithmetic(found.by_flops[kind], found.by_channels[kind], peak, call_s)
        for kind in found.by_flops
    }
    arithmetic["default"] = arithmetic["conv2d"]
    back = backward_share([one for some in kinds for one in some])
    compute = Compute(peak_flops_per_s=peak, kinds=arithmetic, backward_share=back)
    rates_of = {
        dtype: compute.model_copy(update={"peak_flops_per_s": peak * share})
        for dtype, share in relative_rates(found.by_type).items()
    }
    link, link_error = fit_link(MESSAGES, found.messages)
    link = link.model_copy(update={"concurrent_messages": max(ranks - 1, 1)})
    sums, sums_error = fit_all_reduce(link, ranks, MESSAGES, found.sums)
    memory, by_bytes, memory_error = fit_memory(found.touch_s, ARRAYS, found.arrays)
    errors = {
        kind: arithmetic_error(compute, kind, found.checks[kind], call_s) for kind in found.checks
    }
    errors |= {"memory": memory_error, "messages": link_error, "sums": sums_error}
    spread = f"0×{ranks}" if spread is None else spread
    crowd = fullest_host(spread)
    device_bytes = memory_bytes() // crowd
    how = (
        f"measured by tilewise calibrate on {ranks} ranks of {platform.node()} "
        f"({machine_name()}, {os.cpu_count()} cores), torch {torch.__version__}"
    )
    return Machine(
        name=name,
        sources={
            "all rates": how,
            CONDITIONS: conditions(spread),
            "memory_bytes": "memory of a host, or of the container, shared by its ranks",
            "reserved_bytes": HELD,
            "workspace_channel_block": "oneDNN computes convolutions on blocks of 16 channels",
            "overlap_halo": "an exchange is finished before the layer computes",
        },
        workspace_channel_block=16,
        devices_per_node=crowd,
        memory_bytes=device_bytes,
        reserved_bytes=min(found.resident_bytes, device_bytes // MOST_RESERVED),
        memory_bandwidth_bytes_per_s=memory,
        memory_by_bytes=by_bytes,
        call_s=call_s,
        compute=rates_of | {"float32": compute},
        node=link,
        network=link,
        all_reduce=sums,
        overlap_halo=0.0,
        overlap_sums=found.hidden,
        fit_errors=errors,
    )


def relative_rates(by_type: Mapping[str, Sequence[Timed]]) -> dict[str, float]:
    """Return how fast layers are in each other dtype, of what they are in float32."""

    def seconds(one: Timed) -> float:
        return one.forward_s + one.backward_s

    return {
        dtype: median(seconds(a) / seconds(b) for a, b in zip(by_type["float32"], some))
        for dtype, some in by_type.items()
        if dtype != "float32"
    }


def fullest_host(spread: str) -> int:
    """Return the most ranks that share a host, of what `hosts` says."""
    ranks: dict[str, int] = {}
    for run in spread.split():
        host, some = run.split("×")
        ranks[host] = ranks.get(host, 0) + int(some)
    return max(ranks.values())


def conditions(spread: str) -> str:
    """Return what rates of a machine depend on, that they may be used again."""
    return f"tilewise {own_version()}, torch {torch.__version__}, {machine_name()}, hosts {spread}"


def typical(times: Sequence[float]) -> float:
    """Return the mean of the second fastest fifth of the calls, fifths of those in a row.

    Single calls tell little: where ranks share cores, one runs at full speed until it has to wait.
    """
    size = max(len(times) // 5, 1)
    means = [fmean(times[i : i + size]) for i in range(0, len(times) - size + 1, size)]
    return sorted(means)[min(1, len(means) - 1)]


# -- on the ranks ---------------------------------------------------------------------------------


def resident(mesh: Mesh) -> int:
    """Return the most memory that a rank holds now."""
    return int(slowest(mesh, [float(resident_bytes())])[0])


def time_layers(mesh: Mesh, cases: Sequence[Case]) -> list[Timed]:
    """Time layers forward and backward, on all ranks at once."""
    times = _in_turn(mesh, [_step(case) for case in cases])
    found = []
    for case, both in zip(cases, times, strict=True):
        forward, backward = zip(*both, strict=True)
        seconds = typical(forward), typical(backward)
        found.append(Timed(case.flops, case.mean_channels, *seconds))
    return found


def _step(case: Case) -> Callable[[], tuple[float, float]]:
    """Return a function that runs a layer, and returns the seconds of forward and backward."""
    layer, tensors = _build(case)

    def step() -> tuple[float, float]:
        start = time.perf_counter()
        y = layer(*tensors)
        middle = time.perf_counter()
        torch.autograd.grad(y, tensors, y.detach())
        return middle - start, time.perf_counter() - middle

    return step


def _in_turn(mesh: Mesh, calls: Sequence[Callable[[], Found]]) -> list[list[Found]]:
    """Make calls for SECONDS each, in ROUNDS, on all ranks at once; the first ones do not count."""
    found: list[list[Found]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(ROUNDS):
        for call, some in zip(calls, found, strict=True):
            mesh.agree("calibrate")
            began = time.perf_counter()
            some.append(call())
            while time.perf_counter() - began < SECONDS / ROUNDS:
                some.append(call())
    return found


def _build(case: Case) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]:
    extents, dtype = (case.extent,) * case.space, getattr(torch, case.dtype)
    x = torch.randn(case.samples, case.channels, *extents, dtype=dtype)
    w = torch.randn(case.filters, case.channels, *(case.kernel,) * case.space, dtype=dtype)
    x, w = x.requires_grad_(), w.requires_grad_()
    if case.kind == "linear":
        return F.linear, (x, w)
    call: Any = F.conv2d if case.space == 2 else F.conv3d
    return lambda x, w: call(x, w, padding=case.kernel // 2), (x, w)


def time_arrays(mesh: Mesh, sizes: Sequence[int]) -> tuple[float, list[float]]:
    """Time a call on next to nothing, and calls that read and write so many bytes."""
    touch, *found = (typical(some) for some in _in_turn(mesh, [_add(n) for n in (8, *sizes)]))
    return touch, found


def _add(size: int) -> Callable[[], float]:
    x = torch.randn(max(size // 8, 1))
    out = torch.empty_like(x)

    def add() -> float:
        start = time.perf_counter()
        torch.add(x, 1.0, out=out)
        return time.perf_counter() - start

    return add


def time_messages(mesh: Mesh, sizes: Sequence[int]) -> list[float]:
    """Time exchanges in which every rank receives so many bytes, in one part from each other."""
    return _timed_together(mesh, sizes, lambda size: _exchange(mesh, size))


def _exchange(mesh: Mesh, size: int) -> Callable[[], Any]:
    """Return a move of a matrix from rows to columns."""
    others = max(mesh.size - 1, 1)
    width = mesh.size * max(size // (4 * others), 1)
    rows = Layout((mesh.size, width), [Axis(mesh.size, 0)])
    columns = Layout((mesh.size, width), [Axis(mesh.size, 1)])
    exchange = Exchange(mesh, rows, columns, layer="calibrate")
    mine = torch.zeros(1, width)
    return lambda: exchange.start(mine).finish()


def time_sums(mesh: Mesh, sizes: Sequence[int]) -> list[float]:
    """Time sums over all ranks, as gradients are summed: put together, added up and taken apart."""
    group = mesh.group()

    def prepare(size: int) -> Callable[[], Any]:
        parts = [torch.zeros(size // 4 // PARTS) for _ in range(PARTS)]

        def summed() -> None:
            buffer = torch.cat(parts)
            mesh.sum(buffer, group, layer="calibrate")
            for part, new in zip(parts, buffer.split(size // 4 // PARTS)):
                part.copy_(new)

        return summed

    return _timed_together(mesh, sizes, prepare)


def time_hidden(mesh: Mesh) -> float:
    """Return the share of a sum's time that passes behind a matrix product of the same length."""
    if mesh.size == 1:
        return 1.0
    group = mesh.group()
    buffer, square = torch.zeros(1_000_000), torch.randn(384, 384)

    def together(products: int, sums: bool) -> float:
        mesh.agree("calibrate")
        start = time.perf_counter()
        work = mesh.sum(buffer, group, layer="calibrate", wait=False) if sums else None
        for _ in range(products):
            torch.mm(square, square)
        mesh.finish(work, group, layer="calibrate")
        return time.perf_counter() - start

    def times(*ways: tuple[int, bool]) -> list[float]:
        rounds = [[together(*way) for way in ways] for _ in range(12)]
        return [typical(some) for some in zip(*rounds[2:], strict=True)]

    alone, one = times((0, True), (8, False))
    count = int(mesh.total([8 * alone / one], layer="calibrate")[0] / mesh.size) + 1
    alone, compute, both = times((0, True), (count, False), (count, True))
    hidden = (alone + compute - both) / min(alone, compute)
    return min(max(hidden, 0.0), 1.0)


def _timed_together(
    mesh: Mesh, sizes: Sequence[int], prepare: Callable[[int], Callable[[], Any]]
) -> list[float]:
    """Time calls that all ranks make equally often, in rounds over all sizes.

    As long as the first rank's times do not grow with the size, there are more rounds.
    """
    calls = [prepare(size) for size in sizes]
    times: list[list[float]] = [[] for _ in sizes]
    found: list[float] = []
    for _ in range(TRIES):
        for _ in range(ROUNDS):
            for size, call, some in zip(sizes, calls, times, strict=True):
                some.extend(_in_a_row(mesh, call, 12 if size < 1_000_000 else 4))
        found = [typical(some) for some in times]
        again = mesh.rank == 0 and not grows(sizes, found)
        if not mesh.total([float(again)], layer="calibrate")[0]:
            break
    return found


def _in_a_row(mesh: Mesh, call: Callable[[], Any], count: int) -> list[float]:
    """Return the seconds of so many calls, one before them left out."""
    times = []
    for _ in range(1 + count):
        mesh.agree("calibrate")
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times[1:]
