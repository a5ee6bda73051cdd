"""Recipes: one small TOML file that says what is trained on what, and how.

A key that does not exist and a value that cannot be are errors that name the key, what is allowed,
and what was probably meant.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from tilewise.errors import RecipeError, meant

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Loss = Literal["mse", "mae", "smooth_l1", "cross_entropy", "binary_cross_entropy"]
Precision = Literal["float32", "float64", "bfloat16", "float16"]
MetricName = Literal["mse", "mae", "accuracy", "top5", "dice", "iou", "f1", "auc"]


class Section(BaseModel):
    """A table of a recipe: no other keys than its own."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelSection(Section):
    """The network."""

    name: str
    args: dict[str, Any] = {}
    seed: int = 0
    pretrained: str | None = None
    fresh: list[str] = []
    frozen: list[str] = []


class Make(Section):
    """A set that is made where there is none yet, as by `tilewise data make`."""

    kind: Literal["cosmology", "organs", "mesh", "images", "brain"]
    size: Positive = 64
    count: Positive = 512
    seed: Count = 0
    format: Literal["hdf5", "zarr", "npy", "tfrecord"] = "hdf5"


class DataSection(Section):
    """The set, how it is dealt out, and what is done to its samples."""

    path: str
    make: Make | None = None
    fields: list[str] | None = None
    shares: Annotated[list[float], Field(min_length=1, max_length=3)] = [0.8, 0.1, 0.1]
    valid: str | None = None
    test: str | None = None
    held_out: bool = False
    sub_volumes: dict[str, list[int]] | None = None
    transforms: dict[str, list[str | dict[str, dict[str, Any]]]] = {}
    augment: list[str | dict[str, dict[str, Any]]] = []
    store: str | None = None
    prefetch: Count = 2
    drop_last: bool = False
    finite: bool = False


class Stop(Section):
    """When to stop before the last epoch: at a target, or after epochs without a better value."""

    metric: str
    target: float | None = None
    patience: Positive | None = None


class TrainSection(Section):
    """How the network is trained."""

    loss: str
    class_weights: list[float] | None = None
    epochs: Positive = 1
    steps: Positive | None = None
    batch: Positive
    accumulate: Positive = 1
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop"] = "adamw"
    lr: Rate = 1e-3
    momentum: Rate = 0.9
    betas: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 0.999]
    weight_decay: Rate = 0.0
    clip: Annotated[float, Field(gt=0)] | None = None
    precision: Precision = "float32"
    recompute: list[str] = []
    statistics: Literal["global", "spatial", "local"] = "global"
    seed: Count = 0
    nan: Literal["stop", "skip"] = "stop"
    checksum: Count = 0
    stop: Stop | None = None

    @field_validator("loss")
    @classmethod
    def _known(cls, loss: str) -> str:
        words = get_args(Loss)
        if loss not in words and ":" not in loss:
            raise ValueError(
                f"{meant(loss, words)}{loss!r} must be one of {', '.join(words)}, or "
                "file.py:function or package.module:function"
            )
        return loss

    @model_validator(mode="after")
    def _parts(self) -> TrainSection:
        if self.batch % self.accumulate:
            raise ValueError(
                f"batch (={self.batch}) must be a multiple of accumulate (={self.accumulate})"
            )
        return self


class ScheduleSection(Section):
    """How the learning rate goes; `warmup` and `steps` count optimizer steps."""

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: Count = 0
    end: Annotated[float, Field(ge=0, le=1)] = 0.0
    milestones: list[Annotated[float, Field(gt=0, lt=1)]] = [0.5, 0.75]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.1


class CheckpointSection(Section):
    """When the run is saved: after so many epochs, and steps."""

    epochs: Count = 1
    steps: Count = 0
    keep: Positive = 2


class MetricsSection(Section):
    """What is measured on the samples kept for it, and where it is written."""

    names: list[MetricName] = []
    epochs: Positive = 1
    log_steps: Positive = 1
    tensorboard: bool = False


class Recipe(Section):
    """All that a run needs to know."""

    plan: str | dict[str, str] = "1"
    ranks: Positive | None = None
    memory: str | None = None
    model: ModelSection
    data: DataSection
    train: TrainSection
    schedule: ScheduleSection = ScheduleSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, from which `from_dict` makes the same recipe."""
        return self.model_dump(mode="json")

    def without_pretrained(self) -> Recipe:
        """Return the recipe for values that come from a checkpoint."""
        model = self.model.model_copy(update={"pretrained": None, "fresh": []})
        return self.model_copy(update={"model": model})


def shipped() -> list[str]:
    """List the names of the recipes that come with the package."""
    folder = resources.files("tilewise").joinpath("recipes")
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith("toml"))


def read_recipe(name: str | Path, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe by file or by shipped name; `changes` are `section.key=value`."""
    text, label = _text(str(name))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"recipe {label}: this is not TOML: {error}") from error
    for change in changes:
        _change(table, change)
    return from_dict(table, label)


def from_dict(table: Mapping[str, Any], label: str = "recipe") -> Recipe:
    """Make a recipe of plain values."""
    try:
        return Recipe.model_validate(table)
    except ValidationError as error:
        raise RecipeError(f"recipe {label}: {_explained(error)}") from error


def _text(name: str) -> tuple[str, str]:
    path = Path(name)
    if path.is_file():
        return path.read_text(encoding="utf-8"), name
    if path.suffix == ".toml" or path.parent != Path("."):
        raise RecipeError(f"recipe: there is no file {name}")
    known = shipped()
    if name not in known:
        raise RecipeError(
            f"recipe: {name!r} is neither a file nor a recipe that comes with tilewise; "
            f"{meant(name, known)}these do: {', '.join(known)}"
        )
    found = resources.files("tilewise").joinpath("recipes", f"{name}.toml")
    return found.read_text(encoding="utf-8"), name


def _change(table: dict[str, Any], change: str) -> None:
    """Set `section.key=value` in a table; the value is TOML, or a word."""
    key, equals, value = change.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise RecipeError(f"--set: {change!r} must be section.key=value, such as train.lr=1e-3")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    here = table
    for part in path[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise RecipeError(f"--set: {change!r}: {part} is no table of the recipe")
    here[path[-1]] = parsed


def _explained(error: ValidationError) -> str:
    """Say what is wrong, one clause for each key."""
    said: dict[str, str] = {}
    for one in error.errors():
        place = [part for part in one["loc"] if isinstance(part, str)]
        section, key = _section(place)
        path = ".".join(place)
        if one["type"] == "extra_forbidden":
            said[path] = f"there is no key {path}; {_meant(place, list(section.model_fields))}"
        elif one["type"] == "missing":
            said[path] = f"{path} is missing"
        elif one["type"] == "value_error":
            said[path] = f"{path}: {one['ctx']['error']}"
        else:
            where = ".".join([*place[: place.index(key)], key]) if key in place else path
            said.setdefault(where, f"{where} {_wrong(section, key, one)}")
    return "; ".join(said.values())


def _section(place: list[str]) -> tuple[type[BaseModel], str]:
    """Return the table in which a key stands, and the key."""
    section: type[BaseModel] = Recipe
    for part in place:
        field = section.model_fields.get(part)
        inner = None if field is None else _table_in(field.annotation)
        if inner is None:
            return section, part
        section = inner
    return section, place[-1] if place else ""


def _table_in(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _meant(place: list[str], keys: list[str]) -> str:
    guess = meant(place[-1], keys)
    if not guess:  # a key of another table?
        homes = [s for s, f in Recipe.model_fields.items() if place[-1] in _keys(f.annotation)]
        guess = f"did you mean {homes[0]}.{place[-1]}? " if homes else ""
    table = f"[{'.'.join(place[:-1])}]" if len(place) > 1 else "a recipe"
    return f"{guess}{table} takes {', '.join(keys)}"


def _keys(annotation: Any) -> list[str]:
    table = _table_in(annotation)
    return [] if table is None else list(table.model_fields)


def _wrong(section: type[BaseModel], key: str, one: Any) -> str:
    given = one["input"]
    allowed = _words(section.model_fields[key].annotation) if key in section.model_fields else []
    if allowed:
        guess = meant(str(given), allowed)
        return f"(={given!r}) is not known; {guess}it must be one of {', '.join(allowed)}"
    message = one["msg"].removeprefix("Input ")
    return f"(={given!r}) {message[0].lower()}{message[1:]}"


def _words(annotation: Any) -> list[str]:
    """List the words that a value may be, if it is one of some words."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    inner = [one for one in get_args(annotation) if one is not type(None)]
    found = [_words(one) for one in inner]
    return found[0] if len(found) == 1 or (found and found[0] and str not in inner) else []


def changes(before: Mapping[str, Any], now: Mapping[str, Any], of: str = "") -> list[str]:
    """List what differs between two recipes, plans left out."""
    found = []
    for key in (key for key in now if f"{of}{key}" != "plan"):
        old, new = before.get(key), now[key]
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{of}{key}.")
        elif old != new:
            found.append(f"{of}{key} was {old!r} and is {new!r}")
    return found
