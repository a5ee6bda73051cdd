"""Make sense of a loader's arguments, the same on all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.comm import Mesh
from tilewise.data.amplification import amplification, whole_note
from tilewise.data.augmentation import Augmentation
from tilewise.data.feed import Feed
from tilewise.data.open import open_source
from tilewise.data.source import Field, Source
from tilewise.data.transform import TransformLike, as_transforms
from tilewise.data.whole import WholeSamples
from tilewise.errors import DataError, MismatchError, TilewiseError
from tilewise.layout import Cover, Layout

# Reads that go through more than so many times the bytes of the slabs are warned of.
AMPLIFIED = 2.0


def as_source(data: Any, fields: Sequence[str] | None = None) -> Source:
    """Return a source, open a path for these fields, or take whole samples from a Dataset."""
    if isinstance(data, Source):
        return data
    if isinstance(data, (str, Path)):
        return open_source(data, fields)
    return WholeSamples(data)


def field_names(
    source: Source,
    layouts: Sequence[Layout | Cover],
    given: Sequence[str] | None,
    ranks: int,
) -> list[str]:
    """Return the fields that the layouts stand for, in order."""
    names = list(source.fields) if given is None else list(given)
    missing = [name for name in names if name not in source.fields]
    if missing:
        raise DataError(f"data: no field {missing[0]!r}; the source has {list(source.fields)}")
    if len(names) != len(layouts) or not names:
        raise DataError(
            f"data: {len(layouts)} layouts for the fields {names}; there must be one for each, in "
            f"order; say fields= to choose some{_origin(source)}"
        )
    for name, layout in zip(names, layouts):
        if layout.ranks != ranks:
            raise DataError(
                f"data: the layout of {name!r} is for {layout.ranks} ranks, the mesh has {ranks}"
            )
        if not layout.shape:
            raise DataError(f"data: the layout of {name!r} is a scalar's, without a batch")
    return names


def refuse_to_guess(data: Any, chosen: Mapping[str, Field]) -> None:
    """Raise where a path's fields could be taken for each other, and nothing says their order.

    A made set's description orders its fields, and `x` before `y` is the custom.
    """
    if not isinstance(data, (str, Path)) or (Path(data) / "set.json").is_file():
        return
    for one in chosen.values():
        alike = [name for name, field in chosen.items() if field == one]
        if len(alike) > 1 and alike != ["x", "y"]:
            raise DataError(
                f"data: {data}: the fields {alike} are alike ({one}), and only the alphabet would "
                f"put them in the order {list(chosen)}; say which of them the layouts stand for "
                "with fields=[...], in the layouts' order"
            )


def _origin(source: Source) -> str:
    """Say which of several files decided what the fields are."""
    if source.origin is None:
        return ""
    return (
        f"; the fields are those of {source.origin}, and `tilewise data check` finds files that "
        "are not like most"
    )


def agree_to_open(mesh: Mesh, name: str, failure: Exception | None) -> None:
    """Raise on all ranks what failed on one; on one rank alone, the error itself."""
    if mesh.size == 1 and failure is not None:
        raise failure
    error = None
    if failure is not None:
        error = str(failure) if isinstance(failure, TilewiseError) else repr(failure)
    try:
        mesh.agree(name, error=error)
    except MismatchError as error:
        raise DataError(str(error)) from failure


def make_feeds(
    source: Source,
    names: Sequence[str],
    layouts: Sequence[Layout | Cover],
    transforms: Mapping[str, TransformLike | Sequence[TransformLike]],
    augmentation: Augmentation,
) -> list[Feed]:
    """Return the feeds of the fields, in order."""
    unknown = [field for field in transforms if field not in names]
    if unknown:
        raise DataError(f"data: transforms for {unknown[0]!r}, the fields are {list(names)}")
    for field, layout in zip(names, layouts):
        stored = source.fields[field].shape
        shape = augmentation.shape(field, stored)
        if layout.shape[1:] != shape:
            cropped = f" (stored as {stored})" if shape != stored else ""
            raise DataError(
                f"data: field {field!r} has samples of shape {shape}{cropped}, its layout expects "
                f"{layout.shape[1:]} after the batch; the fields are taken in the order "
                f"{list(names)}, say fields= for another{_origin(source)}"
            )
    return [
        Feed(
            number,
            field,
            source.fields[field],
            layout,
            as_transforms(transforms.get(field)),
            augmentation,
        )
        for number, (field, layout) in enumerate(zip(names, layouts))
    ]


def note_costs(source: Source, feeds: Sequence[Feed], rank: int, name: str) -> None:
    """Warn where a rank reads much more than its slabs."""
    factor = amplification(source, feeds, rank)
    if isinstance(source, WholeSamples):
        if factor > 1:
            warnings.warn(whole_note(source, name, factor), stacklevel=4)
    elif factor > AMPLIFIED:
        warnings.warn(
            f"{name}: reading this rank's slabs goes through {factor:.1f} times their bytes, "
            "because of how the files are laid out; `tilewise data inspect` shows which plan or "
            "which chunks would fit",
            stacklevel=4,
        )
