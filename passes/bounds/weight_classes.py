"""Weight classes: weights of about the same size, of which a bound counts how many are streamed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from gascompile.passes.model.problem import Problem, Weight

_MOST_CLASSES = {1: 16, 2: 8, 3: 5, 4: 3}
"""By the number of links; for more links there are too many occupancies."""
_MOST_SIZES = 512
"""Where more sizes differ, those next to each other are one from the start."""


@dataclass(frozen=True, slots=True)
class WeightClass:
    """Weights of about the same size, counted in units of the smallest one's bytes.

    What is said of a unit holds for every member's share of it at least.
    """

    count: float
    size_bytes: int
    in_use_bytes: int
    """What any one of the weights takes in the arena."""
    kept_bytes: float
    """What a unit takes in the arena where it stays."""
    transfers: float
    """Transfers per unit."""
    op_s: float
    """Seconds for which an op holds a unit."""


_Group = list[tuple[Weight, float]]
"""Weights of about the same size, each with the seconds of the ops that hold it."""


def weight_classes(problem: Problem, num_links: int) -> list[WeightClass]:
    """Return classes of the weights, the smallest first; each op is held by the largest weight it reads."""
    weights = [weight for weight in problem.weights if weight.uses]
    largest: dict[int, str] = {}
    for weight in sorted(weights, key=lambda weight: weight.size_bytes):
        largest.update(dict.fromkeys(weight.uses, weight.name))
    by_size: dict[int, _Group] = {}
    for weight in weights:
        held = [op for op in weight.uses if largest[op] == weight.name]
        op_s = sum(problem.op_times_s[op] for op in held)
        by_size.setdefault(weight.size_bytes, []).append((weight, op_s))
    most = _MOST_CLASSES.get(num_links, 0)
    groups = [by_size[size] for size in sorted(by_size) if size] if most else []
    return [_class(group) for group in _merged(groups, most)]


def _merged(groups: list[_Group], most: int) -> list[_Group]:
    """Return at most ``most`` groups: neighbours that hold few bytes become one."""
    if len(groups) > _MOST_SIZES:
        step = -(-len(groups) // _MOST_SIZES)
        groups = [list(chain(*groups[i : i + step])) for i in range(0, len(groups), step)]
    totals = [sum(weight.size_bytes for weight, _ in group) for group in groups]
    while len(groups) > most:
        i = min(range(len(groups) - 1), key=lambda i: totals[i] + totals[i + 1])
        groups[i : i + 2] = [groups[i] + groups[i + 1]]
        totals[i : i + 2] = [totals[i] + totals[i + 1]]
    return groups


def _class(group: _Group) -> WeightClass:
    unit = min(weight.size_bytes for weight, _ in group)
    return WeightClass(
        count=sum(weight.size_bytes for weight, _ in group) / unit,
        size_bytes=unit,
        in_use_bytes=min(weight.reserved_bytes for weight, _ in group),
        kept_bytes=min(weight.reserved_bytes * unit / weight.size_bytes for weight, _ in group),
        transfers=min(unit / weight.size_bytes for weight, _ in group),
        op_s=min(op_s * unit / weight.size_bytes for weight, op_s in group),
    )
