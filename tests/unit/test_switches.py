"""Switches in the environment take few words, and refuse others."""

from __future__ import annotations

import sys

import pytest

from tilewise.cli import main
from tilewise.comm import heap
from tilewise.errors import InputError
from tilewise.ops.tune import tuning
from tilewise.switches import KEEP_MEMORY, SWITCHES, TUNE, switched_on


@pytest.mark.parametrize(
    ("value", "on"),
    [("on", True), ("1", True), ("Yes", True), ("", True), ("off", False), ("0", False),
     ("FALSE", False), ("no", False)],
)  # fmt: skip
def test_words(value: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, value)
        assert switched_on(name) is on
    assert tuning() is on


def test_a_switch_that_is_not_set_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TUNE, raising=False)
    assert switched_on(TUNE)


def test_another_word_is_an_error_that_names_the_right_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = r"(='banana') must be one of on, 1, yes, true or off, 0, no, false"
    for name in SWITCHES:
        monkeypatch.setenv(name, "banana")
        monkeypatch.setattr(sys, "argv", ["tilewise", "doctor"])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert capsys.readouterr().err == f"tilewise: {name} {told}\n"
        monkeypatch.delenv(name)
    monkeypatch.setenv(TUNE, "banana")
    with pytest.raises(InputError, match=TUNE):
        tuning()
    monkeypatch.setenv(KEEP_MEMORY, "banana")
    monkeypatch.setattr(heap, "_kept", False)
    with pytest.raises(InputError, match=KEEP_MEMORY):
        heap.keep_freed()
