"""Choose the way to do the local work of a convolution, by measuring.

All ranks measure at the same time, add up their times and so choose alike. What was measured is
kept on disk for each machine, version and shape.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, prod
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tilewise.comm import Frame, Mesh
from tilewise.comm.formats import formatted
from tilewise.ops.conv_local import By, LocalConv, Way, Ways
from tilewise.ops.conv_taps import weight_gradient
from tilewise.ops.kept import folder, load, machine_name, store
from tilewise.switches import TUNE, switched_on

WORTH = 2e7  # multiplications below which no choice pays for its measuring
GAIN = 0.97  # what a way must beat to be worth leaving the plain one
MEASURED = 7  # a number of what is measured; times that are kept under another are not used
ROUNDS = 3
BEHIND = 1.3  # how many times the fastest way's time one may take to be measured again
ROUNDED = 2e-5  # how far from the exact gradient, of the largest, a way may be, or as torch is
FEW = 8  # channels below which matrix products of single taps are hopeless
JUDGED = 8  # filters whose gradients are compared with the exact ones
SLOW, SLOW_S = 2.5, 0.02  # a first run that takes so much longer, as a factor and in seconds, tells
WAYS = [
    Way(patch, last, by) for by in get_args(By) for patch in (False, True) for last in (False, True)
]
PHASES = ("forward", "data", "weight")
Times = dict[tuple[Way, ...], float]
Phase = Callable[[Way], Tensor]


def worth_tuning(work: float, x: Tensor) -> bool:
    """Whether there is a choice worth its measuring; the same on all ranks."""
    if isinstance(x, FakeTensor) or x.is_meta:
        return False  # it takes no time to convolve
    # in half types torch 2.13 has wrong channels_last kernels (grouped, and transposed ones')
    return tuning() and work >= WORTH and x.dim() > 3 and x.dtype is torch.float32


@dataclass(frozen=True)
class Tuned:
    """What the ways of a convolution take, in seconds added up over all ranks.

    Args:
        times: of each way in each phase, and of bringing x and the result from one memory format
            to the other.
        last: whether x came with its channels innermost in memory, on any rank.
    """

    times: tuple[float, ...]
    last: bool

    def best(self, last: bool, *, data: bool) -> tuple[Ways, float]:
        """Return the fastest ways between tensors in this memory format, and what they take.

        `data` is whether the gradient of x is wanted. The result is in the same format as x: in
        another one it may come sooner, but what reads it then mixes formats. ResNet-50 took a
        fifth longer when each convolution chose.
        """
        change_x, change_y = self.times[-2:]
        to_data, to_weight = self._phase("data"), self._phase("weight")
        if not data:
            to_data = dict.fromkeys(WAYS, 0.0)

        def other(*ways: Way) -> int:
            return len({way.last for way in ways} - {last})

        forth: Times = {(way,): self.forward(way, last) for way in WAYS}
        back: Times = {  # both take dy, in one format or in two; one gives dx, one takes x
            (one, two): to_data[one]
            + to_weight[two]
            + other(one, two) * change_y
            + (other(one) * data + other(two)) * change_x
            for one in WAYS
            for two in WAYS
        }
        (there,), (first, second) = _clearest(forth, last), _clearest(back, last)
        return Ways(there, first, second, last), forth[there,] + back[first, second]

    def forward(self, way: Way, last: bool) -> float:
        """Return what a way takes forward between tensors in this memory format."""
        changes = sum(self.times[-2:]) if way.last != last else 0.0
        return self._phase("forward")[way] + changes

    def _phase(self, name: str) -> dict[Way, float]:
        at = PHASES.index(name) * len(WAYS)
        return dict(zip(WAYS, self.times[at : at + len(WAYS)]))


def choose(conv: LocalConv, mesh: Mesh, x: Tensor, weight: Tensor, *, last: bool) -> Tuned:
    """Find out what the ways of a convolution take; all ranks ask together.

    Communication: one small all-reduce.
    """
    *totals, lasts = mesh.total([*_known(conv, x, weight), float(last)], layer="tuning")
    return Tuned(tuple(totals), lasts > 0)


def noise(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return numbers to measure with, and leave the caller's random numbers alone.

    Slabs differ in size: ranks that have the same seed would go on with different numbers. Most of
    them are positive, so that sums grow and rounding shows.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    drawn = torch.rand(*shape, dtype=like.dtype, device=like.device, generator=generator)
    return drawn.sub_(0.25)


def _clearest(seconds: Times, last: bool) -> tuple[Way, ...]:
    """Return the fastest ways, but plain ones as far as these are hardly slower."""
    plain = Way(patch=False, last=last)
    enough = min(seconds.values()) / GAIN
    near = [ways for ways, taken in seconds.items() if taken <= enough]
    return min(near, key=lambda ways: (sum(way != plain for way in ways), seconds[ways]))


def tuning() -> bool:
    """Whether ways are measured: not where results must be the same from run to run."""
    return switched_on(TUNE) and not torch.are_deterministic_algorithms_enabled()


def cache_file() -> Path:
    """Return where measured times are kept on this machine."""
    return folder() / "ways.json"


def _known(conv: LocalConv, x: Tensor, weight: Tensor) -> list[float]:
    """Return the times of each way in each phase and of changes of format, measured once."""
    key = _key(conv, x, weight)
    known = load(cache_file()).get(key)
    if isinstance(known, list) and len(known) == len(PHASES) * len(WAYS) + 2:
        return [float(value) for value in known]
    times = _measure(conv, x.detach(), weight.detach())
    store(cache_file(), {key: times})
    return times


def _key(conv: LocalConv, x: Tensor, weight: Tensor) -> str:
    halo = conv.halo
    return json.dumps(
        [
            MEASURED, machine_name(), torch.__version__, torch.get_num_threads(), x.device.type,
            str(x.dtype), list(x.shape), list(weight.shape), list(conv.out), list(conv.padding),
            list(conv.spec.stride), list(conv.spec.dilation), conv.groups, _onednn(),
            None if halo is None else [str(box) for box in halo.boxes],
        ]
    )  # fmt: skip


def _measure(conv: LocalConv, x: Tensor, weight: Tensor) -> list[float]:
    """Time each way in each phase, without any message, and changes of memory format.

    A way gets its operands in its own format. Without a halo nothing is patched, where torch calls
    oneDNN by itself, or there is none, calling it is no way of its own, and taps are for gradients
    of weights, neither patched nor extended: such ways take as long as those they are the same as.
    Ways whose gradient of the weight is rounded much worse than torch's take for ever: some kernels
    add up millions of values one after the other.
    """
    given = noise(x, conv.out)
    slabs = {last: formatted(x, last=last) for last in (False, True)}
    grads = {last: formatted(given, last=last) for last in (False, True)}
    frame = None if conv.halo is None else conv.halo.zeros(x)

    def forward(way: Way) -> Tensor:
        return conv.forward(way, slabs[way.last], weight, None, lambda: frame)[0]  # type: ignore[arg-type, return-value]

    def data(way: Way) -> Tensor:
        return conv.data(way, grads[way.last], slabs[way.last], weight, frame, lambda outer: None)

    found: dict[Way, Tensor] = {}

    def to_weight(way: Way) -> Tensor:
        dw = conv.weight(way, grads[way.last], slabs[way.last], weight, frame, bias=False)[0]
        found[way] = dw[:JUDGED].clone()
        return dw

    apart = _onednn_differs(conv, x, weight)
    patches = conv.halo is not None and conv.halo.thin is not None
    phases: dict[str, Phase] = dict(zip(PHASES, (forward, data, to_weight)))
    times = []
    for name, phase in phases.items():
        turned = name == "data" and _turns(conv, x, weight)
        tapped = name == "weight" and _taps(conv, x, weight)

        def same(way: Way, turned: bool = turned, tapped: bool = tapped) -> Way:
            own = {"torch": True, "onednn": apart or (turned and way.last), "taps": tapped}
            by = way.by if own[way.by] else "torch"
            return Way(way.patch and patches and by != "taps", way.last, by)

        taken = _times(phase, [way for way in WAYS if same(way) == way], x)
        if name == "weight":
            taken |= dict.fromkeys(_poor(found, _exact(conv, given, x, frame)), inf)
        times += [taken[same(way)] for way in WAYS]
    return [*times, *(_changing(tensors, x) for tensors in (slabs, grads))]


def _changing(tensors: dict[bool, Tensor], x: Tensor) -> float:
    """Return what it takes to bring a tensor from one memory format to the other, on average."""

    def change(way: Way) -> Tensor:
        return formatted(tensors[not way.last], last=way.last)

    found = [_times(change, [Way(patch=False, last=last)], x) for last in (False, True)]
    return sum(sum(times.values()) for times in found) / len(found)


def _turns(conv: LocalConv, x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of x can be found by oneDNN as a convolution of dy."""
    return _on_cpu(conv, x, weight) and _onednn() and conv.turns(conv.padding)


def _taps(conv: LocalConv, x: Tensor, weight: Tensor) -> bool:
    """Whether the gradient of the weight can be found as matrix products that are not too thin."""
    return _on_cpu(conv, x, weight) and conv.groups == 1 and min(weight.shape[:2]) >= FEW


def _onednn_differs(conv: LocalConv, x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN is there, and calling it does something else than torch does by itself."""
    if not _on_cpu(conv, x, weight) or not _onednn():
        return False
    if conv.thins:
        return True
    spec, halo = conv.spec, conv.halo
    slabs = [(x if halo is None else halo.shaped(x), conv.padding)]
    if halo is not None and halo.thin is not None:
        slabs.append((x, halo.inner_padding))
    backends = [
        torch._C._select_conv_backend(
            slab, weight, None, spec.stride, padding, spec.dilation, False, [0] * spec.ndim,
            conv.groups,
        )
        for slab, padding in slabs
    ]  # fmt: skip
    return any("Mkldnn" not in str(backend) for backend in backends)


def _on_cpu(conv: LocalConv, x: Tensor, weight: Tensor) -> bool:
    """Whether there is anything to convolve here, on a CPU."""
    return x.device.type == "cpu" and bool(prod(conv.out) and x.numel() and weight.numel())


def _onednn() -> bool:
    """Whether torch has oneDNN and may call it."""
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)


def _exact(conv: LocalConv, dy: Tensor, x: Tensor, frame: Frame | None) -> Tensor | None:
    """Return some filters' gradients, summed in float64; None where there is nothing to sum."""
    if conv.groups > 1 or not (prod(conv.out) and x.numel()):
        return None
    spec = conv.spec
    slab = x if conv.halo is None or frame is None else conv.halo.extend(x, frame, last=False)
    whole = [(slab.double(), [0] * spec.ndim)]
    return weight_gradient(
        dy[:, :JUDGED].double(), whole, spec.kernel, stride=spec.stride, padding=conv.padding,
        dilation=spec.dilation, last=False,
    )  # fmt: skip


def _poor(results: dict[Way, Tensor], exact: Tensor | None) -> set[Way]:
    """Return the ways that round worse than they may, and worse than the plain one."""
    if exact is None or not exact.numel():
        return set()
    off = {way: float((found - exact).abs().max()) for way, found in results.items()}
    plain = next(iter(results))
    most = max(ROUNDED * float(exact.abs().max()), 2 * off[plain])
    return {way for way in results if off[way] > most}


def _times(phase: Phase, ways: list[Way], x: Tensor) -> dict[Way, float]:
    """Return the shortest of a few runs of each way, in seconds, taken in turn.

    The first run prepares what later ones use, so it only tells who is far behind. Those that are
    behind are left out.
    """

    def run(way: Way) -> float:
        settle(x)
        began = time.perf_counter()
        phase(way)
        settle(x)
        return time.perf_counter() - began

    first = {way: run(way) for way in ways}
    limit = max(SLOW * min(first.values()), min(first.values()) + SLOW_S)
    left = [way for way in ways if first[way] <= limit]
    best = {way: inf if way in left else first[way] for way in ways}
    for _ in range(ROUNDS):
        for way in left:
            best[way] = min(best[way], run(way))
        fastest = min(best.values())
        left = [way for way in left if best[way] <= BEHIND * fastest]
        if len(left) < 2 <= len(ways):
            break
    return best


def settle(x: Tensor) -> None:
    """Wait until the device of a tensor has done all that it was given."""
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
