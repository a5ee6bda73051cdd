"""What each layer of a chosen plan costs, in seconds and in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tilewise.planner.chosen import chosen_copies, chosen_moves
from tilewise.planner.cost import NodeCost, bare
from tilewise.planner.formulation import Formulation
from tilewise.planner.payload import Payload
from tilewise.planner.solve import Moves
from tilewise.planner.timeline import KINDS, by_kind

PASSING = KINDS[-1]


@dataclass(frozen=True)
class Row:
    """One layer: seconds of a step by kind, and the bytes that all ranks together send for it.

    `bytes_by_kind` is what the fullest rank has of it: parameters, their gradients, the optimizer's
    states, activations that are kept for backward, and the most that is there only while it runs,
    which passes before the next layer's does.

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
    bytes_by_kind: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def rows(found: Formulation, choice: Sequence[int], payload: Payload) -> tuple[Row, ...]:
    """List the layers of the training program that a split matters to."""
    moves = chosen_moves(found, choice)
    overlap = found.setting.machine.overlap_halo
    sent = _sent(found, payload)
    copies = chosen_copies(found, choice)
    passing = dict(zip(found.called, _passing(found, choice), strict=True))
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
                _held(found, cost, copies.get(node.name, 0)) | {PASSING: passing[node.name]},
            )
        )
    return tuple(out)


def together(some: Iterable[Row]) -> dict[str, int]:
    """Return what layers have by kind: the sum, but the most of what passes, one after another."""
    held = [row.bytes_by_kind for row in some]
    return {kind: (max if kind == PASSING else sum)([one[kind] for one in held]) for kind in KINDS}


def _held(found: Formulation, cost: NodeCost, copies: int) -> dict[str, int]:
    """Return what stays of a layer until backward or longer, moved copies of operands included."""
    block, trained = round(float(cost.block_bytes[0])), round(float(cost.trained_bytes[0]))
    kept = round(float(cost.held_bytes[0])) + copies
    return dict(zip(KINDS, (block, trained, trained * found.setting.states, kept)))


def _passing(found: Formulation, choice: Sequence[int]) -> list[int]:
    """Return the most that is there of each call for a moment."""
    most = by_kind(found, choice)[:, KINDS.index(PASSING)].max(0)
    return [round(one) for one in most.tolist()]


def _sent(found: Formulation, payload: Payload) -> dict[str, int]:
    """Return the bytes sent for each layer; handing out results counts for the last one."""
    sent, owner = dict(payload.bytes_by_layer), found.choices.owner
    last = [node.name for node in found.choices.program.nodes if node.name in owner][-1]
    for name in [name for name in sent if name not in owner]:
        sent[last] = sent.get(last, 0) + sent.pop(name)
    return sent


def _seconds(move: Moves) -> float:
    return float(move.forward[0, 0] + move.backward[0, 0])
