"""The training loop, as every rank runs it."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from tilewise.comm import Mesh
from tilewise.data import Batch, Loader
from tilewise.errors import TrainingError
from tilewise.graph import clip_grad_norm_
from tilewise.train.evaluate import evaluate
from tilewise.train.inputs import make_loader
from tilewise.train.job import Job, build
from tilewise.train.journal import Journal
from tilewise.train.metrics import SMALLER_IS_BETTER
from tilewise.train.precision import Precision
from tilewise.train.recipe import Stop, from_dict
from tilewise.train.schedule import rate_factor

Event = dict[str, Any]


@dataclass
class Progress:
    """Where a run stands: what has to be known beside the tensors to go on."""

    epoch: int = 0
    step: int = 0
    best: float | None = None
    worse_epochs: int = 0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)


def train(
    mesh: Mesh, table: dict[str, Any], options: dict[str, Any]
) -> Generator[Event, None, Event]:
    """Train a recipe on the ranks of a mesh; the first rank yields what happens.

    `options` has `out`, the folder of the run.
    """
    recipe = from_dict(table)
    started = time.monotonic()
    job = build(mesh, recipe)
    run = Run(job, Path(options["out"]))
    try:
        yield from run.train()
    finally:
        run.close()
    return {
        "seconds": time.monotonic() - started,
        "steps": run.progress.step,
        "epochs": run.progress.epoch,
        "peak_bytes": _peak_bytes(),
        **run.progress.evaluations,
    }


class Run:
    """One run of a job."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job, self.out, self.mesh = job, out, job.mesh
        self.recipe, self.model = job.recipe, job.model
        self.progress = Progress()
        self.precision = Precision(self.recipe.train.precision)
        self.evaluations: dict[str, Loader] = {}
        for name, source in (("valid", job.sets.valid), ("test", job.sets.test)):
            if source is not None:
                self.model.eval()
                self.evaluations[name] = make_loader(
                    source, self.model.input_covers, self.recipe, self.mesh,
                    training=False, name=name,
                )  # fmt: skip
        self.journal: Journal | None = None
        if self.speaks:
            out.mkdir(parents=True, exist_ok=True)
            self.model.plan.save(out / "plan.json")
            self.journal = Journal(out, tensorboard=self.recipe.metrics.tensorboard)

    @property
    def speaks(self) -> bool:
        """Whether this rank reports for all."""
        return self.mesh.rank == 0

    def close(self) -> None:
        """End threads and close files."""
        for loader in self.evaluations.values():
            loader.close()
        self.job.close()
        if self.journal is not None:
            self.journal.close()

    # -- epochs ----------------------------------------------------------------------------

    def train(self) -> Generator[Event, None, None]:
        """Train until the last epoch or step, or until the recipe's target is reached."""
        progress, train = self.progress, self.recipe.train
        if self.speaks:
            yield self._start()
        stopped = False
        while progress.epoch < train.epochs and not stopped:
            yield from self._epoch()
            ended = progress.epoch == train.epochs or progress.step >= self.job.total_steps
            if "valid" in self.evaluations and (
                ended or progress.epoch % self.recipe.metrics.epochs == 0
            ):
                yield from self._evaluate("valid")
                stopped = self._target_reached()
            stopped = stopped or ended
        if "test" in self.evaluations:
            yield from self._evaluate("test")

    def _start(self) -> Event:
        job = self.job
        return {
            "kind": "start",
            "step": self.progress.step,
            "epoch": self.progress.epoch,
            "epochs": self.recipe.train.epochs,
            "steps": job.total_steps,
            "steps_per_epoch": job.steps_per_epoch,
            "samples": len(job.sets.train),
            "ranks": self.mesh.size,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "notes": list(self.model.plan.notes),
        }

    def _epoch(self) -> Generator[Event, None, None]:
        self.job.train_mode()
        progress = self.progress
        for batches in self._groups():
            record = self._step(batches)
            progress.step += 1
            if self.speaks:
                record = {"kind": "train", "epoch": progress.epoch, "step": progress.step, **record}
                if self.journal is not None and (
                    progress.step % self.recipe.metrics.log_steps == 0
                ):
                    self.journal.write(record)
                yield record
            if progress.step >= self.job.total_steps:
                break
        progress.epoch += 1

    def _groups(self) -> Iterator[list[Batch]]:
        """Yield the batches of each optimizer step; the last one may have fewer."""
        group: list[Batch] = []
        for batch in self.job.loader:
            group.append(batch)
            if len(group) == self.recipe.train.accumulate:
                yield group
                group = []
        if group:
            yield group

    # -- steps -----------------------------------------------------------------------------

    def _step(self, batches: list[Batch]) -> Event:
        job, train = self.job, self.recipe.train
        started = time.perf_counter()
        rate = train.lr * rate_factor(self.recipe.schedule, self.progress.step, job.total_steps)
        for group in job.optimizer.param_groups:
            group["lr"] = rate
        samples = sum(batch.size for batch in batches)
        loss = 0.0
        for number, batch in enumerate(batches):
            share = batch.size / samples
            if number + 1 < len(batches):
                with self.model.no_sync():
                    loss += self._pass(batch, share)
            else:
                loss += self._pass(batch, share)
        self.precision.unscale(self.model)
        limit = float("inf") if train.clip is None else train.clip
        norm = float(clip_grad_norm_(self.model, limit))
        if not isfinite(loss):
            raise TrainingError(f"step {self.progress.step + 1}: the loss is {loss}")
        self.precision.note(isfinite(norm))
        if isfinite(norm):
            job.optimizer.step()
        elif not self.precision.scaled:
            raise TrainingError(f"step {self.progress.step + 1}: the gradients' norm is {norm}")
        job.optimizer.zero_grad()
        seconds = time.perf_counter() - started
        return {
            "loss": loss,
            "lr": rate,
            "grad_norm": norm,
            "samples_per_s": samples / seconds,
            "seconds": seconds,
        }

    def _pass(self, batch: Batch, share: float) -> float:
        """Run forward and backward on some samples of a step; returns their part of its loss."""
        with self.precision.autocast():
            loss = self.model.loss(*batch, batch=batch.size) * share
        self.precision.scale_loss(loss).backward()
        return float(loss.detach())

    # -- evaluation ------------------------------------------------------------------------

    def _evaluate(self, name: str) -> Generator[Event, None, None]:
        own = not any(metric.name == "loss" for metric in self.job.metrics)
        started = time.perf_counter()
        found = evaluate(
            self.model, self.evaluations[name], self.job.metrics, self.precision, own_loss=own
        )
        self.progress.evaluations[name] = found
        if self.speaks:
            record = {
                "kind": name,
                "epoch": self.progress.epoch,
                "step": self.progress.step,
                **found,
                "seconds": time.perf_counter() - started,
            }
            if self.journal is not None:
                self.journal.write(record)
            yield record

    def _target_reached(self) -> bool:
        """Whether the recipe's early stop applies after an evaluation."""
        stop = self.recipe.train.stop
        if stop is None:
            return False
        found = self.progress.evaluations["valid"]
        if stop.metric not in found:
            raise TrainingError(
                f"train.stop.metric (={stop.metric!r}) must be one of {', '.join(found)}"
            )
        return reached(stop, found[stop.metric], self.progress)


def reached(stop: Stop, value: float, progress: Progress) -> bool:
    """Whether a value is at the target, or has not got better for as long as one waits."""
    smaller = stop.metric.split("/")[0] in SMALLER_IS_BETTER
    sign = -1.0 if smaller else 1.0
    if stop.target is not None and sign * value >= sign * stop.target:
        return True
    if progress.best is None or sign * value > sign * progress.best:
        progress.best, progress.worse_epochs = value, 0
    else:
        progress.worse_epochs += 1
    return stop.patience is not None and progress.worse_epochs >= stop.patience


def _peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
