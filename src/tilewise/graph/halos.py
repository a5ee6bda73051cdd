"""Inputs that come with the halo their first layer needs, instead of exchanging it."""

from __future__ import annotations

from collections import defaultdict

from tilewise.graph.graph import Value
from tilewise.graph.held import at_rest
from tilewise.graph.lower import Planned
from tilewise.layout import Cover
from tilewise.ops.operation import Need


def inputs_with_halos(planned: Planned) -> dict[Value, Cover]:
    """Return the covers of those inputs that a single layer reads, with more than their slab.

    An input that several layers read, that is also an output, or whose padding is not zero, is
    exchanged as ever.
    """
    needs: dict[Value, list[Need]] = defaultdict(list)
    for lowered in planned.lowered:
        for value, need in zip(lowered.operands, lowered.operation.needs, strict=True):
            needs[value].append(need)
    found = {}
    for value in planned.program.inputs:
        if len(needs[value]) != 1 or value in planned.program.output_values:
            continue
        (need,) = needs[value]
        plain = Cover.of(planned.layouts[value])
        cover = at_rest(need.cover)
        same_batch = cover.blocks[0] == plain.blocks[0]
        if need.fill == 0 and same_batch and not plain.same_blocks(cover):
            found[value] = cover
    return found
