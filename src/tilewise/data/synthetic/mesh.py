"""Mesh: a moving quadrilateral mesh, and where it is about to tangle.

**Data.** x is 18 × size × size float32, one value of each channel a node; y is 1 × size × size
uint8: 1 where one of the node's cells is tangled after the coming step.

**Motion.** Node (i, j) starts at the grid point X and keeps its velocity v(X):

    X(t) = X + t v(X),      v = (∂ψ/∂x₁, -∂ψ/∂x₀),

ψ a random stream function whose strain is equally strong at all wavelengths from 8 cells to the
box, and 0 at the border, along which the nodes slide. The flow keeps areas at first order;
det(I + t ∇v) = 1 + t² det ∇v falls below 0 first where the flow strains most. x shows the mesh at
t, y the tangled cells at t + Δt; t + Δt is the time at which the determinant is negative on 1 to
6 % of the cells, and t is 0.6 to 0.8 of it.

**Tangled.** Going round a cell's corners a, b, c, d, the corner at b has the signed area (of its
parallelogram, 1 undeformed)

    A_b = (b - a) × (c - b),

and the bilinear map of the cell is one to one where all four are positive. An inverted cell has all
four negative, one that crosses itself two, one with a corner pushed in one. A cell is tangled when
any is ≤ 0.

**Channels**, lengths in units of the undeformed spacing: 0–1 position (in units of the box, from
-1 to 1), 2–3 the coming step's movement, 4–11 edges to the next and last node along either index,
12 mean signed area of the node's cells, 13 the smallest signed corner area at the node (1 is
undeformed), 14 logarithm of the edges' length ratio, 15 cosine between them; with e₀, e₁ the mean
edges and m₀, m₁ the differences of the movement along either index, 16 growth of the area
m₀ × e₁ + e₀ × m₁ and 17 circulation m₀·e₁ - m₁·e₀ of the movement. At the border an edge that leads
outside is the opposite edge mirrored.

**Baseline.** All clear: accuracy about 0.93, Dice (F1) 0 for the tangled nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise.data.synthetic.gaussian import gaussian_field, wave_numbers
from tilewise.data.synthetic.kind import Sample, class_counts, constant_class, generator
from tilewise.data.write import Array, Field

SMALLEST = 16
CLASSES = ("clear", "tangled")
CHANNELS = (
    *("position_0", "position_1", "movement_0", "movement_1"),
    *("next_0_0", "next_0_1", "next_1_0", "next_1_1"),
    *("last_0_0", "last_0_1", "last_1_0", "last_1_1"),
    *("area", "corner_area", "aspect", "cosine", "growth", "circulation"),
)
SHORTEST = 8.0
TANGLED_CELLS = (0.01, 0.06)
SHOWN_AT = (0.6, 0.8)


def fields(size: int) -> dict[str, Field]:
    """Return what a sample has."""
    return {
        "x": Field((len(CHANNELS), size, size), "float32"),
        "y": Field((1, size, size), "uint8"),
    }


def sample(size: int, seed: int, index: int) -> Sample:
    """Make one mesh and the labels of its nodes."""
    rng = generator("mesh", seed, index)
    velocity = _velocity(rng, size)
    share = rng.uniform(*TANGLED_CELLS)
    strain = np.stack([np.stack(np.gradient(part)) for part in velocity])
    folding = -np.quantile(_cross(strain[0], strain[1]), share)
    end = 1 / np.sqrt(folding)
    begin = rng.uniform(*SHOWN_AT) * end
    grid = np.stack(np.meshgrid(*[np.arange(size, dtype=np.float64)] * 2, indexing="ij"))
    x = channels(grid + begin * velocity, (end - begin) * velocity)
    y = to_nodes(tangled(grid + end * velocity))
    return {"x": x, "y": y[None].astype(np.uint8)}


def _velocity(rng: np.random.Generator, size: int) -> Array:
    """Draw a flow without divergence that slides along the border.

    The stream function is 0 there, being odd about it: a field of twice the extent, less its
    mirror images.
    """
    double = 2 * (size - 1)
    waves = wave_numbers((double, double))
    waves[0, 0] = 1.0
    # Strain is ψ differentiated twice: k⁴ P(k), times the 2πk modes of a ring, is flat in ln k.
    power = np.where(waves <= double / SHORTEST, waves**-6.0, 0.0)
    power[0, 0] = 0.0
    stream = gaussian_field(rng, power.astype(np.float32), (double, double)).astype(np.float64)
    for dim in (0, 1):
        stream = stream - np.roll(np.flip(stream, dim), 1, dim)
    first, second = np.gradient(stream[:size, :size])
    velocity = np.stack([second, -first])
    velocity /= np.abs(velocity).max()
    return velocity


def corner_areas(nodes: Array) -> Array:
    """Return the signed areas at a cell's four corners, 4 × (size-1) × (size-1), 1 undeformed.

    Corners in turn: (i, j), (i+1, j), (i+1, j+1), (i, j+1).
    """
    ring = [nodes[:, :-1, :-1], nodes[:, 1:, :-1], nodes[:, 1:, 1:], nodes[:, :-1, 1:]]
    return np.stack(
        [_cross(ring[at] - ring[at - 1], ring[(at + 1) % 4] - ring[at]) for at in range(4)]
    )


def tangled(nodes: Array) -> Array:
    """Return which cells of a 2 × size × size mesh are inverted, folded or crossing themselves."""
    bad: Array = np.asarray((corner_areas(nodes) <= 0).any(0))
    return bad


def to_nodes(cells: Array) -> Array:
    """Return for each node whether any of its up to four cells is marked."""
    around = np.pad(cells, 1)
    nodes: Array = around[:-1, :-1] | around[:-1, 1:] | around[1:, :-1] | around[1:, 1:]
    return nodes


def channels(nodes: Array, movement: Array) -> Array:
    """Return the 18 channels of a mesh with the given positions and coming movement."""
    size = nodes.shape[1]
    (next_0, last_0), (next_1, last_1) = (_edges(nodes, dim) for dim in (1, 2))
    across, along = (next_0 - last_0) / 2, (next_1 - last_1) / 2
    lengths = [np.sqrt(np.square(edge).sum(0)) + 1e-6 for edge in (across, along)]
    shape = [
        _mean_over_cells(corner_areas(nodes).mean(0)),
        _smallest_corner(next_0, next_1, last_0, last_1),
        np.log(lengths[0] / lengths[1]),
        (across * along).sum(0) / (lengths[0] * lengths[1]),
    ]
    moved_0, moved_1 = (
        np.stack([np.gradient(part, axis=dim) for part in movement]) for dim in (0, 1)
    )
    flow = [
        _cross(moved_0, along) + _cross(across, moved_1),
        (moved_0 * along - moved_1 * across).sum(0),
    ]
    parts = [2 * nodes / (size - 1) - 1, movement, next_0, next_1, last_0, last_1]
    return np.concatenate([*parts, np.stack(shape), np.stack(flow)]).astype(np.float32)


def _edges(nodes: Array, dim: int) -> tuple[Array, Array]:
    """Return the edges to the next and to the last node along a dim, mirrored at the border."""
    steps = np.diff(nodes, axis=dim)
    first, last = np.take(steps, [0], dim), np.take(steps, [-1], dim)
    return np.concatenate([steps, last], dim), -np.concatenate([first, steps], dim)


def _smallest_corner(next_0: Array, next_1: Array, last_0: Array, last_1: Array) -> Array:
    """Return the least of the signed areas of a node's four corners."""
    turn = [next_0, next_1, last_0, last_1]
    areas = np.stack([_cross(turn[at], turn[(at + 1) % 4]) for at in range(4)])
    least: Array = areas.min(0)
    return least


def _mean_over_cells(cells: Array) -> Array:
    around = np.pad(cells, 1, mode="edge")
    mean: Array = (around[:-1, :-1] + around[:-1, 1:] + around[1:, :-1] + around[1:, 1:]) / 4
    return mean


def _cross(a: Array, b: Array) -> Array:
    area: Array = a[0] * b[1] - a[1] * b[0]
    return area


def tally(y: Array) -> Array:
    """Count the clear and the tangled nodes."""
    return class_counts(y, len(CLASSES))


def baseline(tallies: Array) -> dict[str, Any]:
    """Score the predictor that calls every node clear."""
    return constant_class(tallies, CLASSES)


def facts(size: int, count: int, seed: int) -> dict[str, Any]:
    """Return the names of channels and classes."""
    return {"channels": list(CHANNELS), "classes": list(CLASSES)}
