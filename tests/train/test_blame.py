"""Replicas that drift and gradients that are not finite are found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from small_runs import Regressor, make_set, recipe, trained
from tilewise import Mesh, parallelize
from tilewise.report.traces import measured_layers
from tilewise.testing import ranks
from tilewise.train.blame import bad_gradients, checksum, drifted

SHAPE = (2, 2, 7, 6, 5)


@given(st.integers(1, 300), st.integers(0, 10**6), st.sampled_from(["f4", "f8", "i1", "f2"]))
def test_a_checksum_sees_every_bit_and_place(size: int, seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtypes = {"f4": torch.float32, "f8": torch.float64, "i1": torch.int8, "f2": torch.bfloat16}
    tensor = (torch.randn(size, generator=generator) * 20).to(dtypes[kind])
    same = tensor.clone()
    assert checksum(same) == checksum(tensor)
    at = int(torch.randint(size, (), generator=generator))
    bits = same.view(torch.uint8)
    bits[at * tensor.element_size()] ^= 1
    assert checksum(same) != checksum(tensor)
    if size > 1 and tensor[0] != tensor[-1]:
        swapped = tensor.clone()
        swapped[0], swapped[-1] = tensor[-1], tensor[0]
        assert checksum(swapped) != checksum(tensor)


def damage(mesh: Mesh, plan: str, name: str, rank: int) -> list[Any]:
    """Change the last bit of a tensor on a rank; return who is blamed before and after."""
    torch.manual_seed(0)
    x, y = torch.randn(SHAPE), torch.randn(2, 3)
    model = parallelize(Regressor(0.0), x, plan, loss=F.mse_loss, mesh=mesh)
    model.loss(*model.scatter(x, y)).backward()
    before: list[Any] = [drifted(model), bad_gradients(model)]
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name]
    if mesh.rank == rank:
        tensor.data.view(torch.uint8).view(-1)[0] ^= 1
        if isinstance(tensor, torch.nn.Parameter):
            assert tensor.grad is not None
            tensor.grad.view(-1)[0] = float("inf")
    return [*before, drifted(model), bad_gradients(model)]


@pytest.mark.parametrize(
    ("count", "plan", "name", "rank", "blamed"),
    [
        (2, "d2", "features.4.weight", 1, [1]),
        (4, "n2 d2", "features.1.running_var", 2, [2]),
        # split by filters over pairs: ranks 0 and 2 hold the same block
        (4, "d2 f2", "features.0.weight", 2, [2]),
        (4, "d2 f2", "features.0.weight", 3, [3]),
    ],
)
def test_the_replica_that_drifts_is_named(
    count: int, plan: str, name: str, rank: int, blamed: list[int]
) -> None:
    for clean, fine, found, gradient in ranks(count, damage, plan, name, rank):
        assert clean is None
        assert fine is None
        assert found == (name, blamed)
        assert gradient == ((name, [rank]) if name.endswith("weight") else None)


def test_a_profile_names_the_layers_on_every_rank(tmp_path: Path) -> None:
    data = make_set(tmp_path / "set")
    table = recipe(data, plan="d2", train_epochs=3, data_shares=[1.0])
    trained(2, table, tmp_path / "run", profile=True)
    for rank in range(2):
        trace = json.loads((tmp_path / "run" / "profile" / f"rank-{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        for layer in ("features.0", "features.1", "head", "dropout"):
            assert names.count(layer) == 4
    measured = measured_layers(tmp_path / "run" / "profile")
    for layer in ("features.0", "features.1", "head", "dropout"):
        assert measured[layer]["forward_s"] > 0
        assert measured[layer]["backward_s"] > 0
