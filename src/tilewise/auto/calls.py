"""Time the calls of a model under their splits, on the ranks that are to train it.

Each call runs as in a step, with its own messages, and all ranks at once, under the caller's
autocast. What was measured is kept on disk for the next time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tilewise.auto.tell import hosts, slowest
from tilewise.comm import Chain, Mesh
from tilewise.comm.formats import formatted
from tilewise.comm.heap import steady
from tilewise.errors import CommError, MismatchError
from tilewise.graph.formats import Formats
from tilewise.graph.graph import Value
from tilewise.graph.runs import no_autocast
from tilewise.ops.kept import folder, load, machine_name, own_version, store
from tilewise.ops.operation import Bound
from tilewise.ops.tune import settle
from tilewise.planner.calls import SplitCall
from tilewise.planner.machine import CallTime

LONG = 0.005  # seconds; shorter calls are measured under all of their splits
BLOCKS = 3
BLOCK_S = 0.02
AT_ONCE = 16  # calls between two times that what was measured is kept
UNKNOWN = ()  # kept of a call for which there was no time


def cache_file(mesh: Mesh, backend: str) -> Path:
    """Return where times of calls on so many ranks are kept."""
    return folder() / f"calls-{mesh.size}-{backend}.json"


def head(mesh: Mesh, device: torch.device) -> str:
    """Return what all times of this process depend on; all ranks ask together."""
    casts = torch.is_autocast_enabled(device.type)
    dtype = str(torch.get_autocast_dtype(device.type)) if casts else "no autocast"
    return (
        f"tilewise {own_version()} {machine_name()} torch {torch.__version__} "
        f"{torch.get_num_threads()} threads hosts {hosts(mesh)} {dtype} {device}"
    )


def worth_measuring(calls: Sequence[SplitCall], hopeless: float) -> list[int]:
    """Leave out long calls under hopeless splits; return the others' places, the best splits first.

    Hopeless is a split that is predicted to take so many times the time of the call's best one.
    """
    best: dict[str, float] = {}
    for one in calls:
        best[one.call] = min(best.get(one.call, inf), one.predicted_s)
    behind = [one.predicted_s / max(best[one.call], 1e-9) for one in calls]
    worth = [
        place
        for place, one in enumerate(calls)
        if one.predicted_s <= LONG or behind[place] <= hopeless
    ]
    return sorted(worth, key=behind.__getitem__)


def said(
    mesh: Mesh, measuring: Generator[tuple[int, int], None, tuple[CallTime, ...]]
) -> Generator[str, None, tuple[CallTime, ...]]:
    """Say what takes so long, if anything is measured, and how far it is."""
    first = True
    while True:
        try:
            done, total = next(measuring)
        except StopIteration as ended:
            times: tuple[CallTime, ...] = ended.value
            return times
        if first and mesh.rank == 0:
            text = f"measuring {total} splits of layers for the plan; they are kept in {folder()}"
            print(f"tilewise: {text}", file=sys.stderr, flush=True)
        first = False
        yield f"layers: {done} of {total}"


def time_calls(
    mesh: Mesh,
    calls: Sequence[SplitCall],
    labels: Mapping[Value, str],
    device: torch.device,
    backend: str,
    seconds: float,
) -> Generator[tuple[int, int], None, tuple[CallTime, ...]]:
    """Return the times of calls, known or measured now; yields how many of how many are done.

    After so many seconds those that are left stay unknown, the next time too.

    Communication: the calls' own, where the ranks are, and one sum to agree on what is known.
    """
    path = cache_file(mesh, backend)
    measured_on = head(mesh, device)
    kept = load(path)
    known = [kept.get(f"{measured_on} {one.key}") for one in calls]
    everywhere = mesh.total([float(one is not None) for one in known] or [0.0], layer="auto")
    missing = [one for one, ranks in zip(calls, everywhere) if ranks < mesh.size]
    found = {one.key: times for one, times in zip(calls, known) if times is not None}
    nothing = _empty_backward(device)
    began = time.monotonic()
    for begin in range(0, len(missing), AT_ONCE):
        times: list[float] = []
        for number, one in enumerate(missing[begin : begin + AT_ONCE], start=begin):
            there, back = _tried(mesh, one, labels, device)
            times += there, max(back - nothing, 0.1 * back)
            yield number + 1, len(missing)
        *longest, taken = slowest(mesh, [*times, time.monotonic() - began])
        new: dict[str, Sequence[float]] = {
            one.key: longest[2 * i : 2 * i + 2]
            for i, one in enumerate(missing[begin : begin + AT_ONCE])
            if isfinite(longest[2 * i])
        }
        late = taken > seconds
        if late:
            new |= {one.key: UNKNOWN for one in missing[begin + AT_ONCE :]}
        store(path, {f"{measured_on} {key}": times for key, times in new.items()})
        found |= new
        if late:
            break
    return tuple(
        CallTime(call=key, forward_s=times[0], backward_s=times[1])
        for key, times in found.items()
        if len(times)
    )


def _tried(
    mesh: Mesh, one: SplitCall, labels: Mapping[Value, str], device: torch.device
) -> tuple[float, float]:
    """Time a call; infinite where it refuses what is drawn for it, which all ranks see alike."""
    try:
        return _time(mesh, one, labels, device)
    except Exception as error:
        refusal(error)
        return inf, inf


def refusal(error: Exception) -> None:
    """Raise again what is not a model's refusal of drawn numbers, which all ranks see alike."""
    if isinstance(error, (CommError, MismatchError)):
        raise error
    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
        raise error  # of one rank perhaps; to go on would be to lose the others
    if not isinstance(error, (RuntimeError, ValueError, IndexError)):
        raise error


def _time(
    mesh: Mesh, one: SplitCall, labels: Mapping[Value, str], device: torch.device
) -> tuple[float, float]:
    """Return the seconds of one call forward and backward on this rank."""
    lowered = one.lowered(labels, ranks=mesh.size, rank=mesh.rank)
    operation, node = lowered.operation, one.node
    sources: list[Any] = []
    for value, need in zip(lowered.operands, operation.needs, strict=True):
        if value.held:
            sources.append(None)
        else:
            sources.append(one.split if value is one.operand else need.home)
    bound = operation.bind(mesh, sources, layer=node.name)
    first = lowered.operands[0] if lowered.operands else None
    if lowered.in_place is not None and bound.brings[0] is None and first is not None:
        bound.local = lowered.in_place
    has = dict(zip(node.values(), one.grads))
    leaves = [
        drawn(value, need.cover if source is None else source, mesh.rank, device).requires_grad_(
            value.trained or has.get(value, False)
        )
        for value, need, source in zip(lowered.operands, operation.needs, sources, strict=True)
    ]
    held = [value.held for value in lowered.operands]
    if Formats([bound]).choose(leaves):  # as in a network of such layers
        leaves = [leaf if own else _innermost(leaf) for leaf, own in zip(leaves, held)]
    mesh.agree("auto")
    # which also tunes a convolution
    steady(partial(_once, bound, leaves, held, node.no_grad), partial(mesh.total, layer="auto"))
    count = _count(mesh, bound, leaves, held, node.no_grad)
    forward, backward = [], []
    for _ in range(BLOCKS):
        there = back = 0.0
        for _ in range(count):
            once = _once(bound, leaves, held, node.no_grad)
            there, back = there + once[0], back + once[1]
        forward.append(there / count)
        backward.append(back / count)
    return min(forward), min(backward)


def _innermost(leaf: Tensor) -> Tensor:
    """Return a leaf with its channels innermost in memory."""
    return formatted(leaf.detach(), last=True).requires_grad_(leaf.requires_grad)


def _count(mesh: Mesh, bound: Bound, leaves: list[Tensor], held: list[bool], no_grad: bool) -> int:
    """Return how often to repeat a call in a block, the same on all ranks."""
    seconds = sum(_once(bound, leaves, held, no_grad))
    mean = mesh.total([seconds], layer="auto")[0] / mesh.size
    return max(1, min(50, int(BLOCK_S / max(mean, 1e-6))))


def _once(
    bound: Bound, leaves: list[Tensor], held: list[bool], no_grad: bool
) -> tuple[float, float]:
    """Run a call forward and backward; returns the seconds of each."""
    chain = Chain()
    tracked = [leaf for leaf in leaves if leaf.requires_grad] if not no_grad else []
    with torch.set_grad_enabled(bool(tracked)):
        # what the model computes is no leaf, and may be written to
        operands = [leaf if own else leaf.clone() for leaf, own in zip(leaves, held)]
        if tracked:
            chain.start(leaves[0].device)
        start = time.perf_counter()
        results = bound(*operands, chain=chain)
        settle(leaves[0])
        middle = time.perf_counter()
    outs = [results] if isinstance(results, Tensor) else list(results)
    outs = [out for out in outs if out.requires_grad]
    if not outs:
        return middle - start, 0.0
    seeds = [out.detach() for out in outs]
    begin = time.perf_counter()
    with no_autocast():
        torch.autograd.grad(outs, tracked, seeds, allow_unused=True)
    settle(leaves[0])
    return middle - start, time.perf_counter() - begin


def _empty_backward(device: torch.device) -> float:
    """Return what a backward pass takes that computes nothing: a step has one, not one a call."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    times = []
    for _ in range(50):
        copy = leaf.clone()
        settle(leaf)
        start = time.perf_counter()
        torch.autograd.grad([copy], [leaf], [copy.detach()])
        settle(leaf)
        times.append(time.perf_counter() - start)
    return median(times)


def drawn(value: Value, where: Any, rank: int, device: torch.device) -> Tensor:
    """Return something of the shape that a rank holds of a value."""
    shape = where.local_shape(rank)
    constant = value.constant
    if constant is not None and tuple(constant.shape) == tuple(shape):
        return constant.detach().clone().to(device)
    if value.dtype.is_floating_point:  # between 0 and 1, where logarithms and entropies are at home
        return torch.rand(shape, device=device).to(value.dtype)
    return torch.zeros(shape, dtype=value.dtype, device=device)
