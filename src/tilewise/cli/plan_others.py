"""The tables of `tilewise plan` that hold a plan against others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import floor, isfinite, log10

from rich.box import SIMPLE_HEAD
from rich.console import Console, JustifyMethod
from rich.table import Table

from tilewise.cli.plan_tables import AGAIN, KINDS, compact, explain, milliseconds, way
from tilewise.plan import Plan
from tilewise.planner.candidates import Dropped
from tilewise.planner.explain import Alternative, variable_of
from tilewise.planner.places import resolved
from tilewise.planner.search import Found, Priced
from tilewise.planner.sensitivity import Tried
from tilewise.units import all_enough, size

MOST_ALTERNATIVES = 20
MOST_EXAMPLES = 3
MOST_DEGREES = 2
UNDER = 1 - 1e-6
"""Which share of the plan's step counts as less."""
PEOPLE_USE = (
    "data: samples only; spatial: depth, height and width only; model: channels and filters only; "
    "owt (one weird trick): samples, but linear layers by filters; uniform: the same degrees for "
    "all layers, each as far as it has room. Each is the fastest of its kind that fits, so another "
    "--memory may bring another one; where none fits it is one that needs little"
)


def show_comparison(found: Found, console: Console) -> None:
    """Show what the plans that people use would take."""
    table = Table(title="compared with")
    for name in ("plan", "degrees"):
        table.add_column(name)
    for name in ("step (ms)", "ratio", "memory", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in found.baselines.items():
        table.add_row(
            name,
            _in_short(found, one.plan),
            milliseconds(one.step_seconds),
            f"{one.step_seconds / found.step_seconds:.2f}",
            size(one.peak_bytes),
            "yes" if one.fits else "[red]no[/]",
        )
    console.print(table)
    explain(PEOPLE_USE + "; all keep the pins" * bool(found.pins), console)


def _in_short(found: Found, plan: Plan) -> str:
    """Return the degrees that all layers share; of a mix those of most layers first."""
    shared = found.shared_degrees(plan)
    if shared is not None:
        return str(shared)
    counts = Counter(map(str, plan.layers.values())).most_common()
    few = "; ".join(f"{degrees} for {count}" for degrees, count in counts[:MOST_DEGREES])
    left = sum(count for _, count in counts[MOST_DEGREES:])
    return few + f"; others for {left}" * bool(left)


def show_frontier(points: Sequence[Priced], console: Console) -> None:
    """Show how much time less memory costs."""
    table = Table(title="time against memory")
    table.add_column("memory", justify="right")
    table.add_column("step (ms)", justify="right")
    table.add_column("")
    fastest = min(1e3 * one.step_seconds for one in points)
    digits = max(3 - floor(log10(fastest)), 0)
    for peak, one in zip(all_enough([one.peak_bytes for one in points]), points, strict=True):
        proven = "proven best" if one.optimal else "best found"
        table.add_row(peak, f"{1e3 * one.step_seconds:.{digits}f}", proven)
    console.print(table)


def show_alternatives(
    layer: str, alternatives: Sequence[Alternative], found: Found, console: Console
) -> None:
    """Show the price of other ways to split a layer."""
    title = f"{layer}: the step with each way to split it, all others re-optimised, milliseconds"
    owner = found.formulation.names[variable_of(found.formulation, layer)]
    if owner != layer:
        title = f"{layer} is split as {owner}: " + title.removeprefix(f"{layer}: ")
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False)  # for 80 columns
    for name in ("degrees", "step", "more", *KINDS, "peak", "decides"):
        justify: JustifyMethod = "left" if name in ("degrees", "decides") else "right"
        table.add_column(name, justify=justify, no_wrap=name != "degrees")
    fitting = [one for one in alternatives if isfinite(one.step_seconds)]
    shown = fitting[:MOST_ALTERNATIVES]
    shown += [one for one in fitting[MOST_ALTERNATIVES:] if one.chosen]  # bounds may sort before it
    for one in shown:
        bound, seconds = "" if one.exact else "≥ ", one.step_seconds
        peak = found.peak_bytes if one.chosen else one.peak_bytes
        if one.chosen and not one.exact:  # the plan itself is known to have it
            bound, seconds = "≤ ", found.step_seconds
        table.add_row(
            way(one.degrees, one.recompute) + " *" * one.chosen,
            bound + milliseconds(seconds),
            f"{round(seconds / found.step_seconds - 1, 3) + 0.0:+.1%}",
            *(milliseconds(getattr(one, f"{kind}_s")) for kind in KINDS),
            "–" if peak is None else size(peak),
            one.decides,
        )
    console.print(table)
    left = len(fitting) - len(shown)
    less = [one for one in shown if one.exact and one.step_seconds < found.step_seconds * UNDER]
    unproven = any(one.chosen and not one.exact for one in shown)
    text = (
        "* chosen; ≥ a lower bound; "
        + "≤ the plan's own step, which is not proven best; " * unproven
        + "less than the plan: a faster one was found while pricing, search longer; " * bool(less)
        + "compute to sync: of this layer and those that follow it (its norm, its activation), "
        "halos before any of them hides behind compute; peak: the memory of that step; "
        "decides: the largest of these costs, sums of gradients as far as the plan's do not hide "
        "behind backward"
    )
    text += f"; {AGAIN}" * any(one.recompute for one in shown)
    explain(text + f"; {left} others not shown, none of them may take less" * (left > 0), console)


def show_left_out(layer: str, left_out: Mapping[str, Sequence[Dropped]], console: Console) -> None:
    """Show why ways to split a layer were left out, with some that are the least cut."""
    if not left_out:
        return
    table = compact(f"{layer}: ways that are left out", ("because", "such as"), ("ways",))
    for rule, some in left_out.items():
        few = sorted(some, key=lambda one: one.degrees.product)[:MOST_EXAMPLES]
        examples = "; ".join(way(one.degrees, one.recompute) for one in few)
        table.add_row(rule, examples, str(len(some)))
    console.print(table)
    if any(one.recompute for some in left_out.values() for one in some):
        explain(AGAIN, console)


def show_sensitivity(tried: Sequence[Tried], console: Console) -> None:
    """Show where the plan would no longer be the best one."""
    table = Table(title="if one of the machine's rates were 10 % off")
    for name in ("rate", "times", "plan is slower than the best by", "layers that change"):
        table.add_column(
            name, justify="left" if name == "rate" else "right", no_wrap=name == "rate"
        )
    for one in tried:
        regret = "the same" if one.survives else f"{one.regret:.1%}"
        regret += "" if one.proven else " (unproven)"
        table.add_row(one.rate, f"{one.share:.1f}", regret, str(one.changed))
    console.print(table)
    worst = max(tried, key=lambda one: one.regret)
    said = f"it depends most on {worst.rate}"
    unproven = sum(not one.proven for one in tried)
    survives = "the plan survives all of them" + ", as far as was found" * bool(unproven)
    console.print(survives if worst.survives else said)
    if unproven:
        explain(
            f"unproven: {unproven} of {len(tried)} searches ended before they had proven the plan "
            "that is the best there; --time-limit gives them more time",
            console,
        )


def show_difference(found: Found, other: Priced, console: Console) -> None:
    """Show where another plan differs, and what it costs."""
    plans = (found.plan, other.plan)
    every = [resolved(found.formulation.graph, plan) for plan in plans]
    ways = {
        name: [
            way(degrees[name], plan.recomputes(name) is not None)
            for plan, degrees in zip(plans, every)
        ]
        for name in dict.fromkeys(name for plan in plans for name in plan.layers)
    }
    differing = {name: pair for name, pair in ways.items() if pair[0] != pair[1]}
    if differing:
        table = Table(title="split differently")
        for title in ("layer", "this plan", "the other"):
            table.add_column(title)
        for name, pair in differing.items():
            table.add_row(name, *pair)
        console.print(table)
        if any(plan.recompute for plan in plans):
            explain(AGAIN, console)
    else:
        console.print("the other plan splits all layers as this one does")
    console.print(
        f"the other plan: step {milliseconds(other.step_seconds)} ms "
        f"({other.step_seconds / found.step_seconds:.2f} of this one's), memory "
        f"{size(other.peak_bytes)}, {'fits' if other.fits else 'does not fit'}"
    )
