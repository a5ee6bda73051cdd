"""The memory format of a network: whether channels lie outermost or innermost between its layers.

Convolutions tell what they would take in either. They are most of the work, and what lies between
them keeps the format that it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.ops.conv_run import ConvRun
from tilewise.ops.operation import Bound
from tilewise.ops.tune import GAIN, Tuned, tuning


class Formats:
    """Chooses between the memory formats for the convolutions of one program."""

    def __init__(self, calls: Iterable[Bound]) -> None:
        self.convs = [call.fused for call in calls if isinstance(call.fused, ConvRun)]
        self.chosen: dict[Any, bool | None] = {}
        self.last: bool | None = None

    def choose(self, inputs: Sequence[Tensor]) -> bool | None:
        """Whether channels should lie innermost; None where nothing tells. All ranks ask together.

        Communication: one small all-reduce for each convolution that measures, in the first pass.
        """
        like = next((x for x in inputs if x.dim() > 3 and x.is_floating_point()), None)
        if like is None or not self.convs or torch.is_autocast_enabled(like.device.type):
            last = None
        else:
            key = (like.dtype, like.device.type, torch.is_grad_enabled(), tuning())
            if key not in self.chosen:
                self.chosen[key] = self._faster(like)
            last = self.chosen[key]
        self.last = last
        for conv in self.convs:
            conv.last = last
        return last

    def _faster(self, like: Tensor) -> bool | None:
        tuned = [found for conv in self.convs if (found := conv.tune(like)) is not None]
        if not tuned:
            return None
        outermost, innermost = (
            sum(_seconds(found, last) for found in tuned) for last in (False, True)
        )
        return innermost < GAIN * outermost


def _seconds(found: Tuned, last: bool) -> float:
    ways, both = found.best(last, data=True)
    return both if torch.is_grad_enabled() else found.forward(ways.forward, last)
