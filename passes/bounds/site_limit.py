"""Site limit: a time that no plan beats even when ops may run where their weights rest.

Sites compute at once. So of the ops' time only that along one path of results that need each other is certain,
and what each site has to do by itself. Bytes of weights whose ops are sent to their tier need not move, but
cost the time of the op there. Fractions of ops may be sent, the cheapest first, so every real choice is covered.
Of an op that may be in parts (``OpSpec.cuts``), each site does some at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from gascompile.core.machine import Machine
from gascompile.core.workload import OpSpec
from gascompile.passes.bounds.certify import physical_limit

_HALVINGS = 60
"""Of a whole number of bytes: more than the bits of any size, so that the search ends at one byte."""


def has_sites(ops: Sequence[OpSpec], machine: Machine) -> bool:
    """Whether an op has a time on a tier of ``machine`` besides the one that computes."""
    tiers = set(machine.tiers) - {machine.compute_tier}
    return any(tiers & op.time_s.keys() for op in ops)


def site_limit(
    ops: Sequence[OpSpec],
    machine: Machine,
    weight_bytes: Mapping[str, int],
    arena_bytes: int,
    room_bytes: Mapping[str, int],
) -> tuple[float, str]:
    """Return the limit in seconds and what sets it, as ``certify.physical_limit`` does.

    Where ops may run on several other tiers it is that of the longest path alone.

    Args:
        ops: what an iteration runs.
        machine: its links.
        weight_bytes: sizes of the weights that ops read.
        arena_bytes: what the compute tier can hold of them at most.
        room_bytes: what each slow tier may hold.
    """
    own = machine.compute_tier
    able = [t for t in machine.tiers if t != own and any(t in op.time_s for op in ops)]
    path = _longest_path(ops, (own, *able))
    path_s = sum(least_s(op, (own, *able)) for op in path)
    if len(able) != 1:
        return path_s, "compute"
    (tier,) = able
    total = sum(weight_bytes.values())
    on_path = {op.name for op in path}
    # A weight that is sent costs what its ops take longer there, or what they take of the site at all.
    longer = {
        op.name: op.time_s[tier] - least_s(op, (own, tier))
        if op.name in on_path and not op.cuts
        else 0.0
        for op in ops
        if tier in op.time_s
    }
    whole = {op.name: op.time_s[tier] for op in ops if tier in op.time_s}
    limits = [(_balance_s(ops, own, tier), "compute")]
    for base_s, costs in ((path_s, longer), (0.0, whole)):
        prices = _prices(ops, costs, weight_bytes)
        limits.append(
            _tier_limit(base_s, prices, tier, total, arena_bytes, machine, dict(room_bytes))
        )
    return max(limits, key=lambda limit: limit[0])


def least_s(op: OpSpec, sites: Iterable[str]) -> float:
    """Return the seconds of an op where it is fastest, or of its parts at all ``sites`` at once if it may have some."""
    times_s = [op.time_s[site] for site in sites if site in op.time_s]
    if op.cuts and min(times_s) > 0:
        return 1 / sum(1 / time_s for time_s in times_s)
    return min(times_s)


def _longest_path(ops: Sequence[OpSpec], sites: Sequence[str]) -> list[OpSpec]:
    """Return ops of which each needs what the one before it wrote, that take longest at their fastest."""
    writer: dict[str, int] = {}
    reached_s: list[float] = []
    before: list[int | None] = []
    for i, op in enumerate(ops):
        # Who writes what is there already comes after who wrote it before.
        needed = {writer[name] for name in (*op.reads, *op.writes) if name in writer}
        last = max(needed, key=lambda k: reached_s[k], default=None)
        before.append(last)
        reached_s.append((reached_s[last] if last is not None else 0.0) + least_s(op, sites))
        writer.update(dict.fromkeys(op.writes, i))
    path: list[OpSpec] = []
    at = max(range(len(ops)), key=lambda k: reached_s[k], default=None)
    while at is not None:
        path.append(ops[at])
        at = before[at]
    return path[::-1]


def _balance_s(ops: Sequence[OpSpec], own: str, tier: str) -> float:
    """Return the least time in which two sites do all ops, of which fractions may run at once.

    Ops go to the other site in the order of how much slower they are there; at the best point both end at once.
    """
    own_s = sum(op.time_s[own] for op in ops if own in op.time_s)
    elsewhere_s = sum(op.time_s[tier] for op in ops if own not in op.time_s)
    both = [op for op in ops if own in op.time_s and tier in op.time_s]
    for op in sorted(
        both, key=lambda o: o.time_s[tier] / o.time_s[own] if o.time_s[own] else math.inf
    ):
        here_s, there_s = op.time_s[own], op.time_s[tier]
        if elsewhere_s + there_s >= own_s - here_s:
            share = (own_s - elsewhere_s) / (here_s + there_s) if here_s + there_s else 0.0
            return max(own_s - max(share, 0.0) * here_s, elsewhere_s)
        own_s -= here_s
        elsewhere_s += there_s
    return max(own_s, elsewhere_s)


def _prices(
    ops: Sequence[OpSpec], costs_s: Mapping[str, float], weight_bytes: Mapping[str, int]
) -> list[tuple[float, int]]:
    """Return ``(seconds per byte, bytes)`` of the weights that can rest elsewhere, cheapest first.

    Args:
        ops: what an iteration runs.
        costs_s: what it costs to send an op, by name; one without a cost cannot be sent.
        weight_bytes: sizes of the weights that ops read.
    """
    price: dict[str, float] = {}
    for op in ops:
        weights = [name for name in dict.fromkeys(op.reads) if name in weight_bytes]
        size_bytes = sum(weight_bytes[name] for name in weights)
        extra_s = costs_s.get(op.name, math.inf)
        for name in weights:
            price[name] = price.get(name, 0.0) + (extra_s / size_bytes if size_bytes else 0.0)
    return sorted((p, weight_bytes[name]) for name, p in price.items() if p != math.inf)


def _tier_limit(
    least_s: float,
    prices: Sequence[tuple[float, int]],
    tier: str,
    total_bytes: int,
    arena_bytes: int,
    machine: Machine,
    room_bytes: dict[str, int],
) -> tuple[float, str]:
    """Return the limit when ops may be sent to ``tier``: sending more costs compute and saves bytes."""
    room = room_bytes.get(tier, total_bytes)
    most = min(sum(size for _, size in prices), room, max(0, total_bytes - arena_bytes))

    def limit(sent_bytes: int, priced_bytes: int) -> tuple[float, str]:
        left = {**room_bytes, tier: room - sent_bytes}
        compute_s = least_s + _price_s(prices, priced_bytes)
        return physical_limit(compute_s, total_bytes - sent_bytes, arena_bytes, machine, left)

    low, high = 0, most
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        moved_s, _ = physical_limit(
            0.0, total_bytes - middle, arena_bytes, machine, {**room_bytes, tier: room - middle}
        )
        if moved_s > least_s + _price_s(prices, middle):
            low = middle
        else:
            high = middle
    # Sending no more than ``low`` leaves at least its transfers, sending more at least its price.
    return limit(high, low)


def _price_s(prices: Sequence[tuple[float, int]], sent_bytes: int) -> float:
    left, seconds = sent_bytes, 0.0
    for price, size in prices:
        taken = min(left, size)
        seconds += price * taken
        left -= taken
        if not left:
            break
    return seconds
