"""Find the checkpoint that a run goes on from."""

from __future__ import annotations

from pathlib import Path

from tilewise.comm import Mesh
from tilewise.train.checkpoint import Checkpoints

CHECKPOINTS = "checkpoints"


def find_checkpoint(text: str, own: Checkpoints, mesh: Mesh | None = None) -> Path | None:
    """Return the folder that `latest`, a checkpoint or a run means; None if there is none yet.

    `own` are the checkpoints of the run itself. Of another run it is the newest that is whole.
    """
    if text == "latest":
        return own.latest()
    folder = Path(text)
    if (folder / CHECKPOINTS).is_dir():
        return Checkpoints(folder / CHECKPOINTS, mesh=mesh).latest()
    return folder
