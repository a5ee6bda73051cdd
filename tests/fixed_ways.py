"""Ways of convolutions that a test fixes, in place of measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tilewise.ops import conv_run, overwrite
from tilewise.ops.conv_local import By, Way, Ways

EXACT: tuple[By, ...] = ("torch", "taps")
"""What convolutions can be done by in float64, which oneDNN has not."""


@dataclass(frozen=True)
class Fixed:
    """Answers as what was measured would, for these ways; `innermost_s` is for that format."""

    ways: Ways
    innermost_s: float = 1.0

    @property
    def last(self) -> bool:
        return self.ways.last

    def best(self, last: bool, *, data: bool) -> tuple[Ways, float]:
        return self.ways, self.innermost_s if last else 1.0

    def forward(self, way: Way, last: bool) -> float:
        return self.innermost_s if last else 1.0


@contextmanager
def fixed_ways(ways: Ways | Callable[[], Ways], innermost_s: float = 1.0) -> Iterator[None]:
    """Let every convolution do its local work in these ways, or in those that a function draws.

    Gradients of activations are written over however small they are.
    """

    def choose(*_: Any, **__: Any) -> Fixed:
        return Fixed(ways if isinstance(ways, Ways) else ways(), innermost_s)

    with ExitStack() as stack:
        for name, value in {"worth_tuning": lambda *_: True, "choose": choose}.items():
            stack.enter_context(mock.patch.object(conv_run, name, value))
        stack.enter_context(mock.patch.object(overwrite, "OVERWRITTEN_BYTES", 0))
        yield
