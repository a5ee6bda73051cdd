"""Build the optimizer of a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tilewise.train.recipe import TrainSection


def make_optimizer(section: TrainSection, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer that steps these parameters; frozen ones are left out."""
    stepped = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    if section.optimizer in ("adam", "adamw"):
        betas = (section.betas[0], section.betas[1])
        kind = torch.optim.Adam if section.optimizer == "adam" else torch.optim.AdamW
        return kind(stepped, betas=betas, **options)
    if section.optimizer == "rmsprop":
        return torch.optim.RMSprop(stepped, momentum=section.momentum, **options)
    return torch.optim.SGD(stepped, momentum=section.momentum, **options)


def planned_as(section: TrainSection) -> str:
    """Return which of the planner's optimizers keeps as many states as the recipe's."""
    if section.momentum and section.optimizer == "sgd":
        return "momentum"
    if section.momentum and section.optimizer == "rmsprop":
        return "adam"
    return section.optimizer
