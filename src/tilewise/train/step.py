"""One optimizer step: forward and backward on the step's batches, then the step itself."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from tilewise.data import Batch
from tilewise.errors import TrainingError
from tilewise.graph import GradScaler, clip_grad_norm_, grad_norm
from tilewise.train.blame import bad_gradients, first_bad_layer
from tilewise.train.job import Job
from tilewise.train.precision import Precision
from tilewise.train.schedule import rate_factor

SKIPS_IN_A_ROW = 20


class NotFinite(Exception):
    """The loss or a gradient of this step is not finite; the same on every rank."""


class Stepper:
    """Takes optimizer steps, and leaves out those whose numbers are not finite if it may.

    A step that is left out changes neither parameters nor running statistics. Random layers draw by
    the number of the step, whatever was evaluated in between.
    """

    def __init__(self, job: Job, precision: Precision) -> None:
        self.job, self.model, self.precision = job, job.model, precision
        self.scaler = GradScaler(job.model, enabled=precision.scaled)
        self.section = job.recipe.train
        self.skipped = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        factor = rate_factor(self.job.recipe.schedule, step, self.job.total_steps)
        return self.section.lr * factor

    def step(self, number: int, batches: Sequence[Batch]) -> dict[str, Any]:
        """Take step `number`, counted from 0, on some batches; returns what is worth noting."""
        rate = self.rate(number)
        for group in self.job.optimizer.param_groups:
            group["lr"] = rate
        buffers = self._kept()
        record: dict[str, Any] = {"loss": None, "lr": rate}
        try:
            self.model.draws.step = number * self.section.accumulate
            record["loss"] = self._passes(batches)
            record["grad_norm"] = self._norm()
            self.job.optimizer.step()
            self.skipped = 0
        except NotFinite as problem:
            self._skip(number, str(problem), buffers)
            record["skipped"] = str(problem)
        self.job.optimizer.zero_grad()
        if self.precision.scaled:
            record["scale"] = self.scaler.get_scale()
        return record

    def _kept(self) -> list[tuple[Tensor, Tensor]]:
        """Copy the buffers if they may have to be put back."""
        if self.section.nan != "skip" and not self.precision.scaled:
            return []
        return [(buffer, buffer.clone()) for buffer in self.model.buffers()]

    def _passes(self, batches: Sequence[Batch]) -> float:
        """Run forward and backward on all batches; only the last one's backward sums gradients."""
        samples = sum(batch.size for batch in batches)
        total = 0.0
        for batch in batches[:-1]:
            with self.model.no_sync():
                total += self._pass(batch, batch.size / samples)
        return total + self._pass(batches[-1], batches[-1].size / samples)

    def _pass(self, batch: Batch, share: float) -> float:
        with self.precision.autocast():
            loss = self.model.loss(*batch, batch=batch.size)
        value = float(loss.detach())
        if not isfinite(value):
            found = first_bad_layer(self.model, batch, self.precision)
            where = "" if found is None else f"; {_first(*found)}"
            raise NotFinite(f"the loss is {value}{where}")
        self.scaler.scale(loss * share).backward()
        return value * share

    def _norm(self) -> float:
        """Return the gradients' norm, and clip them by it."""
        self.scaler.unscale_(self.job.optimizer)
        clip = self.section.clip
        norm = float(grad_norm(self.model))
        self.scaler.update()
        if not isfinite(norm):
            found = bad_gradients(self.model)
            where = "" if found is None else f"; {_first(*found)}"
            raise NotFinite(f"the norm of the gradients is {norm}{where}")
        if clip is not None and norm > clip:
            clip_grad_norm_(self.model, clip)
        return norm

    def _skip(self, number: int, problem: str, buffers: list[tuple[Tensor, Tensor]]) -> None:
        overflow = self.precision.scaled and problem.startswith("the norm")
        if self.section.nan != "skip" and not overflow:
            raise TrainingError(
                f"step {number + 1}: {problem}; try a smaller train.lr or train.clip, or "
                "train.nan = 'skip'"
            )
        self.skipped += 1
        if self.skipped > SKIPS_IN_A_ROW:
            raise TrainingError(
                f"step {number + 1}: {problem}; {SKIPS_IN_A_ROW} steps before it were left out too"
            )
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _first(name: str, ranks: list[int]) -> str:
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"first in {name}, on {who}"
