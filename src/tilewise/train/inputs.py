"""The sets of a run: made where there are none, dealt out, and read by slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewise import data
from tilewise.comm import Mesh
from tilewise.data.arguments import refuse_to_guess
from tilewise.data.open import read_facts
from tilewise.data.region import Array, Box
from tilewise.data.source import Counts, Storage
from tilewise.data.synthetic.generate import generate, kind_named
from tilewise.errors import DataError, RecipeError, meant
from tilewise.layout import Cover, Layout
from tilewise.planner.search import parse_bytes
from tilewise.train.recipe import DataSection, Make, Recipe

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "log1p": data.Log1p,
    "normalize": data.Normalize,
}
AUGMENTS: dict[str, Callable[..., Any]] = {
    "flip": data.Flip,
    "roll": data.Roll,
    "transpose": data.Transpose,
    "crop": data.Crop,
    "scale": data.Scale,
    "shift": data.Shift,
    "noise": data.Noise,
}


@dataclass
class Sets:
    """The samples to train on, to choose by, and to judge by; the latter two may be missing."""

    train: data.Source
    valid: data.Source | None
    test: data.Source | None
    facts: dict[str, Any]

    def close(self) -> None:
        """Close all files."""
        for source in (self.train, self.valid, self.test):
            if source is not None:
                source.close()


def make_missing(section: DataSection, progress: Callable[[int], None] | None = None) -> bool:
    """Make the set if it does not exist and the recipe says how; returns whether it was made."""
    path = Path(section.path)
    if path.exists() or section.make is None:
        return False
    generate(
        section.make.kind,
        path,
        size=section.make.size,
        count=section.make.count,
        seed=section.make.seed,
        format=section.make.format,
        progress=progress,
    )
    return True


def open_sets(recipe: Recipe) -> Sets:
    """Open the recipe's sets and deal the samples out, the same on every rank.

    A set that is yet to be made has its shapes only.
    """
    section = recipe.data
    whole, facts = _open(section)
    others = [_other(section.valid, section), _other(section.test, section)]
    shares = list(section.shares) + [0.0] * (3 - len(section.shares))
    if any(other is not None for other in others):
        shares = [shares[0], *(0.0 if o is not None else s for o, s in zip(others, shares[1:]))]
    parts = _dealt(whole, shares, section, facts, seed=recipe.train.seed)
    found = [_cut(part, section) for part in parts]
    for index, other in enumerate(others):
        if other is not None:
            found[index + 1] = _cut(other, section)
    train, valid, test = (part if len(part) else None for part in found)
    if train is None:
        raise RecipeError(f"recipe: data.shares (={section.shares}) leave no sample to train on")
    return Sets(train, valid, test, facts)


class Unmade(data.Source):
    """A set that the recipe says how to make, before it is made: its shapes, but no samples."""

    def __init__(self, make: Make, fields: Sequence[str] | None) -> None:
        self.count, self.counts = make.count, Counts()
        found = kind_named(make.kind).fields(make.size)
        self.fields = {
            name: data.Field(found[name].shape, np.dtype(found[name].dtype))
            for name in fields or found
        }

    def __len__(self) -> int:
        return self.count

    def storage(self, field: str) -> Storage:
        return Storage(self.fields[field].shape, self.fields[field].dtype.itemsize)

    def place(self, index: int, field: str) -> str:
        return "a set that is not made yet"

    def touched(self, index: int, field: str, box: Box) -> int:
        return 0

    def fill(self, index: int, field: str, box: Box, out: Array) -> None:
        raise DataError("data: the set is not made yet")


def _open(section: DataSection) -> tuple[data.Source, dict[str, Any]]:
    path = Path(section.path)
    if section.make is not None and not path.exists():
        make = section.make
        facts = kind_named(make.kind).facts(make.size, make.count, make.seed)
        return Unmade(make, section.fields), facts
    facts = read_facts(path) if (path / "set.json").is_file() else {}
    source = data.open_source(path, section.fields)
    if section.fields is None:
        refuse_to_guess(path, source.fields)
    return source, facts


def _dealt(
    whole: data.Source, shares: Sequence[float], section: DataSection, facts: Any, *, seed: int
) -> list[data.Source]:
    if not section.held_out:
        return [*data.split(whole, shares, seed=seed)]
    kept = facts.get("held_out")
    if kept is None:
        raise RecipeError(
            f"recipe: data.held_out: {section.path} has no set.json that lists samples held out"
        )
    rest = [index for index in range(len(whole)) if index not in set(kept)]
    train, valid = data.split(data.Subset(whole, rest), (shares[0], shares[1]), seed=seed)
    return [train, valid, data.Subset(whole, kept)]


def _other(path: str | None, section: DataSection) -> data.Source | None:
    return None if path is None else data.open_source(path, section.fields)


def _cut(source: data.Source, section: DataSection) -> data.Source:
    if section.sub_volumes is None:
        return source
    return data.SubVolumes(source, section.sub_volumes)


def examples(source: data.Source, recipe: Recipe) -> list[Tensor]:
    """Return meta tensors of the shapes and dtypes that a part of a batch has, field by field."""
    size = recipe.train.batch // recipe.train.accumulate
    return [
        torch.empty((size, *shape), dtype=dtype, device="meta")
        for shape, dtype in zip(_shapes(source, recipe.data), dtypes(source, recipe))
    ]


def _shapes(source: data.Source, section: DataSection) -> list[tuple[int, ...]]:
    """Return the fields' shapes as augmentation leaves them."""
    shapes = [field.shape for field in source.fields.values()]
    for one in augments(section):
        if isinstance(one, data.Crop):
            lead = len(shapes[0]) - len(one.size)
            cut = shapes[0][lead:]
            shapes = [
                (*s[: len(s) - len(cut)], *one.size) if s[len(s) - len(cut) :] == cut else s
                for s in shapes
            ]
    return shapes


def dtypes(source: data.Source, recipe: Recipe) -> list[torch.dtype]:
    """Return what each field is converted to: the last one to what the loss takes."""
    number = torch.float64 if recipe.train.precision == "float64" else torch.float32
    kinds = [number] * len(source.fields)
    if recipe.train.loss == "cross_entropy":
        kinds[-1] = torch.int64
    return kinds


def augments(section: DataSection) -> list[Any]:
    """Build the augmentations."""
    return [_built("data.augment", one, AUGMENTS) for one in section.augment]


def transforms(source: data.Source, section: DataSection) -> dict[str, list[Any]]:
    """Build the transforms of each field."""
    unknown = [name for name in section.transforms if name not in source.fields]
    if unknown:
        raise RecipeError(
            f"recipe: data.transforms names {unknown[0]!r}; the fields are "
            f"{', '.join(source.fields)}"
        )
    return {
        name: [_built(f"data.transforms.{name}", one, TRANSFORMS) for one in some]
        for name, some in section.transforms.items()
    }


def make_loader(
    source: data.Source,
    layouts: Sequence[Layout | Cover],
    recipe: Recipe,
    mesh: Mesh,
    *,
    training: bool,
    fields: Sequence[str] | None = None,
    name: str,
) -> data.Loader:
    """Return a loader of the recipe's samples; only training shuffles and augments."""
    section = recipe.data
    names = list(source.fields) if fields is None else list(fields)
    kinds = dict(zip(source.fields, dtypes(source, recipe)))
    found = transforms(source, section)
    changes = {name: [*found.get(name, ()), kinds[name]] for name in names}
    crops = [one for one in augments(section) if isinstance(one, data.Crop)]
    return data.loader(
        source,
        layouts,
        batch=recipe.train.batch // recipe.train.accumulate,
        fields=names,
        seed=recipe.train.seed,
        shuffle=training,
        drop_last=training and section.drop_last,
        prefetch=section.prefetch,
        store_bytes=None if section.store is None else parse_bytes(section.store),
        transforms=changes,
        augment=augments(section) if training else [data.Crop(c.size, centre=True) for c in crops],
        finite=section.finite,
        mesh=mesh,
        name=name,
    )


def _built(
    where: str, one: str | dict[str, dict[str, Any]], known: dict[str, Callable[..., Any]]
) -> Any:
    """Build what `name` or `{name = {argument = value}}` says."""
    entry = {one: {}} if isinstance(one, str) else one
    if len(entry) != 1:
        raise RecipeError(f"recipe: {where}: {one!r} must be a name, or {{name = {{…}}}}")
    ((name, arguments),) = entry.items()
    if name not in known:
        raise RecipeError(
            f"recipe: {where}: {meant(name, known)}{name!r} must be one of {', '.join(known)}"
        )
    plain = {key: tuple(v) if isinstance(v, list) else v for key, v in arguments.items()}
    try:
        return known[name](**plain)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"recipe: {where}: {name}: {error}") from error
