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

from tilewise.layout import Degrees
from tilewise.planner.candidates import LETTERS, all_degrees
from tilewise.planner.distinct import distinct_rows
from tilewise.planner.formulation import Formulation
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
    cut = np.array([any(name in layer.extents for layer in found.graph.layers) for name in LETTERS])
    full = every[(every.prod(1) == devices) & (cut | (every == 1)).all(1)]  # what some layer has
    n, space, channels = full[:, 0], full[:, 1:4].prod(1), full[:, 4:].prod(1)
    data = full[n == devices]
    kinds = {
        "data": data,
        "spatial": full[space == devices],
        "model": full[channels == devices],
        "uniform": full,
    }
    rows = {name: _fitted(found, table) for name, table in kinds.items() if len(table)}
    by_filter = full[full[:, 5] == devices]
    layers = {layer.name: layer for layer in found.graph.layers}
    linear = [v for v, name in enumerate(found.names) if layers[name].kind == "linear"]
    if "data" in rows and len(by_filter):
        rows["owt"] = rows["data"].copy()
        rows["owt"][:, linear] = _fitted(found, by_filter)[:, linear]
    bests = {name: _best(found, rows[name], cap) for name in NAMES if name in rows}
    return {name: best for name, best in bests.items() if best is not None}


def shared_degrees(found: Formulation, choice: Choice) -> Degrees | None:
    """Return the degrees that all layers have as far as they can use them, if there are such.

    Layers with one candidate only, which may be pinned, have that one.
    """
    rows = [
        (some.table[index], "cf" in some.layer.extents)
        for some, index in zip(found.choices.candidates, choice, strict=True)
        if (some.table != some.table[0]).any()
    ]
    # where only the product of c and f counts, all of it stands under c
    plain = [row for row, joint in rows if not joint] or [row for row, _ in rows]
    wanted = Degrees(*map(int, np.max(plain, axis=0))) if plain else Degrees()
    return wanted if found.nearest(wanted) == choice else None


def _best(found: Formulation, choices: Ints, cap: int) -> tuple[Choice, Cost] | None:
    """Return the fastest choice whose peak fits; where none of those looked at does, a small one.

    After LOOK that do not fit, only those are looked at that should by what their layers hold.
    """
    variables = found.problem.variables
    choices = choices[distinct_rows(choices)[0]]
    burst = np.max([v.burst[choices[:, i]] for i, v in enumerate(variables)], axis=0)
    held = np.sum([v.held[choices[:, i], 0] for i, v in enumerate(variables)], axis=0)
    smallest: tuple[int, Choice] | None = None
    misses = 0
    for index in np.argsort(seconds_of(found, choices), kind="stable").tolist():
        if misses >= LOOK and held[index] + burst[index] > cap:
            continue
        choice = tuple(int(k) for k in choices[index])
        if not _agrees(found, choice):
            continue
        peak = peak_bytes(found, choice)
        if peak <= cap:
            return choice, evaluate(found.problem, choice)
        misses += 1
        if smallest is None or peak < smallest[0]:
            smallest = peak, choice
    return None if smallest is None else (smallest[1], evaluate(found.problem, smallest[1]))


def _agrees(found: Formulation, choice: Choice) -> bool:
    """Say whether layers that share a parameter are cut alike."""
    return all(
        len({int(labels[choice[v]]) for v, labels in zip(tie.variables, tie.labels)}) == 1
        for tie in found.problem.ties
    )


def seconds_of(found: Formulation, choices: Ints) -> NDArray[np.float64]:
    """Return the seconds of many choices at once, as `evaluate` does for one."""
    parts = [
        [getattr(v, name)[choices[:, i]] for i, v in enumerate(found.problem.variables)]
        for name in ("forward", "backward", "sync")
    ]
    forward, backward, sync = (np.sum(part, axis=0) for part in parts)
    moves = found.moves.values()
    for transfer, costs in zip(found.problem.transfers, moves, strict=True):
        leaves = transfer.leaves[choices[:, transfer.source]]
        seen: list[Ints] = []
        for consumer in transfer.consumers:
            wants = consumer.wants[choices[:, consumer.variable]]
            there, back = costs.beside(leaves, wants)
            new = np.all([wants != other for other in seen] or [True], axis=0)
            forward, backward = forward + new * there, backward + new * back
            seen.append(wants)
    return np.asarray(forward + np.maximum(backward, sync))


def _fitted(found: Formulation, wanted: Ints) -> Ints:
    """Return, for each row of degrees, the candidate of each layer that comes nearest to it."""
    known: dict[Any, Ints] = {}
    columns = []
    most = found.setting.devices
    for some in found.choices.candidates:
        # all that counts of an extent is which degrees it has room for
        room = tuple(sorted((name, min(size, most)) for name, size in some.layer.extents.items()))
        key = (room, some.table.tobytes(), len(some.again))
        if key not in known:
            known[key] = some.nearest(wanted)
        columns.append(known[key])
    return np.stack(columns, axis=1)
