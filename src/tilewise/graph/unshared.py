"""Gradients that come in new tensors which nobody else holds: they can be written over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from tilewise.graph.graph import Node, Value

PRODUCTS = ("conv", "linear")
GIVE_NEW = (*PRODUCTS, "batch_norm", "max_pool", "avg_pool")
"""How the names of calls begin whose first operand's gradient is a new tensor."""

OVERWRITING = ("relu", "leaky_relu")
"""Calls whose backward can be written over the gradient that it gets."""


def fresh_gradients(nodes: Iterable[Node]) -> set[str]:
    """Name the parameters that one convolution or linear layer reads, and nothing else."""
    return {
        str(value.source)
        for value, readers in _readers(nodes).items()
        if value.origin == "parameter" and _one_of(readers, PRODUCTS)
    }


def unshared(nodes: Iterable[Node], outputs: Collection[Value]) -> set[Value]:
    """Return the results that one call reads and nothing else, and whose gradients are new."""
    return {
        value
        for value, readers in _readers(nodes).items()
        if value.origin == "node"
        and value not in outputs
        and _one_of(readers, GIVE_NEW)
        and readers[0].args[0] is value
    }


def overwrites(node: Node, free: Collection[Value]) -> bool:
    """Whether a call's backward is written over its result's gradient, as `free` ones can be."""
    return node.kind in OVERWRITING and node.out in free and slope_of(node) >= 0


def slope_of(node: Node) -> float:
    """Return by what a rectifier multiplies values below zero."""
    if node.kind == "relu":
        return 0.0
    return float(node.args[1] if len(node.args) > 1 else node.kwargs.get("negative_slope", 0.01))


def _readers(nodes: Iterable[Node]) -> dict[Value, list[Node]]:
    found: dict[Value, list[Node]] = defaultdict(list)
    for node in nodes:
        for value in node.values():
            found[value].append(node)
    return found


def _one_of(readers: list[Node], kinds: tuple[str, ...]) -> bool:
    return len(readers) == 1 and readers[0].kind.startswith(kinds)
