"""A record of what was sent, for tests and reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    """One operation handed to the engine: what, for which layer, with which ranks, how much.

    `bytes` is the payload that this rank hands over: what it sends, or its share of a collective.
    """

    operation: str
    layer: str
    ranks: tuple[int, ...]
    bytes: int


@dataclass
class Trace:
    """The events since recording was switched on."""

    events: list[Event] = field(default_factory=list)
    recording: bool = False

    def add(self, operation: str, layer: str, ranks: tuple[int, ...], bytes: int) -> None:
        if self.recording:
            self.events.append(Event(operation, layer, ranks, bytes))

    @contextmanager
    def record(self) -> Iterator[list[Event]]:
        """Record within the block; the events are the list it gives."""
        outer, was = self.events, self.recording
        self.events, self.recording = [], True
        try:
            yield self.events
        finally:
            self.events, self.recording = outer, was
