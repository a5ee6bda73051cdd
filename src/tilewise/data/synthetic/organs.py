"""Organs: scans of a body with organs, lesions in them, and other bright lumps around.

**Data.** x is 1 × size³ float32; y is size³ uint8: 0 background, 1 organ, 2 lesion.

**Geometry.** With the box as unit, an ellipsoid of centre c, radii r and rotation R is

    q(p) = (p - c)ᵀ R diag(1/r²) Rᵀ (p - c) < 1 + 0.1 s(p),

s a smooth random field of variance 1 that dents the surface. A body (radii 0.4 to 0.48) holds one
or two organs (0.18 to 0.3), each organ one to three lesions (0.07 to 0.12) centred in it; a
lesion's label ends at its organ's surface. Lumps like lesions, up to twelve, lie elsewhere in the
body and are background: what surrounds a bright lump decides its class, not its brightness.

**Intensity.** Tissue t is 0 outside, 0.35 in the body, 0.65 in organs, 1 in lesions and lumps.

    x = t · exp(0.15 b) + 0.07 ε,

b a smooth bias field of variance 1 (no detail finer than about a third of the box), ε white noise.

**Baseline.** All background: accuracy 0.94 (the share of background), Dice 0 for organ and lesion.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.data.synthetic.gaussian import smooth_field
from tilewise.data.synthetic.kind import Sample, class_counts, constant_class, generator
from tilewise.data.write import Array, Field

SMALLEST = 16
CLASSES = ("background", "organ", "lesion")
TISSUE = {"body": 0.35, "organ": 0.65, "lesion": 1.0}
DENTS, BIAS, NOISE = 0.1, 0.15, 0.07
_TRIES = 50

Ellipsoid = tuple[Array, Array, Array]
Box = tuple[slice, ...]


def fields(size: int) -> dict[str, Field]:
    """Return what a sample has."""
    return {"x": Field((1, size, size, size), "float32"), "y": Field((size,) * 3, "uint8")}


def sample(size: int, seed: int, index: int) -> Sample:
    """Make one scan and its labels."""
    rng = generator("organs", seed, index)
    shape = (size, size, size)
    dents = smooth_field(rng, shape, 4.0)
    tissue = np.zeros(shape, np.float32)
    y = np.zeros(shape, np.uint8)
    body = rng.uniform(0.47, 0.53, 3)
    reach = rng.uniform(0.4, 0.48, 3)
    _paint(*_inside(dents, body, reach, _rotation(rng)), (tissue, TISSUE["body"]))
    organs = _organs(rng, body)
    for centre, radii, turn in organs:
        box, inside = _inside(dents, centre, radii, turn)
        inside &= tissue[box] > 0
        _paint(box, inside, (tissue, TISSUE["organ"]), (y, 1))
    for centre, radii, turn in organs:
        for _ in range(rng.integers(1, 4)):
            place = centre + turn @ (radii * _in_ball(rng) * 0.7)
            box, inside = _lump(rng, dents, place)
            inside &= y[box] > 0
            _paint(box, inside, (tissue, TISSUE["lesion"]), (y, 2))
    for _ in range(rng.integers(6, 13)):
        box, inside = _lump(rng, dents, body + 0.4 * _in_ball(rng))
        if not y[box][inside].any():
            inside &= tissue[box] > 0
            _paint(box, inside, (tissue, TISSUE["lesion"]))
    bias = np.exp(np.float32(BIAS) * smooth_field(rng, shape, 1.5))
    noise = np.float32(NOISE) * rng.standard_normal(shape, dtype=np.float32)
    return {"x": (tissue * bias + noise)[None], "y": y}


def _organs(rng: np.random.Generator, body: Array) -> list[Ellipsoid]:
    """Draw one or two ellipsoids that keep apart, as far as a few tries find room."""
    found: list[Ellipsoid] = []
    wanted = int(rng.integers(1, 3))
    for _ in range(_TRIES):
        radii = rng.uniform(0.18, 0.3, 3)
        centre = body + 0.25 * _in_ball(rng)
        turn = _rotation(rng)
        apart = all(
            np.linalg.norm(centre - other) > radii.mean() + size.mean() for other, size, _ in found
        )
        if apart:
            found.append((centre, radii, turn))
        if len(found) == wanted:
            break
    return found


def _lump(rng: np.random.Generator, dents: Array, centre: Array) -> tuple[Box, Array]:
    return _inside(dents, centre, rng.uniform(0.07, 0.12, 3), _rotation(rng))


def _paint(box: Box, inside: Array, *values: tuple[Array, float]) -> None:
    for array, value in values:
        array[box][inside] = value


def _inside(dents: Array, centre: Array, radii: Array, turn: Array) -> tuple[Box, Array]:
    """Return the box around an ellipsoid and which of its voxels are inside.

    An ellipsoid reaches sqrt(Σ_b R_ab² r_b²) along axis a, a dented one a little further.
    """
    size = dents.shape[0]
    reach = np.sqrt(np.square(turn) @ np.square(radii)) * np.sqrt(1 + 4 * DENTS)
    low = np.clip(np.floor((centre - reach) * size), 0, size).astype(int)
    high = np.clip(np.ceil((centre + reach) * size), 0, size).astype(int)
    box = tuple(slice(a, b) for a, b in zip(low.tolist(), high.tolist()))
    form = turn @ np.diag(1 / np.square(radii)) @ turn.T
    steps = [(np.arange(part.start, part.stop) + 0.5) / size - c for part, c in zip(box, centre)]
    z, y, x = np.meshgrid(*steps, indexing="ij", sparse=True)
    squares = form[0, 0] * z * z + form[1, 1] * y * y + form[2, 2] * x * x
    mixed = 2 * (form[0, 1] * z * y + form[0, 2] * z * x + form[1, 2] * y * x)
    inside: Array = squares + mixed < 1 + DENTS * dents[box]
    return box, inside


def _rotation(rng: np.random.Generator) -> Array:
    """Draw a rotation, all equally likely: a random unit quaternion."""
    w, x, y, z = _unit(rng.standard_normal(4))
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def _in_ball(rng: np.random.Generator) -> Array:
    inside: Array = _unit(rng.standard_normal(3)) * rng.uniform() ** (1 / 3)
    return inside


def _unit(vector: Array) -> Array:
    unit: Array = vector / np.sqrt(np.square(vector).sum())
    return unit


def tally(y: Array) -> Array:
    """Count the voxels of each class."""
    return class_counts(y, len(CLASSES))


def baseline(tallies: Array) -> dict[str, Any]:
    """Score the predictor that calls every voxel background."""
    return constant_class(tallies, CLASSES)


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the names of the classes."""
    return {"classes": list(CLASSES)}
