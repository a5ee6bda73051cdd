"""Cosmology: counts of galaxies in a cube, and the four parameters of their power spectrum.

**Data.** x is 4 × size³ int16: the same universe at four redshifts. y is 4 float32 in [-1, 1].

**Physics.** Wave numbers k are in cycles per box, so `size` is the resolution of a box that stays
the same. A Gaussian field g has the power

    P(k) = A k^ns / (1 + (k/k0)²)² · { exp(large)   for k < 2
                                     { 1            otherwise,

rising as k^ns on large scales, turning over at k0, falling as k^(ns-4) on small ones. A is set
before the last factor, so that g smoothed with a Gaussian of width box/48 has the rms sigma. At
redshift z the field has grown by D(z) to the log-normal density, and the counts are Poisson:

    ρ_z = exp(D_z g - D_z² σ_g² / 2),   σ_g² = Σ_k P(k),   ⟨ρ_z⟩ = 1,
    x_z ~ Poisson(n_z ρ_z).

The depth n_z of each redshift's survey, 4 to 12 galaxies a voxel, is drawn for each sample and not
told: the mean count says nothing.

**Targets.** sigma in [0.3, 0.6], ns in [-0.6, 1.2], k0 in [3, 12] and large in [0, 4], each
uniform and mapped to [-1, 1]. `large` changes only the 26 modes with k < 2, those longer than half
the edge, and only strengthens them. A cube of half the edge (an eighth of the box) sees pieces of
their waves, which tell something of the strongest; a quarter of the edge sees hardly more than a
mean, which n_z hides. The other three can be read from any part, better from a larger one.

**Baseline.** The mean predictor's MSE is the variance of the targets: 1/3 each. Ridge regression
on the logarithms of band powers explains these shares of the variance (32³, 400 samples, out of
sample):

    cube          sigma    ns     k0     large
    whole          0.97   0.54   0.66    0.90
    half edge      0.86   0.45   0.53    0.44
    quarter edge   0.65   0.38   0.43    0.01
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.data.synthetic.gaussian import gaussian_field, total, wave_numbers
from tilewise.data.synthetic.kind import Sample, generator
from tilewise.data.write import Array, Field

SMALLEST = 16
REDSHIFTS = (0.0, 0.5, 1.0, 2.0)
# D(z) of a flat universe with a matter density of 0.3, to two digits.
GROWTH = (1.0, 0.77, 0.61, 0.42)
RANGES = {"sigma": (0.3, 0.6), "ns": (-0.6, 1.2), "k0": (3.0, 12.0), "large": (0.0, 4.0)}
LARGE_BELOW = 2.0
SMOOTHING = 1 / 48
DEPTH = (4.0, 12.0)
_HIGHEST = np.iinfo(np.int16).max


def fields(size: int) -> dict[str, Field]:
    """Return what a sample has."""
    return {
        "x": Field((len(REDSHIFTS), size, size, size), "int16"),
        "y": Field((len(RANGES),), "float32"),
    }


def sample(size: int, seed: int, index: int) -> Sample:
    """Make one universe and its parameters."""
    rng = generator("cosmology", seed, index)
    y = rng.uniform(-1, 1, len(RANGES)).astype(np.float32)
    low, high = np.log(DEPTH)
    depths = np.exp(rng.uniform(low, high, len(REDSHIFTS)))
    shape = (size, size, size)
    power = spectrum(wave_numbers(shape), **parameters(y))
    field = gaussian_field(rng, power, shape)
    variance = total(power, shape)
    x = np.empty((len(REDSHIFTS), *shape), np.int16)
    for channel, (depth, growth) in enumerate(zip(depths, GROWTH)):
        shift = np.log(depth) - growth**2 * variance / 2
        for plane, values in zip(x[channel], field):
            expected = np.exp(growth * values.astype(np.float64) + shift)
            plane[...] = np.minimum(rng.poisson(np.minimum(expected, _HIGHEST)), _HIGHEST)
    return {"x": x, "y": y}


def parameters(y: Array) -> dict[str, float]:
    """Return the physical values of normalised targets."""
    shares = (np.asarray(y, np.float64) + 1) / 2
    return {
        name: float(low + (high - low) * share)
        for (name, (low, high)), share in zip(RANGES.items(), shares)
    }


def spectrum(waves: Array, *, sigma: float, ns: float, k0: float, large: float) -> Array:
    """Return P(k), with nothing at k = 0."""
    waves = waves.astype(np.float64)
    waves.flat[0] = 1.0
    power: Array = waves**ns / (1 + np.square(waves / k0)) ** 2
    power.flat[0] = 0.0
    window = np.exp(-np.square(2 * np.pi * SMOOTHING * waves))
    edge = waves.shape[0]
    power *= sigma**2 / total(power * window, (edge,) * waves.ndim)
    power[waves < LARGE_BELOW] *= np.exp(large)
    power = power.astype(np.float32)
    return power


def tally(y: Array) -> Array:
    """Return the targets themselves."""
    return y


def baseline(tallies: Array) -> dict[str, Any]:
    """Score the predictor that answers the mean of each target."""
    variances = tallies.astype(np.float64).var(0)
    return {
        "predictor": "the mean",
        "mse": float(variances.mean()),
        "mse_by_target": {name: float(value) for name, value in zip(RANGES, variances)},
    }


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the names and ranges of channels and targets."""
    return {
        "channels": [f"z={redshift:g}" for redshift in REDSHIFTS],
        "targets": list(RANGES),
        "ranges": {name: list(span) for name, span in RANGES.items()},
    }
