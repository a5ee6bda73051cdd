"""Convolutions, linear layers and matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilewise.graph.graph import Value
from tilewise.graph.labels import channel_last
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.layout import Degrees
from tilewise.ops.conv import conv
from tilewise.ops.conv_spec import ConvSpec
from tilewise.ops.linear import addmm, bmm, linear, matmul


def _operands(*values: Value | None) -> Sequence[Value]:
    return [value for value in values if value is not None]


def _degrees(site: Site, dims: str) -> Degrees:
    """Return the plan's degrees, or those of the producer as far as the layer has them."""
    if site.degrees is not None:
        return site.degrees
    letters = set(dims) | {"c", "f"}
    followed = {name: size for name, size in site.followed.items() if name in letters}
    return Degrees(**followed)


def _conv(site: Site, spec: dict[str, Any]) -> Lowered:
    x, weight, bias = (
        site.argument(0, "input"),
        site.argument(1, "weight"),
        site.argument(2, "bias"),
    )
    layer = site.node.name
    found = ConvSpec.of(weight.shape, layer=layer, **spec)
    operation = conv(
        site.layout(x),
        weight.shape,
        found,
        degrees=_degrees(site, site.labels[site.node.out]),
        rank=site.rank,
        bias=bias is not None,
        layer=layer,
    )
    return Lowered(operation, _operands(x, weight, bias))


@rule("conv1d", "conv2d", "conv3d")
def _plain(site: Site) -> Lowered:
    return _conv(
        site,
        {
            "stride": site.argument(3, "stride", 1),
            "padding": site.argument(4, "padding", 0),
            "dilation": site.argument(5, "dilation", 1),
            "groups": site.argument(6, "groups", 1),
        },
    )


@rule("convolution")
def _general(site: Site) -> Lowered:
    return _conv(
        site,
        {
            "stride": site.argument(3, "stride"),
            "padding": site.argument(4, "padding"),
            "dilation": site.argument(5, "dilation"),
            "transposed": site.argument(6, "transposed"),
            "output_padding": site.argument(7, "output_padding"),
            "groups": site.argument(8, "groups"),
        },
    )


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(site: Site) -> Lowered:
    return _conv(
        site,
        {
            "stride": site.argument(3, "stride", 1),
            "padding": site.argument(4, "padding", 0),
            "output_padding": site.argument(5, "output_padding", 0),
            "groups": site.argument(6, "groups", 1),
            "dilation": site.argument(7, "dilation", 1),
            "transposed": True,
        },
    )


@rule("linear")
def _linear(site: Site) -> Lowered:
    x, weight, bias = (
        site.argument(0, "input"),
        site.argument(1, "weight"),
        site.argument(2, "bias"),
    )
    dims = channel_last(site.labels[x])
    operation = linear(
        site.layout(x),
        weight.shape,
        dims=dims,
        degrees=_degrees(site, dims),
        rank=site.rank,
        bias=bias is not None,
        layer=site.node.name,
    )
    return Lowered(operation, _operands(x, weight, bias))


@rule("matmul", "mm", "bmm", cuts=False)
def _matmul(site: Site) -> Lowered:
    a, b = site.node.values()
    layer = site.node.name
    if b.held and len(b.shape) == 2 and not a.held:
        dims = channel_last(site.labels[a])
        degrees = _degrees(site, dims)
        return Lowered(
            matmul(site.layout(a), b.shape, dims=dims, degrees=degrees, layer=layer), (a, b)
        )
    return Lowered(bmm(site.layout(a), site.layout(b), axes=site.axes, layer=layer), (a, b))


@rule("addmm", cuts=False)
def _addmm(site: Site) -> Lowered:
    bias, x, weight = site.node.values()
    operation = addmm(
        bias.shape,
        site.layout(x),
        weight.shape,
        degrees=_degrees(site, "nc"),
        rank=site.rank,
        beta=site.node.kwargs.get("beta", 1.0),
        alpha=site.node.kwargs.get("alpha", 1.0),
        layer=site.node.name,
    )
    return Lowered(operation, (bias, x, weight))
