"""What a report cannot show."""

from __future__ import annotations

from tilewise.errors import TilewiseError


class ReportError(TilewiseError, ValueError):
    """Something that a report cannot show."""
