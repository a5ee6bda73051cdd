"""Choose the way to do the local work of a convolution, by measuring.

All ranks measure at the same time, add up their times and so choose alike. What was measured is
kept on disk for each machine, version and shape.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tilewise.comm import Mesh
from tilewise.ops.conv_local import LocalConv, Way, Ways, is_last

WORTH = 2e7  # multiplications below which no choice pays for its measuring
GAIN = 0.97  # what a way must beat to be worth leaving the plain one
ROUNDS = 3
LONG = 0.2  # seconds after which one measurement is enough
WAYS = [Way(patch, last) for patch in (False, True) for last in (False, True)]


def worth_tuning(work: float, x: Tensor) -> bool:
    """Whether there is a choice worth its measuring; the same on all ranks."""
    if isinstance(x, FakeTensor):
        return False  # it takes no time to convolve
    return tuning() and work >= WORTH and x.dim() > 3 and x.dtype is not torch.float64


def choose(conv: LocalConv, mesh: Mesh, x: Tensor, weight: Tensor) -> Ways:
    """Return the fastest ways for a convolution; all ranks ask together.

    Communication: one small all-reduce.
    """
    *totals, lasts = mesh.total([*_known(conv, x, weight), float(is_last(x))], layer="tuning")
    plain = WAYS.index(Way(patch=False, last=lasts > 0))
    best = []
    for phase in range(3):
        times = totals[phase * len(WAYS) : (phase + 1) * len(WAYS)]
        clear = min(times) < GAIN * times[plain]
        best.append(WAYS[times.index(min(times)) if clear else plain])
    return Ways(*best)


def tuning() -> bool:
    """Whether ways are measured: not where results must be the same from run to run."""
    off = os.environ.get("TILEWISE_TUNE", "on").lower() in ("off", "0", "no", "false")
    return not off and not torch.are_deterministic_algorithms_enabled()


def cache_file() -> Path:
    """Return where measured times are kept on this machine."""
    folder = os.environ.get("TILEWISE_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "tilewise"
    )
    return Path(folder) / "ways.json"


def _known(conv: LocalConv, x: Tensor, weight: Tensor) -> list[float]:
    """Return the time of each way in each phase, from the file or measured now."""
    key = _key(conv, x, weight)
    known = _load().get(key)
    if isinstance(known, list) and len(known) == 3 * len(WAYS):
        return [float(value) for value in known]
    times = _measure(conv, x.detach(), weight.detach())
    _store(key, times)
    return times


def _key(conv: LocalConv, x: Tensor, weight: Tensor) -> str:
    halo = conv.halo
    return json.dumps(
        [
            machine_name(), torch.__version__, torch.get_num_threads(), x.device.type, str(x.dtype),
            is_last(x), list(x.shape), list(weight.shape), list(conv.out), list(conv.padding),
            list(conv.spec.stride), list(conv.spec.dilation), conv.groups,
            None if halo is None else [str(box) for box in halo.boxes],
        ]
    )  # fmt: skip


@cache
def machine_name() -> str:
    """Return what kind of processor this is."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _load() -> dict[str, Any]:
    try:
        found = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _store(key: str, times: list[float]) -> None:
    """Add to the file, as a whole or not at all; a file that cannot be written is no error."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that store at the same time wait in turn
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump(_load() | {key: times}, file)
            os.replace(file.name, path)
    except OSError:
        return


def _measure(conv: LocalConv, x: Tensor, weight: Tensor) -> list[float]:
    """Time each way in each phase, without any message."""
    dy = torch.randn_like(x.new_empty(conv.out))
    frame = None if conv.halo is None else conv.halo.zeros(x)

    def forward(way: Way) -> None:
        conv.forward(way, x, weight, None, lambda: frame)  # type: ignore[arg-type, return-value]

    def data(way: Way) -> None:
        conv.data(way, dy, x, weight, frame, lambda outer: None)

    def to_weight(way: Way) -> None:
        conv.weight(way, dy, x, weight, frame, bias=False)

    phases: list[Callable[[Way], None]] = [forward, data, to_weight]
    return [_time(phase, way, x) for phase in phases for way in WAYS]


def _time(phase: Callable[[Way], None], way: Way, x: Tensor) -> float:
    """Return the shortest of a few runs, in seconds."""
    phase(way)
    best = float("inf")
    for _ in range(ROUNDS):
        _settle(x)
        began = time.perf_counter()
        phase(way)
        _settle(x)
        best = min(best, time.perf_counter() - began)
        if best > LONG:
            break
    return best


def _settle(x: Tensor) -> None:
    if x.device.type != "cpu":
        torch.accelerator.synchronize(x.device)
