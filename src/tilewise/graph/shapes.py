"""Example inputs of other global shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tilewise.errors import PlanError

Shape = Sequence[int]


def tensors_in(tree: Any) -> list[Tensor]:
    """List the tensors in nested inputs or outputs, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def key(examples: Any) -> Any:
    """Return what tells examples of different shapes apart."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in tree_leaves(examples)
    )


def with_batch(examples: tuple[Any, ...], old: int, batch: int) -> tuple[Any, ...]:
    """Return examples of another batch: whatever has `old` samples gets `batch`."""

    def change(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != old:
            return leaf
        return _like(leaf, (batch, *leaf.shape[1:]))

    return cast(tuple[Any, ...], tree_map(change, examples))


def batch_of(examples: tuple[Any, ...]) -> int:
    """Return how many samples the first input has."""
    return next(tensor.shape[0] for tensor in tensors_in(examples) if tensor.dim())


def with_shapes(examples: tuple[Any, ...], shapes: Iterator[Shape]) -> tuple[Any, ...]:
    """Return examples of other shapes, one taken for each tensor."""
    leaves, spec = tree_flatten(examples)
    try:
        changed = [
            _like(leaf, next(shapes)) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
    except StopIteration:
        raise PlanError(
            f"at: there are fewer shapes than the {len(tensors_in(examples))} inputs; give one "
            "for each, and one for each target of the loss after them if these cannot be guessed"
        ) from None
    return cast(tuple[Any, ...], tree_unflatten(changed, spec))


def _like(example: Tensor, shape: Shape) -> Tensor:
    return torch.empty(tuple(shape), dtype=example.dtype, device="meta")
