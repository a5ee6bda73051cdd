"""A convolution's arguments, read as torch takes them and checked as torch would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.errors import OperatorError
from tilewise.layout import Window


@dataclass(frozen=True)
class ConvSpec:
    """A convolution's arguments, one entry for each spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def ndim(self) -> int:
        return len(self.kernel)

    @property
    def windows(self) -> tuple[Window, ...]:
        extra = self.output_padding or (0,) * self.ndim
        return tuple(
            Window(k, s, d, before, after - (more if self.transposed else 0), self.transposed)
            for k, s, d, (before, after), more in zip(
                self.kernel, self.stride, self.dilation, self.padding, extra
            )
        )

    @classmethod
    def of(
        cls,
        weight: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | str | Sequence[int | tuple[int, int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        transposed: bool = False,
        output_padding: int | Sequence[int] = 0,
        layer: str = "conv",
    ) -> ConvSpec:
        """Read the arguments as torch takes them; padding may also be (before, after) pairs."""
        if not 3 <= len(weight) <= 5:
            raise OperatorError(
                f"{layer}: weight {tuple(weight)} has {len(weight)} dims; a 1-D, 2-D or 3-D "
                "convolution has 3, 4 or 5 (filters, channels and the kernel)"
            )
        ndim = len(weight) - 2
        kernel = _each("kernel", weight[2:], ndim, 1, layer)
        if weight[0] < 1 or weight[1] < 1:
            raise OperatorError(f"{layer}: weight {tuple(weight)} must not be empty")
        if groups < 1:
            raise OperatorError(f"{layer}: groups (={groups}) must be at least 1")
        spec = cls(
            kernel,
            _each("stride", stride, ndim, 1, layer),
            ((0, 0),) * ndim,
            _each("dilation", dilation, ndim, 1, layer),
            groups,
            transposed,
            _each("output_padding", output_padding, ndim, 0, layer),
        )
        _check_output_padding(spec, layer)
        return cls(
            kernel,
            spec.stride,
            _pairs(padding, spec, layer),
            spec.dilation,
            groups,
            transposed,
            spec.output_padding if transposed else (),
        )


def _pairs(padding: Any, spec: ConvSpec, layer: str) -> tuple[tuple[int, int], ...]:
    """Return the padding before and after along each dim."""
    if isinstance(padding, str):
        return _named_padding(padding, spec, layer)
    values = [padding] if isinstance(padding, int) else list(padding)
    befores = [value if isinstance(value, int) else value[0] for value in values]
    afters = [value if isinstance(value, int) else value[1] for value in values]
    if spec.transposed and befores != afters:
        raise OperatorError(
            f"{layer}: padding (={tuple(values)}) of a transposed convolution must be the same "
            "before and after; use output_padding"
        )
    return tuple(
        zip(
            _each("padding", befores, spec.ndim, 0, layer),
            _each("padding", afters, spec.ndim, 0, layer),
        )
    )


def _named_padding(padding: str, spec: ConvSpec, layer: str) -> tuple[tuple[int, int], ...]:
    if padding not in ("same", "valid") or spec.transposed:
        raise OperatorError(
            f"{layer}: padding (={padding!r}) must be a number for each dim"
            + ("" if spec.transposed else ", 'same' or 'valid'")
        )
    if padding == "valid":
        return ((0, 0),) * spec.ndim
    if any(step > 1 for step in spec.stride):
        raise OperatorError(
            f"{layer}: padding='same' needs a stride of 1, this one is {spec.stride}; give the "
            "padding in numbers"
        )
    totals = [d * (k - 1) for k, d in zip(spec.kernel, spec.dilation)]
    return tuple((total // 2, total - total // 2) for total in totals)


def _check_output_padding(spec: ConvSpec, layer: str) -> None:
    if not spec.transposed and any(spec.output_padding):
        raise OperatorError(
            f"{layer}: output_padding (={spec.output_padding}) belongs to a transposed convolution"
        )
    for more, stride, dilation in zip(spec.output_padding, spec.stride, spec.dilation):
        if spec.transposed and more >= max(stride, dilation):
            raise OperatorError(
                f"{layer}: output_padding (={spec.output_padding}) must be smaller than the stride "
                f"(={spec.stride}) or the dilation (={spec.dilation})"
            )


def _each(
    name: str, value: int | Sequence[int], ndim: int, least: int, layer: str
) -> tuple[int, ...]:
    """Return one number for each dim, or raise unless all are at least `least`."""
    values = [value] if isinstance(value, int) else list(value)
    if len(values) not in (1, ndim):
        raise OperatorError(
            f"{layer}: {name} (={tuple(values)}) has {len(values)} numbers; a {ndim}-D "
            f"convolution takes one, or {ndim}"
        )
    if any(number < least for number in values):
        raise OperatorError(f"{layer}: {name} (={tuple(values)}) must be at least {least}")
    return tuple(values * ndim if len(values) == 1 else values)
