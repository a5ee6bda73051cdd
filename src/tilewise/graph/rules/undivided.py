"""Calls that run on undivided tensors, the same on every rank."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.graph.graph import Call
from tilewise.graph.rule import Lowered, Site
from tilewise.layout import Cover, Layout
from tilewise.ops.operation import Need, Operation


def whole(site: Site) -> Lowered:
    """Run a call whose operands every rank has whole: weights computed from parameters."""
    return _undivided(site, fallback=False)


def fallback(site: Site) -> Lowered:
    """Bring all operands whole to every rank and run the call as it is."""
    return _undivided(site, fallback=True)


def _undivided(site: Site, *, fallback: bool) -> Lowered:
    node = site.node
    values = node.values()
    needs = tuple(Need.of(Layout.replicated(v.shape, ranks=site.ranks)) for v in values)
    outs = tuple(Layout.replicated(v.shape, ranks=site.ranks) for v in node.outs)

    call = Call(node.op, node.args, node.kwargs)

    def local(inner: list[Any], *tensors: Tensor) -> Any:
        result = call(*tensors)
        return tuple(result) if node.several else result

    gives = tuple(Cover.of(out) for out in outs)
    return Lowered(Operation(needs, local, gives, outs), values, fallback=fallback)
