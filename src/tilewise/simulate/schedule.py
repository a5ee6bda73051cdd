"""Lay what was recorded on three streams: compute, messages, and sums of gradients.

    compute   ──conv1──┐  ┌──conv2──┐        ┌─ backward … ─┐         ┌ optimizer ┐
    messages   halo──┘ moves─┘ halo──┘          halo──┘               │
    sync                                          sum ──── sum ───────┘

A layer begins when the one before it is done. Its halo starts with it, and hides behind the share
of its compute that the machine overlaps; other exchanges of a layer hide behind nothing. Sums of
gradients follow each other, from the moment when their bucket is complete, and the optimizer waits
for the last one; then it updates one layer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tilewise.simulate.price import Priced
from tilewise.simulate.record import Segment


@dataclass(frozen=True)
class Bar:
    """Something on a stream, from `start_s` to `end_s`."""

    stream: str
    layer: str
    phase: str
    kind: str
    start_s: float
    end_s: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Timeline:
    """The step's bars, and when each phase ends.

    `tail_s` is how long the optimizer waits for sums of gradients after backward is done; `sync_s`
    what all of them take.
    """

    bars: tuple[Bar, ...]
    spans: tuple[tuple[Segment, float, float], ...]
    forward_s: float
    backward_s: float
    sync_s: float
    tail_s: float
    optimizer_s: float

    @property
    def step_seconds(self) -> float:
        return self.forward_s + self.backward_s + self.tail_s + self.optimizer_s

    def seconds(self, stream: str) -> float:
        """Return how long a stream is busy."""
        return sum(bar.end_s - bar.start_s for bar in self.bars if bar.stream == stream)


def lay(segments: Sequence[Priced], overlap: float) -> Timeline:
    """Lay priced segments one after the other; `overlap` is the machine's for halos."""
    updates = [one for one in segments if one.segment.phase == "optimizer"]
    bars: list[Bar] = []
    spans = []
    now = synced = sync = forward = 0.0
    for one in segments:
        if one.segment.phase == "optimizer":
            continue
        segment, began = one.segment, now
        add = _Adder(bars, segment)
        now = add("messages", "exchange", now, one.before_s)
        bare = max(one.halo_s - overlap * one.compute_s, 0.0)
        add("messages", "halo", now, one.halo_s)
        now = add("compute", segment.phase, now + bare, one.compute_s)
        now = add("messages", "exchange", now, one.after_s)
        for _, seconds in one.gradients:
            synced = add("sync", "gradients", max(now, synced), seconds)
            sync += seconds
        spans.append((segment, began, now))
        if segment.phase == "forward":
            forward = now
    tail = max(synced - now, 0.0)
    began = end = now + tail
    for one in updates:
        start = end
        end = _Adder(bars, one.segment)("compute", "optimizer", start, one.compute_s)
        spans.append((one.segment, start, end))
    return Timeline(tuple(bars), tuple(spans), forward, now - forward, sync, tail, end - began)


class _Adder:
    """Add bars of one segment."""

    def __init__(self, bars: list[Bar], segment: Segment) -> None:
        self.bars, self.segment = bars, segment

    def __call__(self, stream: str, kind: str, start: float, seconds: float) -> float:
        """Add a bar unless it takes no time; returns when it ends."""
        if seconds > 0:
            layer, phase = self.segment.layer, self.segment.phase
            self.bars.append(Bar(stream, layer, phase, kind, start, start + seconds))
        return start + seconds


def slowest(ranks: Sequence[Sequence[Priced]]) -> list[Priced]:
    """Join the segments of several ranks: each takes as long as on the slowest of them.

    Messages tie ranks to each other at every layer, so nobody runs ahead of the slowest one.
    """
    found: dict[tuple[str, str], Priced] = {}
    for segments in ranks:
        for one in segments:
            key = (one.segment.layer, one.segment.phase)
            found[key] = found[key].slower(one) if key in found else one
    return list(found.values())
