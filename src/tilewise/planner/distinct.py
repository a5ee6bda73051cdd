"""Which rows of a table are equal."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

LARGEST = 1 << 62
"""Numbers that stand for rows are below this."""


def distinct_rows(table: Ints) -> tuple[Ints, Ints]:
    """Return where each different row stands first, in order of rows, and which one each row is.

    numpy compares whole rows, which takes many times as long as numbers that stand for them.
    """
    number = np.zeros(len(table), np.int64)
    count = 1
    for column in table.T if len(table) else ():
        least = int(column.min())
        values, width = column - least, int(column.max()) - least + 1
        if count * width >= LARGEST:
            seen, values = np.unique(column, return_inverse=True)
            values, width = values.reshape(-1), len(seen)
        if count * width >= LARGEST:
            number = np.unique(number, return_inverse=True)[1].reshape(-1)
            count = int(number.max()) + 1
        number = number * width + values
        count *= width
    _, first, where = np.unique(number, return_index=True, return_inverse=True)
    return first, where.reshape(-1)
