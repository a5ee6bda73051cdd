"""The tables of `tilewise plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from math import isfinite

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tilewise.cli.local import Calibration
from tilewise.layout import Degrees
from tilewise.planner.rows import Row, together
from tilewise.planner.search import Found
from tilewise.units import size

KINDS = ("compute", "halo", "exchange", "sync")
WAITING = (
    "halo: a layer's wait for rows and gathered channels of others, as far as compute does not "
    "hide it; exchange: scattered results, statistics of norms, and moves between layers"
)
COSTS = (
    f"compute: arithmetic and the optimizer; {WAITING}; sync: sums of gradients, before any of "
    "them hides behind backward; sent: by all devices in a step"
)
HELD = (
    "states: the optimizer's; kept: activations for backward, the network's input among them; "
    "passing: the most that is there only while a layer runs (halos, gathered and moved tensors, "
    "workspace, gradients on their way, copies for sums and the optimizer), of several layers the "
    "largest, as they run one after another"
)
AGAIN = "again: what backward needs of it is not kept, but computed a second time"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds, or a dash where there is none."""
    return f"{1e3 * seconds:.3g}" if seconds else "–"


def show_plan(found: Found, console: Console) -> None:
    """Show stretches of layers with equal degrees, with their times and bytes."""
    title = f"plan for {found.devices} devices of {found.machine.name}, milliseconds"
    table = compact(title, ("layers", "degrees"), (*KINDS, "sent"))
    for split, stretch in _stretches(found):
        table.add_row(
            _named(stretch), split, *_times(stretch), size(sum(row.bytes for row in stretch))
        )
    table.add_section()
    total = size(sum(row.bytes for row in found.rows))
    table.add_row("all", "", *_times(found.rows), total, style="bold")
    console.print(table)
    again = f"; {AGAIN}" * any(row.recompute for row in found.rows)
    explain(COSTS + again, console)
    hidden = found.hidden_seconds
    console.print(
        f"step {milliseconds(found.step_seconds)} ms: forward "
        f"{milliseconds(found.cost.forward - found.optimizer_seconds)}, backward "
        f"{milliseconds(found.backward_seconds)}, optimizer "
        f"{milliseconds(found.optimizer_seconds)}, gradient sums {milliseconds(found.cost.sync)} "
        f"({milliseconds(hidden) if hidden else 'none'} hidden behind backward)"
    )
    show_held(found, console)
    proof = "proven best of all candidates" if found.optimal else _how_near(found.gap)
    console.print(
        f"{proof}; priced in {found.price_seconds:.1f} s, searched in {found.solve_seconds:.1f} s"
    )


def show_held(found: Found, console: Console) -> None:
    """Show what the fullest device has of each stretch of layers, and what its peak is made of."""
    total = together(found.rows)
    table = compact("bytes on the fullest device", ("layers", "degrees"), total)
    for split, stretch in _stretches(found):
        table.add_row(_named(stretch), split, *_sizes(together(stretch)))
    table.add_section()
    table.add_row("all", "", *_sizes(total), style="bold")
    console.print(table)
    again = f"; {AGAIN}" * any(row.recompute for row in found.rows)
    explain(HELD + again, console)
    console.print(
        f"memory {size(found.peak_bytes)} of {size(found.memory_bytes)} on the fullest device"
    )
    if found.memory_bytes > found.machine.memory_bytes:
        console.print(
            f"[yellow]a device of {found.machine.name} has {size(found.machine.memory_bytes)} "
            "only: this plans for larger ones[/]"
        )
    moment = found.fullest
    held = ", ".join(f"{kind} {size(count)}" for kind, count in moment.bytes_by_kind.items())
    console.print(f"at its fullest, {moment.phase} of {moment.layer}: {held}")


def compact(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """Return a table for 80 columns, in which words may be folded and numbers may not."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _sizes(held: Mapping[str, int]) -> list[str]:
    return [size(count) if count else "–" for count in held.values()]


def explain(text: str, console: Console) -> None:
    """Say what a table's words mean."""
    console.print(text, style="dim", highlight=False)


def explain_local(kept: Calibration, console: Console) -> None:
    """Say which measurements a table is for."""
    console.print(kept.told(datetime.now()), style="dim", highlight=False, soft_wrap=True)


def _stretches(found: Found) -> Iterator[tuple[str, list[Row]]]:
    """Yield layers that follow each other and are split alike, with how they are."""
    for split, group in groupby(found.rows, key=lambda row: way(row.degrees, row.recompute)):
        yield split, list(group)


def _named(stretch: Sequence[Row]) -> str:
    return between([row.name for row in stretch])


def between(names: Sequence[str]) -> str:
    """Return the first and the last of layers that follow each other, and how many they are."""
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def _times(stretch: Sequence[Row]) -> list[str]:
    return [milliseconds(sum(getattr(row, f"{kind}_s") for row in stretch)) for kind in KINDS]


def way(degrees: Degrees | str, recompute: bool) -> str:
    """Return how a layer is split, and whether it is computed again in backward."""
    return f"{degrees}, again" if recompute else str(degrees)


def _how_near(gap: float) -> str:
    if isfinite(gap):
        return f"at most {gap:.2%} from the best of all candidates"
    return "not proven: the time was over before there was any bound (--time-limit)"
