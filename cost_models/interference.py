"""Interference: the share of the links' speed that an op takes while it runs."""

from __future__ import annotations

from gascompile.ir import Machine, OpSpec


def lost_share(op: OpSpec, machine: Machine) -> float:
    """Return the share for the op's arithmetic intensity: linear between the machine's points, constant beyond."""
    points = sorted(machine.interference.points, key=lambda point: point.flops_per_byte)
    if not points:
        return 0.0
    intensity = op.arithmetic_intensity
    below = [point for point in points if point.flops_per_byte <= intensity]
    above = points[len(below) :]
    if not below or not above:
        return (below or above)[-1 if below else 0].lost_share
    low, high = below[-1], above[0]
    part = (intensity - low.flops_per_byte) / (high.flops_per_byte - low.flops_per_byte)
    return low.lost_share + part * (high.lost_share - low.lost_share)
