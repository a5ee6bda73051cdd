"""Say why an `auto` plan leaves a model whole on several ranks."""

from __future__ import annotations

from collections.abc import Mapping

from tilewise.plan import Plan
from tilewise.planner.search import Found


def split(plan: Plan) -> bool:
    """Whether a plan cuts any layer."""
    return any(degrees.product > 1 for degrees in plan.layers.values())


def why_unsplit(chosen: Plan, found: Found, ran: Mapping[str, float]) -> str:
    """Compare a plan that cuts nothing with the fastest ones that do, predicted and measured.

    `ran` holds the seconds of a step under plans that ran, by their JSON.
    """
    others = {name: one for name, one in found.baselines.items() if split(one.plan) and one.fits}
    name = min(others, key=lambda name: others[name].step_seconds, default=None)
    text = (
        f"plan 'auto' splits no layer on {found.devices} ranks, each of them does all of the work: "
        f"a step is predicted to take {_ms(found.price(chosen).step_seconds)}"
    )
    if name is None:
        text += ", and no common plan that splits fits"
    else:
        text += f", and {_ms(others[name].step_seconds)} under the best common split ({name!r})"
    by_split: dict[bool, list[float]] = {False: [], True: []}
    for json, seconds in ran.items():
        by_split[split(Plan.from_json(json))].append(seconds)
    if all(by_split.values()):
        whole, cut = min(by_split[False]), min(by_split[True])
        text += f"; measured were {_ms(whole)}, and {_ms(cut)} under the fastest split that ran"
    return text


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
