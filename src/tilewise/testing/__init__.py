"""Tools for authors of operators: local ranks, comparison with one device, adjoint tests."""

from tilewise.testing.compare import assert_adjoint, assert_close, assert_matches_serial, error
from tilewise.testing.ranks import RanksError, ranks

__all__ = [
    "RanksError",
    "assert_adjoint",
    "assert_close",
    "assert_matches_serial",
    "error",
    "ranks",
]
