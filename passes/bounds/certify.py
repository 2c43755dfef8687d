"""Certify: the physical limit of a problem and what is proven about a plan's time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gascompile.core.machine import Link, Machine, Pipe
from gascompile.core.plan import Certificate, SolverStatus
from gascompile.core.workload import PERSISTENT, Workload

if TYPE_CHECKING:  # which comes with numpy; plans of other kinds are certified without
    from gascompile.passes.model.problem import Problem

WEIGHTS, EVERYTHING = "weights", "everything"
"""What a bound holds over: placements of weights in one arena, all of one place by the same way, with all else in its
place, or any plan at all."""
_ROUNDING = 1 - 1e-12
"""What ``rate * (bytes / rate)`` may be more than the bytes."""
_WITHOUT_END = 1 << 62
"""Bytes, of what nothing limits but time."""
_DISPROVED = 1e-6
"""A plan that is faster than a bound by more than rounding shows that the bound is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What no plan of a problem can beat."""

    limit_s: float
    """The physical limit."""
    binding: str
    """What sets it: ``compute`` or a link's name."""
    bound_s: float
    """The solver's dual bound, where it was asked; of plans that only stream weights, unless it is ``all_s``."""
    all_s: float = 0.0
    """A bound of every plan whatsoever, where one is known beyond the limit."""
    timed_out: bool
    """The clock ended the search for a better bound."""

    def without_what_fails(self, predicted_s: float) -> Proof:
        """Return the proof without the bounds that a plan of ``predicted_s`` beats: they prove nothing."""
        most_s = predicted_s * (1 + _DISPROVED)
        return replace(
            self,
            limit_s=self.limit_s if self.limit_s <= most_s else 0.0,
            bound_s=self.bound_s if self.bound_s <= most_s else 0.0,
            all_s=self.all_s if self.all_s <= most_s else 0.0,
        )


def certify(
    predicted_s: float, proof: Proof, *, solve_s: float, mip_gap: float, solver: str = ""
) -> Certificate:
    """Return the certificate of a plan.

    Args:
        predicted_s: what the replay says.
        proof: what no plan can beat.
        solve_s: seconds spent on planning.
        mip_gap: the gap up to which a plan counts as optimal.
        solver: which solver there was.
    """
    # Where plan and bound meet, they differ by rounding.
    limit_s = min(proof.limit_s, predicted_s)
    all_s = min(max(limit_s, proof.all_s), predicted_s)
    lower_s = min(max(all_s, proof.bound_s), predicted_s)
    if predicted_s - all_s <= mip_gap * predicted_s:
        # What holds over everything is worth more than a bound that is closer by less than was asked.
        lower_s = all_s
    gap = (predicted_s - lower_s) / predicted_s if predicted_s > 0 else 0.0
    status = SolverStatus.OPTIMAL if gap <= mip_gap else SolverStatus.FEASIBLE
    if proof.timed_out and status is not SolverStatus.OPTIMAL:
        status = SolverStatus.TIMEOUT
    return Certificate(
        predicted_s=predicted_s,
        lower_bound_s=lower_s,
        limit_s=limit_s,
        gap=gap,
        status=status,
        solve_s=solve_s,
        binding=proof.binding,
        solver=solver,
        holds_over=WEIGHTS if lower_s > all_s else EVERYTHING,
        lower_bound_all_s=all_s,
    )


def physical_limit(
    compute_s: float,
    weight_bytes: int,
    arena_bytes: int,
    machine: Machine,
    room_bytes: Mapping[str, int] | None = None,
    *,
    has_hops: bool = True,
) -> tuple[float, str]:
    """Return the limit in seconds and what sets it: ``compute`` or a link's name.

    The arena holds at most ``arena_bytes`` of the ``weight_bytes`` that an iteration reads; the rest
    comes over the links, at best over all at once, and over each no more than its tier holds, and than is brought
    there meanwhile from other tiers.

    Args:
        room_bytes: what each slow tier may hold; a tier that is not named holds everything.
        has_hops: whether bytes may make their way in two hops; without, no plan in which all come directly beats it.
    """
    links = machine.links_into(machine.compute_tier)
    unavoidable = max(0, weight_bytes - max(0, arena_bytes))
    if not links or not unavoidable:
        return compute_s, "compute"
    room = room_bytes or {}
    feeds = machine.two_hops() if has_hops else ()
    every = [_rates(link, room.get(link.source_tier, unavoidable), feeds, ()) for link in links]
    rates = [pair for pairs in every for pair in pairs]
    limits = [(_least_time_s(rates, unavoidable), _last_link(links, every, unavoidable))]
    for pipe in machine.pipes:
        inside = [link for link in links if pipe.name in link.shared]
        within = {feed.name for feed, _ in feeds if pipe.name in feed.shared}
        outside = [
            pair
            for link in links
            if link not in inside
            for pair in _rates(link, room.get(link.source_tier, unavoidable), feeds, within)
        ]
        if inside:
            shared = [(pipe_rate(machine, pipe), unavoidable), *outside]
            limits.append((_least_time_s(shared, unavoidable), inside[0].name))
    transfer_s, name = max(limits, key=lambda limit: limit[0])
    return (transfer_s, name) if transfer_s > compute_s else (compute_s, "compute")


def _rates(
    link: Link, room_bytes: int, feeds: Sequence[tuple[Link, Link]], within: Collection[str]
) -> list[tuple[float, int]]:
    """Return ``(rate, bytes at most)`` that together carry no less than a link: of its own place, and of what is fed.

    In time ``T`` it carries ``min(r T, room + f T)`` bytes at most, where what leads to its place has the rate ``f``.

    Args:
        within: feeds whose bytes are counted elsewhere.
    """
    rate = link.bandwidth_bytes_per_s
    leading = [feed for feed, push in feeds if push == link and feed.name not in within]
    fed = min(sum(feed.bandwidth_bytes_per_s for feed in leading), rate)
    pairs = [(fed, _WITHOUT_END)] if fed else []
    return [*pairs, *([(rate - fed, room_bytes)] if rate > fed else [])]


def problem_limit(
    problem: Problem, arena_bytes: int | None = None, *, has_hops: bool = True
) -> tuple[float, str]:
    """Return the ``physical_limit`` of a problem, in an arena of another size where one is given."""
    return physical_limit(
        problem.compute_s,
        sum(weight.size_bytes for weight in problem.weights if weight.uses),
        problem.arena_limit_bytes if arena_bytes is None else arena_bytes,
        problem.machine,
        problem.room_bytes,
        has_hops=has_hops,
    )


def needs_hops(workload: Workload, machine: Machine, limits_bytes: Mapping[str, int]) -> bool:
    """Return whether two hops may pay: what lasts is more than a place in between holds for good."""
    lasting = sum(t.size_bytes for t in workload.tensors if t.kind in PERSISTENT)
    return any(lasting > limits_bytes[push.source_tier] for _, push in machine.two_hops())


def pipe_rate(machine: Machine, pipe: Pipe) -> float:
    """Return the rate at which bytes of a whole iteration pass ``pipe`` at most.

    A link faster than its pipe delivers its last transfer before the pipe would have let it pass.
    """
    links = (link.bandwidth_bytes_per_s for link in machine.links if pipe.name in link.shared)
    return max(pipe.bandwidth_bytes_per_s, *links, 0.0)


def _least_time_s(rates: Sequence[tuple[float, int]], size_bytes: int) -> float:
    """Return the least time in which links of ``(rate, bytes at most)`` bring ``size_bytes``."""
    left_bytes = float(size_bytes)
    # Links run dry in this order; those that are left carry the rest.
    ordered = sorted(rates, key=lambda pair: pair[1] / pair[0])
    for first, (rate, most_bytes) in enumerate(ordered):
        time_s = left_bytes / sum(other for other, _ in ordered[first:])
        if most_bytes >= rate * time_s * _ROUNDING:
            return time_s
        left_bytes -= most_bytes
    return math.inf


def _last_link(
    links: Sequence[Link], every: Sequence[Sequence[tuple[float, int]]], size_bytes: int
) -> str:
    """Return the fastest link that is still busy at the end of the least time; ``every`` has the rates of each."""
    time_s = _least_time_s([pair for rates in every for pair in rates], size_bytes)
    busy = [
        link.name
        for link, rates in zip(links, every, strict=True)
        if all(most_bytes >= rate * time_s * _ROUNDING for rate, most_bytes in rates)
    ]
    return busy[0] if busy else links[-1].name
