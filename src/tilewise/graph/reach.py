"""Which parameters get a gradient: those that an output depends on which some rank uses.

All messages of backward travel, also those of a branch that the loss ignores, with zeros. On one
device the parameters of such a branch get no gradient at all, and an optimizer leaves them alone.
So each pass finds out which outputs are used, and lets through the gradients that follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.comm import Chain, Mesh
from tilewise.comm.chain import passed
from tilewise.graph.shares import Use, at_end_of_backward


@dataclass
class Reach:
    """For each output of a program, the uses of parameters that it depends on.

    They are the same in every pass, so the first one tells.
    """

    outputs: list[frozenset[Use]] = field(default_factory=list)

    def find(self, outputs: Sequence[Tensor], use_at: Callable[[Any, int], Use | None]) -> None:
        """Follow each output back to the parameters; `use_at` names what a node stands for."""
        if not self.outputs:
            for output in outputs:
                uses = [use_at(node, number) for node, number in passed(output)]
                self.outputs.append(frozenset(use for use in uses if use is not None))

    def always(self, use: Use) -> bool:
        """Whether the parameter gets a gradient whichever output is used."""
        return bool(self.outputs) and all(use in uses for uses in self.outputs)


@dataclass
class Passing:
    """Which outputs of one pass some rank uses; known once backward has begun.

    `at_end` runs after backward.
    """

    mesh: Mesh
    reach: Reach
    used: list[bool]
    at_end: Callable[[], None] | None = None

    def wants(self, use: Use) -> bool:
        """Whether a parameter, or whatever else was found as a use, gets a gradient."""
        return any(used and use in uses for used, uses in zip(self.used, self.reach.outputs))


def leave(outputs: tuple[Tensor, ...], passing: Passing, chain: Chain) -> tuple[Tensor, ...]:
    """Make whoever runs backward from one of the outputs pass the whole chain.

    The ranks tell each other which outputs they use before the first other message of backward.
    """
    tied = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not tied or chain.token is None:
        return outputs
    found = list(outputs)
    left = _Leave.apply(passing, tied, chain.token, *(outputs[i] for i in tied))
    for i, output in zip(tied, left):
        found[i] = output
    return tuple(found)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passing: Passing, tied: list[int], token: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.passing, ctx.tied, ctx.token_at = passing, tied, 0
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        passing: Passing = ctx.passing
        flags = [0.0] * len(passing.used)
        for i, grad in zip(ctx.tied, grads):
            flags[i] = float(grad is not None)
        users = passing.mesh.total(flags, layer="outputs (backward)")
        passing.used = [count > 0 for count in users]
        if passing.at_end is not None:
            at_end_of_backward(passing.at_end)
        return None, None, torch.zeros(()), *grads  # where the token is: no device waits


class Gate(torch.autograd.Function):
    """Let a gradient through where one device would have one; for blocks that no rank shares."""

    @staticmethod
    def forward(ctx: Any, passing: Passing, use: Use, parameter: Tensor) -> Tensor:
        ctx.passing, ctx.use = passing, use
        ctx.set_materialize_grads(False)
        return parameter.view_as(parameter)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None, Tensor | None]:
        return None, None, grad if ctx.passing.wants(ctx.use) else None
