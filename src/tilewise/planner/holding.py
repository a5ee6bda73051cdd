"""Charge what a step keeps for its backward, once every tensor has its place and its readers."""

from __future__ import annotations

from math import prod

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node, Value
from tilewise.planner.cost import VIEWS
from tilewise.planner.memory import keeps
from tilewise.planner.moves import MoveCosts, Tables
from tilewise.planner.walk import Walk

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def hold(walk: Walk) -> None:
    """Charge what is kept to the variable under which it lies, each tensor once."""
    makers = walk.choices.program.producers()
    first = next(iter(walk.found.costs))
    for name, cost in walk.found.costs.items():
        cost.again += walk.choices.again(name)
        # computed again, it needs in backward what it needs forward
        anew = np.maximum(cost.burst_bytes, cost.workspace_bytes)
        cost.burst_bytes[:] = np.where(cost.again > 0, anew, cost.burst_bytes)
    for value in walk.choices.program.inputs:
        if value not in walk.places and value not in walk.given:
            whole = prod(value.shape) * walk.setting.size(value)
            walk.found.costs[first].given_bytes += whole
    walk.found.costs[first].given_bytes += walk.found.graph.idle_bytes
    gone: dict[Value, Bools] = {}
    for value, place in walk.places.items():
        readers = walk.found.readers.get(value, [])
        keepers = [reader for reader in readers if reader.keeps]
        always = [reader for reader in keepers if keeps(reader.node, walk.grads).operands]
        keepers = always or keepers
        size = place.local * walk.setting.size(value)
        maker = makers.get(value)
        there = None if maker is None else _viewed(walk, value, maker)
        if maker is not None and there is not None:
            # where it is as large, another look at what was handed in; else a copy of that
            cost = walk.found.costs[maker.name]
            copied = (there != place.local) & (value in walk.kept or bool(keepers))
            cost.later_bytes += np.where(copied & (cost.again == 0), size, 0.0)
            if value in walk.outside:
                cost.left_bytes += cost.again * size
            else:
                gone[value] = cost.again > 0
            walk.kept.add(value)
            continue
        if value.origin == "input" or value in walk.kept or len(keepers) > 1:
            if maker is None:
                walk.found.costs[_charged(walk, value, first)].given_bytes += size
            else:
                cost = walk.found.costs[maker.name]
                own = keeps(maker, walk.grads).results
                saved = cost.saved_bytes if own else cost.later_bytes
                # what its stretch keeps, if that is computed again, is there only meanwhile
                saved += size if value in walk.kept else np.where(cost.again > 0, 0.0, size)
                if value in walk.outside or len(keepers) > 1:
                    cost.left_bytes += cost.again * size
                else:
                    gone[value] = cost.again > 0
            walk.kept.add(value)
            continue
        fresh = maker is not None and maker.in_place is None and maker.kind not in VIEWS
        if maker is not None and fresh and value in walk.grads:
            # nobody keeps it here, yet it is there when its maker is done
            walk.found.costs[maker.name].workspace_bytes += size
        if keepers:
            # kept by this reader alone: as its copy with a halo, or else as it is
            reader = keepers[0]
            local = reader.wants.local() * walk.setting.size(value)
            cost = walk.found.costs[reader.node.name]
            cost.saved_bytes += np.where(reader.halo | (cost.again > 0), 0.0, local)
    _hold_results(walk)
    tables = Tables()
    for value, readers in walk.found.readers.items():
        place = walk.places[value]
        kept = np.full(len(place.where), value in walk.kept)
        if value in gone:
            kept &= ~gone[value]
        again = [walk.found.costs[reader.node.name].again > 0 for reader in readers]
        walk.found.moves[value] = MoveCosts.shared(
            value, place, readers, walk.setting, value in walk.grads, kept, again, tables
        )


def _viewed(walk: Walk, value: Value, maker: Node) -> Floats | None:
    """Return the elements that were handed in of an input that a tensor is a view of, if any."""
    operands = [one for one in maker.values() if not one.held]
    if maker.kind not in VIEWS or len(operands) != len(maker.outs):
        return None
    return walk.given.get(operands[maker.outs.index(value)])


def _hold_results(walk: Walk) -> None:
    """Charge what stands beside a stretch while its backward runs.

    That are its results, made again, and their gradients, which are all there from the start.
    """
    program = walk.choices.program
    readers: dict[Value, list[str]] = {}
    for node in program.nodes:
        for value in node.values():
            readers.setdefault(value, []).append(node.name)
    makers = program.producers()
    for value, place in walk.places.items():
        maker = makers.get(value)
        stretch = () if maker is None else walk.choices.stretches[place.owner]
        if maker is None or maker.name not in stretch:
            continue
        leaves = value in program.output_values
        if not leaves and all(name in stretch for name in readers.get(value, ())):
            continue
        size = place.local * walk.setting.size(value)
        anew = keeps(maker, walk.grads, in_place=False)
        written = maker.in_place is not None and not anew.results
        beside = 1.0 if written or value not in walk.kept else 0.0
        for name in stretch:
            cost = walk.found.costs.get(name)
            if cost is not None:
                gradient = 0.0 if name == maker.name else 1.0
                cost.burst_bytes += cost.again * size * (beside + gradient)


def _charged(walk: Walk, value: Value, first: str) -> str:
    """Return the call that an input's bytes are charged to."""
    owner = walk.places[value].owner
    return next((n for n, i in walk.choices.variable.items() if i == owner), first)
