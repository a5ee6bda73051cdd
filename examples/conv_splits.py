"""Run one 3-D convolution on four ranks under a dozen splits and compare each with one device."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from tilewise import Degrees, Layout, Mesh
from tilewise.ops.conv import conv
from tilewise.ops.conv_spec import ConvSpec
from tilewise.testing import error, ranks

SPLITS = (
    "1", "n2", "d2", "d4", "h4", "w4", "d2 h2", "h2 w2", "c4", "f4", "c2 f2", "n2 d2", "d2 c2",
    "h2 f2",
)  # fmt: skip
SHAPE, FILTERS, KERNEL, STRIDE, PADDING = (2, 6, 13, 11, 9), 10, (3, 5, 2), (2, 1, 1), (1, 2, 0)


def run(mesh: Mesh, degrees: str) -> tuple[float, float, float, int]:
    """Return the errors of y, dx and dw on this rank, and the bytes it sent."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(
        (FILTERS, SHAPE[1], *KERNEL), generator=generator, dtype=torch.float64, requires_grad=True
    )
    y = F.conv3d(x, weight, stride=STRIDE, padding=PADDING)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    y.backward(dy)

    x_layout = Layout.of(SHAPE, "ncdhw", degrees, ranks=mesh.size)
    w_layout = Layout.replicated(weight.shape, ranks=mesh.size)
    spec = ConvSpec.of(weight.shape, stride=STRIDE, padding=PADDING)
    operation = conv(x_layout, weight.shape, spec, degrees=Degrees.parse(degrees), rank=mesh.rank)
    split_conv = operation.bind(mesh, [x_layout, w_layout], layer="conv")

    x_slab = x.detach()[x_layout.slab(mesh.rank)].clone().requires_grad_()
    w = weight.detach().clone().requires_grad_()
    with mesh.trace.record() as events:
        y_slab = split_conv(x_slab, w)
        y_slab.backward(dy[operation.out.slab(mesh.rank)])
    assert x.grad is not None
    assert weight.grad is not None
    assert x_slab.grad is not None
    assert w.grad is not None
    return (
        error(y_slab, y[operation.out.slab(mesh.rank)]),
        error(x_slab.grad, x.grad[x_layout.slab(mesh.rank)]),
        error(w.grad, weight.grad),
        sum(event.bytes for event in events),
    )


def main() -> None:
    table = Table(title=f"Conv3d {SHAPE[1]}→{FILTERS}, kernel {KERNEL}, input {SHAPE}, float64")
    for name in ("split", "error of y", "error of dx", "error of dw", "bytes sent", "verdict"):
        table.add_column(name, justify="left" if name in ("split", "verdict") else "right")
    failed = 0
    for degrees in SPLITS:
        found = ranks(4, run, degrees)
        errors = [max(column) for column in list(zip(*found))[:3]]
        good = max(errors) <= 1e-10
        failed += not good
        table.add_row(
            degrees,
            *(f"{value:.1e}" for value in errors),
            f"{max(row[3] for row in found):,}",
            "equal" if good else "WRONG",
        )
    Console().print(table)
    print(f"{len(SPLITS) - failed} of {len(SPLITS)} splits equal one device within 1e-10")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
