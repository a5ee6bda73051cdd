"""Say where a line or a curve does not fit what was measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping

LARGE = 0.25
"""From which typical error on a fit is not to be trusted."""


def warn_of_fits(errors: Mapping[str, float]) -> None:
    """Print a warning for the fits whose typical relative error is large."""
    bad = [f"{name} {error:.0%}" for name, error in errors.items() if error >= LARGE]
    if bad:
        print(
            f"warning: some fits are bad, their typical errors are: {', '.join(bad)}. What is "
            "predicted from them is rough; measure again while nothing else runs on the machine.",
            file=sys.stderr,
        )
