"""Random numbers by position: the same whatever the split.

The number at a place is a hash of (seed, step, stream, global index). No state is carried from one
to the next, so a rank draws for its own slab alone, and drawing again gives the same numbers.

    index·odd constant + key(seed, step, stream) ──rounds of xor-shift and multiply──▶ 64 bits

The rounds are the finaliser of splitmix64 (Steele, Lea and Flood 2014, with Stafford's constants).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, prod

import torch
from torch import Tensor

from tilewise.layout import Layout

_WORD = 1 << 64
_ODD = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
# Elements hashed at a time: 512 KiB stays in cache, which made 4 M draws twice as fast as one
# pass over all of them (16 against 35 ms on one core; torch's own bernoulli_ takes 40).
_STRETCH = 1 << 16
_VECTOR = 1 << 10


@dataclass
class Draws:
    """Where a run stands: its seed, and the step that the loop counts up."""

    seed: int = 0
    step: int = 0

    def key(self, stream: int) -> int:
        """Return 64 bits for a stream of numbers at this step."""
        key = 0
        for part in (self.seed, self.step, stream):
            key = _mixed_int((key + part) * _ODD + 1)
        return key


def uniform_bits(
    draws: Draws, stream: int, layout: Layout, rank: int, *, device: torch.device | None = None
) -> Tensor:
    """Return 64 random bits for each element of the rank's slab, as int64."""
    return _draw(draws, stream, layout, rank, torch.int64, device, lambda bits: bits)


def bernoulli(
    draws: Draws,
    stream: int,
    layout: Layout,
    rank: int,
    p: float,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """Return true with probability p for each element of the rank's slab."""
    below = int(p * _WORD) - _WORD // 2
    if below >= _WORD // 2:
        return torch.ones(layout.local_shape(rank), dtype=torch.bool, device=device)
    return _draw(draws, stream, layout, rank, torch.bool, device, lambda bits: bits < below)


def uniform(
    draws: Draws,
    stream: int,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return numbers in [0, 1) for the rank's slab, each dtype as many bits as it can hold."""
    digits = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}[dtype]

    def finish(bits: Tensor) -> Tensor:
        return _shifted(bits, 64 - digits).to(dtype).mul_(2.0**-digits)

    return _draw(draws, stream, layout, rank, dtype, device, finish)


def normal(
    draws: Draws,
    stream: int,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:
    """Return numbers of mean 0 and variance 1 for the rank's slab, by Box and Muller's rule."""

    def finish(bits: Tensor) -> Tensor:
        high = _shifted(bits, 32).double().add_(1.0).mul_(2.0**-32)
        low = bits.bitwise_and_((1 << 32) - 1).double().mul_(2.0**-32)
        radius = high.log_().mul_(-2.0).sqrt_()
        return low.mul_(2 * pi).cos_().mul_(radius).to(dtype)

    return _draw(draws, stream, layout, rank, dtype, device, finish)


def _draw(
    draws: Draws,
    stream: int,
    layout: Layout,
    rank: int,
    dtype: torch.dtype,
    device: torch.device | None,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """Hash key + index·odd over the rank's slab, a stretch at a time.

    The slab is seen as (outer dims, one dim, inner dims): the one is the last that makes a
    stretch long enough to be worth a vector loop, and is itself walked in pieces.
    """
    out = torch.empty(layout.local_shape(rank), dtype=dtype, device=device)
    if not out.numel():
        return out
    spans = [range(1), *(range(*interval) for interval in layout.intervals(rank))]
    steps = [0, *(prod(layout.shape[dim + 1 :]) * _ODD for dim in range(len(layout.shape)))]
    middle = len(spans) - 1
    while middle and prod(len(span) for span in spans[middle:]) < _VECTOR:
        middle -= 1
    outer = _counters(spans[:middle], steps[:middle], device) + _signed(draws.key(stream))
    inner = _counters(spans[middle + 1 :], steps[middle + 1 :], device)
    table = out.view(len(outer), len(spans[middle]), len(inner))
    columns = max(_STRETCH // len(inner), 1)
    rows = max(_STRETCH // (len(inner) * min(columns, len(spans[middle]))), 1)
    for column in range(0, table.shape[1], columns):
        span = spans[middle][column : column + columns]
        both = _counters([span], steps[middle : middle + 1], device)[:, None] + inner
        for row in range(0, len(outer), rows):
            bits = outer[row : row + rows, None, None] + both
            table[row : row + rows, column : column + columns] = finish(_mix(bits))
    return out


def _counters(spans: list[range], steps: list[int], device: torch.device | None) -> Tensor:
    """Return the sums of index·step over all combinations of indices, flattened."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for span, step in zip(spans, steps):
        terms = torch.arange(span.start, span.stop, device=device) * _signed(step)
        total = (total[:, None] + terms).flatten()
    return total


def _mix(bits: Tensor) -> Tensor:
    """Hash int64 words in place."""
    for shift, factor in _ROUNDS:
        bits ^= _shifted(bits, shift)
        if factor != 1:
            bits *= _signed(factor)
    return bits


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Return the words shifted right with zeros moving in."""
    return bits.bitwise_right_shift(shift).bitwise_and_((1 << (64 - shift)) - 1)


def _mixed_int(word: int) -> int:
    word %= _WORD
    for shift, factor in _ROUNDS:
        word = (word ^ (word >> shift)) * factor % _WORD
    return word


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits."""
    return (word + _WORD // 2) % _WORD - _WORD // 2
