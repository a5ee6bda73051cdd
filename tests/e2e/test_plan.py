"""`tilewise plan` as a user runs it."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from datetime import datetime, timedelta
from itertools import pairwise
from math import comb
from pathlib import Path
from typing import Any

import pytest

from measured_here import keep_rates
from scripts import finish
from tilewise import Plan
from tilewise.cli import main
from tilewise.cli.local import Calibration
from tilewise.layout import Degrees
from tilewise.report.plans import plan_view
from tilewise.report.sources import Source

PARTS = ("forward_seconds", "backward_seconds", "optimizer_seconds", "sync_seconds")
KEYS = {
    "step_seconds", "peak_bytes", "optimal", "gap", "solve_seconds", "devices", "machine",
    "layers", "baselines", "details", "price_seconds", "bytes_by_kind", "fullest",
    "memory_bytes", "device_bytes", *PARTS, "hidden_seconds",
}  # fmt: skip
ROW = {"name", "kind", "degrees", "compute_s", "halo_s", "exchange_s", "sync_s", "bytes",
       "recompute", "bytes_by_kind"}  # fmt: skip
HELD = ["parameters", "gradients", "states", "kept", "passing"]
BASELINES = {"data", "spatial", "model", "owt", "uniform"}
OTHERS = (("other", "conv1", "n2"), ("wide", "features.0", "n4"), ("deep", "features.0", "d2"))
SMALL = ["alexnet", "--arg", "width=0.25", "--input", "8x3x96x96"]


def test_json_has_the_promised_keys_and_the_plan_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    path = tmp_path / "plan.json"
    where = ["--devices", "4", "--machine", "p100x4", "--pin", "features.0=h4"]
    words = [*SMALL, *where, "--price-limit", "60", "--json", "-o", str(path)]
    assert finish(shlex.join(["tilewise", "plan", *words]), monkeypatch) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert set(found) == KEYS
    parts = sum(found[part] for part in PARTS) - found["hidden_seconds"]
    assert parts == pytest.approx(found["step_seconds"])
    assert found["memory_bytes"] <= found["device_bytes"]
    assert all(set(row) == ROW for row in found["layers"])
    assert set(found["baselines"]) == BASELINES
    assert all(
        set(one) == {"step_seconds", "peak_bytes", "fits", "degrees"}
        for one in found["baselines"].values()
    )
    assert found["baselines"]["data"]["degrees"] == "n4"
    assert found["baselines"]["owt"]["degrees"] is None
    assert Degrees.parse(found["baselines"]["uniform"]["degrees"]).product == 4
    assert found["devices"] == 4
    assert found["machine"] == "p100x4"
    assert found["optimal"] is True
    about = json.loads(path.read_text())["details"]
    assert found["details"].items() <= about.items()
    _check_network(about)
    _check_bytes(found)
    plan = Plan.load(path)
    assert str(plan.layers["features.0"]) == "h4"
    degrees = {row["name"]: row["degrees"] for row in found["layers"]}
    assert all(degrees[name] == str(one) for name, one in plan.layers.items())
    words = [*SMALL, *where, "--diff", str(path), "--pareto", "--explain", "features.1"]
    words += ["--memory", "64GiB", "-o", str(path)]
    assert finish(shlex.join(["tilewise", "plan", *words]), monkeypatch) == 0
    shown = capsys.readouterr().out
    for text in ("compared with", "proven best", "time against memory", "the other"):
        assert text in shown
    assert re.search(r"proven in [0-9.]+ s \(--price-limit\)\nwritten to .*plan.json\n", shown)
    line = " ".join(shown.split())
    for text in ("compute does not hide it", "owt (one weird trick)",
                 "peak: the memory of that step", "features.1 is split as features.0",
                 "all keep the pins",
                 "has 14.9 GiB only: this plans for larger ones"):  # fmt: skip
        assert text in line
    assert "features.1: ways that are left out" in shown
    assert "the layer has no depth to cut by d" in shown


def _check_bytes(found: dict[str, Any]) -> None:
    """What layers have by kind adds up to the whole, and what the peak is made of to the peak."""
    rows = [row["bytes_by_kind"] for row in found["layers"]]
    total = found["bytes_by_kind"]
    assert all(list(row) == HELD for row in [*rows, total])
    assert total == {
        kind: (max if kind == "passing" else sum)(row[kind] for row in rows) for kind in HELD
    }
    fullest = found["fullest"]
    assert sum(fullest["bytes_by_kind"].values()) == found["peak_bytes"]
    assert fullest["layer"] in [row["name"] for row in found["layers"]]
    assert all(fullest["bytes_by_kind"][kind] <= total[kind] + 1 for kind in HELD)


def test_json_says_of_every_way_why_it_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--devices", "4", "--machine", "p100x4", "--explain", "features.0", "--json"]
    assert finish(shlex.join(["tilewise", "plan", *words]), monkeypatch) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)["explain"]
    groups = {one["reason"]: one for one in found["left_out"]}
    assert all(one["count"] == len(one["ways"]) for one in groups.values())
    never = groups["the layer has no depth to cut by d"]
    assert {"degrees": "d4", "recompute": False,
            "reason": "the layer has no depth to cut by d4"} in never["ways"]  # fmt: skip
    slower = groups["proven slower, however other layers are split"]["ways"]
    assert {one["degrees"] for one in slower} < {one["degrees"] for one in found["alternatives"]}
    total = sum(one["count"] for one in groups.values())
    assert 0 < comb(2 + 6, 6) - total <= len(found["alternatives"])


def test_several_layers_are_explained_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = ["features.0", "features.3"]
    where = [*SMALL, "--devices", "2", "--machine", "p100x4"]
    words = ["tilewise", "plan", *where, *(f"--explain={name}" for name in (*layers, layers[0]))]
    assert finish(shlex.join(words), monkeypatch) == 0
    shown = capsys.readouterr().out
    first, second = (shown.index(f"{name}: the step with each way") for name in layers)
    assert first < second
    assert "this layer and those that follow it" in " ".join(shown.split())
    assert finish(shlex.join([*words, "--json"]), monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["layer"] for one in found["explain"]] == layers
    assert all(one["alternatives"] and one["left_out"] for one in found["explain"])
    view = plan_view(Source("plan", "found", Path("found.json"), found), "found")
    assert set(view["explain"]) == set(layers)


def test_a_step_is_planned_with_its_loss(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--devices", "2", "--machine", "p100x4", "--pin", "*=n2", "--json"]
    found = {}
    for loss in ("none", "cross_entropy"):
        command = ["tilewise", "plan", *words, "--price-limit", "0", "--loss", loss]
        assert finish(shlex.join(command), monkeypatch) == 0
        found[loss] = json.loads(capsys.readouterr().out)
        assert found[loss]["details"]["loss"] == loss
    kinds = {loss: {row["kind"] for row in one["layers"]} for loss, one in found.items()}
    assert kinds["cross_entropy"] - kinds["none"] == {"cross_entropy_loss"}
    assert found["cross_entropy"]["step_seconds"] > found["none"]["step_seconds"]


def test_tables_say_what_again_means(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["tilewise", "plan", "unet3d", "--arg", "width=0.25", "--input", "1x1x32x32x32",
             "--devices", "2", "--machine", "p100x4", "--time-limit", "2"]  # fmt: skip
    limited = ["--memory", "24MiB", "--recompute", "--explain", "bottom.conv1"]
    for options, times in ((limited, 4), ([], 0)):
        assert finish(shlex.join([*words, *options]), monkeypatch) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert shown.count("again: what backward needs") == times
        assert ", again, " not in shown


def _check_network(about: dict[str, Any]) -> None:
    """Halos come with the layers that have windows, and the step adds up to the plan's."""
    calls = {call["name"]: call for call in about["network"]}
    assert list(calls) == [row["name"] for row in about["layers"]]
    first = calls["features.0"]
    assert first["reads"] == []
    assert first["axes"] == [[4, 2]]
    (operand,) = first["operands"]
    blocks = operand["reach"]["2"]
    assert len(blocks) == 4
    assert blocks[0][0][0] == 0
    assert blocks[-1][-1][1] == 96
    assert all(a[-1][1] > b[0][0] for a, b in pairwise(blocks))
    assert all(set(call["reads"]) <= set(calls) for call in calls.values())
    rows = about["step"]
    forward = sum(sum(row["forward_s"]) + row["optimizer_s"] for row in rows)
    backward = sum(sum(row["backward_s"]) for row in rows)
    seconds = forward + backward + sum(row["sync_s"] for row in rows)  # no overlap on p100x4
    assert seconds == pytest.approx(about["step_seconds"])
    fullest = max(row[f"{phase}_bytes"] for row in rows for phase in
                  ("forward", "backward", "optimizer"))  # fmt: skip
    assert fullest == about["peak_bytes"]
    for name, ways in about["prices"].items():
        (chosen,) = [way for way in ways if way["chosen"]]
        assert chosen["degrees"] == calls_degrees(about)[name]
        assert chosen["exact"]
        for key in ("step_seconds", "alone_seconds"):
            assert chosen[key] == pytest.approx(about["step_seconds"])
        assert sum(way["exact"] for way in ways) > 1 or len(ways) == 1, name
        for way in ways:
            if way["exact"] and way["alone_seconds"] is not None:
                assert chosen["step_seconds"] <= way["step_seconds"] * (1 + 1e-8)
                assert way["step_seconds"] <= way["alone_seconds"] * (1 + 1e-8)


def test_tables_are_whole_on_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [*SMALL, "--devices", "4", "--machine", "lassen", "--explain", "features.3"]
    words += ["--sensitivity", "--time-limit", "5"]
    assert finish(shlex.join(["tilewise", "plan", *words]), monkeypatch) == 0
    shown = capsys.readouterr().out
    for text in ("bytes on the fullest device", "parameters", "kept", "passing", "at its fullest"):
        assert text in shown
    assert all(line.endswith(" …") for line in re.findall(r".*…", shown)), "names are whole"
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert re.search(r"│ data +│ n4 +│", shown)
    assert re.search(r"│ owt +│ n4 for 8; f4 for 3 +│", shown)
    shown = shown.partition("each way to split it")[2]
    for text in ("exchange", "decides", "memory_bandwidth_bytes_per_s"):
        assert text in shown
    assert "…" not in shown


def calls_degrees(about: dict[str, Any]) -> dict[str, str]:
    return {row["name"]: row["degrees"] for row in about["layers"]}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--machine", "abacus"], 2, "neither a file nor a machine that is known"),
        (["--machine", "lasen"], 2, "did you mean 'lassen'? "),
        (["--machine", "lassen", "--explain", "feature.0"], 2, "did you mean 'features.0'? "),
        (["--machine", "lassen", "--pin", "feature.*=h2"], 2, "did you mean 'features.*'? "),
        (["--machine", "local"], 2, "not measured with 2 ranks yet"),
        (["--machine", "lassen", "--memory", "lots"], 2, "must be a size"),
        (["--machine", "lassen", "--pin", "features.0"], 2, "must be layer=degrees"),
        (["--machine", "lassen", "--diff", "none.json"], 2, "there is no file none.json"),
        (["--machine", "lassen", "--diff", "other.json"], 2, "names 'conv1', which is not a layer"),
        (["--machine", "lassen", "--diff", "wide.json"], 2, "must divide the number of ranks (=2)"),
        (["--machine", "lassen", "--diff", "deep.json"], 2, "--diff: plan: features.0 cannot be"),
        (["--machine", "lassen", "-o", "."], 2, "-o: . is a folder"),
        (
            ["--machine", "lassen", "--pin", "features.0=n2", "--pin", "features.0=h2"],
            2,
            "--pin: features.0 is fixed as 'n2' and as 'h2'",
        ),
        (["--machine", "lassen", "--loss", "rms"], 2, "must be one of none, mse, cross_entropy"),
        (["--machine", "lassen", "--memory", "1KB"], 1, "is too small"),
        (["--machine", "lassen", "--dtype", "int8"], 2, "one of float64, float32, bfloat16, flo"),
        (
            ["--machine", "lassen", "--dtype", "bfloat16"],
            2,
            "machine lassen: no rates for bfloat16; it has float32, float64, float16",
        ),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, layer, degrees in OTHERS:
        Plan({layer: Degrees.parse(degrees)}).save(f"{name}.json")
    monkeypatch.setattr(sys, "argv", ["tilewise", "plan", *SMALL, "--devices", "2", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_what_the_smallest_plan_needs_is_told_to_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--devices", "2", "--machine", "lassen", "--memory", "1KB", "--json"]
    assert finish(shlex.join(["tilewise", "plan", *SMALL, *where]), monkeypatch) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["error"] in said.err
    assert told["memory_bytes"] == 1000 < told["least_bytes_proven"] <= told["least_bytes"]
    assert sum(one["bytes"] for one in told["holders"]) <= told["least_bytes"]


def test_local_says_which_measurements_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    keep_rates(tmp_path, 2)
    os.utime(tmp_path / "machine-2-gloo.json", (0, 0))
    line = f"machine local: {tmp_path / 'machine-2-gloo.json'}, measured "
    where = ["--devices", "2", "--machine", "local"]
    for command in ("plan", "simulate"):
        words = ["tilewise", command, *SMALL, *where]
        assert finish(shlex.join(words), monkeypatch) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0].startswith(line)
        assert " days ago (19" in shown[0]
        assert sum(text.startswith("machine local") for text in shown) == 1
        assert finish(shlex.join([*words, "--json"]), monkeypatch) == 0
        found = json.loads(capsys.readouterr().out)["machine_file"]
        assert found["path"] == str(tmp_path / "machine-2-gloo.json")
        assert datetime.fromisoformat(found["measured"]).timestamp() == 0


def test_an_age_is_told_in_its_largest_unit() -> None:
    then = datetime(2026, 1, 31, 12, 0)
    kept = Calibration(Path("kept.json"), then)
    for passed, text in (
        (timedelta(seconds=5), "just now"),
        (timedelta(minutes=1), "1 minute ago"),
        (timedelta(hours=5, minutes=59), "5 hours ago"),
        (timedelta(days=3), "3 days ago"),
    ):
        told = kept.told(then + passed)
        assert told == f"machine local: kept.json, measured {text} (2026-01-31 12:00)"


def test_float16_has_rates_and_sizes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for dtype in ("float32", "float16"):
        words = [*SMALL, "--devices", "2", "--machine", "dgx-h100", "--dtype", dtype, "--json"]
        assert finish(shlex.join(["tilewise", "plan", *words]), monkeypatch) == 0
        found[dtype] = json.loads(capsys.readouterr().out)
    assert found["float16"]["details"]["dtype"] == "float16"
    assert found["float16"]["peak_bytes"] < 0.6 * found["float32"]["peak_bytes"]
