"""Reductions and softmax: they follow their operand."""

from __future__ import annotations

from typing import Any

from tilewise.graph.rule import Lowered, Site, rule
from tilewise.graph.rules.elementwise import elementwise
from tilewise.graph.rules.undivided import fallback
from tilewise.ops.reduce import reduce
from tilewise.ops.softmax import softmax


def _reduced(site: Site, kind: str, dims: Any, keepdim: bool, **options: Any) -> Lowered:
    x = site.node.values()[0]
    if site.node.out.dtype != x.dtype and not kind.startswith("arg"):
        return fallback(site)
    operation = reduce(
        site.layout(x),
        kind,
        dims if dims != [] else None,
        keepdim,
        rank=site.rank,
        layer=site.node.name,
        **options,
    )
    return Lowered(operation, (x,))


@rule("sum", "mean", "amax", "amin", cuts=False)
def _plain(site: Site) -> Lowered:
    return _reduced(
        site, site.node.kind, site.argument(1, "dim", None), site.argument(2, "keepdim", False)
    )


@rule("max", "min", cuts=False)
def _extreme(site: Site) -> Lowered:
    if len(site.node.values()) == 2:
        return elementwise(site)
    if not site.node.several:
        return _reduced(site, f"a{site.node.kind}", None, False)
    dim, keepdim = site.argument(1, "dim"), site.argument(2, "keepdim", False)
    return _reduced(site, site.node.kind, dim, keepdim)


@rule("argmax", "argmin", cuts=False)
def _position(site: Site) -> Lowered:
    dim = site.argument(1, "dim", None)
    if dim is None:
        return fallback(site)
    return _reduced(site, site.node.kind, dim, site.argument(2, "keepdim", False))


@rule("var", "std", cuts=False)
def _spread(site: Site) -> Lowered:
    node = site.node
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if isinstance(dims, bool):
        return _reduced(site, node.kind, None, False, correction=float(dims))
    correction = node.kwargs.get("correction", 1.0)
    if len(node.args) > 2 and isinstance(node.args[2], bool):
        correction = float(node.args[2])
    keepdim = bool(node.kwargs.get("keepdim", node.args[3] if len(node.args) > 3 else False))
    spread = 1.0 if correction is None else float(correction)
    return _reduced(site, node.kind, dims, keepdim, correction=spread)


@rule("softmax", "log_softmax")
def _softmax(site: Site) -> Lowered:
    x = site.node.values()[0]
    if site.node.out.dtype != x.dtype:
        return fallback(site)
    log = site.node.kind == "log_softmax"
    return Lowered(softmax(site.layout(x), site.argument(1, "dim"), log=log, **site.where), (x,))
