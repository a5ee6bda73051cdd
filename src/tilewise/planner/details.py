"""What there is to see of a plan beyond its degrees: the network, its slabs, prices, the step.

All of it is plain values, written beside the plan by `tilewise plan -o` and drawn by
`tilewise report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.graph.graph import Node, Value
from tilewise.graph.lower import Planned
from tilewise.layout import Cover, Layout
from tilewise.ops.operation import Need
from tilewise.planner.chosen import chosen_moves
from tilewise.planner.cost import bare
from tilewise.planner.formulation import Formulation
from tilewise.planner.search import Found
from tilewise.planner.solve import Prices
from tilewise.planner.solve import prices as solved_prices
from tilewise.planner.timeline import moments
from tilewise.planner.within import Limited

MOST_WAYS = 16
"""How many ways to split a layer are kept, the cheapest first."""

MOST_CANDIDATES = 400_000
"""How many candidates of all layers together are priced: those of ResNet-50 on 512 devices."""


def details(found: Found, *, time_limit: float = 5.0) -> dict[str, Any]:
    """Return all of it for a plan that was found; `time_limit` bounds what pricing may take."""
    choice, formulation = found.solution.choice, found.formulation
    setting = formulation.setting
    planned = found.planned(found.plan)
    return {
        "inputs": [list(value.shape) for value in planned.program.inputs],
        "dtype": setting.dtype,
        "optimizer": setting.optimizer,
        "memory_bytes": found.memory_bytes,
        "devices_per_node": setting.node,
        "network": network(planned, [row.name for row in found.rows]),
        "prices": prices(formulation, found.limited, time_limit=time_limit),
        "step": step(formulation, choice),
    }


def network(planned: Planned, layers: Sequence[str]) -> list[dict[str, Any]]:
    """List the calls whose split matters, with what they read and where tensors lie.

    `reads` names the calls an operand comes from, past those that are left out. A layout is given
    by its axes as [size, dim], slowest first, with dim −1 for replicas.
    """
    shown = set(layers)
    origins: dict[Value, list[str]] = {value: [] for value in planned.program.inputs}
    found = []
    for node, lowered in zip(planned.program.nodes, planned.lowered, strict=True):
        operands = [value for value in node.values() if not value.held]
        reads = list(dict.fromkeys(name for v in operands for name in origins.get(v, ())))
        for out in node.outs:
            origins[out] = [node.name] if node.name in shown else reads
        if node.name in shown:
            brought = zip(lowered.operands, lowered.operation.needs, strict=True)
            found.append(
                _call(node, planned)
                | {
                    "reads": reads,
                    "operands": [
                        _operand(value, need, planned) for value, need in brought if not value.held
                    ],
                }
            )
    return found


def _call(node: Node, planned: Planned) -> dict[str, Any]:
    parameters = {value for value in node.values() if value.origin == "parameter"}
    return {
        "name": node.name,
        "kind": node.kind,
        "shape": list(node.out.shape),
        "dims": planned.labels.get(node.out, ""),
        "axes": _axes(planned.layouts[node.out]),
        "parameters": int(sum(np.prod(value.shape) for value in parameters)),
        "flops": node.flops,
    }


def _operand(value: Value, need: Need, planned: Planned) -> dict[str, Any]:
    """Describe what a call needs of a tensor: where its blocks lie, and how far they reach.

    `reach` holds, for each dim whose blocks are not the layout's, the intervals of each block.
    """
    home = Cover.of(need.home)
    reach = {
        str(dim): [[[piece.start, piece.stop] for piece in block.pieces] for block in blocks]
        for dim, blocks in enumerate(need.cover.blocks)
        if blocks != home.blocks[dim]
    }
    lies = planned.layouts[value]
    return {
        "shape": list(value.shape),
        "dims": planned.labels.get(value, ""),
        "axes": _axes(need.home),
        "reach": reach,
        "moved": lies != need.home,
    }


def _axes(layout: Layout) -> list[list[int]]:
    return [[axis.size, axis.dim] for axis in layout.axes]


def prices(
    found: Formulation, limited: Limited, *, time_limit: float
) -> dict[str, list[dict[str, Any]]]:
    """Return the cheapest ways to split each layer, with the step that each would have.

    `step_seconds` is the best step when all other layers re-optimise, none where no plan fits; it
    is a lower bound where not `exact`, and `found_seconds` the best that was found, none where
    nothing was. `alone_seconds` is the step if they stay as they are, with
    `alone_peak_bytes`; none where that is not allowed or does not fit. Nothing is priced where
    there are too many candidates to bound all of them.
    """
    if sum(map(len, found.problem.variables)) > MOST_CANDIDATES:
        return {}
    solution = limited.solution
    some = solved_prices(
        limited.problem, solution, limited.cap, most=MOST_WAYS, time_limit=time_limit
    )
    return {
        name: _ways(found, limited, variable, one)
        for variable, (name, one) in enumerate(zip(found.names, some, strict=True))
    }


def _ways(found: Formulation, limited: Limited, variable: int, one: Prices) -> list[dict[str, Any]]:
    order = np.lexsort((one.alone, one.seconds)).tolist()
    kept, chosen = order[:MOST_WAYS], limited.solution.choice[variable]
    if chosen not in kept:
        kept = [chosen, *kept[:-1]]
    one = limited.judged(variable, one, kept)
    some = found.choices.candidates[variable]
    return [
        {
            "degrees": str(some.degrees(index)),
            "recompute": bool(some.again[index]),
            "step_seconds": _finite(one.seconds[index]),
            "found_seconds": _finite(one.found[index]),
            "exact": bool(one.exact[index]),
            "alone_seconds": _finite(one.alone[index]),
            "alone_peak_bytes": int(one.alone_bytes[index]),
            "chosen": index == chosen,
        }
        for index in kept
    ]


def _finite(seconds: float) -> float | None:
    return float(seconds) if np.isfinite(seconds) else None


def step(found: Formulation, choice: Sequence[int]) -> list[dict[str, Any]]:
    """List what each call takes forward and backward, and the bytes held at that moment."""
    moves = chosen_moves(found, choice)
    held = moments(found, choice)
    overlap = found.setting.machine.overlap_halo
    rows = []
    for index, name in enumerate(held.names):
        cost = found.costs[name].take(np.array([choice[found.choices.owner[name]]]))
        moved = moves.get(name, ())
        forward = float(sum(one.forward[0, 0] for one in moved) + cost.exchange_forward[0])
        backward = float(sum(one.backward[0, 0] for one in moved) + cost.exchange_backward[0])
        halo = bare(cost.halo_forward, cost.compute_forward, overlap)
        halo_back = bare(cost.halo_backward, cost.compute_backward, overlap)
        rows.append(
            {
                "name": name,
                "forward_s": [
                    float(cost.compute_forward[0]),
                    float(halo[0]),
                    forward,
                ],
                "backward_s": [
                    float((cost.compute_backward + cost.again * cost.compute_forward)[0]),
                    float((halo_back + cost.again * halo)[0]),
                    backward + float((cost.again * cost.exchange_forward)[0]),
                ],
                "sync_s": float(cost.sync[0]),
                "optimizer_s": float(cost.optimizer[0]),
                "forward_bytes": int(held.forward[index]),
                "backward_bytes": int(held.backward[index]),
                "optimizer_bytes": int(held.optimizer[index]),
            }
        )
    return rows
