"""`tilewise verify` as a user runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from measured_here import keep_rates, tilewise_here
from scripts import finish
from tilewise.cli import main
from tilewise.cli.crew import Crew
from tilewise.cli.verify import verify as verify_command
from tilewise.comm.pool import Pool
from tilewise.errors import TilewiseError

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)
        self.fc = nn.Linear(width, 2)

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))

class Branch(Net):
    def forward(self, x):
        y = super().forward(x)
        if y.sum() > 0:
            y = y + 1
        return y

class Odd(Net):
    def forward(self, x):
        return torch.sort(super().forward(x), dim=1).values
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of models, in which commands run."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
def test_json_says_what_was_compared(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "net.py:Net --arg width=6 --input 4x3x9x7 --ranks 4 --plan 'n2 h2' --steps 2 --json"
    code = finish(f"tilewise verify {words}", monkeypatch)
    shown, said = capfd.readouterr()
    assert code == 0, said
    found = json.loads(shown)
    assert found["ok"] is True
    assert found["model"] == "net.py:Net"
    assert (found["plan"], found["ranks"]) == ("n2 h2", 4)
    assert set(found["max_error"]) == {"output", "input_grad", "param_grad", "buffers", "loss"}
    assert 0 < max(found["max_error"].values()) < 1e-9
    assert found["fallbacks"] == []
    assert found["worst_layer"]
    assert found["seconds"] > 0
    assert said.strip() == ""


@pytest.mark.usefixtures("folder")
def test_people_get_progress_and_a_table_and_are_told_of_fallbacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    words = "net.py:Odd --input 4x3x9x7 --plan h2 --steps 1"
    code = finish(f"tilewise verify {words}", monkeypatch)
    shown, said = (re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text) for text in capfd.readouterr())
    assert code == 0, said
    assert "param grad" in shown
    assert "equal within 1e-09" in shown
    assert "undivided: #sort has no rule" in shown
    assert "3/3" in said  # splitting, the first pass, one step
    assert "verify, first pass" in said
    assert "no rule" not in said


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet5", "--input", "1x3x32x32"), "resnet50"),
        (("net.py:Nothing", "--input", "1x3x8x8"), "net.py has no 'Nothing'"),
        (("none.py:Net", "--input", "1x3x8x8"), "model: there is no file /"),
        (("net.py:Net", "--input", "1x3xx8"), "must be extents joined by x"),
        (("net.py:Net", "--input", "2x3x8x8", "--plan", "conv=d2"), "conv has no depth"),
        (("net.py:Net", "--input", "2x3x8x8", "--plan", "h4"), "(=2); it may be 1, 2"),
        (("net.py:Net", "--input", "2x3x8x8", "--plan", "q2"), "'q2' in 'q2' is not one of"),
        (("net.py:Net", "--input", "2x3x8x8", "--plan", "atuo"), "did you mean 'auto'?"),
        (("net.py:Net", "--input", "2x3x8x8", "--arg", "width"), "must be key=value"),
        (("net.py:Net", "--input", "2x3x8x8", "--arg", "depth=3"), "raised"),
        (("net.py:Net", "--input", "2x5x8x8"), "could not trace Net"),
        (("net.py:Branch", "--input", "2x3x8x8"), "it branches on the value of a tensor"),
        (("net.py:Branch", "--input", "2x3x8x8"), "net.py:18)"),
        (("net.py:Net", "--input", "2x3x8x8", "--plan", "conf=h2"), "did you mean 'conv'?"),
        (("net.py:Net", "--input", "2x3x8x8", "--dtype", "int8"), "must be one of float64"),
        (("net.py:Net", "--input", "2x3x8x8", "--loss", "rmse"), "must be one of mse"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", "verify", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    errors = capfd.readouterr().err
    assert ended.value.code == 2, errors
    assert message in errors
    assert "Traceback" not in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"conv": "d2"}, "depth"),
        ({"conv": "n4"}, "(=2); it may be 1, 2"),
        ({"conv9": "n2"}, "made for another model"),
    ],
)
def test_a_plan_that_does_not_fit_is_found_before_ranks_start(
    layers: dict[str, str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(crew: Crew) -> Pool:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(Crew, "start", start)
    (folder / "plan.json").write_text(json.dumps({"format": 1, "layers": layers}))
    with pytest.raises(TilewiseError, match=re.escape(message)):
        verify_command("net.py:Net", ["2x3x8x8"], ranks=2, plan="plan.json")


def test_the_auto_plan_is_equal_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    keep_rates(tmp_path, 2)
    path = tmp_path / "net.py"
    path.write_text(NET)
    words = ["verify", f"{path}:Net", "--input", "2x3x9x8", "--plan", "auto"]
    found = tilewise_here(tmp_path, monkeypatch, capfd, *words)
    assert found["ok"]
    assert found["plan"] == "auto"
    assert list(tmp_path.glob("calls-2-*.json"))
