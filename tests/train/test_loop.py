"""Training under every plan is training on one device."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from small_runs import Regressor, losses, make_set, recipe, trained
from tilewise.testing.ranks import RanksError
from tilewise.train.checkpoint import whole_state_dict
from tilewise.train.journal import METRICS, Journal, read_journal
from tilewise.train.progress import Progress, reached
from tilewise.train.recipe import Stop
from tilewise.train.resume import checkpoint_in

PLANS = [(2, "n2"), (2, "d2"), (4, "h2 w2"), (3, {"features.*": "d3", "head": "f3"})]
OPTIMIZERS = [
    {"train_optimizer": "sgd", "schedule_kind": "cosine", "schedule_warmup": 2},
    {"train_optimizer": "adamw", "train_weight_decay": 0.1, "train_clip": 0.1},
]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("sets") / "numbers")


@pytest.fixture(scope="module")
def voxels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_set(tmp_path_factory.mktemp("sets") / "voxels", segment=True)


def parameters(out: Path) -> dict[str, torch.Tensor]:
    return whole_state_dict(checkpoint_in(out))[0]


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_losses_and_metrics_equal_one_device(
    options: dict[str, Any], numbers: Path, tmp_path: Path
) -> None:
    """Dropout, batch norm, uneven batches and slabs included; float64, so equal to 1e-9."""
    alone, journal = trained(1, recipe(numbers, **options), tmp_path / "alone")
    expected = losses(journal)
    assert len(expected) == 4
    assert expected[-1] != expected[0]
    for number, (count, plan) in enumerate(PLANS):
        table = recipe(numbers, plan=plan, **options)
        split, journal = trained(count, table, tmp_path / str(number))
        assert losses(journal) == pytest.approx(expected, rel=1e-9)
        assert split["valid"] == pytest.approx(alone["valid"], rel=1e-9)
        assert split["test"] == pytest.approx(alone["test"], rel=1e-9)


def test_segmentation_equals_one_device(voxels: Path, tmp_path: Path) -> None:
    options = {"segment": True, "train_class_weights": [1.0, 2.0, 4.0]}
    alone, journal = trained(1, recipe(voxels, **options), tmp_path / "alone")
    expected = losses(journal)
    for number, (count, plan) in enumerate([(2, "d2"), (4, "n2 w2"), (4, "d2 f2")]):
        split, journal = trained(
            count, recipe(voxels, plan=plan, **options), tmp_path / str(number)
        )
        assert losses(journal) == pytest.approx(expected, rel=1e-9)
        assert split["test"] == pytest.approx(alone["test"], rel=1e-9)
        assert {"loss", "dice", "iou", "accuracy", "dice/2"} <= set(split["test"])


def test_accumulated_parts_equal_the_large_batch(numbers: Path, tmp_path: Path) -> None:
    """Without batch norm's and dropout's dependence on the parts."""
    common: dict[str, Any] = {
        "model_args": {"dropout": 0.0}, "model_frozen": ["features.1"], "train_batch": 4,
        "plan": "d2",
    }  # fmt: skip
    _, whole = trained(2, recipe(numbers, **common), tmp_path / "whole")
    _, parts = trained(2, recipe(numbers, train_accumulate=2, **common), tmp_path / "parts")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)
    for name, value in parameters(tmp_path / "whole").items():
        torch.testing.assert_close(parameters(tmp_path / "parts")[name], value)


def test_pretrained_values_and_frozen_layers(numbers: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = Regressor().state_dict()
    state["head.weight"] = torch.zeros(7, 6)  # another head
    torch.save(state, tmp_path / "old.pt")
    table = recipe(
        numbers, plan="h2", model_pretrained=str(tmp_path / "old.pt"), model_fresh=["head"],
        model_frozen=["features.0", "features.1"],
    )  # fmt: skip
    trained(2, table, tmp_path / "run")
    found = parameters(tmp_path / "run")
    for name in ("features.0.weight", "features.1.weight", "features.1.running_mean"):
        torch.testing.assert_close(found[name], state[name].double(), rtol=0, atol=0)
    assert not torch.equal(found["features.4.weight"], state["features.4.weight"].double())
    table["model"]["fresh"] = []
    with pytest.raises(RanksError, match=r"head.weight has shape .* name its layer in model.fresh"):
        trained(2, table, tmp_path / "again")


def test_resuming_on_another_plan_goes_on_as_if_nothing_had_been(
    numbers: Path, tmp_path: Path
) -> None:
    """Left after three of six steps, in the middle of the second epoch."""
    options: dict[str, Any] = {"train_epochs": 3, "checkpoint_steps": 2}
    _, whole = trained(1, recipe(numbers, **options), tmp_path / "whole")
    trained(2, recipe(numbers, plan="d2", train_steps=3, **options), tmp_path / "parts")
    resumed = recipe(numbers, plan="n2 w2", **options)
    summary, parts = trained(4, resumed, tmp_path / "parts", resume="latest")
    assert summary["epochs"] == 3
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-9)
    steps = [(record["epoch"], record["step"]) for record in parts if record["kind"] == "train"]
    assert steps == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    found = [(record["epoch"], record["step"]) for record in parts if record["kind"] == "valid"]
    assert found == [(1, 2), (2, 3), (2, 4), (3, 6)]


def test_epochs_that_were_counted_from_0_go_on_from_1(tmp_path: Path) -> None:
    old = [
        {"kind": "train", "epoch": 0, "step": 1}, {"kind": "valid", "epoch": 1, "step": 1},
        {"kind": "train", "epoch": 1, "step": 2}, {"kind": "train", "epoch": 2, "step": 3},
    ]  # fmt: skip
    (tmp_path / METRICS).write_text("".join(json.dumps(record) + "\n" for record in old))
    for _ in range(2):  # what counts from 1 stays
        Journal(tmp_path, after=2).close()
        found = [(one["kind"], one["epoch"]) for one in read_journal(tmp_path / METRICS)]
        assert found == [("train", 1), ("valid", 1), ("train", 2)]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_learns_the_same_and_writes_what_the_page_says(
    precision: str, numbers: Path, tmp_path: Path
) -> None:
    table = recipe(numbers, plan="d2", train_precision=precision, train_checksum=1)
    _, journal = trained(2, table, tmp_path / "run")
    _, full = trained(1, recipe(numbers, train_precision="float32"), tmp_path / "full")
    assert losses(journal) == pytest.approx(losses(full), rel=0.1)
    page = (Path(__file__).parents[2] / "docs" / "train.md").read_text()
    table = page[page.index("The fields of a line") :]
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"\n\|(.*?)\|", table))))
    assert {"kind", "epoch", "lr"} <= documented
    for record in journal:
        fields = set(record) if record["kind"] == "train" else set(record) - {"mse", "mae"}
        assert fields <= documented
    assert {"compute", "halo", "redistribution", "sync", "input"} == set(journal[0]["shares"])
    if precision == "float16":
        assert journal[0]["scale"] == 2.0**16


def test_a_loss_that_is_not_finite_names_its_layer(numbers: Path, tmp_path: Path) -> None:
    table = recipe(
        numbers, plan="d2", model_args={"overflow": True}, train_precision="float32", train_epochs=1
    )
    with pytest.raises(
        RanksError, match=r"step 1: the loss is nan; first in #mul.1, on ranks 0, 1"
    ):
        trained(2, table, tmp_path / "stop")
    table["train"]["nan"] = "skip"
    _, journal = trained(2, table, tmp_path / "skip")
    records = [record for record in journal if record["kind"] == "train"]
    assert [record["loss"] for record in records] == [None, None]
    assert "first in #mul.1" in records[0]["skipped"]
    left = parameters(tmp_path / "skip")
    assert left["features.1.num_batches_tracked"] == 0
    assert left["features.1.running_mean"].isfinite().all()


def test_a_run_stops_at_its_target(numbers: Path, tmp_path: Path) -> None:
    stop = {"metric": "mse", "target": 1e9}
    summary, _ = trained(2, recipe(numbers, train_stop=stop, train_epochs=5), tmp_path / "run")
    assert summary["epochs"] == 1
    with pytest.raises(RanksError, match=r"train.stop.metric .* must be one of loss, mse, mae"):
        trained(2, recipe(numbers, train_stop={"metric": "dice"}), tmp_path / "other")


def test_patience_waits_for_something_better() -> None:
    stop, progress = Stop(metric="dice/organ", patience=2), Progress()
    assert [reached(stop, value, progress) for value in (0.1, 0.3, 0.2, 0.25)] == [
        False, False, False, True,
    ]  # fmt: skip
    stop, progress = Stop(metric="mse", patience=1), Progress()
    assert not reached(stop, 0.5, progress)
    assert reached(stop, float("nan"), progress)
    assert not reached(stop, 0.4, progress)
    lower = Stop(metric="mse", target=0.2)
    assert [reached(lower, value, Progress()) for value in (0.3, 0.2)] == [False, True]
