"""Fit a machine's models to measurements; each fit comes with its typical relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.machine import AllReduce, Arithmetic, Compute, Curve, Link

Floats = NDArray[np.float64]

FAILED = 1.0
"""The least error of a fit that failed: it is warned of, and what stands in its place is rough."""

TELLING = 0.1
"""What share of a time a size must make up; what is less cannot be told from noise."""


@dataclass(frozen=True)
class Timed:
    """A call that was timed: operations, geometric mean of channels and filters, seconds."""

    flops: float
    channels: float
    forward_s: float
    backward_s: float


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Fit a + b·size with the least relative error; returns a, b and the median error.

    Where b is not to be told from the noise, the largest size gives it, and the error is at least
    FAILED.
    """
    x, t = np.array(sizes, np.float64), np.array(seconds, np.float64)
    rows = np.stack([np.ones_like(x), x], 1) / t[:, None]
    (a, b), *_ = np.linalg.lstsq(rows, np.ones_like(t), rcond=None)
    if a < 0:
        a, b = 0.0, float(np.median(t / x))
    last = int(x.argmax())
    sound = TELLING <= b * x[last] / t[last] <= 1.0 / TELLING
    if not sound:
        a, b = float(t.min()), _by_largest(t, last) / float(x[last])
    error = _median_error(a + b * x, t)
    return float(a), float(b), error if sound else max(error, FAILED)


def _by_largest(seconds: Floats, last: int) -> float:
    """Return what the largest size takes beyond the least time of all, or in all."""
    whole = float(seconds[last])
    beyond = whole - float(seconds.min())
    return beyond if beyond >= TELLING * whole else whole


def grows(sizes: Sequence[float], seconds: Sequence[float]) -> bool:
    """Whether a line through these times tells what a byte takes."""
    return fit_line(sizes, seconds)[2] < FAILED


def fit_link(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[Link, float]:
    """Fit latency and bandwidth to messages of these sizes in bytes."""
    latency, per_byte, error = fit_line(sizes, seconds)
    return Link(latency_s=latency, bandwidth_bytes_per_s=1.0 / per_byte), error


def fit_all_reduce(
    link: Link, ranks: int, sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[AllReduce, float]:
    """Fit the shares of its link's latency and bandwidth that a sum has, and what it costs more."""
    rounds = np.log2(ranks)
    ring = 2.0 * max(ranks - 1, 1) / ranks / link.bandwidth_bytes_per_s
    fixed = 2.0 * rounds * link.latency_s
    start, per_byte, error = fit_line(sizes, seconds)
    found = AllReduce(
        small_bytes=0,
        efficiency=ring / per_byte,
        latency_share=min(start / fixed, 1.0) if fixed else 0.0,
        overhead_s=max(start - fixed, 0.0),
    )
    return found, error


def fit_curve(sizes: Sequence[float], rates: Sequence[float], top: float) -> Curve:
    """Return the share of `top` at each size; the order of the sizes does not matter."""
    found: dict[float, list[float]] = {}
    for size, rate in zip(sizes, rates, strict=True):
        found.setdefault(size, []).append(min(rate / top, 1.0))
    at = sorted(found)
    return Curve(at=tuple(at), share=tuple(float(np.median(found[size])) for size in at))


def fit_memory(
    touch_s: float, sizes: Sequence[float], seconds: Sequence[float]
) -> tuple[float, Curve, float]:
    """Return the peak rate, the share of it by bytes, and the error; `touch_s` starts a call.

    No call takes less than its start, so a start that took longer is not believed. Arrays that take
    hardly longer than it have no part in the peak; if these are not only the smallest, the fit has
    failed.
    """
    start = min(touch_s, *seconds)
    busy = [max(t - start, TELLING * t) for t in seconds]
    rates = [size / t for size, t in zip(sizes, busy, strict=True)]
    both = zip(rates, seconds, strict=True)
    telling = [rate for rate, t in both if t - start >= TELLING * t]
    peak = max(telling, default=sizes[-1] / seconds[-1])
    error = curve_error(sizes, rates)
    sound = len(telling) >= len(sizes) - 1
    return peak, fit_curve(sizes, rates, peak), error if sound else max(error, FAILED)


def fit_call(call_s: float, timed: Sequence[Timed]) -> float:
    """Return what it takes to start a call: no more than any call took."""
    return min(call_s, *(one.forward_s for one in timed))


def curve_error(sizes: Sequence[float], rates: Sequence[float]) -> float:
    """Return the median error of a curve at points between others that it does not know of."""
    found = []
    for i in range(1, len(sizes) - 1):
        known = [k for k in range(len(sizes)) if k != i]
        curve = fit_curve([sizes[k] for k in known], [rates[k] for k in known], max(rates))
        guess = max(rates) * float(curve(np.array(sizes[i])))
        found.append(abs(guess / rates[i] - 1.0))
    return float(np.median(found))


def fit_arithmetic(
    by_flops: Sequence[Timed], by_channels: Sequence[Timed], peak: float, call_s: float
) -> Arithmetic:
    """Fit shares of the peak: by operations relative to the largest call, the rest by channels."""
    rates = [rate(one, call_s) for one in by_flops]
    flops = fit_curve([one.flops for one in by_flops], rates, max(rates))
    every = [*by_channels, *by_flops]
    rest = [rate(one, call_s) / float(flops(np.array(one.flops))) for one in every]
    channels = fit_curve([one.channels for one in every], rest, peak)
    return Arithmetic(by_flops=flops, by_channels=channels)


def rate(one: Timed, call_s: float) -> float:
    """Return the operations a second of a call, the time to start it left out."""
    return one.flops / max(one.forward_s - call_s, TELLING * one.forward_s)


def peak_of(kinds: Sequence[Sequence[Timed]], call_s: float) -> float:
    """Return the highest rate of all measured calls."""
    return max(rate(one, call_s) for some in kinds for one in some)


def backward_share(timed: Sequence[Timed]) -> float:
    """Return how fast backward, which has twice the operations, runs relative to forward."""
    return float(np.median([2.0 * one.forward_s / one.backward_s for one in timed]))


def arithmetic_error(compute: Compute, kind: str, timed: Sequence[Timed], call_s: float) -> float:
    """Return the median relative error of predicted forward times."""
    found = compute.kinds[kind]
    flops = np.array([one.flops for one in timed])
    share = found.by_flops(flops) * found.by_channels(np.array([one.channels for one in timed]))
    predicted = call_s + flops / (compute.peak_flops_per_s * share)
    return _median_error(predicted, np.array([one.forward_s for one in timed]))


def _median_error(predicted: Floats, seconds: Floats) -> float:
    return float(np.median(np.abs(predicted - seconds) / seconds))
