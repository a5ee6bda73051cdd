"""Scale losses for float16, with one decision of all ranks on each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.graph.clip import everyone
from tilewise.graph.parallel import ParallelModel


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for a parallel model: all ranks leave out a step, or none does.

    torch's own looks at this rank's gradients. Where the plan cuts parameters, a gradient may
    overflow on one rank only: that rank would leave out the step and the others not.

    Communication: one number from every rank, in `unscale_` or else in `step`.

    Args:
        model: whose ranks decide; all of them call the scaler's methods alike.
        device: type of the device; that of the model's parameters by default.
        options: those of torch.amp.GradScaler.
    """

    def __init__(self, model: ParallelModel, device: str | None = None, **options: Any) -> None:
        first = next(iter(model.parameters()), None)
        own = "cpu" if first is None else first.device.type
        super().__init__(device or own, **options)
        self.model = model

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        model = self.model
        model.runs.shares.check("GradScaler", model.parameters())
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = [flag.to(found_inf.device, non_blocking=True) for flag in found.values()]
        mine = torch.stack([found_inf, *flags]).max()
        shared = everyone(model, mine, layer="GradScaler").max()
        return {device: shared.to(device, non_blocking=True) for device in found}
