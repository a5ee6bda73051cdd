"""What each layer of a chosen plan costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tilewise.planner.cost import bare
from tilewise.planner.formulate import Formulation
from tilewise.planner.payload import Payload
from tilewise.planner.solve import Moves


@dataclass(frozen=True)
class Row:
    """One layer: seconds of a step by kind, and the bytes that all ranks together send for it.

    `compute_s` includes the optimizer, `halo_s` is what does not hide behind compute. `sync_s`
    hides behind the backward pass of all layers. With `recompute` the layer runs forward twice.
    """

    name: str
    kind: str
    degrees: str
    compute_s: float
    halo_s: float
    exchange_s: float
    sync_s: float
    bytes: int
    recompute: bool = False

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows(found: Formulation, choice: Sequence[int], payload: Payload) -> tuple[Row, ...]:
    """List the layers of the training program that a split matters to."""
    moves = chosen_moves(found, choice)
    overlap = found.setting.machine.overlap_halo
    sent = _sent(found, payload)
    out = []
    for node in found.choices.program.nodes:
        owner = found.choices.owner.get(node.name)
        if owner is None:
            continue  # every rank does it alike with what it holds: a counter, a weight's norm
        cost = found.costs[node.name].take(np.array([choice[owner]]))
        degrees = found.choices.candidates[owner].degrees(choice[owner])
        runs = 1 + cost.again
        compute = runs * cost.compute_forward + cost.compute_backward
        exchange = runs * cost.exchange_forward + cost.exchange_backward
        halo = runs * bare(cost.halo_forward, cost.compute_forward, overlap)
        halo = halo + bare(cost.halo_backward, cost.compute_backward, overlap)
        out.append(
            Row(
                node.name,
                node.kind,
                str(degrees),
                float((compute + cost.optimizer)[0]),
                float(halo[0]),
                float(exchange[0]) + sum(_seconds(one) for one in moves.get(node.name, ())),
                float(cost.sync[0]),
                sent.get(node.name, 0),
                bool(cost.again[0]),
            )
        )
    return tuple(out)


def _sent(found: Formulation, payload: Payload) -> dict[str, int]:
    """Return the bytes sent for each layer; handing out results counts for the last one."""
    sent, owner = dict(payload.bytes_by_layer), found.choices.owner
    last = [node.name for node in found.choices.program.nodes if node.name in owner][-1]
    for name in [name for name in sent if name not in owner]:
        sent[last] = sent.get(last, 0) + sent.pop(name)
    return sent


def _seconds(move: Moves) -> float:
    return float(move.forward[0, 0] + move.backward[0, 0])


def chosen_moves(found: Formulation, choice: Sequence[int]) -> dict[str, list[Moves]]:
    """Return the moves that bring tensors to each layer that is the first to want them so."""
    out: dict[str, list[Moves]] = {}
    for value, readers in found.readers.items():
        moves = found.moves[value]
        source = moves.leaves[[choice[found.choices.places[value].owner]]]
        seen: set[int] = set()
        for reader, wants in zip(readers, moves.wants, strict=True):
            label = int(wants[choice[reader.variable]])
            if label in seen:
                continue
            seen.add(label)
            out.setdefault(reader.node.name, []).append(moves(source, np.array([label])))
    return out
