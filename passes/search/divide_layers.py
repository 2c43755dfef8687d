"""Divide layers: linear layers of which two processors compute a part each, with the rows that they have.

A layer whose weight does not fit the tier that computes is streamed, or sent as a whole to the processor that has it,
while the other one waits. In between lies a share of its output features: that part is computed where its rows rest
and never cross the link, beside the other part, and the two are joined where the whole is needed. Shares are the same
for all layers at first, or weighed by a formula, each for another price of the link's time; schedules are made of them
in the order of what is certain, and the best one's shares are changed as long as that makes it faster. Layers of one
shape have one share or two, or, of few layers, each its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gascompile.core.tiles import Tile
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.cost_models.formulas.contention import giving_s
from gascompile.passes.graph.divide import Division, divide
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.site_choices import certain_s
from gascompile.passes.search.site_routes import closed
from gascompile.passes.search.sites import SitedSchedule, best_with, other_tiers, searched
from gascompile.passes.search.strategies import MANY_WEIGHTS

_STEPS = 16
"""Shares are multiples of one part of so many."""
_GROUPS = ((1024, 64), (0, 16))
"""From so many rows on parts have a multiple of so many, as matrix kernels like it."""
_PRICES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95)
"""Of a second of the link, in seconds of an iteration, of which the ops have the rest."""
_MOST_SHARES = 12
"""Layers of one shape have up to two shares each, or all layers their own, as long as there are no more."""
_STRIDES = (1, 4, 8)
"""Steps that a share is changed by, and another one by some the other way."""
_TRIED_OPS = 200_000
"""Ops of divided workloads that are gone through to tell what is certain. [Empirical] Some five seconds on one core."""
_SCHEDULED_OPS = 20_000
"""Ops of those that schedules are made of. [Empirical] A schedule takes four to ten times as long."""
_MOST_SCHEDULES = 80
"""Of one workload. [Empirical] With 28 layers in parts these take two seconds on one core."""
_SEARCHED = 2
"""Choices of many weights whose schedules are sought as thoroughly as those of few."""

Shares = tuple[int, ...]
"""Steps of each group of layers that the other processor has, 0 to ``_STEPS``."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one shape, which have one share."""

    ops: tuple[OpSpec, ...]
    rows: int
    weight_bytes: int
    own_s: float
    other_s: float
    out_s: float
    """Of copying the input to the other processor."""
    back: tuple[float, float]
    """Seconds of copying nothing of the result back, and more for all of it."""
    join_s: float
    """Of putting the result together."""


def divide_layers(
    task: Problem,
    best_s: float,
    fits: Callable[[SitedSchedule], bool],
    again: Callable[[Workload], Problem],
) -> SitedSchedule | None:
    """Return the fastest schedule found in which layers are divided between two processors, if it beats ``best_s``.

    Args:
        task: the problem with whole layers, all on the tier that computes.
        best_s: seconds to beat.
        fits: whether the account of a schedule keeps the budget.
        again: makes the same problem of the workload in parts.
    """
    best: SitedSchedule | None = None
    for tier in other_tiers(task):
        kinds = _kinds(task, tier)
        if not kinds:
            continue
        trials = _Trials(task, tier, kinds, again, fits)
        best = trials.scheduled(best.seconds if best else best_s) or best
    return best


def _kinds(task: Problem, tier: str) -> list[_Kind]:
    """Return the layers that may be divided, by what they take."""
    own, machine = task.machine.compute_tier, task.machine
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    lasting = {t.name for t in task.workload.tensors if t.kind == TensorKind.WEIGHT}
    out, back = machine.link(f"{own}->{tier}"), machine.link(f"{tier}->{own}")
    rates = {rate.device: rate.bandwidth_bytes_per_s for rate in machine.memory}
    ops_of: dict[tuple[float, ...], list[OpSpec]] = {}
    for op in task.workload.ops:
        is_layer = bool(op.cuts) and lasting.issuperset(op.cuts)
        if not is_layer or not {own, tier} <= op.time_s.keys() or own not in rates:
            continue
        given = sum(sizes[name] for name in op.reads if name not in lasting)
        made = sum(sizes[name] for name in op.writes)
        weight, rows = next(iter(op.cuts.items()))
        if _is_cut(rows, _STEPS // 2):
            key = (rows, sizes[weight], op.time_s[own], op.time_s[tier], given, made)
            ops_of.setdefault(key, []).append(op)
    return [
        _Kind(
            ops=tuple(ops),
            rows=int(rows),
            weight_bytes=int(size),
            own_s=own_s,
            other_s=other_s,
            out_s=out.transfer_time_s(int(given)) + giving_s(machine, int(given)),
            back=(
                back.latency_s + giving_s(machine, 0),
                made / back.bandwidth_bytes_per_s
                + giving_s(machine, int(made))
                - giving_s(machine, 0),
            ),
            join_s=2 * made / rates[own],
        )
        for (rows, size, own_s, other_s, given, made), ops in ops_of.items()
    ]


def _groups(kinds: Sequence[_Kind]) -> list[_Kind]:
    """Return the layers that have one share each: all apart, every other one of a shape, or all of a shape."""
    for parts in (max(len(kind.ops) for kind in kinds), 2):
        groups = [
            replace(kind, ops=kind.ops[k::parts])
            for kind in kinds
            for k in range(min(parts, len(kind.ops)))
        ]
        if len(groups) <= _MOST_SHARES:
            return groups
    return list(kinds)


def _cut(rows: int, share: int) -> int:
    """Return the first row of the other processor's part, 0 or ``rows`` where one of them has them all."""
    group = next(group for least, group in _GROUPS if rows >= least)
    return min(round(rows * (_STEPS - share) / _STEPS / group) * group, rows) if share else rows


def _is_cut(rows: int, share: int) -> bool:
    return 0 < _cut(rows, share) < rows


class _Trials:
    """Choices of shares, and what is known of each."""

    def __init__(
        self,
        task: Problem,
        tier: str,
        kinds: Sequence[_Kind],
        again: Callable[[Workload], Problem],
        fits: Callable[[SitedSchedule], bool],
    ) -> None:
        """Have tried none."""
        self._task, self._tier, self._again, self._fits = task, tier, again, fits
        self._kinds = _groups(kinds)
        self._certain: dict[Shares, float] = {}
        self._certain_left = _TRIED_OPS
        self._made: dict[Shares, SitedSchedule | None] = {}
        self._ops_left = _SCHEDULED_OPS

    def scheduled(self, best_s: float) -> SitedSchedule | None:
        """Return the fastest schedule found, if it beats ``best_s``."""
        known = {shares: self._certain_s(shares) for shares in self._first()}
        chosen: Shares | None = None
        limit_s = best_s
        for shares in sorted(known, key=lambda shares: (known[shares], shares)):
            if (tried_s := self._seconds(shares, limit_s)) < limit_s:
                chosen, limit_s = shares, tried_s
        if chosen is not None:
            chosen = self._improved(chosen, limit_s)
        best = self._made[chosen] if chosen is not None else None
        for shares in sorted(self._certain, key=lambda shares: (self._certain[shares], shares))[
            :_SEARCHED
        ]:
            divided, sent = self.divided(shares)
            if len(divided.weights) < MANY_WEIGHTS:
                break  # it has been
            limit_s = best.seconds if best is not None else best_s
            best = searched(divided, self._tier, sent, limit_s, self._fits) or best
        return best

    def _seconds(self, shares: Shares, best_s: float) -> float:
        """Return the seconds of a schedule with ``shares``; infinity where none beats ``best_s``."""
        if self._certain_s(shares) >= best_s:
            return math.inf
        if shares not in self._made:
            divided, sent = self.divided(shares)
            if self._ops_left < 0 or len(self._made) >= _MOST_SCHEDULES:
                return math.inf
            self._ops_left -= len(divided.workload.ops)
            choice = (divided, self._tier, sent, best_s, self._fits)
            is_small = len(divided.weights) < MANY_WEIGHTS
            sited = searched(*choice) if is_small else best_with(*choice)[1]
            self._made[shares] = sited
        sited = self._made[shares]
        return sited.seconds if sited is not None else math.inf

    def _improved(self, shares: Shares, best_s: float) -> Shares:
        """Return ``shares`` with one or two of them changed at a time, as long as that makes schedules faster."""
        improves = True
        while improves:
            improves = False
            for changed in self._near(shares):
                if (tried_s := self._seconds(changed, best_s)) < best_s:
                    shares, best_s, improves = changed, tried_s, True
                    break
        return shares

    def _near(self, shares: Shares) -> Iterator[Shares]:
        """Yield shares of which one is changed, and such in which another one makes up for it."""
        for stride, k in itertools.product(_STRIDES, range(len(shares))):
            yield _changed(shares, {k: stride})
            yield _changed(shares, {k: -stride})
        for more, less in itertools.product(_STRIDES, _STRIDES):
            for k, other in itertools.permutations(range(len(shares)), 2):
                yield _changed(shares, {k: more, other: -less})

    def divided(self, shares: Shares) -> tuple[Problem, frozenset[int]]:
        """Return the problem with layers in parts, and which weights rest at the other processor."""
        cuts: dict[str, tuple[int, ...]] = {}
        names: set[str] = set()
        for kind, share in zip(self._kinds, shares, strict=True):
            row = _cut(kind.rows, share)
            for op in kind.ops if row < kind.rows else ():
                if row:
                    cuts[next(iter(op.cuts))] = (row,)
                tiles = (Tile(name, row, kind.rows).name for name in op.cuts)
                names.update(tiles if row else op.cuts)
        workload = divide(self._task.workload, self._task.machine, Division(cuts=cuts))
        task = self._again(workload)
        sent = frozenset(i for i, weight in enumerate(task.weights) if weight.name in names)
        return task, closed(task, sent, self._tier)

    def _first(self) -> Iterator[Shares]:
        """Yield the same share of all layers, and what takes least by a formula, for several prices of the link."""
        for share in range(1, _STEPS):
            yield (share,) * len(self._kinds)
        links = self._task.links
        rate = max((link.bandwidth_bytes_per_s for link in links), default=math.inf)
        for price in _PRICES:
            yield tuple(_cheapest(kind, price, rate) for kind in self._kinds)

    def _certain_s(self, shares: Shares) -> float:
        """Return what an iteration takes at least with ``shares``; infinity where nothing is in parts."""
        if shares not in self._certain:
            is_divided = any(
                _is_cut(kind.rows, share) for kind, share in zip(self._kinds, shares, strict=True)
            )
            self._certain[shares] = math.inf
            if is_divided and self._certain_left >= 0:
                task, sent = self.divided(shares)
                self._certain_left -= len(task.workload.ops)
                self._certain[shares] = certain_s(task, self._tier, sent) if sent else math.inf
        return self._certain[shares]


def _changed(shares: Shares, strides: Mapping[int, int]) -> Shares:
    moved = (share + strides.get(k, 0) for k, share in enumerate(shares))
    return tuple(min(max(share, 0), _STEPS) for share in moved)


def _cheapest(kind: _Kind, price: float, rate: float) -> int:
    costs = [_cost(kind, share, price, rate) for share in range(_STEPS + 1)]
    return costs.index(min(costs))


def _cost(kind: _Kind, share: int, price: float, rate: float) -> float:
    """Return the seconds of a layer, and of the bytes that are left to stream at ``price`` a second."""
    part = share / _STEPS
    there_s = kind.out_s + part * kind.other_s + kind.back[0] + part * kind.back[1]
    here_s = (1 - part) * kind.own_s
    joins = 0 < share < _STEPS
    ops_s = (max(here_s, there_s) if share else here_s) + joins * kind.join_s
    return (1 - price) * ops_s + price * (1 - part) * kind.weight_bytes / rate
