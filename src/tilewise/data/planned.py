"""The layouts that degrees give a set's fields, where no model is at hand to ask."""

from __future__ import annotations

from tilewise.data.source import Source
from tilewise.layout import Degrees, Layout

LETTERS = "dhw"


def planned_layouts(
    source: Source, degrees: Degrees | str, *, batch: int | None = None, ranks: int | None = None
) -> list[Layout]:
    """Return a layout for each field: batches cut by n, spatial dims by d, h and w.

    The first field has its channels in front, which are not cut. Another field is cut like it if
    its last extents are the same, such as voxel labels; if not, only its batch is.
    """
    degrees = Degrees.parse(degrees)
    first = next(iter(source.fields.values())).shape
    spatial = min(max(len(first) - 1, 0), len(LETTERS))
    extents = first[len(first) - spatial :]
    out = []
    for field in source.fields.values():
        lead = len(field.shape) - spatial
        same = spatial > 0 and lead >= 0 and field.shape[lead:] == extents
        names = "." * lead + LETTERS[3 - spatial :] if same else "." * len(field.shape)
        shape = (degrees.n if batch is None else batch, *field.shape)
        out.append(Layout.of(shape, f"n{names}", degrees, ranks=ranks or degrees.product))
    return out
