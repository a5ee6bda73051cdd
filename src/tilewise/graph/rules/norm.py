"""Batch, group, instance and layer norm."""

from __future__ import annotations

from tilewise.graph.graph import Value
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.ops.batch_norm import batch_norm
from tilewise.ops.group_norm import group_norm
from tilewise.ops.norm import instance_norm, layer_norm


def _present(*values: Value | None) -> list[Value]:
    return [value for value in values if value is not None]


@rule("batch_norm")
def _batch_norm(site: Site) -> Lowered:
    x, weight, bias, mean, var = (site.argument(i, "") for i in range(5))
    momentum = site.argument(6, "momentum", 0.1)
    batches = None
    if "num_batches_tracked" in site.node.kwargs:
        momentum, batches = None, site.node.kwargs["num_batches_tracked"]
    operation = batch_norm(
        site.layout(x),
        affine=weight is not None,
        track=mean is not None,
        training=site.argument(5, "training"),
        momentum=momentum,
        eps=site.argument(7, "eps"),
        statistics=site.statistics,  # type: ignore[arg-type]
        **site.where,
    )
    return Lowered(operation, _present(x, weight, bias, mean, var, batches))


@rule("instance_norm")
def _instance_norm(site: Site) -> Lowered:
    x, weight, bias, mean, var = (site.argument(i, "") for i in range(5))
    operation = instance_norm(
        site.layout(x),
        affine=weight is not None,
        track=mean is not None,
        use_input_stats=site.argument(5, "use_input_stats"),
        momentum=site.argument(6, "momentum"),
        eps=site.argument(7, "eps"),
        **site.where,
    )
    return Lowered(operation, _present(x, weight, bias, mean, var))


@rule("group_norm")
def _group_norm(site: Site) -> Lowered:
    x, weight, bias = site.argument(0, ""), site.argument(2, "weight"), site.argument(3, "bias")
    operation = group_norm(
        site.layout(x),
        site.argument(1, "num_groups"),
        weight=weight is not None,
        bias=bias is not None,
        eps=site.argument(4, "eps", 1e-5),
        **site.where,
    )
    return Lowered(operation, _present(x, weight, bias))


@rule("layer_norm")
def _layer_norm(site: Site) -> Lowered:
    x, weight, bias = site.argument(0, ""), site.argument(2, "weight"), site.argument(3, "bias")
    operation = layer_norm(
        site.layout(x),
        site.argument(1, "normalized_shape"),
        weight=weight is not None,
        bias=bias is not None,
        eps=site.argument(4, "eps", 1e-5),
        **site.where,
    )
    return Lowered(operation, _present(x, weight, bias))
