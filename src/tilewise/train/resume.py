"""Find the checkpoint that is meant."""

from __future__ import annotations

from pathlib import Path

from tilewise.comm import Mesh
from tilewise.errors import CheckpointError
from tilewise.train.checkpoint import Checkpoints

CHECKPOINTS = "checkpoints"
LATEST = "latest"


def find_checkpoint(text: str, own: Checkpoints, mesh: Mesh | None = None) -> Path | None:
    """Return the folder that `latest`, a checkpoint or a run means; None if there is none yet.

    `own` are the checkpoints of the run itself. Of another run it is the newest that is whole.
    """
    return own.latest() if text == LATEST else checkpoint_in(Path(text), mesh)


def checkpoint_in(folder: Path, mesh: Mesh | None = None) -> Path:
    """Return the newest checkpoint of a run that is whole, or the checkpoint itself."""
    is_run = float((folder / CHECKPOINTS).is_dir())
    if mesh is not None:  # a host may not see yet what another one wrote
        is_run = mesh.total([is_run], layer="resume")[0]
    if not is_run:
        return folder
    found = Checkpoints(folder / CHECKPOINTS, mesh=mesh).latest()
    if found is None:
        raise CheckpointError(f"{folder}: there is no whole checkpoint in this run")
    return found
