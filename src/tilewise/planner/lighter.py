"""Of plans that take equally long, one that needs less memory.

The search stops at the first of several fastest plans. Others are near: one layer is split in
another way, or all layers are cut by the same factor along another letter, such as n4 w2 for w8.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from tilewise.planner.candidates import LETTERS
from tilewise.planner.formulation import Formulation
from tilewise.planner.solve import Descent, evaluate
from tilewise.planner.solve.known import know
from tilewise.planner.timeline import peak_bytes

Choice = tuple[int, ...]

EQUAL = 1e-12
"""Which share of a step is rounding."""


class Lighter:
    """Changes of plans that lower their peak and take no time."""

    def __init__(self, found: Formulation) -> None:
        self.found = found
        self._descent = Descent(know(found.problem), None)
        tables = [
            np.concatenate((some.table, some.again[:, None]), 1).tolist()
            for some in found.choices.candidates
        ]
        self._rows = tables
        self._places = [{tuple(row): k for k, row in enumerate(table)} for table in tables]

    def __call__(self, choice: Choice, deadline: float) -> Choice:
        """Return a plan that takes as long as `choice` and needs no more memory."""
        most = evaluate(self.found.problem, choice).seconds * (1 + EQUAL)
        peak, changed = peak_bytes(self.found, choice), True
        while changed:
            changed = False
            for other in self._near(choice, most):
                if time.monotonic() > deadline:
                    return choice
                with suppress(ValueError):  # layers that share a parameter are cut alike
                    if evaluate(self.found.problem, other).seconds <= most:
                        less = peak_bytes(self.found, other)
                        if less < peak:
                            choice, peak, changed = other, less, True
                            break
        return choice

    def _near(self, choice: Choice, most: float) -> Iterator[Choice]:
        """Yield plans that may be as fast: first those that differ in all layers, then in one."""
        yield from dict.fromkeys(self._exchanged(choice))
        for v, (seconds, _) in enumerate(self._descent.alone(choice)):
            for k in np.flatnonzero(seconds <= most * (1 + EQUAL)).tolist():
                if k != choice[v]:
                    yield (*choice[:v], k, *choice[v + 1 :])

    def _exchanged(self, choice: Choice) -> Iterator[Choice]:
        """Yield plans that are cut by a factor along one letter in place of another."""
        rows = [table[k] for table, k in zip(self._rows, choice, strict=True)]
        devices = self.found.setting.devices
        factors = [k for k in range(2, devices + 1) if devices % k == 0]
        for source in range(len(LETTERS)):
            for factor in factors:
                if all(row[source] % factor for row in rows):
                    continue
                for target in range(len(LETTERS)):
                    if target != source:
                        yield tuple(
                            places.get(_exchange(row, source, target, factor), k)
                            for row, places, k in zip(rows, self._places, choice, strict=True)
                        )


def _exchange(row: list[int], source: int, target: int, factor: int) -> tuple[int, ...]:
    if row[source] % factor:
        return tuple(row)
    out = list(row)
    out[source] //= factor
    out[target] *= factor
    return tuple(out)
