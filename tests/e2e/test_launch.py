"""Commands under a launcher: every rank runs them, one speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.comm.launch import engine, first_node, join, launched
from tilewise.errors import CommError

BIN = Path(sys.executable).parent
VERIFY = ["-m", "tilewise", "verify", "cosmoflow", "--arg", "size=16", "--arg", "width=0.0625",
          "--input", "1x4x16x16x16", "--steps", "1", "--json"]  # fmt: skip
LAUNCHERS = {
    "mpiexec": [str(BIN / "mpiexec"), "-n", "2", sys.executable, *VERIFY, "--plan", "d2",
                "--backend", "mpi"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 "--nproc-per-node=2", *VERIFY, "--plan", "h2"],
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_rank_speaks_for_all(launcher: str, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        LAUNCHERS[launcher], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["ok"] is True
    assert found["ranks"] == 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"RANK": "0"}, True),
        ({"PMI_RANK": "1"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),  # an interactive shell in a job
    ],
)
def test_launchers_are_recognised(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launched() is expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("lassen12", "lassen12"),
        ("lassen[12-15,20],other3", "lassen12"),
        ("a3,b4", "a3"),
        ("n[007]", "n007"),
        ("", ""),
    ],
)
def test_first_node_of_a_list(nodes: str, expected: str) -> None:
    assert first_node(nodes) == expected


def test_backends_that_cannot_be_are_named() -> None:
    with pytest.raises(CommError, match="'smoke' must be one of gloo, mpi, nccl"):
        engine("smoke")
    with pytest.raises(CommError, match="built without it"):
        engine("nccl")


def test_ranks_of_torchrun_are_no_ranks_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(CommError, match="torchrun starts no MPI ranks"):
        join("mpi")
