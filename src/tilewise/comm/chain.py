"""A thread through all that communicates, so that backward meets it in one order on all ranks.

Autograd runs what it needs, in the order in which it was recorded. A rank whose loss ignores a
branch would not send the messages that the others wait for. So every communicating node takes a
token from the one before it and hands one on, and the last token is tied to the outputs: whoever
runs backward from any output passes all nodes, in reverse order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Promise:
    """A tensor that is found later."""

    value: Tensor | None = None


class Later:
    """Work of backward that nothing needs yet: done while a message is under way."""

    def __init__(self) -> None:
        self.works: list[Callable[[], None]] = []

    def add(self, work: Callable[[], None]) -> None:
        """Put off some work."""
        self.works.append(work)

    def run(self) -> None:
        """Do all that was put off."""
        works, self.works = self.works, []
        for work in works:
            work()


class Chain:
    """The token of one forward pass, and what its backward puts off."""

    def __init__(self, token: Tensor | None = None) -> None:
        self.token = token
        self.later = Later()

    def start(self, device: torch.device | None = None) -> None:
        """Begin a pass whose communicating nodes need gradients."""
        self.token = torch.zeros((), device=device, requires_grad=True)


def token_of(chain: Chain | None, *tensors: Tensor | None) -> Tensor | None:
    """Return the token for a node of these tensors, or none where backward will not pass it."""
    if chain is None or not torch.is_grad_enabled():
        return None
    needed = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return chain.token if needed else None


def take(ctx: Any, token: Tensor | None, at: int) -> Tensor | None:
    """Note in a node which of its tensors the token is; returns the one that it hands on."""
    ctx.token_at = None if token is None else at
    return None if token is None else token.clone()


def hand_on(chain: Chain | None, token: Tensor | None) -> None:
    """Let the next node take the token that a node handed on, if it did."""
    if chain is not None and token is not None:
        chain.token = token


def passed(tensor: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield all that backward from a tensor passes by itself, as (node, number of its output).

    The thread is left out: nodes that take a token say by `token_at` which of their tensors it is.
    """
    seen: set[tuple[Any, int]] = set()
    opened: set[Any] = set()
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    while waiting:
        edge = waiting.pop()
        node = edge[0]
        if node is None or edge in seen:
            continue
        seen.add(edge)
        yield edge
        if node not in opened:
            opened.add(node)
            token = getattr(node, "token_at", None)
            waiting += [after for i, after in enumerate(node.next_functions) if i != token]
