"""The commands as people run them: local ranks, and those of a launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from typer.testing import CliRunner

from scripts import finish
from small_runs import losses, make_set, recipe
from tilewise import Mesh
from tilewise.cli.app import app, main
from tilewise.cli.crew import Crew
from tilewise.errors import MismatchError
from tilewise.testing import ranks
from tilewise.train.journal import METRICS, read_journal

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            "-m", "tilewise"]  # fmt: skip


def launched(folder: Path, *words: str) -> str:
    ran = subprocess.run(
        [*TORCHRUN, *words], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def as_toml(table: dict[str, Any]) -> str:
    """Write a recipe of numbers, words and lists."""
    plain = [f"{k} = {json.dumps(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for name, section in table.items():
        if isinstance(section, dict):
            plain += [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    return "\n".join(plain) + "\n"


def test_train_and_predict_on_local_ranks_and_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_set(tmp_path / "set", segment=True)
    table = recipe(data, segment=True, plan="d2", checkpoint_steps=1)
    (tmp_path / "own.toml").write_text(as_toml(table))
    monkeypatch.chdir(tmp_path)
    assert finish("tilewise train own.toml", monkeypatch) == 0
    shown, said = capsys.readouterr()
    assert "training on 8 samples and 2 ranks, 4 steps" in said
    assert "valid in epoch 2, after step 4: loss" in said
    assert "epoch 2/2 step 4/4: loss" in said
    assert "compute" in said
    assert "test dice" in shown
    out = launched(tmp_path, "train", "own.toml", "--out", "runs/other", "--plan", "h2", "--json")
    summary = json.loads(out)
    assert summary["steps"] == 4
    assert len(summary["peak_bytes"]) == 2
    found = [losses(read_journal(tmp_path / "runs" / name / METRICS)) for name in ("own", "other")]
    assert found[0] == pytest.approx(found[1], rel=1e-9)
    assert finish(f"tilewise predict runs/own {data} -o y.npy --classes", monkeypatch) == 0
    assert np.load(tmp_path / "y.npy").shape == (10, 7, 6, 5)
    again = CliRunner().invoke(app, ["train", "own.toml"])
    assert str(again.exception) == (
        "train: runs/own holds a run; say --resume latest to go on with it, or --out for another "
        "folder"
    )
    checked = CliRunner().invoke(app, ["train", "own.toml", "--check", "--json"])
    assert json.loads(checked.stdout)["slab_shape"] == [4, 2, 3, 6, 5]
    wrong = CliRunner().invoke(app, ["train", "own.toml", "--set", "train.lrr=1"])
    assert str(wrong.exception).startswith("recipe own.toml: there is no key train.lrr; did you")


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "nowhere", "set", "-o", "y.npy"),
        ("predict", "empty", "set", "-o", "y.npy"),
        ("export", "nowhere", "model.pt"),
        ("train", "own.toml", "--resume", "nowhere"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_bad_input(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "own.toml").write_text(as_toml(recipe(tmp_path / "set")))
    monkeypatch.setattr(sys, "argv", ["tilewise", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith(f"tilewise: {words[0]}: ")
    assert said.count("\n") == 1
    assert ("no whole checkpoint" if "empty" in words else "there is no") in said


# -- one process for all ---------------------------------------------------------------------------


def prepare(mesh: Mesh, fail: bool) -> tuple[int, int, str]:
    """Let the first rank work for all; returns how often it worked and said so, and errors."""
    crew = object.__new__(Crew)
    crew.mesh, crew.timeout = mesh, 1.0
    steps = 0

    def work(tick: Callable[[], None]) -> None:
        nonlocal steps
        for _ in range(5):
            steps += 1
            tick()
        if fail:
            raise OSError("no space left")

    always = mock.patch("tilewise.cli.crew.TICK_S", -1.0)
    with mesh.trace.record() as events, always:
        try:
            crew.first_alone("data", work)
        except MismatchError as error:
            return steps, len(events), str(error)
    return steps, len(events), ""


@pytest.mark.parametrize("fail", [False, True])
def test_the_first_rank_works_for_all_and_keeps_them_waiting(fail: bool) -> None:
    found = ranks(3, prepare, fail)
    assert [steps for steps, _, _ in found] == [5, 0, 0]
    assert {told for _, told, _ in found} == {6}
    assert {said for _, _, said in found} == {"data: rank 0: no space left" if fail else ""}
