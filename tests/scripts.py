"""Run scripts on ranks that are there already, as a launcher would on new ones."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from typing import Any
from unittest import mock
from unittest.mock import DEFAULT

import pytest
import torch.distributed as dist

from tilewise import Mesh
from tilewise.cli import main
from tilewise.testing.ranks import Pool


def run_script(mesh: Mesh, text: str, folder: str) -> str:
    """Run a script as a rank would; returns what it prints."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(said),
            # the ranks have joined already, and stay for the next script
            mock.patch.multiple(dist, init_process_group=DEFAULT, destroy_process_group=DEFAULT),
        ):
            exec(compile(text, "script", "exec"), {"__name__": "__main__"})
    finally:
        sys.path.remove(folder)
    return said.getvalue()


def run_on(count: int, text: str, folder: str) -> str:
    """Run a script on a world of so many ranks; returns what they print, in their order."""
    pool = Pool(count, backend="gloo", timeout=300.0)
    try:
        return "".join(pool.run(tuple(range(count)), run_script, (text, folder), 300.0))
    finally:
        pool.close()


def finish(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", shlex.split(command))
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def run_commands_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a script that starts `python -m tilewise` run the command in this process instead."""
    start = subprocess.run

    def run(command: Any, **options: Any) -> Any:
        if command[:3] != [sys.executable, "-m", "tilewise"]:
            return start(command, **options)
        with mock.patch.dict(os.environ, options.get("env") or {}):
            code = finish(shlex.join(["tilewise", *command[3:]]), monkeypatch)
        if code and options.get("check"):
            raise subprocess.CalledProcessError(code, command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(subprocess, "run", run)
