"""Images: pictures of one patterned shape each, in ten classes.

**Data.** x is 3 × size × size uint8; y is one int64, the class 0 to 9.

**Geometry.** With the picture as [-1, 1]², a shape of m lobes about the centre c, turned by φ₀, is

    |p - c| < R (1 + 0.4 cos m(φ - φ₀)),      m = 2, 3, 4 or 6,

or the disc |p - c| < R for m = 0, and is filled with one of two patterns: stripes, or the checks
that two crossed stripes make. The class counts through the pairs of (m, pattern). Position, size,
turn, wave number, both colours of the filling and both of the ground are drawn freely; the ground
is a darker random field, light falls off to one side, and there is noise: no colour gives the class
away.

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
LOBES = (0, 2, 3, 4, 6)
PATTERNS = ("stripes", "checks")
CLASSES = tuple(f"{lobes}-lobed {pattern}" for lobes in LOBES for pattern in PATTERNS)
DEPTH = 0.4
GROUND = 0.25
NOISE = 5.0


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
    picture = GROUND * _coloured(rng, ground)
    shape = _shape(rng, points, lobes)
    picture = np.where(shape, _coloured(rng, _pattern(rng, points, pattern)), picture)
    picture = picture * _light(rng, points) + NOISE * rng.standard_normal(picture.shape)
    x = np.clip(np.rint(picture), 0, 255).astype(np.uint8)
    return {"x": x, "y": np.asarray(y, np.int64)}


def _shape(rng: np.random.Generator, points: Array, lobes: int) -> Array:
    """Return where a shape of some lobes covers the picture."""
    radius = rng.uniform(0.5, 0.7)
    offset = points - rng.uniform(-0.25, 0.25, (2, 1, 1))
    angle = np.arctan2(offset[0], offset[1]) - rng.uniform(0, 2 * np.pi)
    swing = np.cos(lobes * angle) if lobes else 0.0
    inside: Array = np.hypot(*offset) < radius * (1 + DEPTH * swing)
    return inside


def _pattern(rng: np.random.Generator, points: Array, kind: int) -> Array:
    """Return where stripes (0) or checks (1) are bright."""
    angle = rng.uniform(0, np.pi)
    waves = rng.uniform(3.5, 5.5) * np.pi
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
    scores = constant_class(tallies, CLASSES)
    del scores["dice"]
    return scores


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the names of the classes."""
    return {"classes": list(CLASSES)}
