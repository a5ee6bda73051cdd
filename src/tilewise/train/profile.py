"""Record some steps as a trace with named layers, for Perfetto or chrome://tracing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from tilewise.graph import ParallelModel

FIRST, COUNT = 3, 4


class NamedLayers:
    """Puts the layers' names into the trace."""

    def __init__(self) -> None:
        self.open: list[Any] = []

    def before(self, layer: str) -> None:
        span = record_function(layer)
        span.__enter__()
        self.open.append(span)

    def after(self, layer: str, results: Sequence[Tensor]) -> None:
        self.open.pop().__exit__(None, None, None)


class Profile:
    """Records the third to the sixth step of a run; each rank writes a file of its own."""

    def __init__(self, model: ParallelModel, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.path = folder / f"rank-{model.mesh.rank}.json"
        self.steps = 0
        self.context: Any = None
        self.recorder: Any = None

    def before_step(self) -> None:
        """Begin to record before the first step that is recorded."""
        self.steps += 1
        if self.steps != FIRST:
            return
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it talks while the run is shown
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self.recorder = torch.profiler.profile(activities=activities)
        self.recorder.__enter__()
        self.context = self.model.watched(NamedLayers())
        self.context.__enter__()

    def after_step(self) -> bool:
        """End after the last step; returns whether the trace was written just now."""
        if self.steps != FIRST + COUNT - 1:
            return False
        return self.finish()

    def finish(self) -> bool:
        """Write what was recorded, if anything is open."""
        if self.recorder is None:
            return False
        self.context.__exit__(None, None, None)
        self.recorder.__exit__(None, None, None)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.recorder.export_chrome_trace(str(self.path))
        self.recorder = None
        return True
