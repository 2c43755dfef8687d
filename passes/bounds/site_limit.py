"""Site limit: a time that no plan beats even when ops may run where their weights rest.

Bytes of weights whose ops are sent to their tier need not move, but cost the time by which the op is
slower there. Fractions of ops may be sent, the cheapest bytes first, so every real choice is covered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gascompile.core.machine import Machine
from gascompile.core.workload import OpSpec
from gascompile.passes.bounds.certify import physical_limit

_HALVINGS = 60


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

    Where ops may run on several other tiers it is the compute time alone.

    Args:
        ops: what an iteration runs.
        machine: its links.
        weight_bytes: sizes of the weights that ops read.
        arena_bytes: what the compute tier can hold of them at most.
        room_bytes: what each slow tier may hold.
    """
    tiers = [t for t in machine.tiers if t != machine.compute_tier]
    least_s = sum(
        min(op.time_s[t] for t in (machine.compute_tier, *tiers) if t in op.time_s) for op in ops
    )
    total = sum(weight_bytes.values())
    able = [tier for tier in tiers if any(tier in op.time_s for op in ops)]
    if len(able) != 1:
        return least_s, "compute"
    prices = _prices(ops, machine.compute_tier, able[0], weight_bytes)
    return _tier_limit(least_s, prices, able[0], total, arena_bytes, machine, dict(room_bytes))


def _prices(
    ops: Sequence[OpSpec], own: str, tier: str, weight_bytes: Mapping[str, int]
) -> list[tuple[float, int]]:
    """Return ``(seconds per byte, bytes)`` of the weights that can rest on ``tier``, cheapest first."""
    price: dict[str, float] = {}
    for op in ops:
        weights = [name for name in dict.fromkeys(op.reads) if name in weight_bytes]
        size_bytes = sum(weight_bytes[name] for name in weights)
        extra_s = float("inf")
        if tier in op.time_s:
            extra_s = max(0.0, op.time_s[tier] - op.time_s.get(own, float("inf")))
        for name in weights:
            price[name] = price.get(name, 0.0) + (extra_s / size_bytes if size_bytes else 0.0)
    return sorted((p, weight_bytes[name]) for name, p in price.items() if p != float("inf"))


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
