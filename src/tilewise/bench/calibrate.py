"""Measure this machine: what its ranks compute and send in how many seconds.

All ranks compute at once, as they do in training, so what they share (memory, caches, turbo) is in
the numbers. Of several calls on rank 0 the time is taken that a fifth of them stayed below: others
may be using the machine, and they only ever make calls slower.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.comm import Mesh
from tilewise.comm.pool import Pool
from tilewise.planner.fit import (
    Timed,
    arithmetic_error,
    backward_share,
    fit_all_reduce,
    fit_arithmetic,
    fit_curve,
    fit_line,
    fit_link,
    peak_of,
)
from tilewise.planner.machine import Compute, Machine

SECONDS = 0.25
MESSAGES = (1_000, 10_000, 100_000, 1_000_000, 4_000_000)
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

    @property
    def space(self) -> int:
        return {"linear": 0, "conv2d": 2, "conv3d": 3}[self.kind]

    @property
    def flops(self) -> float:
        outputs: int = self.samples * self.extent**self.space
        taps: int = self.kernel**self.space
        return 2.0 * outputs * self.channels * self.filters * taps


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


@dataclass
class Measured:
    """What was measured so far.

    `touch_s` is a bare call on next to nothing, `call_s` that of a layer that records its
    backward.
    """

    by_flops: dict[str, list[Timed]] = field(default_factory=dict)
    by_channels: dict[str, list[Timed]] = field(default_factory=dict)
    checks: dict[str, list[Timed]] = field(default_factory=dict)
    arrays: list[float] = field(default_factory=list)
    touch_s: float = 0.0
    call_s: float = 0.0
    messages: list[float] = field(default_factory=list)
    sums: list[float] = field(default_factory=list)


def calibrate(found: Measured, ranks: int, backend: str = "gloo") -> Iterator[tuple[str, int]]:
    """Measure in steps into `found`; yields what comes next, and how many steps there are."""
    steps = 3 + 2 * len(BY_FLOPS)
    pool = Pool(ranks, backend=backend, timeout=600.0)
    members = tuple(range(ranks))

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return pool.run(members, function, args, 600.0)[0]

    try:
        yield "memory", steps
        found.touch_s, found.arrays = run(time_arrays, ARRAYS)
        found.call_s = run(time_layers, [TINY])[0].forward_s
        for kind in BY_FLOPS:
            yield f"{kind} by size", steps
            found.by_flops[kind] = run(time_layers, BY_FLOPS[kind])
            yield f"{kind} by channels", steps
            found.by_channels[kind] = run(time_layers, BY_CHANNELS[kind])
            found.checks[kind] = run(time_layers, CHECKS[kind])
        yield "messages", steps
        found.messages = run(time_messages, MESSAGES)
        yield "sums", steps
        found.sums = run(time_sums, MESSAGES)
    finally:
        pool.close()


def machine_of(found: Measured, ranks: int, *, name: str = "local") -> Machine:
    """Fit a machine to measurements."""
    kinds = [*found.by_flops.values(), *found.by_channels.values()]
    peak = peak_of(kinds, found.call_s)
    arithmetic = {
        kind: fit_arithmetic(found.by_flops[kind], found.by_channels[kind], peak, found.call_s)
        for kind in found.by_flops
    }
    arithmetic["default"] = arithmetic["conv2d"]
    back = backward_share([one for some in kinds for one in some])
    compute = Compute(peak_flops_per_s=peak, kinds=arithmetic, backward_share=back)
    link, link_error = fit_link(MESSAGES, found.messages)
    sums, sums_error = fit_all_reduce(link, ranks, MESSAGES, found.sums)
    _, _, arrays_error = fit_line(ARRAYS, found.arrays)
    busy = [max(t - found.touch_s, 0.1 * t) for t in found.arrays]
    rates = [size / t for size, t in zip(ARRAYS, busy, strict=True)]
    errors = {
        kind: arithmetic_error(compute, kind, found.checks[kind], found.call_s)
        for kind in found.checks
    }
    errors |= {"memory": arrays_error, "messages": link_error, "sums": sums_error}
    pages, page = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    how = (
        f"measured by tilewise calibrate on {ranks} ranks of {platform.node()} "
        f"({platform.machine()}, {os.cpu_count()} cores), torch {torch.__version__}"
    )
    return Machine(
        name=name,
        sources={
            "all rates": how,
            "memory_bytes": "physical memory, shared by the ranks",
            "workspace_channel_block": "oneDNN computes convolutions on blocks of 16 channels",
            "overlap_halo": "an exchange is finished before the layer computes",
        },
        workspace_channel_block=16,
        devices_per_node=max(ranks, os.cpu_count() or 1),
        memory_bytes=pages * page // ranks,
        memory_bandwidth_bytes_per_s=max(rates),
        memory_by_bytes=fit_curve(ARRAYS, rates, max(rates)),
        call_s=found.call_s,
        compute={"float32": compute},
        node=link,
        network=link,
        all_reduce=sums,
        overlap_halo=0.0,
        fit_errors=errors,
    )


def typical(times: Sequence[float]) -> float:
    """Return the time that a fifth of the calls stayed below."""
    return sorted(times)[len(times) // 5]


# -- on the ranks ---------------------------------------------------------------------------------


def time_layers(mesh: Mesh, cases: Sequence[Case]) -> list[Timed]:
    """Time layers forward and backward, on all ranks at once."""
    found = []
    for case in cases:
        layer, tensors = _build(case)
        forward: list[float] = []
        backward: list[float] = []

        def step(layer: Any = layer, tensors: Any = tensors) -> tuple[float, float]:
            start = time.perf_counter()
            y = layer(*tensors)
            middle = time.perf_counter()
            torch.autograd.grad(y, tensors, y.detach())
            return middle - start, time.perf_counter() - middle

        mesh.agree("calibrate")
        step()
        began = time.perf_counter()
        while len(forward) < 5 or time.perf_counter() - began < SECONDS:
            there, back = step()
            forward.append(there)
            backward.append(back)
        channels = sqrt(case.channels * case.filters)
        found.append(Timed(case.flops, channels, typical(forward), typical(backward)))
    return found


def _build(case: Case) -> tuple[Callable[..., Tensor], tuple[Tensor, Tensor]]:
    extents = (case.extent,) * case.space
    x = torch.randn(case.samples, case.channels, *extents, requires_grad=True)
    w = torch.randn(case.filters, case.channels, *(case.kernel,) * case.space, requires_grad=True)
    if case.kind == "linear":
        return F.linear, (x, w)
    call: Any = F.conv2d if case.space == 2 else F.conv3d
    return lambda x, w: call(x, w, padding=case.kernel // 2), (x, w)


def time_arrays(mesh: Mesh, sizes: Sequence[int]) -> tuple[float, list[float]]:
    """Time a call on next to nothing, and calls that read and write so many bytes."""

    def timed(size: int) -> float:
        x = torch.randn(max(size // 8, 1))
        out = torch.empty_like(x)
        mesh.agree("calibrate")
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < 5 or time.perf_counter() - began < SECONDS:
            start = time.perf_counter()
            torch.add(x, 1.0, out=out)
            times.append(time.perf_counter() - start)
        return typical(times)

    return timed(8), [timed(size) for size in sizes]


def time_messages(mesh: Mesh, sizes: Sequence[int]) -> list[float]:
    """Time messages around the ring of ranks, all at once."""

    def exchange(buffer: Tensor, arriving: Tensor, tag: int) -> None:
        after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
        receiving = mesh.receive(arriving, before, tag=tag, layer="calibrate")
        sending = mesh.send(buffer, after, tag=tag, layer="calibrate")
        mesh.wait(receiving, "receive", peer=before, layer="calibrate")
        mesh.wait(sending, "send", peer=after, layer="calibrate")

    tag = mesh.tag()
    return _timed_together(mesh, sizes, lambda b: exchange(b, torch.empty_like(b), tag))


def time_sums(mesh: Mesh, sizes: Sequence[int]) -> list[float]:
    """Time sums over all ranks."""
    group = mesh.group()
    return _timed_together(mesh, sizes, lambda b: mesh.sum(b, group, layer="calibrate"))


def _timed_together(mesh: Mesh, sizes: Sequence[int], call: Callable[[Tensor], Any]) -> list[float]:
    """Time a call that all ranks make equally often."""
    found = []
    for size in sizes:
        buffer = torch.zeros(size // 4)
        times: list[float] = []
        for _ in range(60 if size < 1_000_000 else 20):
            mesh.agree("calibrate")
            start = time.perf_counter()
            call(buffer)
            times.append(time.perf_counter() - start)
        found.append(typical(times[2:]))
    return found
