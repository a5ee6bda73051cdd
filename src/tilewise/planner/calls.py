"""Calls under one split each: what a machine's table of measured calls is about.

A call is known by what it computes (its kind, global shapes and options, which operands have
gradients) and how it is split: by its degrees where it has candidates of its own, or by the layout
of the operand that it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewise.graph.graph import Node, Value
from tilewise.graph.rule import Lowered
from tilewise.layout import Degrees, Layout
from tilewise.planner.cost import NodeCost
from tilewise.planner.follow import lower_where
from tilewise.planner.forms import lower_alone, signature
from tilewise.planner.machine import Machine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class SplitCall:
    """A call with its split; `predicted_s` is what it takes as far as is known.

    `call` is the same for all splits of it.
    """

    call: str
    node: Node
    split: Degrees | Layout
    operand: Value | None
    grads: tuple[bool, ...]
    predicted_s: float

    @property
    def key(self) -> str:
        """The name of this call under this split in a machine's table."""
        return key_of(self.call, self.split)

    def lowered(self, labels: Mapping[Value, str], *, ranks: int, rank: int) -> Lowered:
        """Plan the call for one rank."""
        if isinstance(self.split, Degrees):
            return lower_alone(self.node, labels, self.split, ranks=ranks, rank=rank)
        assert self.operand is not None
        return lower_where(self.node, self.operand, self.split, labels, rank=rank)


def key_of(call: str, split: Degrees | Layout) -> str:
    """Name a call under a split."""
    if isinstance(split, Degrees):
        return f"{call} split {split}"
    lies = " ".join(f"{axis.size}:{axis.dim}" for axis in split.axes)
    return f"{call} on {lies}"


def described(node: Node, labels: Mapping[Value, str], grads: set[Value]) -> str:
    """Return a text that is the same for calls that take equally long."""
    flags = "".join(
        "g" if value in grads else "f" if value.origin == "parameter" and not value.trained else "-"
        for value in node.values()
    )
    return f"{signature(node, labels)} {flags}"


def use_measured(
    cost: NodeCost, machine: Machine, keys: list[str], where: Ints, overlap: float
) -> None:
    """Let the parts of a call's cost add up to what was measured of it.

    Candidate i is split as `keys[where[i]]` says. The model's arithmetic of splits that were not
    measured is corrected by the middle ratio of those that send nothing; where all that were
    measured send something, arithmetic and messages are corrected alike.
    """
    known = [machine.timed.get(key) for key in keys]
    if not any(known):
        return
    for direction, total in (("forward", cost.forward), ("backward", cost.backward)):
        modelled = total(overlap)
        seconds = np.array([np.nan if one is None else getattr(one, f"{direction}_s")
                            for one in known])[where]  # fmt: skip
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.where(modelled > 0, seconds / modelled, np.nan)
        messages = [getattr(cost, f"{part}_{direction}") for part in ("halo", "exchange")]
        silent = np.where(sum(messages) > 0, np.nan, ratio)
        alone = bool(np.isfinite(silent).any())
        usual = _middle(silent if alone else ratio)
        for column in messages:
            column *= np.where(np.isnan(ratio), 1.0 if alone else usual, ratio)
        compute = getattr(cost, f"compute_{direction}")
        compute *= np.where(np.isnan(ratio), usual, ratio)
        bare = np.isfinite(seconds) & (modelled <= 0)
        compute[bare] = seconds[bare]


def _middle(ratios: NDArray[np.float64]) -> float:
    return float(np.nanmedian(ratios)) if np.isfinite(ratios).any() else 1.0


def list_calls(
    node: Node,
    call: str,
    splits: Sequence[Degrees | Layout],
    operand: Value | None,
    grads: set[Value],
    seconds: Callable[[int], float],
) -> dict[str, SplitCall]:
    """Return all splits of a call by their keys."""
    flags = tuple(value in grads for value in node.values())
    found = [
        SplitCall(call, node, split, operand, flags, seconds(index))
        for index, split in enumerate(splits)
    ]
    return {one.key: one for one in found}
