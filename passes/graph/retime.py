"""Retime: ops get the seconds that were measured for them in place of a formula's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gascompile.core.workload import Workload


def retime(
    workload: Workload, times_s: Mapping[str, float], *, device: str, added: bool = True
) -> Workload:
    """Return ``workload`` with the seconds on ``device`` of the ops that ``times_s`` names.

    Args:
        workload: whose ops have seconds by a formula.
        times_s: measured, by op.
        device: where.
        added: also of ops that have none there yet.
    """
    ops = tuple(
        replace(op, time_s={**op.time_s, device: times_s[op.name]})
        if op.name in times_s and (added or device in op.time_s)
        else op
        for op in workload.ops
    )
    return replace(workload, ops=ops)
