"""Site segments: what copies between sites cost at least, wherever each op runs.

An op that all others come before or after divides an iteration: what lies between two such ops, a *segment*, begins
when the first has ended and ends before the second starts. So the least times of segments add up, each over the four
choices of where its two ends run. Within one, ops of a site away from where the first end ran start no sooner than
the smallest value of the segment can be there; those of a site away from the second end are over as long before it
starts. In the rest of its time each site does its share of the ops, of which fractions may be anywhere.

    least T with   sum_i f_i t_i,there <= T - lag before - lag behind     for each site, f_i + f_i' = 1

An op runs at one site, as tiles stay where the tier that computes is: what crosses is whole. But one that may be in
parts divides nothing, takes what its parts take at all sites at once, and of its result next to nothing may cross.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from gascompile.core.machine import Link, Machine
from gascompile.core.workload import OpSpec, TensorKind, Workload
from gascompile.passes.bounds.site_limit import least_s

_MOST_OPS = 8192
"""Of more, who comes before whom takes too much memory."""
_HALVINGS = 50
"""Of an interval of seconds: what is left of it is the last bits of a double."""
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
    return _Iteration(workload, own, other, links).least_s()


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

    def least_s(self) -> float:
        """Return the least seconds of all segments, one after the other."""
        ends = [*self._barriers(), len(self.ops)]
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
        lags = {
            (a, b): self._lag_s(before, end, a, b) for a in self.sites for b in self.sites if a != b
        }
        if first and first != last and not inside:
            return lags[first, last]
        taken_s = [
            (lags[first, site] if first not in ("", site) else 0.0)
            + (lags[site, last] if site != last else 0.0)
            for site in self.sites
        ]
        low = self._path_s(before + 1, end)
        high = low + sum(max(self._times_s(op)) for op in inside) + sum(taken_s)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            rooms_s = [max(0.0, middle - time_s) for time_s in taken_s]
            if self._own_s(inside, rooms_s[1]) <= rooms_s[0]:
                high = middle
            else:
                low = middle
        return low

    def _own_s(self, ops: Sequence[OpSpec], room_s: float) -> float:
        """Return what is left to the tier that computes when the other has ``room_s``, filled with what saves most."""
        own, other = self.sites
        left_s = 0.0
        able: list[tuple[float, float]] = []
        for op in ops:
            here_s, there_s = op.time_s.get(own, math.inf), op.time_s.get(other, math.inf)
            if here_s == math.inf:
                room_s -= there_s
            elif there_s == math.inf:
                left_s += here_s
            else:
                able.append((here_s, there_s))
        if room_s < 0:
            return math.inf
        for here_s, there_s in sorted(able, key=lambda t: t[1] / t[0] if t[0] else math.inf):
            share = min(1.0, room_s / there_s) if there_s else 1.0
            room_s -= share * there_s
            left_s += (1 - share) * here_s
        return left_s

    def _times_s(self, op: OpSpec) -> list[float]:
        return [op.time_s[site] for site in self.sites if site in op.time_s]

    def _path_s(self, begin: int, end: int) -> float:
        """Return what ops of a range that need each other take at their fastest."""
        reached_s: dict[int, float] = {}
        for i in range(begin, end):
            waited_s = max((reached_s.get(k, 0.0) for k, _ in self.needs[i]), default=0.0)
            reached_s[i] = waited_s + least_s(self.ops[i], self.sites)
        return max(reached_s.values(), default=0.0)

    def _lag_s(self, before: int, end: int, source: str, target: str) -> float:
        """Return what the smallest value takes that is made in a segment, or right before it, and needed in it."""
        link = self.links[source, target]
        needed = [name for i in range(before + 1, end) for k, name in self.needs[i] if k >= before]
        if end < len(self.ops):
            needed += [name for k, name in self.needs[end] if k >= before]
        else:
            made = {name for op in self.ops[max(before, 0) :] for name in op.writes}
            needed += sorted(made)
        return min((link.transfer_time_s(self.sizes[name]) for name in needed), default=0.0)


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
