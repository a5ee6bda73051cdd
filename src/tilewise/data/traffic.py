"""Messages between the ranks that keep tiles and the ranks that want slabs.

Without augmentation a slab is a tile, and comes from the rank with the same place in the sample. A
flip, a roll or a crop across a split dim, or a halo, takes pieces from other places too. Either
way both sides work out the same list of pieces from what everyone knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from tilewise.comm import Mesh
from tilewise.data.augmentation import Seen
from tilewise.data.feed import Feed
from tilewise.data.region import Array, Box, Piece, Run, clip, cut_out, pieces, runs, within

# Slabs smaller than this go to a peer in one message; larger ones each in their own, uncopied.
SMALL = 1 << 16

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
    """What one rank sends another of one sample."""

    peer: int
    position: int
    pieces: list[Piece]
    target: Array | None = None

    @property
    def elements(self) -> int:
        return sum(prod(piece.shape) for piece in self.pieces)


class Traffic:
    """The messages of one field of one batch on this rank."""

    def __init__(self, mesh: Mesh, feed: Feed, batch: int, number: int) -> None:
        self.mesh, self.feed = mesh, feed
        self.layer = f"data {feed.name}"
        degrees = prod(len(tiles) for tiles in feed.share.tiles)
        self.together = feed.field.bytes // degrees < SMALL
        self.first_tag = (number % 2 * 64 + feed.number) * (batch + 1) + 1
        self._sent: list[tuple[int, Any, Array]] = []
        self._awaited: list[tuple[list[Parcel], Any, Array, int]] = []

    def receive(self, parcels: Sequence[Parcel]) -> None:
        """Post what will come; a parcel with a target goes straight there if it comes alone."""
        for group in self._grouped(parcels):
            target = group[0].target if len(group) == 1 else None
            if target is None:
                size = sum(parcel.elements for parcel in group) * self.feed.field.dtype.itemsize
                buffer = np.empty(size, np.uint8)
            else:
                buffer = as_bytes(target)
            work = self.mesh.receive(
                torch.from_numpy(buffer), group[0].peer, tag=self._tag(group), layer=self.layer
            )
            self._awaited.append((group if target is None else [], work, buffer, group[0].peer))

    def send(self, parcels: Sequence[Parcel], tiles: Sequence[Array], box: Box) -> None:
        """Send pieces of tiles, all of which fill `box`; the tiles must stay as they are."""
        held = {id(parcel): tile for parcel, tile in zip(parcels, tiles)}
        for group in self._grouped(parcels):
            parts = [
                cut_out(held[id(parcel)], within(piece.stored, box))
                for parcel in group
                for piece in parcel.pieces
            ]
            alone = len(parts) == 1 and parts[0].flags.c_contiguous
            buffer = as_bytes(parts[0] if alone else np.concatenate([p.ravel() for p in parts]))
            work = self.mesh.send(
                torch.from_numpy(buffer), group[0].peer, tag=self._tag(group), layer=self.layer
            )
            self._sent.append((group[0].peer, work, buffer))

    def wait(self) -> Iterator[tuple[int, Piece, Array]]:
        """Wait for all messages; then hand over (position, piece, stored values) of each piece."""
        for _, work, _, peer in self._awaited:
            self.mesh.wait(work, "receive", peer=peer, layer=self.layer)
        for peer, work, _ in self._sent:
            self.mesh.wait(work, "send", peer=peer, layer=self.layer)
        self._sent.clear()
        return self._unpacked()

    def _unpacked(self) -> Iterator[tuple[int, Piece, Array]]:
        while self._awaited:
            group, _, buffer, _ = self._awaited.pop()
            values = buffer.view(self.feed.field.dtype)
            at = 0
            for parcel in group:
                for piece in parcel.pieces:
                    size = prod(piece.shape)
                    yield parcel.position, piece, values[at : at + size].reshape(piece.shape)
                    at += size

    def _grouped(self, parcels: Sequence[Parcel]) -> list[list[Parcel]]:
        if not self.together:
            return [[parcel] for parcel in parcels]
        groups: dict[int, list[Parcel]] = {}
        for parcel in sorted(parcels, key=lambda parcel: parcel.position):
            groups.setdefault(parcel.peer, []).append(parcel)
        return list(groups.values())

    def _tag(self, group: Sequence[Parcel]) -> int:
        return self.first_tag + (0 if self.together else 1 + group[0].position)


def as_bytes(array: Array) -> Array:
    """Return a contiguous array as flat bytes that share its memory."""
    return array.reshape(-1).view(np.uint8)
