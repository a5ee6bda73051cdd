"""What a set is made of, and what a plan would cost to read from it."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.data.amplification import read_costs
from tilewise.data.augmentation import Augmentation
from tilewise.data.chunks import fitting_chunks
from tilewise.data.feed import Feed
from tilewise.data.planned import planned_layouts
from tilewise.data.share import Share
from tilewise.data.source import Source
from tilewise.layout import Degrees


@dataclass(frozen=True)
class FieldFacts:
    """A field as it lies on disk."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sample_bytes: int
    chunks: tuple[int, ...] | None
    compression: str


@dataclass(frozen=True)
class ReadCost:
    """What reading a field's slabs costs under a plan.

    Attributes:
        slab: the largest slab of a sample.
        slab_bytes: of all ranks' slabs of a sample, on average.
        amplification: bytes gone through for each byte of the slabs, over all ranks.
        worst: the same for the rank that has it worst.
        chunks: extents that would serve this plan better, where it exceeds 1 and there are any.
        with_chunks: the amplification with those.
    """

    name: str
    slab: tuple[int, ...]
    slab_bytes: int
    amplification: float
    worst: float
    chunks: tuple[int, ...] | None
    with_chunks: float | None


def field_facts(source: Source) -> list[FieldFacts]:
    """Describe the fields of a source."""
    out = []
    for name, field in source.fields.items():
        stored = source.storage(name)
        out.append(
            FieldFacts(
                name,
                field.shape,
                field.dtype.name,
                field.bytes,
                stored.chunks,
                stored.compression,
            )
        )
    return out


def read_plan(source: Source, degrees: Degrees | str, *, sample: int = 0) -> list[ReadCost]:
    """Work out what a plan's input layout costs to read; no data is read."""
    layouts = planned_layouts(source, degrees)
    augmentation = Augmentation((), source.fields)
    out = []
    for number, (layout, (name, field)) in enumerate(zip(layouts, source.fields.items())):
        feed = Feed(number, name, field, layout, [], augmentation)
        costs = {}
        for rank in range(layout.ranks):
            place = feed.share.place(rank)
            if place not in costs:
                costs[place] = read_costs(source, [feed], rank, sample)
        requested = sum(cost[0] for cost in costs.values())
        touched = sum(cost[1] for cost in costs.values())
        factor = touched / requested if requested else 1.0
        chunks, fitted = fitting_chunks(feed.share.blocks, field.dtype.itemsize)
        lead = () if len(source.storage(name).shape) == len(field.shape) else (1,)
        better = factor > 1.05 * fitted
        out.append(
            ReadCost(
                name,
                _largest(feed.share),
                requested // len(costs),
                factor,
                max((t / r for r, t in costs.values() if r), default=1.0),
                (*lead, *chunks) if better else None,
                fitted if better else None,
            )
        )
    return out


def _largest(share: Share) -> tuple[int, ...]:
    return tuple(max(one.size for one in blocks) for blocks in share.blocks)
