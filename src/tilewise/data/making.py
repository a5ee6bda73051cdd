"""Make one rank's slabs of a batch: from the store where it has them, from the files otherwise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tilewise.comm import Mesh
from tilewise.data.augment import View
from tilewise.data.augmentation import Augmentation, Seen
from tilewise.data.feed import Feed, place, straight
from tilewise.data.recycle import Recycler
from tilewise.data.region import Array, Box, Piece, cut_out, pieces, seen, stretches, within
from tilewise.data.source import Counts, Source
from tilewise.data.store import FILE, Owner, Store
from tilewise.data.traffic import Parcel, Routes, Traffic, arriving, leaving
from tilewise.errors import DataError


@dataclass
class Made:
    """A rank's slabs of a batch, or what went wrong; and the tiles to keep if all went well."""

    number: int
    samples: list[int]
    tensors: list[Tensor] = field(default_factory=list)
    error: str | None = None
    owners: list[list[Owner]] = field(default_factory=list)
    tiles: list[dict[int, Array]] = field(default_factory=list)


class Maker:
    """Makes batches on this rank, one after the other, in step with the other ranks' makers.

    Args:
        batch: the largest batch to make.
        keep: how many batches' memory is kept to be used again.
        finite: raise where a value read from a file is not finite.
    """

    def __init__(
        self,
        source: Source,
        feeds: Sequence[Feed],
        augmentation: Augmentation,
        mesh: Mesh,
        *,
        batch: int,
        keep: int,
        store: Store | None = None,
        finite: bool = False,
    ) -> None:
        self.source, self.feeds, self.augmentation = source, feeds, augmentation
        self.mesh, self.store, self.finite = mesh, store, finite
        self.counts = Counts()
        self._memory = [Recycler(feed.batch_bytes(batch, mesh.rank), keep) for feed in feeds]
        self._buffers: dict[int, Array] = {}
        self._plain_routes: dict[tuple[int, bool], Routes] = {}

    def make(
        self, epoch: int, number: int, samples: list[int], *, answer_only: bool = False
    ) -> Made:
        """Make a batch.

        A file that cannot be read becomes the batch's `error`, and the messages that others wait
        for are sent all the same. With `answer_only` that is all that is done.
        """
        made = Made(number, samples, error="not wanted" if answer_only else None)
        views = _Views(self.augmentation, epoch, samples)
        traffic = Traffic(self.mesh)
        for feed in self.feeds:
            self._begin(feed, made)
        coming = [parcel for feed in self.feeds for parcel in self._coming(feed, made, views)]
        traffic.receive(parcel for parcel in coming if parcel.peer != self.mesh.rank)
        going = [parcel for feed in self.feeds for parcel in self._going(feed, made, views)]
        traffic.send(going, self.mesh.rank)
        for parcel in coming:
            if parcel.peer == self.mesh.rank:
                self._put_own(parcel, made, views)
        for feed in self.feeds:
            self._read_rows(feed, made, views)
        for parcel, piece, values in traffic.wait():
            self._put(parcel.feed, values, piece, parcel.position, made, views)
        if answer_only:
            made.error = None
        return made

    def _begin(self, feed: Feed, made: Made) -> None:
        """Find out where a field's slabs come from, and read what this rank begins to keep."""
        if self.store is None:
            owners = [Owner(FILE)] * len(made.samples)
        else:
            owners = self.store.assign(feed, made.samples)
        made.owners.append(owners)
        made.tiles.append(self._read_tiles(feed, made, owners))
        memory = self._memory[feed.number]
        made.tensors.append(feed.allocate(len(made.samples), self.mesh.rank, memory))

    def _row(self, feed: Feed, position: int, made: Made) -> Tensor:
        rows = feed.share.rows(len(made.samples), self.mesh.rank)
        return made.tensors[feed.number][position - rows.start]

    # -- messages --------------------------------------------------------------------------

    def _coming(self, feed: Feed, made: Made, views: _Views) -> Iterator[Parcel]:
        """List what this rank's slabs take from tiles, its own among them."""
        share, rank, owners = feed.share, self.mesh.rank, made.owners[feed.number]
        for position in share.rows(len(made.samples), rank):
            if owners[position].part == FILE:
                continue
            sight = views.seen(feed, position)
            for where, some in self._routes(feed, sight, views, leaves=False):
                peer = share.rank_at(owners[position].part, where, rank)
                parcel = Parcel(peer, feed, position, some)
                if peer != rank and feed.plain:
                    parcel.array = _straight_target(self._row(feed, position, made), some, sight)
                yield parcel

    def _going(self, feed: Feed, made: Made, views: _Views) -> Iterator[Parcel]:
        """List what other ranks' slabs take from this rank's tiles."""
        share, rank, owners = feed.share, self.mesh.rank, made.owners[feed.number]
        mine = share.part(rank)
        for position, owner in enumerate(owners):
            if owner.part != mine:
                continue
            part = share.part_of(len(owners), position)
            sight = views.seen(feed, position)
            for where, some in self._routes(feed, sight, views, leaves=True):
                peer = share.rank_at(part, where, rank)
                if peer != rank:
                    yield Parcel(peer, feed, position, some, self._tile(feed, position, made))

    def _routes(self, feed: Feed, sight: Seen, views: _Views, *, leaves: bool) -> Routes:
        find = leaving if leaves else arriving
        if not views.plain(feed):
            return find(feed, sight, self.mesh.rank)
        key = (feed.number, leaves)
        if key not in self._plain_routes:
            self._plain_routes[key] = find(feed, sight, self.mesh.rank)
        return self._plain_routes[key]

    def _tile(self, feed: Feed, position: int, made: Made) -> Array:
        sample, fresh = made.samples[position], made.tiles[feed.number]
        if sample in fresh:
            return fresh[sample]
        assert self.store is not None
        return self.store.tiles[feed.number][sample]

    def _put_own(self, parcel: Parcel, made: Made, views: _Views) -> None:
        feed, position = parcel.feed, parcel.position
        tile, box = self._tile(feed, position, made), feed.share.tile(self.mesh.rank)
        for piece in parcel.pieces:
            values = cut_out(tile, within(piece.stored, box))
            self._put(feed, values, piece, position, made, views)

    def _put(
        self, feed: Feed, values: Array, piece: Piece, position: int, made: Made, views: _Views
    ) -> None:
        """Bring stored values to their place; what a transform raises becomes the batch's error."""
        if made.error is not None:
            return
        sample = made.samples[position]
        shown = seen(values, piece, views.seen(feed, position).perm)
        try:
            feed.put(self._row(feed, position, made), shown, piece, views.epoch, sample)
        except Exception as error:
            where = self.source.place(sample, feed.name)
            made.error = f"data: {where}: sample {sample} cannot be transformed: {error!r}"

    # -- files -----------------------------------------------------------------------------

    def _read_tiles(self, feed: Feed, made: Made, owners: Sequence[Owner]) -> dict[int, Array]:
        """Read the tiles that this rank begins to keep with this batch."""
        mine, box = feed.share.part(self.mesh.rank), feed.share.tile(self.mesh.rank)
        shape = [stop - start for start, stop in box]
        tiles: dict[int, Array] = {}
        for sample, owner in zip(made.samples, owners):
            if owner.new and owner.part == mine:
                tiles[sample] = np.empty(shape, feed.field.dtype)
                self._read(feed, sample, box, tiles[sample], made)
        return tiles

    def _read_rows(self, feed: Feed, made: Made, views: _Views) -> None:
        """Read the slabs that no rank keeps."""
        for position in feed.share.rows(len(made.samples), self.mesh.rank):
            if made.owners[feed.number][position].part == FILE:
                self._read_row(feed, position, made, views)

    def _read_row(self, feed: Feed, position: int, made: Made, views: _Views) -> None:
        """Read a slab piece by piece, right into its place where it is stored as it is seen."""
        sample, sight = made.samples[position], views.seen(feed, position)
        for piece in pieces(feed.wanted(sight, self.mesh.rank), sight.perm):
            if made.error is not None:
                return
            row = self._row(feed, position, made)
            target = _straight_target(row, [piece], sight) if feed.plain else None
            if target is not None:
                self._read(feed, sample, piece.stored, target, made)
                continue
            buffer = self._buffer(feed, piece)
            self._read(feed, sample, piece.stored, buffer, made)
            self._put(feed, buffer, piece, position, made, views)

    def _buffer(self, feed: Feed, piece: Piece) -> Array:
        """Return the field's reused buffer in the shape of a piece."""
        size = int(np.prod(piece.shape, dtype=np.int64))
        if len(self._buffers.get(feed.number, ())) < size:
            self._buffers[feed.number] = np.empty(size, feed.field.dtype)
        return self._buffers[feed.number][:size].reshape(piece.shape)

    def _read(self, feed: Feed, sample: int, box: Box, out: Array, made: Made) -> None:
        if made.error is not None:
            return
        try:
            self.source.read(sample, feed.name, box, out, self.counts)
            if self.finite:
                check_finite(self.source.place(sample, feed.name), sample, box, out)
        except (DataError, MemoryError) as error:
            made.error = str(error) or "out of memory"


class _Views:
    """How each sample of a batch is seen, drawn when first asked for."""

    def __init__(self, augmentation: Augmentation, epoch: int, samples: list[int]) -> None:
        self.augmentation, self.epoch, self.samples = augmentation, epoch, samples
        self._found: dict[int, View | None] = {}

    def plain(self, feed: Feed) -> bool:
        """Whether all samples of the field are seen as they are stored."""
        return feed.name not in self.augmentation.concerned

    def seen(self, feed: Feed, position: int) -> Seen:
        if self.plain(feed):
            return feed.as_stored
        if position not in self._found:
            self._found[position] = self.augmentation.view(self.epoch, self.samples[position])
        return self.augmentation.seen(self._found[position], feed.name, len(feed.field.shape))


def _straight_target(row: Tensor, some: Sequence[Piece], sight: Seen) -> Array | None:
    """Return the place of a single piece, if stored values can go there as they are."""
    if len(some) != 1 or not straight(some[0], sight):
        return None
    target = place(row, some[0])
    return target if target.flags.c_contiguous else None


def check_finite(where: str, sample: int, box: Box, values: Array) -> None:
    """Raise where a value is not finite, with its position."""
    if values.dtype.kind != "f":
        return
    for stretch in stretches(values.shape):
        part = cut_out(values, stretch)
        good = np.isfinite(part)
        if good.all():
            continue
        first = np.unravel_index(int(np.argmin(good)), part.shape)
        at = tuple(
            start + (cut.start or 0) + int(k) for (start, _), cut, k in zip(box, stretch, first)
        )
        raise DataError(
            f"data: {where}: {part[first]} found at {at} of sample {sample}, expected finite values"
        )
