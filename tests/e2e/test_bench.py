"""`tilewise bench` as a user runs it, with the smallest work that it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from measured_here import keep_rates, tilewise_here
from tilewise.bench.plans import PlanRow, drift_of, spearman
from tilewise.cli import main


def bench(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *arguments: str
) -> Any:
    monkeypatch.setattr(sys, "argv", ["tilewise", "bench", *arguments, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capfd.readouterr()
    assert ended.value.code in (0, None), said.err
    return json.loads(said.out)


def test_layers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = bench(monkeypatch, capfd, "layers", "--layers", "cosmoflow_conv4", "--rounds", "1")
    (row,) = found["rows"]
    assert set(row) >= {
        "layer", "degrees", "ranks", "serial_s", "local_s", "split_s", "forward_s", "backward_s",
        "efficiency", "speedup", "bytes",
    }  # fmt: skip
    assert row["efficiency"] == pytest.approx(row["local_s"] / row["split_s"])
    assert row["speedup"] == pytest.approx(row["serial_s"] / row["split_s"])
    # a halo of one row of 64 channels of 8 × 8 each way, gradients of 128 × 64 × 3³, one flag
    assert row["bytes"] == 4 * (64 * 8 * 8 + 128 * 64 * 27 + 1)


VOLUMES = """
from torch import nn
def net():
    return nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(),
                         nn.Conv3d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 3, 1))
"""


@pytest.mark.parametrize("batch", [1, 2])
def test_model(
    batch: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "volumes.py"
    model.write_text(VOLUMES)
    found = bench(
        monkeypatch, capfd, "model", f"{model}:net", "--input", f"{batch}x1x32x16x16",
        "--plan", "d2", "--rounds", "1",
    )  # fmt: skip
    assert found["ranks"] == 2
    assert found["plan"] == "d2"
    assert found["speedup_vs_1t"] == pytest.approx(found["serial_1t_s"] / found["split_s"])
    assert found["speedup_vs_pt"] == pytest.approx(found["serial_pt_s"] / found["split_s"])
    assert found["efficiency"] == pytest.approx(found["local_s"] / found["split_s"])
    assert found["local_s"] > 0
    if batch == 1:
        assert found["ddp_s"] is found["speedup_vs_ddp"] is None
    else:
        assert found["speedup_vs_ddp"] == pytest.approx(found["ddp_s"] / found["split_s"])
    assert 0 < found["peak_bytes_split"] < found["peak_bytes_serial"]


def test_comm(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    found = bench(monkeypatch, capfd, "comm", "--rounds", "1")
    assert [p["name"] for p in found["primitives"]] == [
        "exchange", "sum", "all-gather", "reduce-scatter",
    ]  # fmt: skip
    for primitive in found["primitives"]:
        assert all(seconds > 0 for seconds in primitive["seconds"].values())
        assert primitive["alpha_s"] + primitive["beta_s_per_byte"] > 0


@pytest.mark.parametrize("kind", ["--strong", "--weak"])
def test_scaling(
    kind: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        monkeypatch, capfd, "scaling", "cosmoflow_conv4", kind, "--ranks", "1,2", "--rounds", "1"
    )
    assert found["scaling"] == kind.strip("-")
    one, two = found["points"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert (one["forward_ratio"], one["backward_ratio"]) == (1, 1)
    work = 2 if kind == "--weak" else 1
    assert two["forward_ratio"] == pytest.approx(work * one["forward_s"] / two["forward_s"])


def test_scaling_of_a_model(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    found = bench(
        monkeypatch, capfd, "scaling", "alexnet", "--input", "2x3x70x65", "--arg", "width=0.0625",
        "--ranks", "1,2", "--rounds", "1",
    )  # fmt: skip
    kinds = [(point["degrees"], point["ranks"]) for point in found["points"]]
    assert kinds == [
        (kind, 1 + (kind != "1")) for kind in ["1", "n2", "1", "h2", "1", "c2", "1", "f2"]
    ]
    assert all(point["forward_s"] > 0 and point["backward_s"] > 0 for point in found["points"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("layers", "--layers", "conv9"), "layer 'conv9' is not one of conv2d_64_256"),
        (("layers", "--backend", "tcp"), "backend 'tcp' must be one of gloo, mpi, nccl"),
        (("scaling", "conv2d_64_256", "--ranks", "1,x"), "must be numbers joined by commas"),
        (("model", "resnet5", "--input", "2x3x32x32"), "resnet50"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capfd.readouterr().err
    assert ended.value.code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keep_rates(tmp_path, 2)
    model = tmp_path / "small.py"
    model.write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3),"
        " nn.Flatten(), nn.Linear(64, 3))\n"
    )
    words = ["bench", "plans", f"{model}:net", "--input", "4x3x8x8", "--rounds", "1"]
    found = tilewise_here(tmp_path, monkeypatch, capfd, *words)
    assert len(found["rows"]) >= 11
    assert found["rows"][0]["plan"].startswith("auto")
    assert found["rows"][0]["layers"] == found["layers"]
    assert set(found["layers"]) >= {"0", "2", "4"}
    for row in found["rows"]:
        off = abs(row["predicted_s"] - row["measured_s"]) / row["measured_s"]
        assert row["error"] == pytest.approx(off)
    fastest = min(row["measured_s"] for row in found["rows"])
    assert found["regret"] == pytest.approx(found["rows"][0]["measured_s"] / fastest)
    assert found["median_error"] == pytest.approx(median(row["error"] for row in found["rows"]))
    assert -1 <= found["rank_correlation"] <= 1
    at_once = [
        abs(row["predicted_s"] / found["drift"] - row["measured_s"]) / row["measured_s"]
        for row in found["rows"]
    ]
    assert found["error_without_drift"] == pytest.approx(median(at_once))
    by_name = {
        name: row["predicted_s"] for row in found["rows"] for name in row["plan"].split(" = ")
    }
    assert by_name["searched"] == min(by_name.values())


def test_a_mix_says_which_degrees_it_has() -> None:
    layers = {"stem": "n2", "body": "h2", "head": "n2"}
    told = "n2 for 2, h2 for 1 layers"
    for name, degrees in (
        ("mix 3", told),
        ("auto = searched", told),
        ("auto = n2", ""),
        ("h2", ""),
    ):
        assert PlanRow(name, 1.0, 1.0, layers).degrees == degrees


def test_the_drift_is_that_of_most_plans() -> None:
    assert drift_of([]) == 1.0
    assert drift_of([(2.0, 1.0), (1.0, 3.0), (4.0, 3.0)]) == 0.75


def test_rank_correlation_shares_ranks() -> None:
    assert spearman([1, 2, 3], [10, 20, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2], [5, 5, 7]) == pytest.approx(1.0)
    assert spearman([1, 1], [1, 2]) == 0.0
