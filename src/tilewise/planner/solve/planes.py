"""Where the lowest of some planes is highest: a small linear program.

    maximise  min over rows of (a + g·y)    with 0 ≤ y ≤ most

Solved from the other side, by the simplex method: of all mixtures of rows (a, g) whose mean of g is
at most zero, that with the least mean of a. For each column, what a mixture has above zero may be
bought off at the price `most`. The mixture says which rows are in each other's way.
"""

from __future__ import annotations

import numpy as np

from tilewise.planner.solve.problem import Floats

ANEW = 25
"""After how many exchanges to invert the basis anew, as rounding adds up."""
TURNS = 10
"""After so many exchanges for each row of the basis, take the first that helps, not the best."""


def highest(constants: Floats, slopes: Floats, most: Floats) -> tuple[Floats, float, Floats]:
    """Return the best y, the height there, and the mixture; slopes have a row for each plane."""
    rows, columns = slopes.shape
    unit = np.abs(slopes).max(0)
    unit = np.where(unit > 0, unit, 1.0)
    size = max(float(np.abs(constants).max()), 1e-300)
    identity = np.eye(columns)
    matrix = np.block(
        [
            [(slopes / unit).T, -identity, identity],
            [np.ones(rows), np.zeros(2 * columns)],
        ]
    )
    prices = np.concatenate((constants / size, most * unit / size, np.zeros(columns)))
    first = int(constants.argmin())
    over = matrix[:-1, first] > 0
    basis = np.append(rows + np.arange(columns) + np.where(over, 0, columns), first)
    multipliers = np.zeros(columns + 1)  # at which any height is a true one
    inverse, amounts = np.eye(columns + 1), np.append(np.zeros(columns), 1.0)
    for turn in range(4 * TURNS * (columns + 1)):
        if turn % ANEW == 0:
            inside = matrix[:, basis]
            if np.linalg.cond(inside) > 1e14:
                break  # rounding has led to a basis that is none
            inverse = np.linalg.inv(inside)
            amounts = inverse[:, -1].clip(0.0)
        multipliers = prices[basis] @ inverse
        reduced = prices - multipliers @ matrix
        rounding = 1e-11 * max(1.0, float(np.abs(multipliers).max()))
        helping = np.flatnonzero(reduced < -rounding)
        if not len(helping):
            break
        stuck = turn > TURNS * (columns + 1)
        enters = int(helping[0] if stuck else helping[reduced[helping].argmin()])
        step = inverse @ matrix[:, enters]
        falls = np.flatnonzero(step > 1e-10)
        if not len(falls):
            break
        ratios = amounts[falls] / step[falls]
        ties = falls[ratios <= ratios.min() + 1e-14]
        leaves = int(ties[basis[ties].argmin()] if stuck else ties[step[ties].argmax()])
        amount, row = amounts[leaves] / step[leaves], inverse[leaves] / step[leaves]
        amounts = (amounts - amount * step).clip(0.0)
        inverse = inverse - np.outer(step, row)
        amounts[leaves], inverse[leaves], basis[leaves] = amount, row, enters
    found = np.clip(-multipliers[:-1] * size / unit, 0.0, most)
    mixture = np.zeros(matrix.shape[1])
    mixture[basis] = amounts
    return found, float((constants + slopes @ found).min()), mixture[:rows]
