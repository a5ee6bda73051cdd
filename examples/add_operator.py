"""Add an operator: torchrun --nproc-per-node 2 examples/add_operator.py

`torch.cumsum` along a dim that is split needs the sums of all slabs before one's own. Without a
rule it would run on the undivided tensor. The rule below computes it on slabs: each rank sums its
own slab, the sums of all ranks are exchanged (one small message), and each rank adds those before
it.
"""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tilewise as tw
from tilewise.graph.rule import Lowered, Site, rule
from tilewise.layout import PARTIAL, Axes, Axis, Cover, Layout
from tilewise.ops.operation import Need, Operation


def cumsum(x: Layout, dim: int, *, rank: int) -> Operation:
    """Plan a cumulative sum along `dim`.

    Layout: x any → the same.
    Communication: one slab's sum along `dim` from each rank that shares it.
    Adjoint: the same, back.
    """
    parts, index = x.degrees[dim], x.coords(rank)[dim]
    totals = Layout([parts if d == dim else e for d, e in enumerate(x.shape)], x.axes)
    # Every rank needs all totals along `dim`, and uses them for results of its own: PARTIAL, so
    # that their gradients are summed on the way back.
    shared = Axes(Axis(a.size, PARTIAL if a.dim == dim else a.dim) for a in totals.axes)
    everyone = Layout(totals.shape, shared)

    def local(inner: list[Any], x: Tensor) -> Tensor:
        y = x.cumsum(dim)
        if parts == 1:
            return y
        sums = inner[0](x.sum(dim, keepdim=True))
        return y + sums.narrow(dim, 0, index).sum(dim, keepdim=True)

    inner = ((Cover.of(totals), Cover.of(everyone)),) if parts > 1 else ()
    return Operation((Need.of(x),), local, (Cover.of(x),), (x,), inner)


@rule("cumsum", cuts=False)
def _cumsum(site: Site) -> Lowered:
    x = site.node.values()[0]
    dim = site.argument(1, "dim") % len(x.shape)
    return Lowered(cumsum(site.layout(x), dim, rank=site.rank), (x,))


class Integrate(nn.Module):
    """A convolution and the running sum of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).cumsum(2)


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, x = Integrate().double(), torch.randn(2, 1, 11, 6, dtype=torch.float64)
    mesh = tw.Mesh()
    pmodel = tw.parallelize(model, x, f"h{mesh.size}", mesh=mesh)
    x_slab = pmodel.scatter(x).requires_grad_()
    y = pmodel(x_slab)
    y.square().sum().backward()
    whole = x.clone().requires_grad_()
    expected = model(whole)
    expected.square().sum().backward()
    assert whole.grad is not None
    assert x_slab.grad is not None
    slab = pmodel.input_layouts[0].slab(mesh.rank)
    print(
        f"rank {mesh.rank}: rows {slab[2].start}–{slab[2].stop - 1}, "
        f"output error {(y - expected[pmodel.output_layouts[0].slab(mesh.rank)]).abs().max():.1e}, "
        f"gradient error {(x_slab.grad - whole.grad[slab]).abs().max():.1e}"
    )


if __name__ == "__main__":
    main()
