"""Messages between the ranks that keep tiles and the ranks that want slabs.

Without augmentation a slab is a tile, and comes from the rank with the same place in the sample. A
flip, a roll or a crop across a split dim, or a halo, takes pieces from other places too. Either
way both sides work out the same list of pieces from what everyone knows.

All that a batch has for a peer, of all samples and fields, goes in as few messages as their size
allows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from tilewise.comm import Mesh
from tilewise.data.augmentation import Seen
from tilewise.data.feed import Feed
from tilewise.data.region import Array, Piece, Run, clip, cut_out, pieces, runs, within

# A message is filled up to this many bytes. Over gloo, 1 MiB took 1 ms in one message and 5 ms in
# 16; more than that is no faster in fewer messages, and a large piece alone need not be packed.
FULL = 1 << 20

Routes = list[tuple[tuple[int, ...], list[Piece]]]


def arriving(feed: Feed, seen: Seen, rank: int) -> Routes:
    """List the places in the sample that keep pieces of the rank's slab, and the pieces."""
    share = feed.share
    dims = []
    for wanted, stored in zip(feed.wanted(seen, rank), seen.perm):
        tiles = enumerate(share.tiles[stored])
        dims.append([(k, found) for k, tile in tiles if (found := clip(wanted, tile))])
    out: Routes = []
    for combination in product(*dims):
        place = [0] * len(seen.perm)
        for stored, (k, _) in zip(seen.perm, combination):
            place[stored] = k
        out.append((tuple(place), _pieces(combination, seen)))
    return out


def leaving(feed: Feed, seen: Seen, rank: int) -> Routes:
    """List the places in the sample whose slabs want pieces of the rank's tile, and the pieces."""
    share = feed.share
    tile = share.tile(rank)
    dims = []
    for blocks, index, stored in zip(share.blocks, seen.index, seen.perm):
        wanted = enumerate(runs(block, index) for block in blocks)
        dims.append([(k, found) for k, some in wanted if (found := clip(some, tile[stored]))])
    return [
        (tuple(k for k, _ in combination), _pieces(combination, seen))
        for combination in product(*dims)
    ]


def _pieces(combination: Sequence[tuple[int, list[Run]]], seen: Seen) -> list[Piece]:
    return list(pieces([some for _, some in combination], seen.perm))


@dataclass
class Parcel:
    """What one rank sends another of one field of one sample.

    `array` is the tile that the pieces are cut from, or the place of a single piece that can be
    received as it is stored.
    """

    peer: int
    feed: Feed
    position: int
    pieces: list[Piece]
    array: Array | None = None

    @property
    def bytes(self) -> int:
        elements = sum(prod(piece.shape) for piece in self.pieces)
        return elements * self.feed.field.dtype.itemsize


class Traffic:
    """The messages of one batch on this rank."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._sent: list[tuple[int, Any, Array]] = []
        self._awaited: list[tuple[list[Parcel], Any, Array]] = []

    def receive(self, parcels: Iterable[Parcel]) -> None:
        """Post what will come; a parcel that has a place goes straight there if it comes alone."""
        for tag, message in _messages(parcels):
            first = message[0]
            straight = len(message) == 1 and first.array is not None
            if straight:
                assert first.array is not None
                buffer = as_bytes(first.array)
            else:
                buffer = np.empty(sum(parcel.bytes for parcel in message), np.uint8)
            work = self.mesh.receive(torch.from_numpy(buffer), first.peer, tag=tag, layer="data")
            self._awaited.append((message, work, buffer[:0] if straight else buffer))

    def send(self, parcels: Iterable[Parcel], rank: int) -> None:
        """Send pieces of this rank's tiles, which must stay as they are."""
        for tag, message in _messages(parcels):
            peer = message[0].peer
            parts = [part for parcel in message for part in _parts(parcel, rank)]
            alone = len(parts) == 1 and parts[0].flags.c_contiguous
            buffer = as_bytes(parts[0]) if alone else _packed(parts)
            work = self.mesh.send(torch.from_numpy(buffer), peer, tag=tag, layer="data")
            self._sent.append((peer, work, buffer))

    def wait(self) -> Iterator[tuple[Parcel, Piece, Array]]:
        """Wait for all messages; then hand over each piece that did not go straight to its place.

        A message's memory is free once its pieces are taken.
        """
        for message, work, _ in self._awaited:
            self.mesh.wait(work, "receive", peer=message[0].peer, layer="data")
        for peer, work, _ in self._sent:
            self.mesh.wait(work, "send", peer=peer, layer="data")
        self._sent.clear()
        self._awaited.reverse()
        return self._unpacked()

    def _unpacked(self) -> Iterator[tuple[Parcel, Piece, Array]]:
        while self._awaited:
            message, _, buffer = self._awaited.pop()
            at = 0
            for parcel in message if len(buffer) else ():
                dtype = parcel.feed.field.dtype
                for piece in parcel.pieces:
                    size = prod(piece.shape) * dtype.itemsize
                    yield parcel, piece, buffer[at : at + size].view(dtype).reshape(piece.shape)
                    at += size


def _messages(parcels: Iterable[Parcel]) -> Iterator[tuple[int, list[Parcel]]]:
    """Put parcels together by peer; both sides do it alike. The tag counts a peer's messages."""
    peers: dict[int, list[list[Parcel]]] = {}
    sizes: dict[int, int] = {}
    for parcel in sorted(parcels, key=lambda parcel: (parcel.feed.number, parcel.position)):
        messages = peers.setdefault(parcel.peer, [])
        size = parcel.bytes
        if messages and sizes[parcel.peer] + size <= FULL:
            messages[-1].append(parcel)
            sizes[parcel.peer] += size
        else:
            messages.append([parcel])
            sizes[parcel.peer] = size
    for messages in peers.values():
        yield from enumerate(messages, start=1)


def _parts(parcel: Parcel, rank: int) -> list[Array]:
    assert parcel.array is not None
    box = parcel.feed.share.tile(rank)
    return [cut_out(parcel.array, within(piece.stored, box)) for piece in parcel.pieces]


def _packed(parts: Sequence[Array]) -> Array:
    """Copy arrays of any dtypes side by side, as bytes."""
    buffer = np.empty(sum(part.nbytes for part in parts), np.uint8)
    at = 0
    for part in parts:
        buffer[at : at + part.nbytes].view(part.dtype).reshape(part.shape)[...] = part
        at += part.nbytes
    return buffer


def as_bytes(array: Array) -> Array:
    """Return a contiguous array as flat bytes that share its memory."""
    return array.reshape(-1).view(np.uint8)
