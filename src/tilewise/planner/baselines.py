"""Plans that people use without a planner, to compare with.

data        samples over all devices
spatial     depth, height and width only, the best way
model       channels and filters only, the best way
owt         convolutions by samples, linear layers by filters ("one weird trick")
uniform     the same degrees for all layers wherever they are legal, the best ones
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.candidates import all_degrees
from tilewise.planner.formulate import Formulation
from tilewise.planner.solve import Cost, evaluate

Ints = NDArray[np.int64]
Choice = tuple[int, ...]

NAMES = ("data", "spatial", "model", "owt", "uniform")


def baselines(found: Formulation, cap: int) -> dict[str, tuple[Choice, Cost]]:
    """Return each baseline's choice and cost: the fastest of its kind that fits, if any does."""
    devices = found.setting.devices
    every = all_degrees(devices)
    full = every[every.prod(1) == devices]
    n, space, channels = full[:, 0], full[:, 1:4].prod(1), full[:, 4:].prod(1)
    data = full[n == devices]
    kinds = {
        "data": data,
        "spatial": full[space == devices],
        "model": full[channels == devices],
        "uniform": full,
    }
    rows = {name: _fitted(found, table) for name, table in kinds.items()}
    rows["owt"] = rows["data"].copy()
    by_filter = _fitted(found, full[full[:, 5] == devices])
    layers = {layer.name: layer for layer in found.graph.layers}
    for variable, name in enumerate(found.names):
        if layers[name].kind == "linear":
            rows["owt"][:, variable] = by_filter[:, variable]
    return {name: best for name in NAMES if (best := _best(found, rows[name], cap)) is not None}


def _best(found: Formulation, choices: Ints, cap: int) -> tuple[Choice, Cost] | None:
    """Return the fastest choice that fits, or the one of least memory.

    The layers' own costs bound a choice from below, so most are never evaluated.
    """
    variables = found.problem.variables
    choices = np.unique(choices, axis=0)

    def total(name: str) -> NDArray[np.float64]:
        columns = [getattr(v, name)[choices[:, i]] for i, v in enumerate(variables)]
        return np.asarray(np.sum(columns, axis=0), np.float64)

    bound = total("forward") + np.maximum(total("backward"), total("sync"))
    burst = np.max([v.burst[choices[:, i]] for i, v in enumerate(variables)], axis=0)
    least = total("held") + burst
    if (least <= cap).any():
        order = np.argsort(np.where(least <= cap, bound, np.inf), kind="stable")
    else:
        order = np.argsort(least, kind="stable")[:1]
    best: tuple[Choice, Cost] | None = None
    for row, cost in _evaluated(found, choices[order]):
        index = order[row]
        if best is not None and (bound[index] >= best[1].seconds or least[index] > cap):
            break
        if best is None or _key(cost, cap) < _key(best[1], cap):
            best = tuple(int(k) for k in choices[index]), cost
    return best


def _key(cost: Cost, cap: int) -> tuple[bool, float]:
    return cost.peak_bytes > cap, cost.seconds


def _evaluated(found: Formulation, choices: Ints) -> Iterator[tuple[int, Cost]]:
    for row, choice in enumerate(choices):
        try:
            yield row, evaluate(found.problem, [int(k) for k in choice])
        except ValueError:  # layers that share a parameter would be cut differently
            continue


def _fitted(found: Formulation, wanted: Ints) -> Ints:
    """Return, for each row of degrees, the candidate of each layer that comes nearest to it."""
    known: dict[Any, Ints] = {}
    columns = []
    for some in found.choices.candidates:
        key = (tuple(sorted(some.layer.extents.items())), some.table.tobytes(), len(some.again))
        if key not in known:
            known[key] = some.nearest(wanted)
        columns.append(known[key])
    return np.stack(columns, axis=1)
