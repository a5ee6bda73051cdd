"""Which calls may be computed again in backward together: a layer's own, and those behind it.

A stretch is a layer with candidates and the calls that follow it without a gap, such as a
convolution, its norm and its activation. Computed again, it keeps nothing but what it reads, as
that lies before it is moved; its own activations are there only while its backward runs.
"""

from __future__ import annotations

from tilewise.graph.graph import Value
from tilewise.planner.places import Choices, first_reader, largest

Stretch = tuple[str, ...]


def stretches(found: Choices) -> list[Stretch]:
    """Return the calls of each variable's stretch; none where it would be the layer alone.

    What every rank computes alike from what it holds, such as a counter, may stand in between.
    """
    program, variable = found.program, found.variable
    owner: dict[Value, int] = {}
    for value in program.inputs:
        first = first_reader(value, program, variable)
        if first is not None:
            owner[value] = first
    calls: list[list[str]] = [[] for _ in found.names]
    current: int | None = None
    between: list[str] = []
    for node in program.nodes:
        mine = variable.get(node.name)
        operand = largest(node, owner)
        if mine is None and operand is None:
            between.append(node.name)
            continue
        followed = owner[operand] if mine is None and operand is not None else mine
        assert followed is not None
        owner.update(dict.fromkeys(node.outs, followed))
        if mine is not None:
            current, calls[mine] = mine, [node.name]
        elif followed == current:
            calls[followed] += [*between, node.name]
        else:
            current = None
        between = []
    return [tuple(some) if len(some) > 1 else () for some in calls]


def named(stretch: Stretch) -> str:
    """Return a stretch as a plan's `recompute` names it."""
    return " ".join(stretch)
