"""Metrics of slabs equal those of the whole tensor, under every cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tilewise as tw
from tilewise import Layout, Mesh
from tilewise.ops.loss import class_indices
from tilewise.testing import ranks
from tilewise.train.losses import loss_sums
from tilewise.train.metrics import Metric, Tally, make_metric
from tilewise.train.precision import load_scaler_state, scaler_state
from tilewise.train.recipe import from_dict

CUTS = ["n2", "d2", "h2 w2", "n2 d2", "w4", "d3", "1"]
SHAPE = (5, 3, 4, 5, 3)


def draw(seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """Return outputs and targets for each family of metrics, with ties among the outputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    logits = (x * 2).round() / 2
    y = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    classes = torch.randint(-1, 3, (SHAPE[0], *SHAPE[2:]), generator=generator)
    return {
        "number": (x, y),
        "class": (logits, classes),
        "binary": (logits, (y > 0.5).double()),
    }


FAMILIES = {
    "mse": "number", "mae": "number", "accuracy": "class", "top5": "class", "dice": "class",
    "iou": "class", "f1": "binary", "auc": "binary",
}  # fmt: skip


def expected() -> dict[str, float]:
    """Compute all metrics on the whole tensors, with numpy and torch alone."""
    drawn = draw()
    x, y = drawn["number"]
    logits, classes = drawn["class"]
    known = (classes >= 0).numpy()
    found = logits.argmax(1).numpy()
    wanted = classes.numpy()
    out: dict[str, float] = {"mse": F.mse_loss(x, y).item(), "mae": F.l1_loss(x, y).item()}
    out["accuracy"] = float((found == wanted)[known].mean())
    out["top5"] = 1.0  # there are three classes
    for kind in (0, 1, 2):
        both = float(((found == kind) & (wanted == kind) & known).sum())
        either = float(((found == kind) & known).sum() + ((wanted == kind) & known).sum())
        out[f"dice/{kind}"] = 2 * both / either
        out[f"iou/{kind}"] = both / (either - both)
    out["dice"] = (out["dice/1"] + out["dice/2"]) / 2
    out["iou"] = (out["iou/1"] + out["iou/2"]) / 2
    scores, truth = (part.flatten().numpy() for part in drawn["binary"])
    right = float(((scores >= 0) & (truth == 1)).sum())
    out["f1"] = 2 * right / float((scores >= 0).sum() + truth.sum())
    yes, no = scores[truth == 1], scores[truth == 0]
    pairs = np.sign(yes[:, None] - no[None, :])
    out["auc"] = float(((pairs + 1) / 2).mean())
    return out


def measure(mesh: Mesh, degrees: str) -> dict[str, float]:
    """Measure everything on this rank's slabs, in two batches."""
    found: dict[str, float] = {}
    drawn = draw()
    for family in ("number", "class", "binary"):
        metrics: list[Metric] = [make_metric(n) for n, kind in FAMILIES.items() if kind == family]
        tally = Tally(mesh, metrics)
        output, target = drawn[family]
        for some in (slice(0, 3), slice(3, 5)):
            _add(tally, mesh, degrees, output[some], target[some], family == "class")
        found |= tally.report()
    return found


def _add(
    tally: Tally, mesh: Mesh, degrees: str, output: Tensor, target: Tensor, indices: bool
) -> None:
    cut = Layout.of(output.shape, "n.dhw", degrees, ranks=mesh.size)
    beside = class_indices(cut) if indices else cut
    if degrees == "d3":  # targets that lie otherwise are brought
        beside = Layout.replicated(target.shape, ranks=mesh.size)
    slabs: list[Any] = [
        whole[layout.slab(mesh.rank)].contiguous()
        for whole, layout in ((output, cut), (target, beside))
    ]
    tally.add(*slabs, cut, beside)


@pytest.mark.parametrize("degrees", CUTS)
def test_metrics_equal_those_of_the_whole(degrees: str) -> None:
    count = 3 if degrees == "d3" else 4
    for found in ranks(count, measure, degrees):
        assert found == pytest.approx(expected(), rel=1e-12)


def test_a_sample_without_numbers_is_not_right() -> None:
    output = torch.tensor([[0.1, 0.9], [float("nan")] * 2, [0.8, float("nan")]])
    target = torch.tensor([1, 0, 0])
    metric = make_metric("accuracy", ())
    assert metric.report(metric.sums(output, target))["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0]])
def test_ignored_targets_do_not_count_in_the_loss(weights: list[float] | None) -> None:
    table: dict[str, Any] = {"model": {"name": "unet3d"}, "data": {"path": "somewhere"}}
    recipe = from_dict(
        table | {"train": {"loss": "cross_entropy", "class_weights": weights, "batch": 2}}
    )
    sums = loss_sums(recipe)
    assert sums is not None
    output, target = torch.randn(4, 3, 5), torch.randint(3, (4, 5))
    target[:2] = -100
    total, weight = sums(output, target)
    given = None if weights is None else torch.tensor(weights)
    assert float(total / weight) == pytest.approx(float(F.cross_entropy(output, target, given)))


def test_the_scale_of_a_run_without_one_is_not_taken() -> None:
    model = tw.parallelize(torch.nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2), "1", mesh=Mesh.alone())
    scaler, off = tw.GradScaler(model), tw.GradScaler(model, enabled=False)
    first = scaler.get_scale()
    load_scaler_state(scaler, scaler_state(off))
    assert scaler.get_scale() == first
    load_scaler_state(scaler, {"scale": first / 2, "good_steps": 7.0})
    again = tw.GradScaler(model)
    load_scaler_state(again, scaler_state(scaler))
    load_scaler_state(off, scaler_state(scaler))
    assert again.get_scale() == first / 2
    assert scaler_state(again)["good_steps"] == 7.0
    assert scaler_state(off) == {}
