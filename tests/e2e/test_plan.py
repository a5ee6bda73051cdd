"""`tilewise plan` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tilewise import Plan
from tilewise.cli import main

KEYS = {
    "step_seconds", "peak_bytes", "optimal", "gap", "solve_seconds", "devices", "machine",
    "layers", "baselines",
}  # fmt: skip
ROW = {"name", "kind", "degrees", "compute_s", "halo_s", "exchange_s", "sync_s", "bytes"}
BASELINES = {"data", "spatial", "model", "owt", "uniform"}
SMALL = ["alexnet", "--arg", "width=0.25", "--input", "8x3x96x96"]


def tilewise(*args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "tilewise", *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def test_json_has_the_promised_keys_and_the_plan_loads(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    where = ["--devices", "4", "--machine", "p100x4", "--pin", "features.0=h4"]
    result = tilewise("plan", *SMALL, *where, "--json", "-o", str(path))
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    assert set(found) == KEYS
    assert all(set(row) == ROW for row in found["layers"])
    assert set(found["baselines"]) == BASELINES
    assert all(
        set(one) == {"step_seconds", "peak_bytes", "fits"} for one in found["baselines"].values()
    )
    assert found["devices"] == 4
    assert found["machine"] == "p100x4"
    assert found["optimal"] is True
    plan = Plan.load(path)
    assert str(plan.layers["features.0"]) == "h4"
    degrees = {row["name"]: row["degrees"] for row in found["layers"]}
    assert all(degrees[name] == str(one) for name, one in plan.layers.items())
    result = tilewise("plan", *SMALL, *where[:4], "--diff", str(path), "--pareto",
                      "--explain", "features.0")  # fmt: skip
    assert result.returncode == 0, result.stderr
    for text in ("compared with", "proven best", "time against memory", "features.0:", "the other"):
        assert text in result.stdout


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--machine", "abacus"], 2, "neither a file nor one of"),
        (["--machine", "lassen", "--memory", "lots"], 2, "must be a size"),
        (["--machine", "lassen", "--pin", "features.0"], 2, "must be layer=degrees"),
        (["--machine", "lassen", "--diff", "none.json"], 2, "there is no file none.json"),
        (["--machine", "lassen", "--memory", "1KB"], 1, "is too small"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str],
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", "plan", *SMALL, "--devices", "2", *options])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said
