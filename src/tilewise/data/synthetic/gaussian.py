"""Random fields with a given power spectrum, in any number of dims.

White noise is coloured in Fourier space. With wave numbers k in cycles per box, the field is

    g(x) = Σ_k  a_k e^{2πi k·x},        ⟨|a_k|²⟩ = P(|k|),

so its variance is Σ_k P(|k|), the sum over all modes of the grid; it is periodic over the box.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from tilewise.data.write import Array


def wave_numbers(shape: Sequence[int]) -> Array:
    """Return |k| in cycles per box for the modes that a real transform keeps."""
    *outer, last = shape
    steps = [np.fft.fftfreq(extent, 1 / extent) for extent in outer]
    steps.append(np.fft.rfftfreq(last, 1 / last))
    squares = np.zeros((1,) * len(shape), dtype=np.float32)
    for dim, step in enumerate(steps):
        across = [1] * len(shape)
        across[dim] = len(step)
        squares = squares + np.square(step).astype(np.float32).reshape(across)
    return np.sqrt(squares)


def total(power: Array, shape: Sequence[int]) -> float:
    """Return Σ_k P over all modes of the grid: the variance of the field."""
    last = shape[-1]
    double = np.full(last // 2 + 1, 2.0)
    double[0] = 1.0
    if last % 2 == 0:
        double[-1] = 1.0
    return float((power * double).sum(dtype=np.float64))


def gaussian_field(rng: np.random.Generator, power: Array, shape: Sequence[int]) -> Array:
    """Draw a float32 field whose modes have the given power, one value for each kept mode."""
    noise = rng.standard_normal(tuple(shape), dtype=np.float32)
    modes = np.fft.rfftn(noise)
    modes *= np.sqrt(power * np.float32(prod(shape)))
    field: Array = np.fft.irfftn(modes, s=tuple(shape), axes=range(len(shape)))
    return field.astype(np.float32, copy=False)


def smooth_field(rng: np.random.Generator, shape: Sequence[int], cutoff: float) -> Array:
    """Draw a field of mean 0 and variance 1 without detail finer than 1/cutoff of the box."""
    waves = wave_numbers(shape)
    power = np.exp(-np.square(waves / np.float32(cutoff)))
    power.flat[0] = 0.0
    return gaussian_field(rng, power / np.float32(total(power, shape)), shape)
