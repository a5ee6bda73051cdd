"""Losses: they follow their prediction."""

from __future__ import annotations

from typing import Any

from tilewise.graph.graph import Value
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.ops.cross_entropy import cross_entropy, nll_loss
from tilewise.ops.loss import elementwise_loss
from tilewise.ops.operation import Operation

REDUCTIONS = ("none", "mean", "sum")
KINDS = {
    "mse_loss": "mse",
    "l1_loss": "l1",
    "smooth_l1_loss": "smooth_l1",
    "huber_loss": "huber",
    "binary_cross_entropy": "bce",
    "binary_cross_entropy_with_logits": "bce_with_logits",
}


def _elementwise(site: Site, reduction: int, *weights: Value | None, **options: Any) -> Lowered:
    prediction, target = site.argument(0, "self"), site.argument(1, "target")
    names = ("weight", "pos_weight")
    shapes: dict[str, Any] = {
        name: None if w is None else w.shape for name, w in zip(names, weights)
    }
    operation: Operation = elementwise_loss(
        site.layout(prediction),
        target.shape,
        KINDS[site.node.kind],
        reduction=REDUCTIONS[reduction],
        rank=site.rank,
        layer=site.node.name,
        **shapes,
        **options,
    )
    return Lowered(operation, [v for v in (prediction, target, *weights) if v is not None])


@rule("mse_loss", "l1_loss", cuts=False)
def _distance(site: Site) -> Lowered:
    return _elementwise(site, site.argument(2, "reduction", 1))


@rule("smooth_l1_loss", "huber_loss", cuts=False)
def _bent(site: Site) -> Lowered:
    name = "beta" if site.node.kind == "smooth_l1_loss" else "delta"
    return _elementwise(site, site.argument(2, "reduction", 1), knee=site.argument(3, name, 1.0))


@rule("binary_cross_entropy", cuts=False)
def _binary(site: Site) -> Lowered:
    return _elementwise(site, site.argument(3, "reduction", 1), site.argument(2, "weight"))


@rule("binary_cross_entropy_with_logits", cuts=False)
def _binary_logits(site: Site) -> Lowered:
    weight, pos_weight = site.argument(2, "weight"), site.argument(3, "pos_weight")
    return _elementwise(site, site.argument(4, "reduction", 1), weight, pos_weight)


@rule("cross_entropy_loss", cuts=False)
def _cross_entropy(site: Site) -> Lowered:
    prediction, target = site.argument(0, "self"), site.argument(1, "target")
    weight = site.argument(2, "weight")
    operation = cross_entropy(
        site.layout(prediction),
        target.shape,
        weight=weight is not None,
        reduction=REDUCTIONS[site.argument(3, "reduction", 1)],
        ignore_index=site.argument(4, "ignore_index", -100),
        label_smoothing=site.argument(5, "label_smoothing", 0.0),
        rank=site.rank,
        layer=site.node.name,
    )
    return Lowered(operation, [v for v in (prediction, target, weight) if v is not None])


@rule("nll_loss", "nll_loss2d", "nll_loss_nd", cuts=False)
def _nll(site: Site) -> Lowered:
    prediction, target = site.argument(0, "self"), site.argument(1, "target")
    weight = site.argument(2, "weight")
    operation = nll_loss(
        site.layout(prediction),
        target.shape,
        weight=weight is not None,
        reduction=REDUCTIONS[site.argument(3, "reduction", 1)],
        ignore_index=site.argument(4, "ignore_index", -100),
        rank=site.rank,
        layer=site.node.name,
    )
    return Lowered(operation, [v for v in (prediction, target, weight) if v is not None])
