"""Number formats: what is computed in, and the scale of float16 losses."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tilewise.graph import GradScaler


class Precision:
    """How a run computes: `float32`, `float64`, or with autocast `bfloat16` and `float16`."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def scaled(self) -> bool:
        """Whether losses are scaled, and steps left out whose gradients overflow."""
        return self.name == "float16"

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context in which forward runs."""
        if self.name not in ("bfloat16", "float16"):
            return nullcontext()
        return torch.autocast("cpu", dtype=getattr(torch, self.name))


def scaler_state(scaler: GradScaler) -> dict[str, float]:
    """Return what changes of a scaler, for a checkpoint; nothing of one that is off."""
    state = scaler.state_dict()
    return {"scale": state["scale"], "good_steps": float(state["_growth_tracker"])} if state else {}


def load_scaler_state(scaler: GradScaler, state: dict[str, float]) -> None:
    """Go on with a checkpoint's scale, if it has one and this run does."""
    if scaler.is_enabled() and state:
        found = {"scale": float(state["scale"]), "_growth_tracker": int(state["good_steps"])}
        scaler.load_state_dict(scaler.state_dict() | found)
