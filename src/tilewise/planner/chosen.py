"""The moves of a chosen plan, and the copies that stay of them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.planner.formulation import Formulation
from tilewise.planner.solve import Moves


def chosen_moves(found: Formulation, choice: Sequence[int]) -> dict[str, list[Moves]]:
    """Return the moves that bring tensors to each layer that is the first to want them so."""
    out: dict[str, list[Moves]] = {}
    for value, readers in found.readers.items():
        moves = found.moves[value]
        source = int(moves.leaves[choice[found.choices.places[value].owner]])
        seen: set[int] = set()
        for reader, wants in zip(readers, moves.wants, strict=True):
            label = int(wants[choice[reader.variable]])
            if label in seen:
                continue
            seen.add(label)
            out.setdefault(reader.node.name, []).append(moves.one(source, label)[0])
    return out


def chosen_copies(found: Formulation, choice: Sequence[int]) -> dict[str, int]:
    """Return the bytes of moved copies that stay until backward, by the first call to keep them."""
    out: dict[str, int] = {}
    for value, readers in found.readers.items():
        moves = found.moves[value]
        if not moves.keeps_copies:
            continue
        source = int(moves.leaves[choice[found.choices.places[value].owner]])
        seen = {moves.nothing}
        for reader, holds in zip(readers, moves.holds, strict=True):
            label = int(holds[choice[reader.variable]])
            if label not in seen:
                seen.add(label)
                kept = int(moves.one(source, label)[0].held[0, 0])
                out[reader.node.name] = out.get(reader.node.name, 0) + kept
    return out
