"""Corrects a measured machine by what whole runs took: few numbers, each fitted on one kind of run.

A part measured alone is faster than the same part in a run, where Python calls it, the allocator works
beside it and reading threads want the processor, too. Every correction says so in the number's ``source``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gascompile.core.machine import (
    ComputeRate,
    Interference,
    InterferencePoint,
    Link,
    Machine,
    RatePoint,
)

FACTOR_RANGE = (0.4, 1.6)
"""Of a measured rate; beyond it a run was disturbed, and the measured rate says more."""
_STEPS = 40
"""Halvings of a factor: more than 2^-40 of the range is not to be told from noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """How much faster than measured alone products of an intensity are in a run; usually below 1."""

    flops_per_byte: float
    factor: float


def overhead_per_op_s(*, measured_s: float, work_s: float, num_ops: int) -> float:
    """Return the fixed seconds of an op: what a run took beyond the roofline of its ops, shared evenly."""
    return max(measured_s - work_s, 0.0) / num_ops


def with_overhead(machine: Machine, overhead_s: float, how: str) -> Machine:
    """Return ``machine`` with the fixed cost of an op as a run showed it."""
    memory = tuple(
        replace(
            rate,
            op_overhead_s=overhead_s,
            source=f"{rate.source}; op overhead of {overhead_s * 1e6:.2f} us by {how}, "
            f"{rate.op_overhead_s * 1e6:.2f} us alone",
        )
        for rate in machine.memory
    )
    return replace(machine, memory=memory)


def compute_factor(*, measured_s: float, predicted_s: float, fixed_s: float) -> float:
    """Return by how much rates have to change for a run's ops to take ``measured_s``.

    Args:
        measured_s: seconds of the run.
        predicted_s: seconds by the rates as they are, fixed costs included.
        fixed_s: the part of both that no rate changes.
    """
    factor = (predicted_s - fixed_s) / max(measured_s - fixed_s, 1e-9)
    low, high = FACTOR_RANGE
    return factor if low <= factor <= high else 1.0


def with_compute_factors(machine: Machine, factors: Sequence[Factor], how: str) -> Machine:
    """Return ``machine`` with the points of its rates multiplied by the factor nearest in intensity."""

    def nearest(point: RatePoint) -> float:
        distance = [
            abs(math.log(point.flops_per_byte / factor.flops_per_byte)) for factor in factors
        ]
        return factors[distance.index(min(distance))].factor

    def corrected(rate: ComputeRate) -> ComputeRate:
        points = tuple(
            replace(point, flops_per_s=point.flops_per_s * nearest(point)) for point in rate.points
        )
        return replace(
            rate,
            points=points,
            flops_per_s=max((p.flops_per_s for p in points), default=rate.flops_per_s),
            source=f"{rate.source}; times {shown} by {how}",
        )

    shown = " to ".join(f"{factor.factor:.2f}" for factor in factors)
    return replace(machine, rates=tuple(corrected(rate) for rate in machine.rates))


def fitted(
    predict: Callable[[float], float], measured_s: float, *, low: float, high: float
) -> float | None:
    """Return the value for which ``predict``, which never grows, gives ``measured_s``.

    ``None`` where no value between ``low`` and ``high`` does: the run says nothing about this number.
    """
    if not predict(high) <= measured_s <= predict(low):
        return None
    for _ in range(_STEPS):
        middle = math.sqrt(low * high)
        if predict(middle) > measured_s:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def with_link(
    machine: Machine,
    name: str,
    *,
    how: str,
    bandwidth_bytes_per_s: float | None = None,
    latency_s: float | None = None,
) -> Machine:
    """Return ``machine`` with another bandwidth or latency of the link called ``name``."""

    def corrected(link: Link) -> Link:
        if link.name != name:
            return link
        source = link.source
        changed = link
        if bandwidth_bytes_per_s is not None:
            changed = replace(changed, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
            source += f"; {bandwidth_bytes_per_s / 1e9:.2f} GB/s by {how}, "
            source += f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s alone"
        if latency_s is not None:
            changed = replace(changed, latency_s=latency_s)
            source += f"; {latency_s * 1e6:.0f} us per transfer by {how}, "
            source += f"{link.latency_s * 1e6:.0f} us alone"
        return replace(changed, source=source)

    return replace(machine, links=tuple(corrected(link) for link in machine.links))


def with_interference(
    machine: Machine, points: Sequence[InterferencePoint], op_s_per_byte: float, how: str
) -> Machine:
    """Return ``machine`` with the shares of the links' speed that are lost beside ops, and what moving costs these."""
    measured = machine.io.source.partition(":")[0]
    interference = Interference(
        points=tuple(points), op_s_per_byte=op_s_per_byte, source=f"{measured}: by {how}"
    )
    return replace(machine, interference=interference)
