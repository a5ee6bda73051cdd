"""What is done to the numbers of a slab after it was read: element by element.

A transform is given a stretch of the slab and the box that it fills in the sample, so that what
differs by position, such as a mean for each channel, is right on every slab.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tilewise.data.region import Box
from tilewise.errors import DataError


class Transform(ABC):
    """An element-wise change of values or dtype.

    Attributes:
        in_place: whether `apply` takes floats, and changes and returns the very tensor given.
    """

    in_place: ClassVar[bool] = False

    @abstractmethod
    def apply(self, tensor: Tensor, box: Box) -> Tensor:
        """Return the changed values; the tensor may be changed in place."""


@dataclass(frozen=True)
class Cast(Transform):
    """Convert to a dtype."""

    dtype: torch.dtype

    def apply(self, tensor: Tensor, box: Box) -> Tensor:
        return tensor.to(self.dtype)


@dataclass(frozen=True)
class Log1p(Transform):
    """Take log(1 + x); integers become float32."""

    in_place = True

    def apply(self, tensor: Tensor, box: Box) -> Tensor:
        return as_float(tensor).log1p_()


@dataclass(frozen=True)
class Normalize(Transform):
    """Subtract a mean and divide by a deviation: one number, or one for each channel (dim 0)."""

    mean: float | Sequence[float]
    std: float | Sequence[float]
    in_place = True

    def __post_init__(self) -> None:
        if any(value == 0 for value in _listed(self.std)):
            raise DataError(f"normalize: std (={self.std}) must not be 0")

    def apply(self, tensor: Tensor, box: Box) -> Tensor:
        tensor = as_float(tensor)
        mean, std = (self._at(value, tensor, box) for value in (self.mean, self.std))
        return tensor.sub_(mean).div_(std)

    def _at(self, value: float | Sequence[float], tensor: Tensor, box: Box) -> Tensor | float:
        if isinstance(value, (int, float)):
            return value
        start, stop = box[0] if box else (0, 0)
        if stop > len(value) or not box:
            raise DataError(
                f"normalize: {len(value)} values given for channels {start} to {stop} of a sample"
            )
        shape = (-1,) + (1,) * (tensor.dim() - 1)
        return torch.tensor(value[start:stop], dtype=tensor.dtype).reshape(shape)


@dataclass(frozen=True)
class Apply(Transform):
    """Call an element-wise function of a tensor."""

    function: Callable[[Tensor], Tensor]

    def apply(self, tensor: Tensor, box: Box) -> Tensor:
        out = self.function(tensor)
        if not isinstance(out, Tensor) or out.shape != tensor.shape:
            found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise DataError(
                f"transform: {self.function!r} turned a tensor of shape {tuple(tensor.shape)} "
                f"into {found}; transforms must be element-wise"
            )
        return out


TransformLike = Transform | torch.dtype | Callable[[Tensor], Tensor]


def as_transforms(given: TransformLike | Sequence[TransformLike] | None) -> list[Transform]:
    """Read transforms, dtypes and plain functions, one or several."""
    if given is None:
        return []
    some = given if isinstance(given, (list, tuple)) else [given]
    out: list[Transform] = []
    for one in some:
        if isinstance(one, Transform):
            out.append(one)
        elif isinstance(one, torch.dtype):
            out.append(Cast(one))
        elif callable(one):
            out.append(Apply(one))
        else:
            raise DataError(f"transform: {one!r} is neither a Transform, a dtype nor a function")
    return out


def as_float(tensor: Tensor) -> Tensor:
    """Return floats as they are, other numbers as float32."""
    return tensor if tensor.is_floating_point() else tensor.float()


def _listed(value: float | Sequence[float]) -> Sequence[float]:
    return [value] if isinstance(value, (int, float)) else value
