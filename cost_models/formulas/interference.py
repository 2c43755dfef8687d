"""Interference: ops take some of the links' speed while they run, and transfers some of the processors' time."""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.core.machine import InterferencePoint, Machine
from gascompile.core.workload import OpSpec


def with_moving(seconds: float, *, ops_s: float, moved_bytes: int, machine: Machine) -> float:
    """Return the seconds of an iteration in which the processors also have to move ``moved_bytes``.

    ``max(seconds, ops_s + moved_bytes * op_s_per_byte)``: while ops wait for links, processors have time for it.
    """
    return max(seconds, ops_s + moved_bytes * machine.interference.op_s_per_byte)


def lost_share(op: OpSpec, machine: Machine) -> float:
    """Return the share for the op's arithmetic intensity."""
    return share_at(machine.interference.points, op.arithmetic_intensity)


def share_at(points: Sequence[InterferencePoint], intensity: float) -> float:
    """Return the share at an arithmetic intensity: linear between the points, constant beyond; 0 without any."""
    points = sorted(points, key=lambda point: point.flops_per_byte)
    if not points:
        return 0.0
    below = [point for point in points if point.flops_per_byte <= intensity]
    above = points[len(below) :]
    if not below or not above:
        return (below or above)[-1 if below else 0].lost_share
    low, high = below[-1], above[0]
    part = (intensity - low.flops_per_byte) / (high.flops_per_byte - low.flops_per_byte)
    return low.lost_share + part * (high.lost_share - low.lost_share)
