"""Checkpoints: written behind the training, whole or not at all, read under any plan.

    main thread     … step │ snapshot │ step │ step │ …
    own thread             └─▶ files ─▶ manifest ─▶ rename ─▶ delete old ones     (own gloo group)

A crash at any point leaves the folders that were whole before; what was being written is a
`.partial` folder, which nothing reads and the next save removes.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from tilewise.comm import Mesh
from tilewise.errors import CheckpointError, CommError, TilewiseError
from tilewise.graph import ParallelModel, load_optimizer_state_dict, optimizer_state_dict
from tilewise.train.manifest import Manifest
from tilewise.train.payload import Payload
from tilewise.train.storage import Reader, Writer, sync_folder

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
ABANDONED = "abandoned-"
LEFT_OVER = re.compile(r"\.step-.*\.(partial|deleted)")


class Checkpoints:
    """The checkpoints of a run, in one folder that all ranks see. All ranks must call alike.

    Args:
        folder: where they are; made when the first is saved.
        keep: how many are kept; older ones are deleted once a newer one is whole.
        mesh: the ranks that save and load together; one process by itself without.
        timeout: how long ranks wait for each other while they write; the mesh's by default. A rank
            must be able to write its file in that time.
        say: told in words what was found damaged; a warning by default.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        mesh: Mesh | None = None,
        timeout: timedelta | None = None,
        say: Callable[[str], Any] | None = None,
    ) -> None:
        if keep < 1:
            raise CheckpointError(f"keep (={keep}) must be at least 1")
        self.folder, self.keep, self.say = Path(folder).absolute(), keep, say or _warn
        self.rank, self.size = (0, 1) if mesh is None else (mesh.rank, mesh.size)
        self._group = None if mesh is None else mesh.side(timeout=timeout)
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._checked: Path | None = None

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        *,
        model: ParallelModel,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Take a snapshot and write it behind what follows.

        Waits for the save before it, and raises on all ranks what went wrong with that one.
        `extra` must be JSON; the first rank's is kept.
        """
        self.wait()
        try:
            kept = json.loads(json.dumps(dict(extra or {})))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"checkpoint: `extra` must be JSON: {error}") from error
        state = {
            name: value.detach().to("cpu", copy=True)
            for name, value in _state(model, optimizer).items()
        }
        plan = json.loads(model.plan.to_json())
        about = Manifest(self.folder, step, self.size, plan, kept, {}, {})
        _hush()
        self._thread = threading.Thread(
            target=self._write, args=(about, state), name=f"checkpoint {step}"
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until what was saved is on the disk; raises on all ranks if it is not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(self, about: Manifest, state: dict[str, Tensor]) -> None:
        name = f"step-{about.step:08d}"
        partial = self.folder / f".{name}.partial"
        try:
            with _explained(f"checkpoint of step {about.step}: it was not saved"):
                save(
                    state,
                    storage_writer=Writer(partial, about, lambda: self._place(name)),
                    planner=DefaultSavePlanner(flatten_state_dict=False),
                    **self._together(),
                )
            if self.rank == 0:
                self._delete_old(about.step)
        except CheckpointError as error:
            self._failure = error
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
        except Exception as error:
            self._failure = CheckpointError(f"checkpoint of step {about.step}: {error!r}")

    def _place(self, name: str) -> Path:
        """Delete what an interrupted run left behind, and return where a new folder goes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.folder.iterdir():
            if LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry)
        final, attempt = self.folder / name, 0
        while final.exists():
            attempt += 1
            final = self.folder / f"{name}.{attempt}"
        return final

    def abandon_after(self, folder: Path) -> None:
        """Rename checkpoints of later steps than one of these, from which a run goes on."""
        if self.rank == 0 and folder.parent == self.folder:
            self._set_aside(_step(folder))

    def _set_aside(self, step: int) -> None:
        """Rename checkpoints of later steps than this: they belong to a run that was given up."""
        for folder in self._found():
            if _step(folder) > step:
                aside, attempt = folder.with_name(f"{ABANDONED}{folder.name}"), 0
                while aside.exists():
                    attempt += 1
                    aside = folder.with_name(f"{ABANDONED}{folder.name}-{attempt}")
                folder.rename(aside)
                self.say(f"{folder} is of a run that was given up; it is now {aside.name}")

    def _delete_old(self, step: int) -> None:
        """Delete all but the newest steps; a crash in the middle leaves none that looks whole."""
        try:
            self._set_aside(step)
            newest: dict[str, Path] = {}
            for folder in self._found():
                newest.setdefault(folder.stem, folder)
            kept = list(newest.values())[: self.keep]
            for old in [folder for folder in self._found() if folder not in kept]:
                aside = old.with_name(f".{old.name}.deleted")
                old.rename(aside)
                sync_folder(self.folder)
                shutil.rmtree(aside)
        except OSError as error:
            self.say(f"{self.folder}: an old checkpoint cannot be deleted ({error})")

    # -- finding -----------------------------------------------------------------------------

    def latest(self) -> Path | None:
        """Return the newest checkpoint that is whole, the same on all ranks; None without any.

        Damaged ones are skipped and told of; where there are only such it is an error, for to
        begin anew would be to lose them. The files are read once for it, each by one rank.
        """
        self.wait()
        problem = None
        for folder in self._shared(self._found() if self.rank == 0 else None):
            problem = self._problem(folder)
            if problem is None:
                return Path(folder)
            if self.rank == 0:
                self.say(f"{problem}; falling back to the checkpoint before it")
        if problem is not None:
            raise CheckpointError(
                f"{self.folder}: no checkpoint in it is whole; move it elsewhere to begin anew "
                f"({problem})"
            )
        return None

    def check(self, folder: str | Path) -> None:
        """Raise on all ranks unless a checkpoint is whole."""
        problem = self._problem(Path(folder).absolute())
        if problem is not None:
            raise CheckpointError(problem)

    def _found(self) -> list[Path]:
        """List the folders by step, newest first."""
        if not self.folder.is_dir():
            return []
        named = [(NAME.fullmatch(entry.name), entry) for entry in self.folder.iterdir()]
        steps = [(int(m[1]), int(m[2] or 0), entry) for m, entry in named if m is not None]
        return [entry for _, _, entry in sorted(steps, reverse=True)]

    def _problem(self, folder: Path) -> str | None:
        """Return what is wrong with a checkpoint on any rank."""
        if self._checked == folder:
            return None
        problem = None
        try:
            manifest = Manifest.read(folder)
            manifest.check_names()
            for name in sorted(manifest.files)[self.rank :: self.size]:
                manifest.check_file(name)
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{folder}: cannot be read ({error})"
        first = next((text for text in self._gathered(problem) if text is not None), None)
        if first is None:
            self._checked = folder
        return first

    # -- loading -----------------------------------------------------------------------------

    def load(
        self, folder: str | Path, *, model: ParallelModel, optimizer: Optimizer | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint into a model and its optimizer; returns its `extra`.

        The plan, the number of ranks and the backend may be others than those it was saved with.
        """
        self.wait()
        folder = Path(folder).absolute()
        self.check(folder)
        manifest = Manifest.read(folder)
        state = _state(model, optimizer)
        _check_fits(manifest, state)
        _hush()
        with _explained(f"{folder}: it cannot be loaded"):
            load(
                {name: value for name, value in state.items() if value.numel()},
                storage_reader=Reader(manifest),
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                **self._together(),
            )
        model.load_state_dict(_part(state, "model"))
        if optimizer is not None:
            load_optimizer_state_dict(model, optimizer, _part(state, "optimizer"))
        return manifest.extra

    # -- ranks -------------------------------------------------------------------------------

    def _together(self) -> dict[str, Any]:
        return {"no_dist": True} if self._group is None else {"process_group": self._group}

    def _shared(self, value: Any) -> Any:
        """Return the first rank's value on all ranks."""
        return self._gathered(value)[0]

    def _gathered(self, value: Any) -> list[Any]:
        """Return every rank's value on all ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise CommError(f"checkpoint: no answer from the other ranks ({error})") from error
        return found


def whole_state_dict(folder: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the model's ordinary state dict and the `extra` of a checkpoint, in one process."""
    alone = Checkpoints(Path(folder).parent)
    alone.check(folder)
    manifest = Manifest.read(Path(folder).absolute())
    payloads = {name: Payload(manifest.folder / name) for name in manifest.files}
    state = {}
    for name, saved in manifest.names("model").items():
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for box in saved.boxes:
            inside = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes))
            whole[inside] = payloads[box.file].tensor(box.key)
        state[name] = whole
    return state, manifest.extra


def _state(model: ParallelModel, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return what is saved, flat: the model's tensors and the optimizer's."""
    state: dict[str, Any] = {f"model/{name}": value for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, value in optimizer_state_dict(model, optimizer).items():
            state[f"optimizer/{name}"] = value
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} is a {type(value).__name__}: only tensors can be saved with the model; "
                "keep other state in `extra`"
            )
    return state


def _part(state: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = f"{part}/"
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _check_fits(manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Raise unless what was saved is what a model and an optimizer have."""

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(f"{manifest.folder}: {problem}")

    for name, value in state.items():
        saved = manifest.tensors.get(name)
        kind, _, rest = name.partition("/")
        if saved is None:
            if not value.numel():
                continue
            raise refuse(
                f"it has no {rest}, which the model has; it is of another model"
                if kind == "model"
                else f"it has no {rest}; it was saved with another optimizer"
            )
        if saved.shape != tuple(value.shape):
            raise refuse(f"its {rest} has shape {saved.shape}, here it is {tuple(value.shape)}")
        if saved.dtype != value.dtype:
            raise refuse(f"its {rest} is {saved.dtype}, here it is {value.dtype}")
    for name in manifest.tensors:
        kind, _, rest = name.partition("/")
        if kind == "model" and name not in state:
            raise refuse(f"its {rest} is not in the model; it is of another model")


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what ranks met into one error with one line, the same on all of them."""
    try:
        yield
    except CheckpointException as error:
        said: dict[str, list[int]] = {}
        for rank, (found, _) in sorted(error.failures.items()):
            kind = (
                "" if isinstance(found, (TilewiseError, OSError)) else f"{type(found).__name__}: "
            )
            said.setdefault(f"{kind}{found}", []).append(rank)
        parts = [
            f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some))}: {text}"
            for text, some in said.items()
        ]
        raise CheckpointError(f"{what}: {'; '.join(parts)}") from error
    except RuntimeError as error:
        if isinstance(error, TilewiseError):
            raise
        raise CheckpointError(f"{what}: another rank died or stopped ({error})") from error


def _hush() -> None:
    """Silence torch's remark that one process saves or loads by itself: it is meant to."""
    warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _step(folder: Path) -> int:
    """Return the step of a checkpoint by its name."""
    found = NAME.fullmatch(folder.name)
    return -1 if found is None else int(found[1])
