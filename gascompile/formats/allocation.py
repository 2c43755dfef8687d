"""Which weight gets which form: an error of the outputs in few bytes, under a ceiling of them. Pure arithmetic.

Errors of different weights are independent, so their squares add up. The weight's form is moved up in steps,
of all weights that with the largest gain per byte first, until the error is small enough or the ceiling is reached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from gascompile.formats.layout import LAYOUT

CEILINGS: Final[Mapping[str, float]] = {"int8": 0.58, "int4": 0.55}
"""Most that the matrices may take, of what they take at two bytes a value."""
UNMEASURED_CEILINGS: Final[Mapping[str, float]] = {"int8": 0.58, "int4": 0.40}
"""The same where nobody knows how large an error of the outputs is."""
TARGETS: Final[Mapping[str, float]] = {"int8": 0.007, "int4": 0.042}
"""Relative error of the outputs that is small enough; well below the 1 % and 6 % that the forms are meant for,
as other inputs feel errors more than those that were measured on."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One form that a weight may have."""

    form: str
    size_bytes: int
    error: float
    """Square of what it makes of the outputs' relative error."""


def allocate(
    choices: Mapping[str, list[Choice]], limit_bytes: int, *, enough: float | None = None
) -> dict[str, str]:
    """Return the form of each weight.

    Args:
        choices: forms of every weight, at least one each.
        limit_bytes: of all weights together; where even the smallest forms take more, these are returned.
        enough: sum of the errors from which on no more bytes are spent; without it, none is small enough.
    """
    form_of = {}
    total_bytes, error = 0, 0.0
    steps: list[tuple[float, str, int, Choice]] = []
    for name, known in choices.items():
        path = _hull(known)
        form_of[name] = path[0].form
        total_bytes += path[0].size_bytes
        error += path[0].error
        for number, (before, after) in enumerate(pairwise(path)):
            steps.append((-_gain(before, after), name, number, after))
    reached = {name: _hull(known)[0] for name, known in choices.items()}
    left_out: set[str] = set()
    for _, name, _, after in sorted(steps, key=lambda step: step[:3]):
        if enough is not None and error <= enough:
            break
        more_bytes = after.size_bytes - reached[name].size_bytes
        if name in left_out or total_bytes + more_bytes > limit_bytes:
            left_out.add(name)
            continue
        error -= reached[name].error - after.error
        form_of[name], reached[name] = after.form, after
        total_bytes += more_bytes
    return form_of


def _gain(before: Choice, after: Choice) -> float:
    return (before.error - after.error) / (after.size_bytes - before.size_bytes)


def _hull(choices: list[Choice]) -> list[Choice]:
    """Return the choices worth taking, from few bytes to many: each step gains less per byte than the one before."""
    path: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.size_bytes, c.error)):
        if path and choice.error >= path[-1].error:
            continue
        while len(path) > 1 and _gain(path[-2], path[-1]) <= _gain(path[-1], choice):
            path.pop()
        path.append(choice)
    return path


def packing_fields() -> dict[str, str]:
    """Return what beside options decides how weights are packed, and what they may lose, as text."""
    forms = repr((dict(CEILINGS), dict(UNMEASURED_CEILINGS), dict(TARGETS)))
    return {"packing": str(LAYOUT), "forms": forms}
