"""Gradients that are not summed yet: `.grad` holds a rank's share of them.

    holders of a block      rank 0      rank 1      rank 2
    .grad before            g           g           g         whole, on each of them
    turned into shares      g           0           0
    after a pass            g + a       b           c
    after the next sum      ◀────────  g + a + b + c  ────────▶

There is nothing beside `.grad`: who clears or scales it clears or scales what is to be summed.
Which parameters have shares is known to all ranks alike, whatever each did to its `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.comm import Mesh
from tilewise.errors import PlanError
from tilewise.graph.held import Held
from tilewise.layout import REPLICA

Use = tuple[str, tuple[int, ...]]
"""A parameter's name and the ranks that share its block in some layer."""


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run something after the backward that is under way, when all gradients are there."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


class Shares:
    """The parameters whose `.grad` is a share, with their names."""

    def __init__(self, mesh: Mesh, held: Held) -> None:
        self.mesh, self.held = mesh, held
        self.waiting: dict[Tensor, str] = WeakTensorKeyDictionary()  # type: ignore[assignment]
        self.watched: dict[Tensor, str] = WeakTensorKeyDictionary()  # type: ignore[assignment]

    @property
    def names(self) -> list[str]:
        return sorted(self.waiting.values())

    def holders(self, name: str) -> tuple[int, ...]:
        """List the ranks that hold this rank's block of a parameter."""
        return self.held.covers[name].sharers(self.mesh.rank, REPLICA)

    def completes(self, use: Use) -> bool:
        """Whether a sum over the ranks of `use` makes a share whole."""
        name, ranks = use
        return set(ranks) == set(self.holders(name))

    def besides(self, uses: Iterable[Use]) -> set[str]:
        """Return the names whose shares none of the sums of these uses makes whole."""
        return set(self.names) - {use[0] for use in uses if self.completes(use)}

    def check(self, what: str, parameters: Iterable[Tensor]) -> None:
        """Refuse to use gradients of which this rank has a share only."""
        if not self.waiting:
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter in self.waiting:
                raise PlanError(
                    f"{what}: the gradient of {self.waiting[parameter]} is not summed yet; run the "
                    "last pass before it outside of no_sync()"
                )

    def watch(self, name: str, parameter: Tensor) -> None:
        """Make whole gradients count once that autograd adds to a share."""
        holders = self.holders(name)
        if len(holders) < 2 or parameter in self.watched:
            return
        self.watched[parameter] = name

        def once(grad: Tensor | None) -> Tensor | None:
            if grad is None or self.mesh.rank == holders[0]:
                return None
            return torch.zeros_like(grad) if self.held.get(name) in self.waiting else None

        parameter.register_hook(once)

    def add(self, use: Use, parameter: Tensor, grad: Tensor | None) -> None:
        """Add this rank's part of a gradient, which `use` shares, to `.grad`."""
        name, ranks = use
        first = self.holders(name)[0]
        if parameter not in self.waiting:
            self.waiting[parameter] = name
            if parameter.grad is not None and self.mesh.rank != first:
                parameter.grad.zero_()
        if grad is None:
            return
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if first in ranks:  # the other holders have the same sum once more
            parameter.grad += grad

    def take(self, use: Use, parameter: Tensor) -> Tensor | None:
        """Return the share that a sum over the ranks of `use` makes whole, and let go of it."""
        if parameter not in self.waiting or not self.completes(use):
            return None
        del self.waiting[parameter]
        return parameter.grad

    @torch.no_grad()
    def sum(self) -> None:
        """Make all shares whole that are left.

        Communication: one all-reduce for each set of holders.
        """
        together: dict[Any, list[str]] = {}
        for name in self.names:
            parameter = self.held.get(name)
            key = (self.holders(name), parameter.dtype, parameter.device)
            together.setdefault(key, []).append(name)
        self.waiting.clear()
        for (ranks, _, _), names in together.items():
            self._sum(ranks, names)

    def _sum(self, ranks: tuple[int, ...], names: list[str]) -> None:
        parameters = [self.held.get(name) for name in names]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        there = parts[0].new_tensor([p.grad is not None for p in parameters])
        flat = torch.cat([*(part.flatten() for part in parts), there])
        self.mesh.sum(flat, self.mesh.group(ranks), layer=f"gradients of {names[0]} (left)")
        *sums, there = flat.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, part, total, seen in zip(parameters, parts, sums, there.tolist()):
            if seen:
                parameter.grad = part.copy_(total.view(part.shape))
