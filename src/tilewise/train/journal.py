"""What a run writes beside its checkpoints: metrics as JSON lines, the recipe and the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from tilewise.errors import TrainingError

METRICS = "metrics.jsonl"


class Journal:
    """The lines of a run, written by the first rank: one for each step and each evaluation.

    Steps and epochs count from 1. A run that resumes after step `after` drops what an earlier one
    wrote beyond it, so that the file is the story of one run.
    """

    def __init__(
        self, folder: Path, *, after: int | None = None, tensorboard: bool = False
    ) -> None:
        self.path = folder / METRICS
        found = [] if after is None else _counted(read_journal(self.path))
        kept = [record for record in found if record["step"] <= after]
        text = "".join(json.dumps(record) + "\n" for record in kept)
        try:
            self.path.write_text(text, encoding="utf-8")
            self.file: TextIO = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise TrainingError(f"{self.path} cannot be written: {error}") from error
        self.board = _board(folder, after) if tensorboard else None

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        """Close the files."""
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a run; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found


def _counted(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let epochs of steps count from 1, where an earlier version counted them from 0."""
    steps = [record for record in records if record.get("kind") == "train"]
    if any(record.get("epoch") == 0 for record in steps):
        for record in steps:
            record["epoch"] += 1
    return records


def _board(folder: Path, after: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise TrainingError(
            f"metrics.tensorboard: {error}; pip install 'tilewise[tensorboard]'"
        ) from error
    return SummaryWriter(
        str(folder / "tensorboard"), purge_step=None if after is None else after + 1
    )
