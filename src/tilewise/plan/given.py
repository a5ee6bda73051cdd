"""What a text may mean where a plan is asked for."""

from __future__ import annotations

from os.path import isfile

from tilewise.errors import LayoutError, meant
from tilewise.layout import Degrees

AUTO = "auto"
WORDS = (AUTO, "1", "")
"""What is never a file's name: `1` is the default, and a file of that name one of `2>1`."""


def is_file(text: str) -> bool:
    """Whether a text names a plan file: one that is there, whatever its name, or a `.json`."""
    return text not in WORDS and (text.endswith(".json") or isfile(text))


def whole_degrees(text: str) -> Degrees:
    """Read degrees for all layers; where a text has none, say what else it might have been."""
    try:
        return Degrees.parse(text)
    except LayoutError as error:
        guess = meant(text, [AUTO]).rstrip()
        guess = guess or "there is no plan file of that name either" * ("." in text or "/" in text)
        raise LayoutError(f"{error}; {guess}" if guess else str(error)) from error
