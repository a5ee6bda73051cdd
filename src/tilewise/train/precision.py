"""Number formats: what is computed in, and the scale of float16 losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilewise.graph import ParallelModel

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000


class Precision:
    """How a run computes: `float32`, `float64`, or with autocast `bfloat16` and `float16`.

    For float16 the loss is multiplied by a scale before backward, and gradients are divided by it.
    A step with gradients that are not finite on any rank is left out on all of them, and the scale
    is halved; after 2000 good steps it is doubled.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.scale = FIRST_SCALE if name == "float16" else 1.0
        self.good_steps = 0

    @property
    def scaled(self) -> bool:
        return self.name == "float16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        if self.name not in ("bfloat16", "float16"):
            return nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.name))

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        return loss * self.scale if self.scaled else loss

    def unscale(self, model: ParallelModel) -> None:
        """Divide all gradients by the scale."""
        if not self.scaled:
            return
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(self.scale)

    def note(self, finite: bool) -> None:
        """Follow whether a step's gradients were finite, which all ranks know alike."""
        if not self.scaled:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2.0, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_STEPS:
            self.scale, self.good_steps = self.scale * 2.0, 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": float(self.good_steps)} if self.scaled else {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.scaled and state:
            self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
