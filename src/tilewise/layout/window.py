"""Which inputs an output needs: convolution, transposed convolution and pooling along one dim.

kernel 3, stride 2, padding 1      input   . 0 1 2 3 4 5
                                   output  └─0─┘
                                               └─1─┘
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.layout.blocks import Interval


@dataclass(frozen=True, slots=True)
class Window:
    """A kernel that slides along one dim.

    With `transposed`, input i reaches outputs i·stride − before + k·dilation, and `after` is the
    padding less the output padding.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    transposed: bool = False

    @property
    def reach(self) -> int:
        """The extent of the dilated kernel."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """Return the number of outputs for `extent` inputs."""
        if self.transposed:
            return (extent - 1) * self.stride + self.reach - self.before - self.after
        return (extent + self.before + self.after - self.reach) // self.stride + 1

    def inputs(self, start: int, stop: int) -> Interval:
        """Return the inputs that outputs [start, stop) need; they may lie past the edges."""
        if start >= stop:
            return 0, 0
        if self.transposed:
            first = -((self.reach - 1 - start - self.before) // self.stride)
            return first, (stop - 1 + self.before) // self.stride + 1
        first = start * self.stride - self.before
        return first, (stop - 1) * self.stride - self.before + self.reach

    def readers(self, start: int, stop: int) -> Interval:
        """Return the outputs that read any of the inputs [start, stop)."""
        return Window(
            self.kernel,
            self.stride,
            self.dilation,
            self.before,
            self.after,
            not self.transposed,
        ).inputs(start, stop)
