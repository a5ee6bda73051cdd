"""Images: pictures of one patterned shape each, in ten classes.

**Data.** x is 3 × size × size uint8; y is one int64, the class 0 to 9.

**Geometry.** With the picture as [-1, 1]², a shape of m lobes about the centre c, turned by φ₀, is

    |p - c| < R (1 + 0.35 cos m(φ - φ₀)),      m = 2 … 6,

and is filled with one of two patterns of wave number f at angle α: stripes, or the checks made of
two crossed stripes. Class 2 (m - 2) + 0 has stripes, 2 (m - 2) + 1 checks. Position, size, turn,
wave number, both colours of the filling and both of the ground are drawn freely; the ground is a
smooth random field with a patch of either pattern on it, two bars cross the picture, light falls
off to one side, and there is noise: neither a colour nor a pattern somewhere gives the class away.

**Baseline.** The classes are equally likely: the commonest scores about 0.1, cross-entropy ln 10 ≈
2.30.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.data.synthetic.gaussian import smooth_field
from tilewise.data.synthetic.kind import Sample, class_counts, constant_class, generator
from tilewise.data.write import Array, Field

SMALLEST = 16
LOBES = (2, 3, 4, 5, 6)
PATTERNS = ("stripes", "checks")
CLASSES = tuple(f"{lobes} lobes, {pattern}" for lobes in LOBES for pattern in PATTERNS)
DEPTH = 0.35
NOISE = 12.0


def fields(size: int) -> dict[str, Field]:
    """Return what a sample has."""
    return {"x": Field((3, size, size), "uint8"), "y": Field((), "int64")}


def sample(size: int, seed: int, index: int) -> Sample:
    """Make one picture and its class."""
    rng = generator("images", seed, index)
    y = int(rng.integers(len(CLASSES)))
    lobes, pattern = LOBES[y // len(PATTERNS)], y % len(PATTERNS)
    steps = (np.arange(size) + 0.5) * 2 / size - 1
    points = np.stack(np.meshgrid(steps, steps, indexing="ij"))
    ground = smooth_field(rng, (size, size), 3.0) > 0
    patch = np.abs(points - rng.uniform(-1, 1, (2, 1, 1))).max(0) < 0.35
    ground = np.where(patch, _pattern(rng, points, int(rng.integers(2))), ground)
    picture = _coloured(rng, ground)
    shape = _shape(rng, points, lobes)
    picture = np.where(shape, _coloured(rng, _pattern(rng, points, pattern)), picture)
    for _ in range(2):
        picture = np.where(_bar(rng, points), rng.uniform(0, 255, (3, 1, 1)), picture)
    picture = picture * _light(rng, points) + NOISE * rng.standard_normal(picture.shape)
    x = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    return {"x": x, "y": np.asarray(y, np.int64)}


def _shape(rng: np.random.Generator, points: Array, lobes: int) -> Array:
    """Return where a shape of some lobes covers the picture."""
    radius = rng.uniform(0.4, 0.65)
    offset = points - rng.uniform(-0.3, 0.3, (2, 1, 1))
    angle = np.arctan2(offset[0], offset[1]) - rng.uniform(0, 2 * np.pi)
    inside: Array = np.hypot(*offset) < radius * (1 + DEPTH * np.cos(lobes * angle))
    return inside


def _pattern(rng: np.random.Generator, points: Array, kind: int) -> Array:
    """Return where stripes (0) or checks (1) are bright."""
    angle = rng.uniform(0, np.pi)
    waves = rng.uniform(2.0, 3.5) * np.pi
    turned = [
        points[0] * np.sin(angle) + points[1] * np.cos(angle),
        points[0] * np.cos(angle) - points[1] * np.sin(angle),
    ]
    first, second = (np.sin(waves * at + rng.uniform(0, 2 * np.pi)) for at in turned)
    bright: Array = (first * second if kind else first) > 0
    return bright


def _coloured(rng: np.random.Generator, bright: Array) -> Array:
    """Return the picture in two colours that are not too alike."""
    one = rng.uniform(0, 255, (3, 1, 1))
    other = one + 127.5 * (1 - 2 * (one > 127.5)) * rng.uniform(0.4, 1.0, (3, 1, 1))
    if rng.uniform() < 0.5:
        one, other = other, one
    return np.where(bright, one, other)


def _bar(rng: np.random.Generator, points: Array) -> Array:
    angle = rng.uniform(0, np.pi)
    across = points[0] * np.sin(angle) + points[1] * np.cos(angle)
    bar: Array = np.abs(across - rng.uniform(-0.8, 0.8)) < rng.uniform(0.03, 0.07)
    return bar


def _light(rng: np.random.Generator, points: Array) -> Array:
    angle = rng.uniform(0, 2 * np.pi)
    fall = points[0] * np.sin(angle) + points[1] * np.cos(angle)
    light: Array = 0.85 + 0.2 * fall
    return light


def tally(y: Array) -> Array:
    """Count the one label."""
    return class_counts(y, len(CLASSES))


def baseline(tallies: Array) -> dict[str, Any]:
    """Score the predictor that always answers the commonest class."""
    return constant_class(tallies, CLASSES)


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the names of the classes."""
    return {"classes": list(CLASSES)}
