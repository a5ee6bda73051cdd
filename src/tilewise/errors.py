"""The errors a user can meet. Each message names the place, the value, the rule and the way out."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class TilewiseError(Exception):
    """The base of every error raised on purpose."""


class LayoutError(TilewiseError, ValueError):
    """Degrees or shapes that cannot describe a split."""


class OperatorError(TilewiseError, ValueError):
    """An operator's arguments are illegal, as they would be on one device."""


class PlanError(TilewiseError, ValueError):
    """A plan asks a layer for something that the layer does not have."""


class CaptureError(TilewiseError, ValueError):
    """A model cannot be captured."""


class DataError(TilewiseError, ValueError):
    """A file, a key or a value of a data set is not what it should be."""


class MismatchError(TilewiseError, RuntimeError):
    """Ranks disagree about what they are about to do; raised on all of them."""


class CommError(TilewiseError, RuntimeError):
    """A peer died or did not answer in time."""


class InputError(TilewiseError, ValueError):
    """Something on the command line or in the environment that cannot be used."""


class RecipeError(TilewiseError, ValueError):
    """A key or a value of a recipe that cannot be used."""


class TrainingError(TilewiseError, RuntimeError):
    """Training cannot go on."""


class CheckpointError(TilewiseError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or is not of this model."""


def meant(word: str, known: Iterable[str]) -> str:
    """Ask for what may have been meant, as a part of an error's text; empty if nothing is near."""
    near = get_close_matches(word, list(known), 1)
    return f"did you mean {near[0]!r}? " if near else ""
