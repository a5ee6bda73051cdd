"""`tilewise doctor` and shell completion as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import finish
from tilewise.cli import doctor
from tilewise.cli.app import app
from tilewise.errors import CommError
from tilewise.planner.machine import load_machine


def test_json_has_what_is_needed_and_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ways.json").write_text('{"a": [], "b": []}')
    (tmp_path / "machine-2-gloo.json").write_text(load_machine("lassen").to_json())
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNE", "on")
    assert finish("tilewise doctor --json", monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    by_name = {one["name"]: one for one in found["findings"]}
    assert {by_name[name]["state"] for name in ("python", "torch", "cpu", "gloo")} == {"ok"}
    assert by_name["ways to convolve"]["found"].startswith("2 shapes")
    assert by_name["machine"]["found"].startswith("lassen")
    for one in found["findings"]:
        assert one["state"] != "wrong" or one["install"]


def test_what_is_missing_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(backend: str) -> str:
        raise CommError(f"backend {backend}: not there")

    monkeypatch.setattr(doctor, "engine", nothing)
    monkeypatch.setattr(doctor, "TORCH", ((1, 0), (1, 1)))
    found = {one.name: one for one in (*doctor._versions(), *doctor._backends())}
    assert (found["torch"].state, found["torch"].install) == (
        "wrong",
        "pip install 'torch>=1.0,<1.1'",
    )
    assert (found["mpi"].state, found["mpi"].install) == ("missing", "pip install 'tilewise[mpi]'")
    assert found["gloo"].state == "wrong"


@pytest.mark.parametrize(
    ("words", "count", "expected"),
    [("tilewise si", "1", "simulate"), ("tilewise simulate --str", "2", "--strong")],
)
def test_the_shell_completes_commands_and_options(
    words: str, count: str, expected: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    variables = {"_TILEWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        app(prog_name="tilewise")
    assert capsys.readouterr().out.split() == [expected]
