"""Rows over (max, +): a time as the latest of some inputs, each delayed by so many seconds."""

from __future__ import annotations

import math
from operator import le

Row = tuple[float, ...]


def nowhere_later(first: Row, second: Row) -> bool:
    """Whether all times of ``first`` are at most those of ``second``, whatever the inputs are; rows in a row."""
    return all(map(le, first, second))


def later(first: Row, second: Row) -> Row:
    """Return the later of two times."""
    # Half of what map(max, ...) takes; searches do little else.
    return tuple([b if b > a else a for a, b in zip(first, second, strict=True)])


def shifted(row: Row, time_s: float) -> Row:
    """Return the time ``time_s`` after another one."""
    return tuple(value + time_s for value in row)


def cycle_mean(rows: list[Row]) -> float:
    """Return the largest mean weight of a cycle of a matrix over (max, +), by Karp's theorem."""
    num = len(rows)
    walks = [[0.0] * num]
    for _ in range(num):
        walks.append([max(map(float.__add__, row, walks[-1])) for row in rows])
    best = 0.0
    for node, last in enumerate(walks[num]):
        if last > -math.inf:
            best = max(best, min((last - walks[k][node]) / (num - k) for k in range(num)))
    return best
