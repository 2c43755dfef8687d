"""Retime: ops get the seconds that were measured for them in place of a formula's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gascompile.core.workload import Workload


def retime(workload: Workload, times_s: Mapping[str, float], *, device: str) -> Workload:
    """Return ``workload`` with the seconds on ``device`` of the ops that ``times_s`` names."""
    ops = tuple(
        replace(op, time_s={**op.time_s, device: times_s[op.name]}) if op.name in times_s else op
        for op in workload.ops
    )
    return replace(workload, ops=ops)
