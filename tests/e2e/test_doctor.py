"""`tilewise doctor` and shell completion as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.cli import doctor
from tilewise.errors import CommError
from tilewise.planner.machine import load_machine

START = "import sys; sys.argv = ['tilewise', *sys.argv[1:]]; from tilewise.cli import main; main()"


def tilewise(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", START, *words],
        capture_output=True, text=True, timeout=120, env=os.environ | variables, check=False,
    )  # fmt: skip


def test_json_has_what_is_needed_and_what_is_measured(tmp_path: Path) -> None:
    (tmp_path / "ways.json").write_text('{"a": [], "b": []}')
    (tmp_path / "machine-2-gloo.json").write_text(load_machine("lassen").to_json())
    result = tilewise("doctor", "--json", TILEWISE_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
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
def test_the_shell_completes_commands_and_options(words: str, count: str, expected: str) -> None:
    variables = {"_TILEWISE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    assert tilewise(**variables).stdout.split() == [expected]
