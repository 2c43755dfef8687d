"""Divide layers: linear layers of which two processors compute a part each, with the rows that they have.

A layer whose weight does not fit the tier that computes is streamed, or sent as a whole to the processor that has it,
while the other one waits. In between lies a share of its output features: that part is computed where its rows rest
and never cross the link, beside the other part, and the two are joined where the whole is needed. Layers of one shape
have one share. Shares are first weighed by a formula, each for another price of the link's time, then changed while
that shortens what is certain; schedules are made of the best few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gascompile.core.tiles import Tile
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.passes.graph.divide import Division, divide
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.site_choices import certain_s
from gascompile.passes.search.site_routes import closed
from gascompile.passes.search.sites import SitedSchedule, best_with, other_tiers, searched

_STEPS = 16
"""Shares are multiples of one part of so many."""
_GROUPS = ((1024, 64), (0, 16))
"""From so many rows on parts have a multiple of so many, as matrix kernels like it."""
_PRICES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.95)
"""Of a second of the link, in seconds of an iteration, of which the ops have the rest."""
_STRIDES = (1, -1, 4, -4)
"""Steps that a share is changed by."""
_TRIED_OPS = 200_000
"""Ops of divided workloads that are gone through to change shares."""
_SCHEDULED = 3
"""Choices of shares that schedules are made of."""

Shares = tuple[int, ...]
"""Steps of each kind of layer that the other processor has, 0 to ``_STEPS``."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Layers of one shape."""

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
        trials = _Trials(task, tier, kinds, again)
        limit_s = best.seconds if best else best_s
        best = trials.scheduled(limit_s, fits) or best
    return best


def _kinds(task: Problem, tier: str) -> list[_Kind]:
    """Return the layers that may be divided, by what they take."""
    own, machine = task.machine.compute_tier, task.machine
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    lasting = {t.name for t in task.workload.tensors if t.kind == TensorKind.WEIGHT}
    out, back = machine.link(f"{own}->{tier}"), machine.link(f"{tier}->{own}")
    rates = {rate.device: rate.bandwidth_bytes_per_s for rate in machine.memory}
    found: dict[tuple[float, ...], list[OpSpec]] = {}
    for op in task.workload.ops:
        if not op.cuts or not {own, tier} <= op.time_s.keys() or own not in rates:
            continue
        given = sum(sizes[name] for name in op.reads if name not in lasting)
        made = sum(sizes[name] for name in op.writes)
        weight, rows = next(iter(op.cuts.items()))
        if _cut(rows, 1) is not None:
            key = (rows, sizes[weight], op.time_s[own], op.time_s[tier], given, made)
            found.setdefault(key, []).append(op)
    return [
        _Kind(
            ops=tuple(ops),
            rows=int(rows),
            weight_bytes=int(size),
            own_s=own_s,
            other_s=other_s,
            out_s=out.transfer_time_s(int(given)),
            back=(back.latency_s, made / back.bandwidth_bytes_per_s),
            join_s=2 * made / rates[own],
        )
        for (rows, size, own_s, other_s, given, made), ops in found.items()
    ]


def _cut(rows: int, share: int) -> int | None:
    """Return the first row of the other processor's part; ``None`` where a part would be empty."""
    group = next(group for least, group in _GROUPS if rows >= least)
    row = round(rows * (_STEPS - share) / _STEPS / group) * group
    return row if 0 < row < rows else None


class _Trials:
    """Choices of shares, and what is known of each."""

    def __init__(
        self,
        task: Problem,
        tier: str,
        kinds: Sequence[_Kind],
        again: Callable[[Workload], Problem],
    ) -> None:
        """Have tried none."""
        self._task, self._tier, self._kinds, self._again = task, tier, kinds, again
        self._left = _TRIED_OPS
        self._known: dict[Shares, float] = {}

    def scheduled(
        self, best_s: float, fits: Callable[[SitedSchedule], bool]
    ) -> SitedSchedule | None:
        """Return the fastest schedule of the most hopeful shares, if it beats ``best_s``."""
        for shares in self._weighed():
            self._certain_s(shares)
        for shares in self._ranked()[:2]:
            self._improve(shares)
        best: SitedSchedule | None = None
        chosen: Shares | None = None
        for shares in self._ranked()[:_SCHEDULED]:
            limit_s = best.seconds if best else best_s
            if self._known[shares] >= limit_s:
                break
            divided, sent = self.divided(shares)
            _, found = best_with(divided, self._tier, sent, limit_s, fits)
            if found is not None:
                best, chosen = found, shares
        if chosen is not None and best is not None:
            divided, sent = self.divided(chosen)
            best = searched(divided, self._tier, sent, best.seconds, fits) or best
        return best

    def divided(self, shares: Shares) -> tuple[Problem, frozenset[int]]:
        """Return the problem with layers in parts, and which weights rest at the other processor."""
        cuts: dict[str, tuple[int, ...]] = {}
        names: set[str] = set()
        for kind, share in zip(self._kinds, shares, strict=True):
            row = _cut(kind.rows, share)
            for op in kind.ops if share else ():
                if row is None:
                    names.update(op.cuts)
                    continue
                cuts[next(iter(op.cuts))] = (row,)
                names.update(Tile(name, row, kind.rows).name for name in op.cuts)
        workload = divide(self._task.workload, self._task.machine, Division(cuts=cuts))
        task = self._again(workload)
        sent = frozenset(i for i, weight in enumerate(task.weights) if weight.name in names)
        return task, closed(task, sent, self._tier)

    def _weighed(self) -> Iterator[Shares]:
        """Yield shares of which each takes least by a formula, for several prices of the link."""
        links = self._task.links
        rate = max((link.bandwidth_bytes_per_s for link in links), default=math.inf)
        for price in _PRICES:
            yield tuple(
                min(range(_STEPS + 1), key=lambda share, k=kind: _cost(k, share, price, rate))
                for kind in self._kinds
            )

    def _ranked(self) -> list[Shares]:
        return sorted(self._known, key=lambda shares: (self._known[shares], shares))

    def _certain_s(self, shares: Shares) -> float:
        """Return what an iteration takes at least with ``shares``; infinity where nothing is in parts."""
        if shares not in self._known:
            is_divided = any(
                share and _cut(kind.rows, share) is not None
                for kind, share in zip(self._kinds, shares, strict=True)
            )
            self._known[shares] = math.inf
            if is_divided:
                task, sent = self.divided(shares)
                self._left -= len(task.workload.ops)
                self._known[shares] = certain_s(task, self._tier, sent) if sent else math.inf
        return self._known[shares]

    def _improve(self, shares: Shares) -> None:
        """Change one share at a time as long as that shortens what is certain."""
        best_s = self._certain_s(shares)
        improves = True
        while improves:
            improves = False
            for k in range(len(shares)):
                for stride in _STRIDES:
                    share = min(max(shares[k] + stride, 0), _STEPS)
                    changed = (*shares[:k], share, *shares[k + 1 :])
                    if self._left < 0:
                        return
                    if (found_s := self._certain_s(changed)) < best_s:
                        shares, best_s, improves = changed, found_s, True


def _cost(kind: _Kind, share: int, price: float, rate: float) -> float:
    """Return the seconds of a layer, and of the bytes that are left to stream at ``price`` a second."""
    part = share / _STEPS
    there_s = kind.out_s + part * kind.other_s + kind.back[0] + part * kind.back[1]
    own_s = (1 - part) * kind.own_s
    if share == 0:
        ops_s = kind.own_s
    elif share == _STEPS:
        ops_s = there_s
    else:
        ops_s = max(own_s, there_s) + kind.join_s
    return (1 - price) * ops_s + price * (1 - part) * kind.weight_bytes / rate
