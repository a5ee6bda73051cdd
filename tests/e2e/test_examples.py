"""The examples and the README's code run as written."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import finish, run_commands_here, run_on
from tilewise.models import unet3d

ROOT = Path(__file__).parents[2]


def torchrun(script: Path, count: int, folder: Path) -> str:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    ran = subprocess.run(
        [sys.executable, *command, str(script)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss ([0-9.]+)", output)]


def test_training_a_model_of_ones_own_gives_the_same_losses_split(tmp_path: Path) -> None:
    script = (ROOT / "examples" / "train_own_model.py").read_text()
    split = losses(run_on(4, script, str(tmp_path)))
    alone = losses(run_on(1, script, str(tmp_path)))
    assert len(split) == 5
    assert split == pytest.approx(alone, rel=1e-4)
    assert split[-1] < split[0]


def test_plan_by_hand_prints_the_plan_and_equals_one_device(tmp_path: Path) -> None:
    output = torchrun(ROOT / "examples" / "plan_by_hand.py", 2, tmp_path)
    assert "features.8: n2" in output
    assert "classifier.1: f2" in output
    difference = float(re.findall(r"from one device ([0-9.e+-]+)", output)[0])
    assert difference < 1e-5


def test_an_added_operator_equals_one_device(tmp_path: Path) -> None:
    output = run_on(3, (ROOT / "examples" / "add_operator.py").read_text(), str(tmp_path))
    errors = [float(number) for number in re.findall(r"error ([0-9.e+-]+)", output)]
    assert len(errors) == 6
    assert max(errors) < 1e-12


def test_the_demo_finds_all_splits_equal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "conv_splits.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "14 of 14 splits equal one device" in capsys.readouterr().out


def test_widths_prints_the_test_error_of_each_width(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = "--widths 2 --seeds 0 --epochs 1 --count 8 --held-out 8 --batch 8 --size 16 --out out"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["widths.py", *tiny.split()])
    run_commands_here(monkeypatch)
    runpy.run_path(str(ROOT / "examples" / "widths.py"), run_name="__main__")
    shown = capsys.readouterr().out
    (error,) = re.findall(r"k = 2, seed 0: test error ([0-9.]+)", shown)
    summary = json.loads((tmp_path / "out" / "k2-seed0" / "summary.json").read_text())
    assert float(error) == pytest.approx(1 - summary["test"]["accuracy"], abs=1e-4)
    assert re.search(rf"│ +2 │ +[0-9,]+ │ +{error} ", shown)


def test_the_readme_trains_and_saves_an_ordinary_state_dict(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    output = run_on(4, code, str(tmp_path))
    assert output.count("slab (1, 1, 16, 32, 32)") == 3
    model = unet3d(width=0.25)
    model.load_state_dict(torch.load(tmp_path / "unet.pt", weights_only=True))


def test_the_page_on_data_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands in order, all but the long measurement, then its code as one script."""
    page = (ROOT / "docs" / "data.md").read_text()
    commands = "".join(re.findall(r"```sh\n(.*?)```", page, re.S)).splitlines()
    assert len(commands) == 5
    monkeypatch.chdir(tmp_path)
    for command in commands:
        if command.startswith("tilewise data"):
            assert finish(command, monkeypatch) == 0
    script = "\n".join(re.findall(r"```python\n(.*?)```", page, re.S))
    output = run_on(2, script, str(tmp_path))
    read = "read 3.0 MiB from files; the store keeps 100% of the set, here 3.0 MiB"
    for rank in range(2):
        for epoch in range(2):
            assert f"rank {rank}, epoch {epoch}: {read}" in output
