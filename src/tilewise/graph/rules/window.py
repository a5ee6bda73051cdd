"""Pooling, resizing and padding."""

from __future__ import annotations

from typing import Any

from tilewise.graph.rule import Lowered, Site, rule
from tilewise.ops.adaptive import adaptive_pool
from tilewise.ops.pad import pad
from tilewise.ops.pool import PoolSpec, pool
from tilewise.ops.resize import pixel_shuffle, pixel_unshuffle, resize


def _space(site: Site) -> int:
    """Return the number of spatial dims, which the operator's name ends on."""
    digits = [letter for letter in site.node.kind if letter.isdigit()]
    return int(digits[0])


def _pool(site: Site, kind: str, **spec: Any) -> Lowered:
    x = site.node.values()[0]
    found = PoolSpec.of(kind, site.argument(1, "kernel_size"), ndim=_space(site), **spec)
    return Lowered(pool(site.layout(x), found, **site.where), (x,))


@rule(
    "max_pool1d", "max_pool2d", "max_pool3d",
    "max_pool1d_with_indices", "max_pool2d_with_indices", "max_pool3d_with_indices",
)  # fmt: skip
def _max_pool(site: Site) -> Lowered:
    return _pool(
        site,
        "max",
        stride=site.argument(2, "stride", None),
        padding=site.argument(3, "padding", 0),
        dilation=site.argument(4, "dilation", 1),
        ceil_mode=site.argument(5, "ceil_mode", False),
        return_indices=site.node.kind.endswith("indices"),
    )


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(site: Site) -> Lowered:
    return _pool(
        site,
        "avg",
        stride=site.argument(2, "stride", None),
        padding=site.argument(3, "padding", 0),
        ceil_mode=site.argument(4, "ceil_mode", False),
        count_include_pad=site.argument(5, "count_include_pad", True),
        divisor_override=site.argument(6, "divisor_override", None),
    )


@rule(
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
    "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
)  # fmt: skip
def _adaptive(site: Site) -> Lowered:
    x = site.node.values()[0]
    maximum = "max" in site.node.kind
    size = site.argument(1, "output_size")
    size = [size] * _space(site) if isinstance(size, int) or size is None else list(size)
    operation = adaptive_pool(
        site.layout(x),
        "max" if maximum else "avg",
        size * _space(site) if len(size) == 1 else size,
        return_indices=maximum,
        **site.where,
    )
    return Lowered(operation, (x,))


@rule(
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "upsample_nearest_exact1d", "upsample_nearest_exact2d", "upsample_nearest_exact3d",
    "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d",
)  # fmt: skip
def _upsample(site: Site) -> Lowered:
    x = site.node.values()[0]
    mode = site.node.kind.removeprefix("upsample_").rstrip("123d").replace("_exact", "-exact")
    size = site.argument(1, "output_size", None)
    at = 2 if mode.startswith("nearest") else 3
    aligned = False if mode.startswith("nearest") else site.argument(2, "align_corners", False)
    scales = site.argument(at, "scale_factors", None)
    if not isinstance(scales, (list, tuple)) and scales is not None:
        scales = list(site.node.args[at:])
    operation = resize(
        site.layout(x), mode, size=size, scales=scales, align_corners=bool(aligned), **site.where
    )
    return Lowered(operation, (x,))


@rule("pixel_shuffle", "pixel_unshuffle")
def _pixel_shuffle(site: Site) -> Lowered:
    x = site.node.values()[0]
    shuffle = pixel_shuffle if site.node.kind == "pixel_shuffle" else pixel_unshuffle
    return Lowered(shuffle(site.layout(x), site.argument(1, "factor"), **site.where), (x,))


@rule("pad", "constant_pad_nd")
def _pad(site: Site) -> Lowered:
    x = site.node.values()[0]
    mode, value = "constant", site.argument(2, "value", 0.0)
    if site.node.kind == "pad":
        mode, value = site.argument(2, "mode", "constant"), site.argument(3, "value", None)
    pads = site.argument(1, "pad")
    operation = pad(site.layout(x), pads, mode, 0.0 if value is None else value, **site.where)
    return Lowered(operation, (x,))
