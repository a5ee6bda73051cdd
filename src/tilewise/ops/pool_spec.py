"""What a pooling operator is told: kernel, stride, padding, dilation and how to count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.errors import OperatorError
from tilewise.layout import Layout, Window


@dataclass(frozen=True)
class PoolSpec:
    """A pooling operator's arguments, one entry for each spatial dim."""

    kind: str
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None
    return_indices: bool = False

    @classmethod
    def of(
        cls,
        kind: str,
        kernel: int | Sequence[int],
        *,
        ndim: int,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        return_indices: bool = False,
    ) -> PoolSpec:
        """Read the arguments as torch takes them; no stride means the kernel's extent."""
        if stride is None or (not isinstance(stride, int) and not len(stride)):
            stride = kernel
        return cls(
            kind,
            _each(kernel, ndim),
            _each(stride, ndim),
            _each(padding, ndim),
            _each(dilation, ndim),
            ceil_mode,
            count_include_pad,
            divisor_override,
            return_indices,
        )

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def windows(self) -> tuple[Window, ...]:
        return tuple(
            Window(k, s, d, p, p)
            for k, s, d, p in zip(self.kernel, self.stride, self.dilation, self.padding)
        )

    def outputs(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Return the spatial extents of the result, by torch's rule."""
        found = []
        for window, extent in zip(self.windows, extents):
            count = window.outputs(extent)
            if self.ceil_mode:
                room = extent + 2 * window.before - window.reach
                count = -(-room // window.stride) + 1
                # the last window starts in the input or in the padding before it
                if (count - 1) * window.stride >= extent + window.before:
                    count -= 1
            found.append(count)
        return tuple(found)

    def check(self, x: Layout, layer: str) -> tuple[int, ...]:
        """Return the spatial extents of the result, or raise what one device would."""
        if self.kind not in ("max", "avg"):
            raise OperatorError(f"{layer}: kind (={self.kind!r}) must be 'max' or 'avg'")
        if len(x.shape) not in (self.ndim + 1, self.ndim + 2):
            raise OperatorError(
                f"{layer}: input {x.shape} has {len(x.shape)} dims, {self.ndim}-D pooling takes "
                f"{self.ndim + 1} or {self.ndim + 2} (channel and {self.ndim} of space, with or "
                "without sample)"
            )
        for name in ("kernel", "stride", "dilation"):
            if min(getattr(self, name)) < 1:
                raise OperatorError(f"{layer}: {name} (={getattr(self, name)}) must be at least 1")
        if self.kind == "avg" and max(self.dilation) > 1:
            raise OperatorError(
                f"{layer}: dilation (={self.dilation}) must be 1 for average pooling"
            )
        if self.kind == "avg" and self.return_indices:
            raise OperatorError(
                f"{layer}: return_indices needs max pooling, this is average pooling"
            )
        if self.divisor_override == 0:
            raise OperatorError(f"{layer}: divisor_override (=0) must not be 0; leave it out")
        if any(p < 0 or 2 * p > k for p, k in zip(self.padding, self.kernel)):
            raise OperatorError(
                f"{layer}: padding (={self.padding}) must lie between 0 and half of the kernel "
                f"(={self.kernel}); pad the input before pooling instead"
            )
        extents = x.shape[-self.ndim :]
        if (self.kind, self.ndim) == ("avg", 3) and any(
            e < k for e, k in zip(extents, self.kernel)
        ):
            raise OperatorError(
                f"{layer}: the kernel (={self.kernel}) of 3-D average pooling must not exceed the "
                f"input {extents} without its padding; pad the input before pooling instead"
            )
        outputs = self.outputs(extents)
        if min(outputs) < 1 or min(extents) < 1:
            raise OperatorError(
                f"{layer}: the kernel {self.kernel} with dilation {self.dilation} reaches further "
                f"than the input {extents} padded by {self.padding}; pad more or use a smaller "
                "kernel"
            )
        return outputs


def _each(value: int | Sequence[int], ndim: int) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else list(value)
    return tuple(values * ndim if len(values) == 1 else values)
