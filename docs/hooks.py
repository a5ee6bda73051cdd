"""Put what is generated from the code into the pages."""

from __future__ import annotations

from typing import Any

from tilewise.cli.reference import reference

COMMANDS = "<!-- commands -->"


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Write the command line's reference where a page asks for it."""
    return markdown.replace(COMMANDS, reference()) if COMMANDS in markdown else markdown
