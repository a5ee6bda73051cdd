"""Where the layers of a network are drawn: rows by depth, lanes by branch.

row 0      a            a chain goes on from a layer to the first one that reads it and that
row 1      b   c        no other chain has; each chain has a lane of its own from where it
row 2      d   |        leaves to where it ends. An edge that is neither inside a chain nor at
row 3      e───┘        one of its ends (a skip) runs in the gutter on the left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edge:
    """From one node to another; `way` is `chain`, `branch`, `merge` or `skip`.

    `slot` counts gutters from the nodes outwards.
    """

    source: str
    target: str
    way: str
    slot: int = 0


@dataclass(frozen=True)
class Drawing:
    """Rows and lanes of all nodes, and how the edges run."""

    places: Mapping[str, tuple[int, int]]
    edges: tuple[Edge, ...]
    rows: int
    lanes: int
    gutters: int


def draw(reads: Mapping[str, Sequence[str]]) -> Drawing:
    """Place nodes, given in an order in which each comes after all that it reads."""
    row: dict[str, int] = {}
    readers: dict[str, list[str]] = {name: [] for name in reads}
    for name, sources in reads.items():
        row[name] = 1 + max((row[source] for source in sources), default=-1)
        for source in sources:
            readers[source].append(name)
    after, before = _chains(reads, readers, row)
    lane = _lanes(reads, readers, row, after, before)
    edges, gutters = _edges(reads, row, lane, after, before)
    places = {name: (row[name], lane[name]) for name in reads}
    return Drawing(
        places,
        edges,
        1 + max(row.values(), default=-1),
        1 + max(lane.values(), default=-1),
        gutters,
    )


def _depths(
    reads: Mapping[str, Sequence[str]], readers: Mapping[str, Sequence[str]]
) -> dict[str, int]:
    """Return how long the longest way from each node to an end is."""
    depth: dict[str, int] = {}
    for name in reversed(list(reads)):
        depth[name] = 1 + max((depth[reader] for reader in readers[name]), default=0)
    return depth


def _chains(
    reads: Mapping[str, Sequence[str]],
    readers: Mapping[str, Sequence[str]],
    row: Mapping[str, int],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return which node follows and precedes each in its chain; longest ways first."""
    depth = _depths(reads, readers)
    after: dict[str, str] = {}
    before: dict[str, str] = {}
    for name in reads:
        for reader in sorted(readers[name], key=lambda reader: -depth[reader]):
            deepest = max(reads[reader], key=lambda source: row[source])
            if reader not in before and name == deepest:
                after[name], before[reader] = reader, name
                break
    return after, before


def _lanes(
    reads: Mapping[str, Sequence[str]],
    readers: Mapping[str, Sequence[str]],
    row: Mapping[str, int],
    after: Mapping[str, str],
    before: Mapping[str, str],
) -> dict[str, int]:
    spans = []
    for head in reads:
        if head in before:
            continue
        chain = [head]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        start = min((row[source] + 1 for source in reads[head]), default=row[head])
        end = max((row[reader] for reader in readers[chain[-1]]), default=row[chain[-1]])
        spans.append((start, max(end, row[chain[-1]]), chain))
    taken: list[list[tuple[int, int]]] = []
    lane: dict[str, int] = {}
    for start, end, chain in sorted(spans, key=lambda span: -len(span[2])):
        number = _free(taken, start, end)
        lane.update(dict.fromkeys(chain, number))
    return lane


def _free(taken: list[list[tuple[int, int]]], start: int, end: int) -> int:
    """Take the first place whose intervals do not meet [start, end]."""
    for number, intervals in enumerate(taken):
        if all(end < a or b < start for a, b in intervals):
            intervals.append((start, end))
            return number
    taken.append([(start, end)])
    return len(taken) - 1


def _edges(
    reads: Mapping[str, Sequence[str]],
    row: Mapping[str, int],
    lane: Mapping[str, int],
    after: Mapping[str, str],
    before: Mapping[str, str],
) -> tuple[tuple[Edge, ...], int]:
    skips, found = [], []
    for name, sources in reads.items():
        for source in sources:
            if before.get(name) == source:
                found.append(Edge(source, name, "chain"))
            elif name not in before and row[name] > row[source]:
                found.append(Edge(source, name, "branch"))
            elif source not in after and lane[source] != lane[name]:
                found.append(Edge(source, name, "merge"))
            else:
                skips.append((row[name] - row[source], source, name))
    taken: list[list[tuple[int, int]]] = []
    for _, source, name in sorted(skips):
        slot = _free(taken, row[source], row[name] - 1)
        found.append(Edge(source, name, "skip", slot))
    return tuple(found), len(taken)
