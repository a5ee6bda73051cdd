"""Exit codes: 0 all is well, 1 a run or check failed, 2 bad input, 75 stopped and saved."""

from __future__ import annotations

from tilewise.errors import CheckpointError, CommError, TilewiseError, TrainingError
from tilewise.train.preempt import STOPPED_CODE

__all__ = ["STOPPED_CODE", "exit_code"]


def exit_code(error: BaseException) -> int:
    """Return the code with which a command ends that met an error."""
    failed = (TrainingError, CheckpointError, CommError)
    return 2 if isinstance(error, TilewiseError) and not isinstance(error, failed) else 1
