"""Where the outputs of an interpolation lie among its inputs, along one dim.

linear, in 4 → out 8       source = (output + ½)·in/out − ½

input      0     1     2     3
output   0  1  2  3  4  5  6  7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.layout.blocks import Interval

_CUBIC = -0.75  # the constant of torch's cubic kernel


@dataclass(frozen=True)
class Sampling:
    """Where the outputs along one dim lie among its inputs, by the arithmetic of torch."""

    mode: str
    extent: int
    outputs: int
    align_corners: bool = False
    factor: float | None = None

    @property
    def copies(self) -> bool:
        """Whether every output is the input of the same position."""
        return self.outputs == self.extent and self.mode not in ("bicubic", "nearest-exact")

    def inputs(self, start: int, stop: int) -> Interval:
        """Return the inputs that outputs [start, stop) read in any precision."""
        if start >= stop:
            return 0, 0
        found = [self.taps(start, stop, dtype)[0] for dtype in (torch.float32, torch.float64)]
        return (
            min(int(index.min()) for index in found),
            max(int(index.max()) for index in found) + 1,
        )

    def taps(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the inputs that outputs [start, stop) read (tap × output), and their weights.

        Positions are computed in float64 for float64 data, in float32 for all other and for the
        nearest modes.
        """
        nearest = self.mode.startswith("nearest")
        real = torch.float64 if dtype == torch.float64 and not nearest else torch.float32
        output = torch.arange(start, stop)
        if self.copies:
            return output[None], None
        source = self._source(output.to(real))
        first = source.floor().long().clamp(max=self.extent - 1)
        if nearest:
            return first[None], None
        t = (source - first).clamp(0, 1)
        if self.mode == "bicubic":
            weights = torch.stack([_far(t + 1), _near(t), _near(1 - t), _far(2 - t)])
            index = first + torch.arange(-1, 3)[:, None]
        else:
            weights = torch.stack([1 - t, t])
            index = first + torch.arange(2)[:, None]
        return index.clamp(0, self.extent - 1), weights

    def _source(self, output: Tensor) -> Tensor:
        real = output.dtype
        if self.align_corners:
            last = torch.tensor(self.extent - 1, dtype=real)
            return output * (last / (self.outputs - 1) if self.outputs > 1 else 0 * last)
        if self.factor and not (self.mode == "nearest" and self.outputs == 2 * self.extent):
            step = torch.tensor(1.0 / self.factor, dtype=real)
        else:
            step = torch.tensor(self.extent, dtype=real) / self.outputs
        if self.mode == "nearest":
            return output * step
        if self.mode == "nearest-exact":
            return (output + 0.5) * step
        return (output + 0.5) * step - 0.5


def _near(t: Tensor) -> Tensor:
    return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1


def _far(t: Tensor) -> Tensor:
    return ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC
