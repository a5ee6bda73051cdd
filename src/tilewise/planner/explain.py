"""Why a layer is split as it is: the price of every other way, and why ways were left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from tilewise.errors import PlanError, meant
from tilewise.layout import Degrees
from tilewise.planner.candidates import Dropped
from tilewise.planner.cost import NodeCost
from tilewise.planner.formulation import Formulation
from tilewise.planner.solve import evaluate, price
from tilewise.planner.within import Limited


@dataclass(frozen=True)
class Alternative:
    """One way to split a layer.

    Args:
        degrees: the way.
        recompute: whether its activations are computed again in backward.
        step_seconds: the best step with it when all other layers re-optimise; a lower bound
            where not `exact`; infinite where no plan with it fits.
        exact: whether that is proven.
        peak_bytes: the memory of a plan that takes `step_seconds`; None where none is known.
        chosen: whether the plan has it.
        compute_s, halo_s, exchange_s, sync_s: the layer's own costs, with its followers'.
        waiting_s: what of sync_s does not hide behind backward, as in the plan.
        held_bytes: what the fullest rank keeps for backward of the layer and its followers.
        alone_seconds, alone_peak_bytes: step and memory if only this layer were changed; the step
            is infinite where that is not allowed or does not fit.
    """

    degrees: Degrees
    recompute: bool
    step_seconds: float
    exact: bool
    peak_bytes: int | None
    chosen: bool
    compute_s: float
    halo_s: float
    exchange_s: float
    sync_s: float
    waiting_s: float
    held_bytes: int
    alone_seconds: float
    alone_peak_bytes: int

    @property
    def decides(self) -> str:
        """The kind of cost that is the largest, sums as far as they do not hide."""
        kinds = {
            "compute": self.compute_s,
            "halo": self.halo_s,
            "exchange": self.exchange_s,
            "sync": self.waiting_s,
        }
        return max(kinds, key=lambda kind: kinds[kind])


def alternatives(
    found: Formulation,
    limited: Limited,
    layer: str,
    *,
    time_limit: float,
) -> list[Alternative]:
    """Price all candidates of a layer, the cheapest first."""
    variable = variable_of(found, layer)
    choice = limited.solution.choice
    prices = price(
        limited.problem,
        variable,
        limited.cap,
        solution=limited.solution,
        time_limit=time_limit,
    )
    prices = limited.judged(variable, prices, range(len(prices.seconds)))
    waiting = _waiting(found, choice)
    members = [cost for name, cost in found.costs.items() if found.choices.owner[name] == variable]
    some = found.choices.candidates[variable]
    out = []
    others = np.arange(len(prices.seconds)) != choice[variable]
    for index in np.lexsort((others, prices.seconds)).tolist():
        costs = [cost.take(np.array([index])) for cost in members]
        out.append(
            Alternative(
                some.degrees(index),
                bool(some.again[index]),
                float(prices.seconds[index]),
                bool(prices.exact[index]),
                int(prices.peaks[index]) or None if prices.exact[index] else None,
                index == choice[variable],
                _again(costs, "compute_forward") + _total(costs, "compute_backward", "optimizer"),
                _again(costs, "halo_forward") + _total(costs, "halo_backward"),
                _again(costs, "exchange_forward") + _total(costs, "exchange_backward"),
                _total(costs, "sync"),
                waiting * _total(costs, "sync"),
                int(_total(costs, "held_bytes")),
                float(prices.alone[index]),
                int(prices.alone_bytes[index]),
            )
        )
    return out


EQUAL = 1e-9
"""By what share of its time a step must be slower to be called so."""


def left_out(
    found: Formulation, layer: str, ways: Sequence[Alternative], step_seconds: float
) -> dict[str, list[Dropped]]:
    """Return the ways to split a layer that no best plan has, by the rule that says so.

    First those that were never candidates, then what is known of `ways`, which were priced: no plan
    with them fits, or every plan with them is slower than `step_seconds`.
    """
    some = found.choices.candidates[variable_of(found, layer)]
    dropped = [*some.dropped(), *(_beaten(way, step_seconds) for way in ways)]
    groups: dict[str, list[Dropped]] = {}
    for one in dropped:
        if one is not None:
            groups.setdefault(one.rule, []).append(one)
    return groups


def _beaten(way: Alternative, step_seconds: float) -> Dropped | None:
    """Return why a way that was priced is not in the plan; none where it may be as good."""
    if not isfinite(way.step_seconds):
        rule = reason = "no plan with it fits in memory"
    elif way.step_seconds > step_seconds * (1 + EQUAL):
        rule = "proven slower, however other layers are split"
        least = "" if way.exact else "at least "
        more = way.step_seconds / step_seconds - 1
        reason = f"a step with it takes {least}{1e3 * way.step_seconds:.4g} ms, {more:+.2%}"
    else:
        return None
    return Dropped(way.degrees, reason, rule, way.recompute)


def _waiting(found: Formulation, choice: Sequence[int]) -> float:
    """Return which part of a plan's gradient sums does not hide behind backward."""
    cost = evaluate(found.problem, choice)
    alone = cost.backward - found.waiting_seconds(choice)
    return max(cost.seconds - cost.forward - alone, 0.0) / cost.sync if cost.sync else 0.0


def _total(costs: Sequence[NodeCost], *names: str) -> float:
    return float(sum(getattr(cost, name)[0] for cost in costs for name in names))


def _again(costs: Sequence[NodeCost], name: str) -> float:
    return float(sum(getattr(cost, name)[0] * (1 + cost.again[0]) for cost in costs))


def variable_of(found: Formulation, layer: str) -> int:
    """Return the variable that decides a layer's split: its own, or the one that it follows."""
    owner = found.choices.owner.get(layer)
    if owner is None:
        known, guess = ", ".join(found.names), meant(layer, found.names)
        raise PlanError(f"plan: there is no layer {layer!r} to explain; {guess}layers: {known}")
    return owner
