"""How operator calls become split operators: the registry of rules.

A rule reads one call of a captured program and plans it on the layouts of its operands:

    @rule("relu", "gelu")
    def _(site):
        return Lowered(pointwise(...), site.node.values())
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewise.errors import PlanError
from tilewise.graph.graph import Node, Value
from tilewise.layout import Axes, Degrees, Layout
from tilewise.ops.draws import Draws
from tilewise.ops.operation import Operation


@dataclass
class Site:
    """Where a rule works: one call, the layouts of its operands, and what the plan wants.

    `followed` are the degrees of the layer that made the largest operand.
    """

    node: Node
    layouts: dict[Value, Layout]
    labels: dict[Value, str]
    degrees: Degrees | None
    ranks: int
    rank: int
    draws: Draws
    stream: int = 0
    statistics: str = "global"
    followed: Degrees = field(default_factory=Degrees)

    def layout(self, value: Value) -> Layout:
        """Return where an operand lies; what the model holds counts as whole on every rank."""
        if value.held:
            return Layout.replicated(value.shape, ranks=self.ranks)
        return self.layouts[value]

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument of the call by position or name."""
        if index < len(self.node.args):
            return self.node.args[index]
        return self.node.kwargs.get(name, default)

    @property
    def axes(self) -> Axes | None:
        """The cut of the result that the plan wants, or None to follow the operands."""
        return self.axes_of(self.node.out)

    def axes_of(self, value: Value) -> Axes | None:
        if self.degrees is None:
            return None
        return Layout.of(value.shape, self.labels[value], self.degrees, ranks=self.ranks).axes

    @property
    def where(self) -> dict[str, Any]:
        """The arguments that every operator takes."""
        return {"axes": self.axes, "rank": self.rank, "layer": self.node.name}


@dataclass(frozen=True)
class Lowered:
    """A planned operator and the operands it takes, in order.

    `in_place` is a local function that writes into the first operand instead.
    """

    operation: Operation
    operands: Sequence[Value]
    in_place: Callable[..., Any] | None = None
    fallback: bool = False


Rule = Callable[[Site], Lowered]


@dataclass(frozen=True)
class Registered:
    """A rule, and whether a plan may give its layers degrees of their own."""

    apply: Rule
    cuts: bool


REGISTRY: dict[str, Registered] = {}


def rule(*kinds: str, cuts: bool = True) -> Callable[[Rule], Rule]:
    """Register a rule for operators by plain name; without `cuts`, it follows its operands."""

    def register(function: Rule) -> Rule:
        for kind in kinds:
            if kind in REGISTRY:
                raise PlanError(f"rule: {kind} has a rule already")
            REGISTRY[kind] = Registered(function, cuts)
        return function

    return register
