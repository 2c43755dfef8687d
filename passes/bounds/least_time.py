"""Least time: the physical limit of a workload within a budget, over all forms, moves and sites."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gascompile.core.machine import Machine
from gascompile.core.tiles import parse_tile
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.bounds.site_limit import has_sites, site_limit
from gascompile.passes.graph.divide import joined_ops


def least_time(
    workload: Workload, machine: Machine, limits_bytes: Mapping[str, int]
) -> tuple[float, str]:
    """Return the limit in seconds and what sets it: ``compute`` or a link's name.

    The whole budget may hold weights, as everything else may leave when it is not used. What is read
    row by row or in tiles in this form of the workload counts as free: in another form it may be.
    """
    # An op in tiles or parts has to be launched more often than the whole one, a gathering one waits for rows.
    # Their weights may still rest with them at another site, so they stay in the list and cost nothing.
    joined = joined_ops(workload.ops)
    counted = [
        replace(op, time_s=dict.fromkeys(op.time_s, 0.0))
        if op.gathers or op.name in joined or parse_tile(op.name) is not None
        else op
        for op in workload.ops
    ]
    read = {name for op in workload.ops for name in op.reads if name not in op.gathers}
    sizes = {
        tensor.name: tensor.size_bytes
        for tensor in workload.tensors
        if tensor.kind == TensorKind.WEIGHT and tensor.name in read
    }
    arena_bytes = limits_bytes[machine.compute_tier]
    if has_sites(workload.ops, machine):
        return site_limit(counted, machine, sizes, arena_bytes, limits_bytes)
    compute_s = sum(op.time_s[machine.compute_tier] for op in counted)
    return physical_limit(compute_s, sum(sizes.values()), arena_bytes, machine, limits_bytes)
