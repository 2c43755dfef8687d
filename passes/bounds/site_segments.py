"""Site segments: what copies between sites cost at least, wherever each op runs.

An op that all others come before or after divides an iteration: what lies between two such ops, a *segment*, begins
when the first has ended and ends before the second starts. So the least times of segments add up, each over the four
choices of where its two ends run. Within one, ops of a site away from where the first end ran start no sooner than
the smallest value of the segment can be there; those of a site away from the second end are over as long before it
starts. In the rest of its time each site does its share of the ops, of which fractions may be anywhere.

    least T with   sum_i f_i t_i,there <= T - lag before - lag behind     for each site, f_i + f_i' = 1

An op runs at one site, as tiles stay where the tier that computes is: what crosses is whole. But one that may be in
parts divides nothing, takes what its parts take at all sites at once, and of its result next to nothing may cross.

Where processors slow each other down (``contention``), ops take longer by how much of their site's time the other one
is at ops: all of it at the site with less to do, ``r`` at one that has the ``1 / r``-fold. Nobody knows ``r``, but of
an interval it is the lower end at least; and the site with more has at least what is left where the other one has the
upper end. So all ``r`` of both cases are divided into intervals, the one whose bound is least first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from gascompile.core.machine import Link, Machine
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.cost_models.formulas.contention import slowed_by
from gascompile.passes.bounds.site_limit import least_s

_MOST_OPS = 8192
"""Of more, who comes before whom takes too much memory."""
_MOST_INTERVALS = 24
"""Of how much the one site has to do beside the other."""
_MOST_WORK = 40_000
"""Ops that are gone through for all of these."""
_Edges = Sequence[tuple[int, str]]


def site_segments(workload: Workload, machine: Machine) -> float:
    """Return seconds that no plan of an iteration beats, wherever its ops run; 0 where nothing is known.

    Args:
        workload: undivided; ops may have times on the tier that computes and on one more.
        machine: with the links between the two.
    """
    own = machine.compute_tier
    able = {t for t in machine.tiers if t != own and any(t in op.time_s for op in workload.ops)}
    links = {(link.source_tier, link.target_tier): link for link in machine.links}
    if len(able) != 1 or len(workload.ops) > _MOST_OPS:
        return 0.0
    (other,) = able
    if not {(own, other), (other, own)} <= links.keys():
        return 0.0
    iteration = _Iteration(workload, own, other, links)
    if machine.contention is None:
        return iteration.least_s()
    return _contended_s(iteration, workload.ops, machine)


def _contended_s(iteration: _Iteration, all_ops: Sequence[OpSpec], machine: Machine) -> float:
    """Return the least seconds where sites slow each other down, whatever either of them has to do."""
    alone = iteration.ops
    factors = [slowed_by(op, machine) for op in alone]
    least_factor = min((slowed_by(op, machine) for op in all_ops), default=1.0)

    def bound_s(more: str, low: float, high: float) -> float:
        """Return it where the other site is at ops for a share from ``low`` to ``high`` of what ``more`` is."""
        beside = dict.fromkeys(iteration.sites, 1.0) | {more: low}
        iteration.ops = [
            replace(op, time_s={site: t * (1 + beside.get(site, 0.0) * (factor - 1)) for site, t in op.time_s.items()})
            for op, factor in zip(alone, factors, strict=True)
        ]  # fmt: skip
        busy_s = _busiest_s(all_ops, more, iteration.sites, high)
        return max(iteration.least_s(), busy_s * (1 + low * (least_factor - 1)))

    intervals = [(bound_s(site, 0.0, 1.0), site, 0.0, 1.0) for site in iteration.sites]
    heapq.heapify(intervals)
    for _ in range(min(_MOST_INTERVALS, _MOST_WORK // (2 * len(all_ops) + 1))):
        _, site, low, high = heapq.heappop(intervals)
        middle = (low + high) / 2
        for part in ((low, middle), (middle, high)):
            heapq.heappush(intervals, (bound_s(site, *part), site, *part))
    return intervals[0][0]


def _busiest_s(ops: Sequence[OpSpec], more: str, sites: Sequence[str], share: float) -> float:
    """Return for how long ``more`` is at ops at least, where the other site is for no more than a share of that."""
    (other,) = (site for site in sites if site != more)
    times_s = [(op.time_s.get(more, math.inf), op.time_s.get(other, math.inf)) for op in ops]
    return _shared_s([(here_s, there_s / share) for here_s, there_s in times_s], (0.0, 0.0))


class _Iteration:
    """The ops that outputs need, in their order."""

    def __init__(
        self,
        workload: Workload,
        own: str,
        other: str,
        links: Mapping[tuple[str, str], Link],
    ) -> None:
        self.own, self.sites, self.links = own, (own, other), links
        self.sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
        self.ops, self.needs = _needed(workload)
        self.sizes.update(dict.fromkeys((n for op in self.ops if op.cuts for n in op.writes), 0))
        self.ends = [*self._barriers(), len(self.ops)]
        self._lags_s: dict[tuple[int, int, str, str], float] = {}

    def least_s(self) -> float:
        """Return the least seconds of all segments, one after the other."""
        ends = self.ends
        # The first segment has nothing before it that would be anywhere.
        least_s = {site: self._segment_s(-1, ends[0], "", site) for site in self.sites}
        for before, end in pairwise(ends):
            ended_s = {
                site: time_s + self.ops[before].time_s.get(site, math.inf)
                for site, time_s in least_s.items()
            }
            least_s = {
                site: min(
                    time_s + self._segment_s(before, end, first, site)
                    for first, time_s in ended_s.items()
                )
                for site in self.sites
            }
        # Outputs are given back by the tier that computes.
        return least_s[self.own] if math.isfinite(least_s[self.own]) else 0.0

    def _barriers(self) -> Iterator[int]:
        """Yield the ops that each other one comes before or after."""
        count = len(self.ops)
        before, after = [0] * count, [0] * count
        for i, needed in enumerate(self.needs):
            for k, _ in needed:
                before[i] |= before[k] | 1 << k
        for i in reversed(range(count)):
            for k, _ in self.needs[i]:
                after[k] |= after[i] | 1 << i
        for i in range(count):
            is_whole = not self.ops[i].cuts
            if is_whole and before[i].bit_count() + after[i].bit_count() == count - 1:
                yield i

    def _segment_s(self, before: int, end: int, first: str, last: str) -> float:
        """Return the least seconds between two barriers that run at ``first`` and ``last``.

        Args:
            before: the barrier before it; -1 at the beginning of the iteration.
            end: the one behind it; the number of ops at the end of the iteration.
            first: site of the barrier before it; empty where none is.
            last: site of the one behind it.
        """
        inside = self.ops[before + 1 : end]
        own, other = self.sites
        if first and first != last and not inside:
            return self._lag_s(before, end, first, last)
        lags_s = [
            (self._lag_s(before, end, first, site) if first not in ("", site) else 0.0)
            + (self._lag_s(before, end, site, last) if site != last else 0.0)
            for site in self.sites
        ]
        times_s = [(op.time_s.get(own, math.inf), op.time_s.get(other, math.inf)) for op in inside]
        return max(self._path_s(before + 1, end), _shared_s(times_s, (lags_s[0], lags_s[1])))

    def _path_s(self, begin: int, end: int) -> float:
        """Return what ops of a range that need each other take at their fastest."""
        reached_s: dict[int, float] = {}
        for i in range(begin, end):
            waited_s = max((reached_s.get(k, 0.0) for k, _ in self.needs[i]), default=0.0)
            reached_s[i] = waited_s + least_s(self.ops[i], self.sites)
        return max(reached_s.values(), default=0.0)

    def _lag_s(self, before: int, end: int, source: str, target: str) -> float:
        """Return what the smallest value takes that is made in a segment, or right before it, and needed in it."""
        known = self._lags_s.get((before, end, source, target))
        if known is not None:
            return known
        link = self.links[source, target]
        needed = [name for i in range(before + 1, end) for k, name in self.needs[i] if k >= before]
        if end < len(self.ops):
            needed += [name for k, name in self.needs[end] if k >= before]
        else:
            made = {name for op in self.ops[max(before, 0) :] for name in op.writes}
            needed += sorted(made)
        lag_s = min((link.transfer_time_s(self.sizes[name]) for name in needed), default=0.0)
        self._lags_s[before, end, source, target] = lag_s
        return lag_s


def _shared_s(times_s: Sequence[tuple[float, float]], lags_s: tuple[float, float]) -> float:
    """Return the least time in which two sites do ops, of which fractions may be at either.

    Args:
        times_s: of each op at the two, infinite where it cannot be.
        lags_s: how much sooner either has to be done, if it does anything.
    """
    here_s = sum(here for here, there in times_s if there == math.inf)
    there_s = sum(there for here, there in times_s if here == math.inf)
    able = sorted(
        (pair for pair in times_s if math.inf not in pair),
        key=lambda pair: pair[1] / pair[0] if pair[0] else math.inf,
    )
    # What is left here when the first ones, which save most, are there.
    left_s = [here_s]
    for here, _ in reversed(able):
        left_s.append(left_s[-1] + here)
    left_s.reverse()

    def done_s(here: float, there: float) -> float:
        return max(here + lags_s[0] if here else 0.0, there + lags_s[1] if there else 0.0)

    best_s = done_s(left_s[0], there_s)
    for (here, there), before_s, after_s in zip(able, left_s, left_s[1:], strict=False):
        more_s = before_s + lags_s[0] - there_s - lags_s[1]
        if 0 < more_s < here + there:
            best_s = min(best_s, there_s + lags_s[1] + more_s / (here + there) * there)
        there_s += there
        best_s = min(best_s, done_s(after_s, there_s))
    return best_s


def _needed(workload: Workload) -> tuple[list[OpSpec], list[_Edges]]:
    """Return the ops that outputs depend on and, per op, ``(op, tensor)`` of what it needs of those before it."""
    writer: dict[str, int] = {}
    needs: list[dict[tuple[int, str], None]] = []
    for i, op in enumerate(workload.ops):
        names = dict.fromkeys((*op.reads, *op.writes))
        needs.append({(writer[name], name): None for name in names if name in writer})
        writer.update(dict.fromkeys(op.writes, i))
    kept: set[int] = set()
    pending = [
        writer[tensor.name]
        for tensor in workload.tensors
        if tensor.kind == TensorKind.OUTPUT and tensor.name in writer
    ]
    while pending:
        i = pending.pop()
        if i not in kept:
            kept.add(i)
            pending.extend(k for k, _ in needs[i])
    number = {i: place for place, i in enumerate(sorted(kept))}
    ops = [workload.ops[i] for i in number]
    return ops, [tuple((number[k], name) for k, name in needs[i]) for i in number]
