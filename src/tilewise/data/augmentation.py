"""All augmentations of a data set, and the fields that they concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.data.augment import LETTERS, Crop, Geometric, Intensity, View
from tilewise.data.chance import Chance
from tilewise.data.region import Box, Index
from tilewise.data.source import Field
from tilewise.errors import DataError

Augment = Geometric | Intensity


@dataclass(frozen=True, slots=True)
class Seen:
    """A field's dims after augmentation: seen dim j is stored dim perm[j], by index[j] if any."""

    perm: tuple[int, ...]
    index: tuple[Index | None, ...]


class Augmentation:
    """Augmentations in the order in which they are applied, for the fields of a source.

    Geometric ones concern the first field and all fields whose last extents are the same, such as
    voxel labels; `fields` names them instead where that guess is wrong. Changes of intensity
    concern the first field.
    """

    def __init__(
        self,
        augment: Sequence[Augment],
        fields: Mapping[str, Field],
        *,
        seed: int = 0,
        concerned: Sequence[str] | None = None,
    ) -> None:
        for one in augment:
            if not isinstance(one, (Geometric, Intensity)):
                raise DataError(f"augment: {one!r} is not an augmentation")
        self.augment, self.seed = tuple(augment), seed
        self.first = next(iter(fields))
        self.spatial = _spatial_dims(self.augment, fields[self.first])
        self.extents = _last(fields[self.first].shape, self.spatial)
        self.concerned = _concerned(fields, self.extents, concerned) if self.geometric else ()
        self.seen_extents = self.extents
        for one in self.augment:
            if isinstance(one, Geometric):
                self.seen_extents = one.extents(self.seen_extents)

    @property
    def geometric(self) -> bool:
        """Whether any of them changes where things are."""
        return any(isinstance(one, Geometric) for one in self.augment)

    def changes_values(self, field: str) -> bool:
        """Whether any of them changes the values of a field."""
        return field == self.first and any(isinstance(one, Intensity) for one in self.augment)

    def shape(self, field: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a field as the model sees it."""
        if field not in self.concerned:
            return stored
        return (*stored[: len(stored) - self.spatial], *self.seen_extents)

    def view(self, epoch: int, sample: int) -> View | None:
        """Draw how a sample is seen in an epoch; None is as it is stored."""
        if not self.geometric:
            return None
        view = View.plain(self.extents)
        for number, one in enumerate(self.augment):
            if isinstance(one, Geometric):
                view = one.see(view, Chance(self.seed, epoch, sample, number))
        return view

    def seen(self, view: View | None, field: str, ndim: int) -> Seen:
        """Return what a view of the spatial dims means for a field."""
        if view is None or field not in self.concerned:
            return Seen(tuple(range(ndim)), (None,) * ndim)
        lead = ndim - self.spatial
        return Seen(
            (*range(lead), *(lead + dim for dim in view.perm)), ((None,) * lead) + view.index
        )

    def change(
        self, tensor: Tensor, shape: tuple[int, ...], box: Box, epoch: int, sample: int
    ) -> Tensor:
        """Apply the changes of intensity to a box of the first field."""
        for number, one in enumerate(self.augment):
            if isinstance(one, Intensity):
                tensor = one.change(tensor, shape, box, Chance(self.seed, epoch, sample, number))
        return tensor


def _spatial_dims(augment: Sequence[Augment], first: Field) -> int:
    """Return how many last dims are spatial: all but a first one for channels, at most three."""
    named = 1
    for one in augment:
        dims = getattr(one, "dims", "")
        named = max([named, *(LETTERS.find(letter) + 1 for letter in dims)])
        if isinstance(one, Crop):
            named = max(named, len(one.size))
    return min(max(named, min(len(first.shape) - 1, 3)), len(first.shape))


def _last(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    return shape[len(shape) - count :]


def _concerned(
    fields: Mapping[str, Field], extents: tuple[int, ...], given: Sequence[str] | None
) -> tuple[str, ...]:
    if given is None:
        return tuple(
            name
            for name, field in fields.items()
            if len(field.shape) >= len(extents) and _last(field.shape, len(extents)) == extents
        )
    for name in given:
        if name not in fields or _last(fields[name].shape, len(extents)) != extents:
            raise DataError(
                f"augment: field {name!r} must be one of {list(fields)} with the last extents "
                f"{extents}"
            )
    return tuple(given)
