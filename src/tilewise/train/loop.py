"""The training loop, as every rank runs it."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.comm import Mesh
from tilewise.data import Batch, Loader
from tilewise.errors import TilewiseError, TrainingError
from tilewise.plan.given import AUTO
from tilewise.train.blame import drifted
from tilewise.train.checkpoint import Checkpoints
from tilewise.train.evaluate import evaluate
from tilewise.train.inputs import make_loader
from tilewise.train.job import Job, build
from tilewise.train.journal import Journal
from tilewise.train.precision import Precision, load_scaler_state, scaler_state
from tilewise.train.preempt import Preemption
from tilewise.train.profile import Profile
from tilewise.train.progress import Progress, check_stop, reached, stops
from tilewise.train.recipe import changes, from_dict
from tilewise.train.resume import CHECKPOINTS, find_checkpoint
from tilewise.train.step import Stepper

Event = dict[str, Any]


@dataclass
class Options:
    """What a run is told beside its recipe.

    Args:
        out: the folder of the run.
        resume: `latest`, or the folder of a checkpoint or of a run to go on from.
        profile: record some steps.
    """

    out: str
    resume: str | None = None
    profile: bool = False


def train(
    mesh: Mesh, table: dict[str, Any], options: dict[str, Any]
) -> Generator[Event, None, Event]:
    """Train a recipe on the ranks of a mesh; the first rank yields what happens.

    `table` is a recipe and `options` are `Options`, both as plain values. Returns a summary.
    """
    started = time.monotonic()
    notes: list[str] = []
    recipe = from_dict(table)
    if recipe.plan == AUTO and mesh.rank == 0:
        yield {"kind": "note", "step": 0, "text": "looking for a plan; the first time, it measures"}
    with Preemption(mesh) as preemption, _noted_warnings(notes):
        run = Run(build(mesh, recipe), Options(**options), preemption, notes)
        try:
            yield from run.train()
        except TrainingError:  # raised on all ranks alike; what is being saved is for resuming
            with suppress(TilewiseError):
                run.checkpoints.wait()
            raise
    run.close()  # after an error it would wait for ranks that may be gone
    return {
        "preempted": run.preempted,
        "seconds": time.monotonic() - started,
        "steps": run.progress.step,
        "epochs": run.progress.epoch,
        "step_seconds": run.step_seconds / max(run.steps, 1),
        "peak_bytes": peak_bytes(),
        **run.progress.evaluations,
    }


class Run:
    """One run of a job."""

    def __init__(
        self, job: Job, options: Options, preemption: Preemption, notes: list[str]
    ) -> None:
        self.job, self.options, self.mesh = job, options, job.mesh
        self.preemption, self.preempted = preemption, False
        self.recipe, self.model = job.recipe, job.model
        self.out = Path(options.out)
        self.progress = Progress()
        self.precision = Precision(self.recipe.train.precision)
        self.stepper = Stepper(job, self.precision)
        self.notes = notes
        self.steps, self.step_seconds = 0, 0.0
        self.saved_step = -1
        self.checkpoints = Checkpoints(
            self.out / CHECKPOINTS,
            keep=self.recipe.checkpoint.keep,
            mesh=self.mesh,
            say=self.notes.append,
        )
        self.evaluations: dict[str, Loader] = {}
        self.model.eval()
        for name, source in (("valid", job.sets.valid), ("test", job.sets.test)):
            if source is not None:
                self.evaluations[name] = make_loader(
                    source, self.model.input_covers, self.recipe, self.mesh,
                    training=False, name=name,
                )  # fmt: skip
        self.profile = Profile(self.model, self.out / "profile") if options.profile else None
        check_stop(self.recipe, [metric.name for metric in job.metrics], job.sets)
        resumed = self._resume()
        self.journal: Journal | None = None
        if self.recipe.plan == AUTO:
            self.notes.append(self._told_plan())
        failure: str | None = None
        if self.speaks:
            try:
                self.journal = self._opened(after=self.progress.step if resumed else None)
            except (TilewiseError, OSError) as error:
                failure = str(error)
        self.mesh.agree("run", error=failure)

    def _opened(self, *, after: int | None) -> Journal:
        """Write what the run is, and open its journal."""
        self.out.mkdir(parents=True, exist_ok=True)
        self.model.plan.save(self.out / "plan.json")
        text = json.dumps(self.recipe.as_dict(), indent=1)
        (self.out / "recipe.json").write_text(text + "\n", encoding="utf-8")
        return Journal(self.out, after=after, tensorboard=self.recipe.metrics.tensorboard)

    def _told_plan(self) -> str:
        """Say what was found."""
        return f"the plan's degrees: {self.model.plan.told()} (plan.json)"

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

    # -- checkpoints -----------------------------------------------------------------------

    def save(self) -> None:
        """Save all that is needed to go on from here; the files are written behind what follows."""
        if self.saved_step == self.progress.step:
            return
        self.saved_step = self.progress.step
        self.checkpoints.save(
            self.progress.step,
            model=self.model,
            optimizer=self.job.optimizer,
            extra={
                "progress": vars(self.progress),
                "loader": self.job.loader.state_dict(),
                "precision": scaler_state(self.stepper.scaler),
                "recipe": self.recipe.as_dict(),
                "input": list(self.model.graph.training.inputs[0].shape),
            },
        )

    def _resume(self) -> bool:
        """Go on from the checkpoint that was asked for; returns whether there is one."""
        if self.options.resume is None:
            return False
        folder = find_checkpoint(self.options.resume, self.checkpoints, self.mesh)
        if folder is None:
            self.notes.append("there is no checkpoint yet; starting from the first step")
            return False
        extra = self.checkpoints.load(folder, model=self.model, optimizer=self.job.optimizer)
        self.checkpoints.abandon_after(folder)
        for group in self.job.optimizer.param_groups:
            group.update(self.job.optimizer.defaults)  # the recipe's, not those of the checkpoint
        self.progress = Progress(**extra["progress"])
        load_scaler_state(self.stepper.scaler, extra["precision"])
        self.job.loader.load_state_dict(extra["loader"])
        self.saved_step = self.progress.step
        self.progress.stopped = self._stops()
        changed = changes(extra.get("recipe", {}), self.recipe.as_dict())
        if changed:
            self.notes.append(f"other than the checkpoint was trained with: {', '.join(changed)}")
        return True

    def _stops(self) -> bool:
        """Whether the last evaluation, as far as there is one, ends the run by this recipe."""
        stop, found = self.recipe.train.stop, self.progress.evaluations.get("valid", {})
        return (
            stop is not None
            and stop.metric in found
            and stops(stop, found[stop.metric], self.progress)
        )

    # -- epochs ----------------------------------------------------------------------------

    def train(self) -> Generator[Event, None, None]:
        """Train until the last epoch or step, or until the recipe's target is reached."""
        progress = self.progress
        if self.speaks:
            yield self._start()
        yield from self._said()
        while not self._ended and not progress.stopped:
            if self.job.loader.epoch == progress.epoch:  # else it was saved after its last step
                yield from self._epoch()
            if self.preempted:
                break
            progress.epoch += self._epoch_done
            if "valid" in self.evaluations and (
                self._ended or progress.epoch % self.recipe.metrics.epochs == 0
            ):
                yield from self._evaluate("valid")
                progress.stopped = self._target_reached()
            every = self.recipe.checkpoint.epochs
            if self._ended or progress.stopped or (every and progress.epoch % every == 0):
                self.saved_step = -1  # what was found in the evaluation belongs to it
                self.save()
        if "test" in self.evaluations and not self.preempted:
            yield from self._evaluate("test")
        self.checkpoints.wait()
        yield from self._said()

    @property
    def _ended(self) -> bool:
        progress = self.progress
        return progress.epoch >= self.recipe.train.epochs or progress.step >= self.job.total_steps

    @property
    def _epoch_done(self) -> bool:
        """Whether the last batch of the epoch was taken; a limit of steps may end it before."""
        loader = self.job.loader
        return loader.epoch > self.progress.epoch or loader.state_dict()["batches"] >= len(loader)

    @property
    def _within_epoch(self) -> bool:
        """Whether some batches of an epoch were taken, and others were not."""
        loader = self.job.loader
        same = loader.epoch == self.progress.epoch
        return same and 0 < loader.state_dict()["batches"] < len(loader)

    def _start(self) -> Event:
        job = self.job
        return {
            "kind": "start",
            "step": self.progress.step,
            "epoch": min(self.progress.epoch + 1, self.recipe.train.epochs),
            "epochs": self.recipe.train.epochs,
            "steps": job.total_steps,
            "steps_per_epoch": job.steps_per_epoch,
            "samples": len(job.sets.train),
            "ranks": self.mesh.size,
            "notes": list(self.model.plan.notes),
        }

    def _said(self) -> Generator[Event, None, None]:
        """Report what is to be told in words."""
        while self.notes:
            text = self.notes.pop(0)
            if self.speaks:
                yield {"kind": "note", "step": self.progress.step, "text": text}

    def _epoch(self) -> Generator[Event, None, None]:
        self.job.train_mode()
        progress, every = self.progress, self.recipe.checkpoint.steps
        clock = _Times(self.mesh)
        for batches in self._groups():
            waited = clock.lap()
            if self.profile is not None:
                self.profile.before_step()
            record = self.stepper.step(progress.step, batches)
            if self.profile is not None and self.profile.after_step():
                self.notes.append(f"trace of this rank: {self.profile.path}")
            progress.step += 1
            self._check_replicas()
            record |= clock.record(waited, sum(batch.size for batch in batches))
            self.steps, self.step_seconds = self.steps + 1, self.step_seconds + record["seconds"]
            if self.speaks:
                yield self._noted(record)
            yield from self._said()
            if progress.step >= self.job.total_steps:
                break
            self.preempted = self.preemption.agreed()
            if self.preempted or (every and progress.step % every == 0):
                self.save()
            if self.preempted:
                return
            clock.lap()

    def _noted(self, record: Event) -> Event:
        progress = self.progress
        record = {"kind": "train", "epoch": progress.epoch + 1, "step": progress.step, **record}
        if self.journal is not None and progress.step % self.recipe.metrics.log_steps == 0:
            self.journal.write(record)
        return record

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

    def _check_replicas(self) -> None:
        """Raise on all ranks if replicas of a tensor have drifted apart."""
        every = self.recipe.train.checksum
        if not every or self.progress.step % every:
            return
        found = drifted(self.model)
        if found is not None:
            name, ranks = found
            raise TrainingError(
                f"step {self.progress.step}: the replicas of {name} have drifted apart: rank"
                f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} hold another value "
                "than the first; resume from the last checkpoint, and suspect the machine"
            )

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
                "epoch": self.progress.epoch + self._within_epoch,
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


@contextmanager
def _noted_warnings(notes: list[str]) -> Iterator[None]:
    """Let warnings be told like everything else, by the first rank, instead of by all."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: notes.append(str(message))
        yield


class _Times:
    """Where the time of a step goes on this rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.waits = dict(mesh.clock.seconds)
        self.start = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin another."""
        now = time.perf_counter()
        seconds, self.start = now - self.start, now
        self.waits = dict(self.mesh.clock.seconds)
        return seconds

    def record(self, waited: float, samples: int) -> Event:
        """Return the time of a step, input included, and the shares of what it was spent on."""
        inside = time.perf_counter() - self.start
        total = inside + waited
        parts = {
            kind: seconds - self.waits[kind] for kind, seconds in self.mesh.clock.seconds.items()
        }
        shares = {"compute": inside - sum(parts.values()), **parts, "input": waited}
        return {
            "seconds": total,
            "samples_per_s": samples / total,
            "shares": {kind: round(seconds / total, 4) for kind, seconds in shares.items()},
        }


def peak_bytes() -> int:
    """Return the most memory that this process has held so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
