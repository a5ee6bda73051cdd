"""Gradients that outlive the call whose backward made them.

Most gradients are made by one call's backward and used up by the next. That of a tensor with
several readers is there from the backward of the last one to that of its maker. What the backward
of a concatenation hands out are views of one gradient, which is there until none of them is left:
each until it is used, or added to another one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Value
from tilewise.planner.cost import Setting
from tilewise.planner.places import Choices


@dataclass(frozen=True)
class Span:
    """Bytes of a gradient under each candidate of `owner`, there between two calls' backward."""

    owner: int
    first: int
    last: int
    bytes: NDArray[np.float64]


def spans(
    choices: Choices, setting: Setting, names: list[str], grads: Collection[Value]
) -> list[Span]:
    """List the gradients that are there while other calls' backward runs.

    `names` are the calls that moments are of, in order; `grads` the values with gradients.
    """
    place = {name: index for index, name in enumerate(names)}
    makers = choices.program.producers()
    nodes = [node for node in choices.program.nodes if node.name in place]
    readers: dict[Value, list[int]] = {}
    for node in nodes:
        for value in dict.fromkeys(node.values()):
            if value in choices.places and value in grads:
                readers.setdefault(value, []).append(place[node.name])
    found: list[Span] = []
    views: dict[int, int] = {}

    def add(value: Value, first: int, last: int) -> None:
        if last - first > 1:
            there = choices.places[value]
            size = there.local * setting.size(value)
            found.append(Span(there.owner, first, last, np.asarray(size, np.float64)))

    for value, calls in readers.items():
        maker = makers.get(value)
        if maker is None or maker.name not in place:
            continue
        first, last = place[maker.name], calls[-1]
        if nodes[last].kind in ("cat", "concat", "concatenate"):
            until = calls[-2] if len(calls) > 1 else first
            views[last] = min(views.get(last, until), until)
            last = until
        add(value, first, last)
    for joined, until in views.items():
        add(nodes[joined].out, until, joined)
    return found
