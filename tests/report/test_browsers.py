"""A browser that is missing is installed, or the tests say so loudly."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import browsers
import pytest


def test_it_is_installed_from_debians_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def install(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(" ".join(words))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.delenv("TILEWISE_CHROMIUM", raising=False)
    monkeypatch.setattr(subprocess, "run", install)
    monkeypatch.setattr(
        browsers.shutil, "which", lambda name: f"/usr/bin/{name}" if len(ran) == 2 else None
    )
    assert browsers.find_chromium() == "/usr/bin/chromium"
    assert "apt-get update" in ran[0]
    assert "apt-get install" in ran[1]


def test_one_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 100, "", "no network")

    monkeypatch.delenv("TILEWISE_CHROMIUM", raising=False)
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(browsers.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="exit code 100\nno network"):
        browsers.find_chromium()


def test_a_wrong_path_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TILEWISE_CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(RuntimeError, match="is not a program"):
        browsers.find_chromium()
