"""Rows and matrices over (max, +), as plain tuples."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = tuple[float, ...]
NEVER = -math.inf


def unit(column: int, num_columns: int) -> Row:
    """Return the row that passes one input on."""
    return tuple(0.0 if c == column else NEVER for c in range(num_columns))


def later(first: Row, second: Row) -> Row:
    """Return the later of two times, whatever the inputs are."""
    return tuple(map(max, first, second))


def shifted(row: Row, time_s: float) -> Row:
    """Return a time ``time_s`` after another one."""
    return tuple(value + time_s for value in row)


def largest_cycle_mean(matrix: Sequence[Row]) -> float:
    """Return the largest mean weight of a cycle, by Karp's theorem from a source before all nodes."""
    num = len(matrix)
    walks = [[0.0] * num]
    for _ in range(num):
        last = walks[-1]
        walks.append([max(map(float.__add__, row, last)) for row in matrix])
    best = NEVER
    for node in range(num):
        final = walks[num][node]
        if final > NEVER:
            means = [(final - walks[k][node]) / (num - k) for k in range(num)]
            best = max(best, min(means))
    return best
