"""Show a run as it goes: live on a terminal, else plain lines every so often."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tilewise.train.check import Checked
from tilewise.train.recipe import Recipe

EVERY_S = 10.0
HIDDEN = ("kind", "step", "epoch", "seconds")


class Show:
    """Turns the events of a run into what people see."""

    def __init__(self, console: Console, *, every_s: float = EVERY_S) -> None:
        self.console, self.every_s = console, every_s
        self.live = console.is_terminal and not console.quiet
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.task: Any = None
        self.facts: dict[str, Any] = {}
        self.line = Text("")
        self.screen: Live | None = None
        self.said = 0.0
        self.window: list[tuple[int, float]] = []

    def __enter__(self) -> Show:
        if self.live:
            self.screen = Live(console=self.console, get_renderable=self._render)
            self.screen.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.screen is not None:
            self.screen.stop()

    def _render(self) -> Group:
        return Group(self.bar, self.line) if self.task is not None else Group(self.line)

    def say(self, text: str) -> None:
        """Print a line, above what is live."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    # -- data ------------------------------------------------------------------------------

    def making(self, kind: str, count: int) -> None:
        """Begin to show how a set is made."""
        self.say(f"making {count} samples of {kind}")
        if self.live:
            self.task = self.bar.add_task("data", total=count)

    def made(self, count: int) -> None:
        """Count samples made."""
        if self.task is not None:
            self.bar.advance(self.task, count)

    # -- events ----------------------------------------------------------------------------

    def event(self, event: dict[str, Any]) -> None:
        """Show what the first rank reports."""
        handler = getattr(self, f"_{event['kind']}", self._evaluation)
        handler(event)

    def _start(self, event: dict[str, Any]) -> None:
        self.facts = event
        self.say(
            f"training on {event['samples']} samples and {_ranks(event['ranks'])}, "
            f"{event['steps']} steps" + (f", from step {event['step']}" if event["step"] else "")
        )
        for note in event["notes"]:
            self.say(f"reduced: {note}")
        if self.live:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task = self.bar.add_task(
                f"epoch {event['epoch']}/{event['epochs']}",
                total=event["steps"],
                completed=event["step"],
            )

    def _note(self, event: dict[str, Any]) -> None:
        self.say(event["text"])

    def _train(self, event: dict[str, Any]) -> None:
        if "skipped" in event:
            self.say(f"step {event['step']} is left out: {event['skipped']}")
        text = self._status(event)
        if self.task is not None:
            where = f"epoch {event['epoch']}/{self.facts['epochs']}"
            self.bar.update(self.task, completed=event["step"], description=where)
            self.line = Text(text)
            return
        now = time.monotonic()
        if now - self.said >= self.every_s or event["step"] == self.facts["steps"]:
            self.said = now
            left = self._left(event)
            self.say(
                f"epoch {event['epoch']}/{self.facts['epochs']} step {event['step']}/"
                f"{self.facts['steps']}: {text}{left}"
            )

    def _status(self, event: dict[str, Any]) -> str:
        loss = "left out" if event["loss"] is None else f"loss {event['loss']:.4g}"
        parts = [loss, f"{event['samples_per_s']:.3g} samples/s"]
        shares = event.get("shares")
        if shares:
            parts.append(", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()))
        return ", ".join(parts)

    def _left(self, event: dict[str, Any]) -> str:
        """Return the time left, from the pace since the last few steps."""
        self.window = [*self.window, (event["step"], time.monotonic())][-5:]
        (first, start), (last, end) = self.window[0], self.window[-1]
        if last == first:
            return ""
        seconds = (end - start) / (last - first) * (self.facts["steps"] - last)
        return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"

    def _evaluation(self, event: dict[str, Any]) -> None:
        values = {name: value for name, value in event.items() if name not in HIDDEN}
        shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
        self.say(f"{event['kind']} in epoch {event['epoch']}, after step {event['step']}: {shown}")

    # -- the end ---------------------------------------------------------------------------

    def summary(self, summary: dict[str, Any]) -> None:
        """Print what a run came to."""
        table = Table(title=f"{summary['out']}, {_ranks(summary['ranks'])}")
        table.add_column("")
        table.add_column("", justify="right")
        table.add_row("steps", str(summary["steps"]))
        table.add_row("time", f"{summary['seconds']:.1f} s")
        table.add_row("memory of a rank", f"{max(summary['peak_bytes']) / 2**20:.0f} MiB")
        for kind in ("valid", "test"):
            for name, value in summary.get(kind, {}).items():
                table.add_row(f"{kind} {name}", f"{value:.5g}")
        Console(quiet=self.console.quiet).print(table)


def show_check(found: Checked, recipe: Recipe, ranks: int) -> None:
    """Print what a recipe comes to."""
    table = Table(title=f"{recipe.model.name} on {_ranks(ranks)}")
    table.add_column("")
    table.add_column("", justify="right")
    dealt = ", ".join(f"{count} {name}" for name, count in found.samples.items())
    table.add_row("model", f"{found.parameters:,} parameters, {found.layers} layers")
    table.add_row("samples", dealt)
    table.add_row(
        "input", f"{_times(found.input_shape)}, of which a rank {_times(found.slab_shape)}"
    )
    table.add_row(
        "memory of a rank", f"{_mib(found.model_bytes)} and {_mib(found.input_bytes)} input"
    )
    table.add_row("memory there is", _mib(found.limit_bytes))
    console = Console()
    console.print(table)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)
    console.print("[green]fits[/]" if found.fits else "[red]does not fit the memory[/]")


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count > 1 else ''}"


def _times(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
