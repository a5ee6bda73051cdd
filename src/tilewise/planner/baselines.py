"""Plans that people use without a planner, to compare with.

data        samples over all devices
spatial     depth, height and width only, the best way
model       channels and filters only, the best way
owt         convolutions by samples, linear layers by filters ("one weird trick")
uniform     the same degrees for all layers wherever they are legal, the best ones
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilewise.planner.candidates import all_degrees
from tilewise.planner.formulate import Formulation
from tilewise.planner.solve import Cost, evaluate
from tilewise.planner.timeline import peak_bytes

Ints = NDArray[np.int64]
Choice = tuple[int, ...]

LOOK = 32  # plans of a kind that may not fit before others are judged by what their layers hold
NAMES = ("data", "spatial", "model", "owt", "uniform")


def baselines(found: Formulation, cap: int) -> dict[str, tuple[Choice, Cost]]:
    """Return each baseline's choice and cost: the fastest of its kind that was found to fit."""
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
    """Return the fastest choice whose peak fits; where none of those looked at does, a small one.

    The layers' own costs bound a choice from below, so most are never evaluated. After LOOK that do
    not fit, only those are looked at that should by what their layers hold.
    """
    variables = found.problem.variables
    choices = np.unique(choices, axis=0)

    def total(name: str) -> NDArray[np.float64]:
        columns = [getattr(v, name)[choices[:, i]] for i, v in enumerate(variables)]
        return np.asarray(np.sum(columns, axis=0), np.float64)

    bound = total("forward") + np.maximum(total("backward"), total("sync"))
    burst = np.max([v.burst[choices[:, i]] for i, v in enumerate(variables)], axis=0)
    least = total("held")[:, 0] + burst
    order = np.argsort(bound, kind="stable")
    best: tuple[Choice, Cost] | None = None
    smallest: tuple[int, Choice, Cost] | None = None
    misses = 0
    for index in order.tolist():
        if best is not None and bound[index] >= best[1].seconds:
            break
        if misses >= LOOK and least[index] > cap:
            continue
        choice = tuple(int(k) for k in choices[index])
        try:
            cost = evaluate(found.problem, choice)
        except ValueError:  # layers that share a parameter would be cut differently
            continue
        if best is not None and cost.seconds >= best[1].seconds:
            continue
        peak = peak_bytes(found, choice)
        if peak <= cap:
            best = choice, cost
            continue
        misses += 1
        if smallest is None or peak < smallest[0]:
            smallest = peak, choice, cost
    return best if best is not None or smallest is None else smallest[1:]


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
