"""Dropout and random tensors, and tensors made in forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import PlanError
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.layout import REPLICA, Axes, Axis, Cover, Layout
from tilewise.ops.operation import Operation
from tilewise.ops.random import bernoulli_like, dropout, rand_like, randn_like


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def _dropout(site: Site) -> Lowered:
    x = site.node.values()[0]
    operation = dropout(
        site.layout(x),
        site.argument(1, "p"),
        training=site.argument(2, "train"),
        draws=site.draws,
        stream=site.stream,
        features="feature" in site.node.kind,
        alpha="alpha" in site.node.kind,
        **site.where,
    )
    return Lowered(operation, (x,))


def _source(site: Site) -> Layout:
    """Return the layout that a random tensor follows: its operand's, or every rank has it whole."""
    values = site.node.values()
    if values:
        return site.layout(values[0])
    return Layout.replicated(site.node.out.shape, ranks=site.ranks)


def _drawn(site: Site, make: Callable[..., Operation], **options: Any) -> Lowered:
    source = _source(site)
    operation = make(
        source,
        draws=site.draws,
        stream=site.stream,
        rank=site.rank,
        shape=site.node.out.shape,
        axes=site.axes,
        dtype=site.node.out.dtype,
        **options,
    )
    if len(operation.needs) == len(site.node.values()):
        return Lowered(operation, site.node.values())
    local = operation.local

    def without_operand(inner: list[Any]) -> Tensor:
        result: Tensor = local(inner, torch.empty(0, dtype=site.node.out.dtype))
        return result

    return Lowered(Operation((), without_operand, operation.gives, operation.outs), ())


@rule("bernoulli", cuts=False)
def _bernoulli(site: Site) -> Lowered:
    p = site.argument(1, "p", None)
    if not isinstance(p, (int, float)):
        raise PlanError(
            f"{site.node.name}: bernoulli takes its probabilities from a tensor, which has no "
            "split form; use a number, or compare torch.rand_like with the tensor"
        )
    return _drawn(site, bernoulli_like, p=float(p), layer=site.node.name)


@rule("rand_like", "rand", "uniform", cuts=False)
def _rand(site: Site) -> Lowered:
    if site.node.kind == "uniform" and tuple(site.node.args[1:3]) not in ((), (0.0, 1.0)):
        raise PlanError(f"{site.node.name}: uniform_ must draw from [0, 1); scale it afterwards")
    return _drawn(site, rand_like)


@rule("randn_like", "randn", "normal_functional", cuts=False)
def _randn(site: Site) -> Lowered:
    if site.node.kind == "normal_functional" and tuple(site.node.args[1:3]) not in ((), (0.0, 1.0)):
        raise PlanError(
            f"{site.node.name}: normal_ must have mean 0 and std 1; scale it afterwards"
        )
    return _drawn(site, randn_like)


@rule("new_empty", "new_zeros", "new_ones", "new_full", cuts=False)
def _made(site: Site) -> Lowered:
    """Make a constant tensor, cut as the tensor it is modelled on where extents agree."""
    like = site.node.values()[0]
    shape = site.node.out.shape
    source = site.layout(like)
    same = len(shape) == len(source.shape)
    axes = Axes(
        Axis(
            a.size,
            a.dim if same and a.dim >= 0 and shape[a.dim] == source.shape[a.dim] else REPLICA,
        )
        for a in source.axes
    )
    out = Layout(shape, axes)
    local_shape = out.local_shape(site.rank)
    fill = {"new_zeros": 0.0, "new_ones": 1.0, "new_empty": 0.0}.get(
        site.node.kind, site.argument(2, "fill_value", 0.0)
    )
    dtype = site.node.out.dtype

    def local(inner: list[Any]) -> Tensor:
        return torch.full(local_shape, fill, dtype=dtype)

    return Lowered(Operation((), local, (Cover.of(out),), (out,)), ())
