"""Prices: what a little more memory or bandwidth would save, as the duals of the relaxed program say.

A price is a slope of the relaxation's optimum at the budget at hand. That optimum falls less and less with more
memory, so the price never promises too little of *it*. A plan is above it, by its gap, and may gain more than the
price says by coming closer: what no plan gains is the business of certificates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gascompile.passes.model.problem import Placement, Problem


@dataclass(frozen=True, slots=True)
class Solution:
    """What the solver found."""

    placement: Placement | None
    """``None`` when there is none, or the clock ran out before the first."""
    order: tuple[int, ...]
    """Weights from those that should stay most to those that should be streamed most."""
    bound_s: float
    """No schedule within the arena is faster; infinite when there is none at all."""
    timed_out: bool
    memory_price_s_per_byte: float = 0.0
    """Seconds of an iteration that one more byte of the arena saves; 0 unless relaxed."""
    link_price_s: Mapping[str, float] = field(default_factory=dict)
    """Per link, seconds that bandwidth saves per relative change: of 1 % more, a hundredth of this."""


def shadow_prices(
    problem: Problem,
    duals: Mapping[str, float],
    slots: Sequence[float],
    loads: Mapping[tuple[int, int, int], float],
    time_unit_s: float,
    unit_bytes: float,
) -> tuple[float, dict[str, float]]:
    """Return the price of the arena and those of the links.

    Args:
        duals: by how much each row of ``place`` holds the time up, in the program's units.
        slots: ``T`` in the program's unit of time.
        loads: ``load`` by weight, interval and link.
        time_unit_s: the program's unit of time.
        unit_bytes: the program's unit of bytes.
    """
    memory = sum(dual for name, dual in duals.items() if name.startswith(("memory_", "buffer_")))
    links: dict[str, float] = {}
    for number, link in enumerate(problem.links):
        # More bandwidth widens what each slot delivers and shortens each transfer but its latency.
        delivered = sum(
            duals.get(f"rate_{number}_{k}", 0.0) * taken * link.bandwidth_bytes_per_s
            for k, taken in enumerate(slots)
        )
        moved_bytes = sum(
            load * problem.weights[w].size_bytes
            for (w, _, over), load in loads.items()
            if over == number and problem.weights[w].uses
        )
        occupied = duals.get(f"occupied_{number}", 0.0) * moved_bytes / link.bandwidth_bytes_per_s
        links[link.name] = delivered / unit_bytes * time_unit_s**2 + occupied
    return memory * time_unit_s / unit_bytes, links
