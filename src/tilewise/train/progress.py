"""Where a run stands, and whether that is its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from tilewise.errors import RecipeError
from tilewise.train.inputs import Sets
from tilewise.train.metrics import SMALLER_IS_BETTER
from tilewise.train.recipe import Recipe, Stop


@dataclass
class Progress:
    """Where a run stands: what has to be known beside the tensors to go on.

    `epoch` and `step` are how many are done; what people read counts both from 1.
    """

    epoch: int = 0
    step: int = 0
    best: float | None = None
    worse_epochs: int = 0
    stopped: bool = False
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)


def check_stop(recipe: Recipe, names: Sequence[str], sets: Sets) -> None:
    """Refuse an early stop that could never be decided; `names` are the metrics."""
    stop, known = recipe.train.stop, dict.fromkeys(("loss", *names))
    if stop is None:
        return
    if sets.valid is None:
        raise RecipeError("recipe: train.stop needs samples to validate on; see data.shares")
    if stop.metric.split("/")[0] not in known:
        raise RecipeError(
            f"recipe: train.stop.metric (={stop.metric!r}) must be one of {', '.join(known)}"
        )


def reached(stop: Stop, value: float, progress: Progress) -> bool:
    """Note the best value and for how long there was no better one; returns whether to stop."""
    sign = _sign(stop)
    if sign * value > sign * (-sign * inf if progress.best is None else progress.best):
        progress.best, progress.worse_epochs = value, 0
    else:  # also where it is no number
        progress.worse_epochs += 1
    return stops(stop, value, progress)


def stops(stop: Stop, value: float, progress: Progress) -> bool:
    """Whether a value is at the target, or there was no better one for as long as one waits."""
    sign = _sign(stop)
    if stop.target is not None and sign * value >= sign * stop.target:
        return True
    return stop.patience is not None and progress.worse_epochs >= stop.patience


def _sign(stop: Stop) -> float:
    return -1.0 if stop.metric.split("/")[0] in SMALLER_IS_BETTER else 1.0
