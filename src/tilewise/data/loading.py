"""The loader: every rank gets its own slabs of the same global batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.comm import Mesh
from tilewise.data.arguments import (
    agree_to_open,
    as_source,
    field_names,
    make_feeds,
    note_costs,
    refuse_to_guess,
)
from tilewise.data.augmentation import Augment, Augmentation
from tilewise.data.batch import Batch
from tilewise.data.making import Made, Maker
from tilewise.data.order import Order
from tilewise.data.source import Source
from tilewise.data.store import Store
from tilewise.data.stream import Stream
from tilewise.data.summary import Summary
from tilewise.data.transform import TransformLike
from tilewise.errors import DataError
from tilewise.layout import Cover, Layout

FORMAT = 1


class Loader:
    """Global batches in an order that (seed, epoch) decides, each rank reading only its slabs.

    Iterating once is one epoch; an epoch that is left early starts again from its first batch. All
    ranks must iterate alike. What fails on one rank is raised on all of them at that batch.

    Memory on a rank: its slab of a batch times (prefetch + 2), the store's budget, and a fixed
    base.

    Args:
        data: a Source, the path of a set, or a map-style torch Dataset of whole samples, which
            must give the same sample for the same index on every rank.
        layouts: one for each field in order, such as `pmodel.input_layouts`; the batch is dim 0. A
            Cover in place of a Layout reads slabs with their halo.
        batch: the global batch; the layouts' by default.
        fields: the names of the source's fields that the layouts stand for, in their order. By
            default all: of a set of `tilewise data make` in its own order, of other files in
            alphabetical order, which is refused where two fields are alike and not `x` and `y`.
            Of a path, only the fields named are opened.
        seed: of order and augmentation.
        shuffle: draw another order for each epoch.
        drop_last: leave out a smaller last batch.
        prefetch: how many batches are made ahead.
        store_bytes: what a rank may keep of the set in memory; None is nothing.
        transforms: for each field by name: dtypes, Transforms or element-wise functions.
        augment: augmentations in the order in which they are applied, after which come the
            transforms and then the changes of intensity.
        augment_fields: the fields that geometric augmentations concern, if not those whose last
            extents are the first field's.
        finite: raise where a file holds a value that is not finite.
        mesh: the ranks that take part, such as `pmodel.mesh`; all by default. The loader opens
            groups of its own on them, so all ranks must make their loaders in the same order.
        name: for messages.
    """

    def __init__(
        self,
        data: Source | str | Path | Any,
        layouts: Sequence[Layout | Cover] | Layout | Cover,
        *,
        batch: int | None = None,
        fields: Sequence[str] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        prefetch: int = 2,
        store_bytes: int | None = None,
        transforms: Mapping[str, TransformLike | Sequence[TransformLike]] | None = None,
        augment: Sequence[Augment] = (),
        augment_fields: Sequence[str] | None = None,
        finite: bool = False,
        mesh: Mesh | None = None,
        name: str = "data",
    ) -> None:
        self.name = name
        self.mesh = Mesh() if mesh is None else Mesh(mesh.world_ranks)
        self.layouts = (layouts,) if isinstance(layouts, (Layout, Cover)) else tuple(layouts)
        self.prefetch = prefetch
        self._epoch = self._start = self._taken = 0
        self._stream: Stream | None = None
        failure: Exception | None = None
        try:
            self.source = as_source(data, fields)
            names = field_names(self.source, self.layouts, fields, self.mesh.size)
            chosen = {field: self.source.fields[field] for field in names}
            if fields is None:
                refuse_to_guess(data, chosen)
            self.augmentation = Augmentation(augment, chosen, seed=seed, concerned=augment_fields)
            self.feeds = make_feeds(
                self.source, names, self.layouts, transforms or {}, self.augmentation
            )
            size = self.layouts[0].shape[0] if batch is None else batch
            self.order = Order(len(self.source), size, seed, shuffle, drop_last)
            for what, value in (("prefetch", prefetch), ("store_bytes", store_bytes or 0)):
                if value < 0:
                    raise DataError(f"data: {what} (={value}) must not be negative")
        except Exception as error:
            failure = error
        try:
            agree_to_open(self.mesh, name, failure)
            self.mesh.agree(name, (self.order, chosen, self.layouts, store_bytes, augment))
            self.store = None
            if store_bytes is not None:
                self.store = Store(self.feeds, self.order, self.mesh.rank, store_bytes)
            self._maker = Maker(
                self.source,
                self.feeds,
                self.augmentation,
                self.mesh,
                batch=self.order.batch,
                keep=prefetch + 2,
                store=self.store,
                finite=finite,
            )
            note_costs(self.source, self.feeds, self.mesh.rank, name)
        except BaseException:
            if getattr(self, "source", data) is not data:  # opened here, and nobody else's
                self.source.close()
            raise

    # -- iterating -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.order)

    @property
    def epoch(self) -> int:
        """The number of the epoch that the next iteration goes through."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Go on with the first batch of another epoch."""
        self._end_stream()
        self._epoch, self._start, self._taken = epoch, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        self._end_stream()
        epoch, start, self._start = self._epoch, self._start, 0
        self._taken = start
        self.mesh.agree(self.name, ("epoch", epoch, "from batch", start))
        order = self.order.epoch(epoch)

        def make(number: int, answer_only: bool) -> Made:
            samples = self.order.of(order, number)
            return self._maker.make(epoch, number, samples, answer_only=answer_only)

        self._stream = Stream(
            make,
            range(start, len(self)),
            self._accept,
            self.mesh,
            prefetch=self.prefetch,
            name=f"{self.name}, epoch {epoch + 1}",
        )
        return _Epoch(self, self._stream)

    def _accept(self, made: Made) -> None:
        if self.store is not None:
            for feed, owners, tiles in zip(self.feeds, made.owners, made.tiles):
                self.store.commit(feed, made.samples, owners, tiles)
        made.owners, made.tiles = [], []

    def _next(self, stream: Stream) -> Batch | None:
        made = stream.take()
        if made is None:
            if stream is self._stream:
                self._end_stream()
                self._epoch, self._taken = self._epoch + 1, 0
            return None
        self._taken = made.number + 1
        return Batch(tuple(made.tensors), len(made.samples), tuple(made.samples))

    def _end_stream(self) -> None:
        if self._stream is not None:
            self._stream.stop()
            self._stream.join()
            self._stream = None

    def close(self) -> None:
        """End the thread and close files and groups; all ranks must."""
        self._end_stream()
        self.source.close()
        self.mesh.close()

    # -- state -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: good for any plan and number of ranks."""
        order = self.order
        return {
            "format": FORMAT,
            "epoch": self._epoch,
            "batches": self._taken,
            "samples": order.samples,
            "batch": order.batch,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "drop_last": order.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the batch at which the state was taken."""
        self._end_stream()
        mine = self.state_dict()
        if set(state) != set(mine) or state["format"] != FORMAT:
            raise DataError(f"{self.name}: this is not the state of a loader: {dict(state)}")
        for key in ("samples", "batch", "seed", "shuffle", "drop_last"):
            if state[key] != mine[key]:
                raise DataError(
                    f"{self.name}: the state has {key} {state[key]!r}, the loader {mine[key]!r}; "
                    "its batches would be others"
                )
        self._epoch, self._start = int(state["epoch"]), int(state["batches"])
        if self._start >= len(self):
            self._epoch, self._start = self._epoch + 1, 0
        self._taken = self._start

    def summary(self) -> Summary:
        """Return what this rank read and keeps so far."""
        counts = self._maker.counts
        return Summary(
            counts.requested_bytes,
            counts.touched_bytes,
            0 if self.store is None else self.store.bytes,
            None if self.store is None else self.store.held,
        )


class _Epoch(Iterator[Batch]):
    """The batches of one epoch; leaving it ends the thread behind it."""

    def __init__(self, loader: Loader, stream: Stream) -> None:
        self._loader, self._stream = loader, stream

    def __next__(self) -> Batch:
        found = self._loader._next(self._stream)
        if found is None:
            raise StopIteration
        return found

    def __del__(self) -> None:
        self._stream.stop()


def loader(
    data: Source | str | Path | Any, layouts: Sequence[Layout | Cover] | Layout, **options: Any
) -> Loader:
    """Make a Loader; its docstring lists the options."""
    return Loader(data, layouts, **options)
