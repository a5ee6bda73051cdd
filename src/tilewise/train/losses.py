"""The losses that a recipe names, and the same over all samples of a set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tilewise.errors import RecipeError
from tilewise.models.find import find_function
from tilewise.train.recipe import Recipe

LossFunction = Callable[..., Tensor]
PLAIN: dict[str, LossFunction] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "smooth_l1": F.smooth_l1_loss,
    "cross_entropy": F.cross_entropy,
    "binary_cross_entropy": F.binary_cross_entropy_with_logits,
}
IGNORED = -100  # the target that torch's cross entropy leaves out
WEIGHTS = {"cross_entropy": "weight", "binary_cross_entropy": "pos_weight"}


def loss_function(recipe: Recipe) -> LossFunction:
    """Return the recipe's loss, a function of output and target."""
    section = recipe.train
    if section.loss not in PLAIN:
        return find_function(section.loss, "train.loss")
    function = PLAIN[section.loss]
    if section.class_weights is None:
        return function
    if section.loss not in WEIGHTS:
        raise RecipeError(
            f"recipe: train.class_weights: the loss {section.loss!r} takes none; "
            f"{' and '.join(WEIGHTS)} do"
        )
    return partial(function, **{WEIGHTS[section.loss]: _weights(recipe)})


def loss_sums(recipe: Recipe) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return a function that gives a slab's share of the loss, and the weight of its elements.

    Shares and weights of all slabs of a set add up, and their quotient is the loss over the set.
    None is for a loss that is not known to be a mean over elements.
    """
    section = recipe.train
    if section.loss not in PLAIN:
        return None
    function = loss_function(recipe)

    def sums(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        each: Tensor = function(output, target, reduction="none")
        total = each.sum(dtype=torch.float64)
        if section.loss == "cross_entropy" and target.shape != output.shape:
            known = target[target != IGNORED]
            if section.class_weights is not None:
                return total, _weights(recipe)[known].sum(dtype=torch.float64)
            return total, torch.tensor(float(known.numel()), dtype=torch.float64)
        return total, torch.tensor(float(each.numel()), dtype=torch.float64)

    return sums


def _weights(recipe: Recipe) -> Tensor:
    kind: Any = torch.float64 if recipe.train.precision == "float64" else torch.float32
    return torch.tensor(recipe.train.class_weights, dtype=kind)
