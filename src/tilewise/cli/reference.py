"""The command line's reference page, written from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from tilewise.cli.app import app

PROGRAM = "tilewise"


def reference() -> str:
    """Return all commands, their arguments and options, as Markdown."""
    root = typer.main.get_command(app)
    return "\n".join(
        line for name, command in _leaves(root, PROGRAM) for line in _page(name, command)
    )


def _leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands that do something, with the words that call them."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        yield name, command
        return
    for word, one in subcommands.items():
        yield from _leaves(one, f"{name} {word}")


def _page(name: str, command: Any) -> Iterator[str]:
    shown = [one for one in command.params if one.name != "help"]
    arguments = [str(one.name).upper() for one in shown if one.param_type_name == "argument"]
    yield f"## {name}\n"
    yield f"{(command.help or '').strip()}\n"
    yield f"    {' '.join([name, *arguments, '[options]'])}\n"
    yield "| | | default |\n|---|---|---|"
    for one in shown:
        yield f"| `{_named(one)}` | {_cell(getattr(one, 'help', None) or '')} | {_default(one)} |"
    yield ""


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.name).upper()
    return ", ".join([*parameter.opts, *parameter.secondary_opts])


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "needed"
    if value is None or value is False or callable(value) or value == ():
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
