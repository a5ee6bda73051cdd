"""A small network on one of whose ranks something goes wrong just before an optimizer step."""

from __future__ import annotations

import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode


class Net(nn.Module):
    """Two layers with 5 filters, so that two ranks hold blocks of different sizes."""

    def __init__(self, fault: str = "", step: int = 0, rank: int = 1, once: str = "") -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 10)
        if fault and dist.get_rank() == rank and not (once and Path(once).exists()):
            Countdown(fault, step, once)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))
        return out


class FailingLoss(TorchDispatchMode):
    """Lets the loss fail here alone, as one does that meets a value it is not defined for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "nll_loss" in func.__name__:
            raise ValueError("all elements of input should be between 0 and 1")
        return func(*args, **(kwargs or {}))


class Countdown:
    """Does what is asked for before step number `step`; leaves a mark so that it is done once."""

    def __init__(self, fault: str, step: int, mark: str) -> None:
        self.fault, self.left, self.mark = fault, step, mark
        register_optimizer_step_pre_hook(self)

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left:
            return
        if self.mark:
            Path(self.mark).touch()
        if self.fault == "raise":
            raise ValueError("the cat sat on the keyboard")
        if self.fault == "loss":
            FailingLoss().__enter__()  # for the rest of this process
            return
        if self.fault == "memory":
            now = mmap.PAGESIZE * int(Path("/proc/self/statm").read_text().split()[0])
            limit = now + (1 << 28)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            torch.ones(1 << 30)
        os.kill(os.getpid(), getattr(signal, self.fault))
