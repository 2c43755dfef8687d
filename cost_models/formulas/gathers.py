"""Gathers: ops that read single rows of a weight from its slow tier while they run, such as embeddings.

``OpSpec.gathers`` says which rows an op needs. As long as the op reads the weight, it finds them there;
where the weight is not among its reads, the rows come over the link that checkpoints come over, or from RAM
where the plan gives the whole weight a home there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gascompile.core.machine import Link, Machine, PlaceKind
from gascompile.core.sizes import PAGE_BYTES, reserve_bytes
from gascompile.core.workload import OpSpec, Workload


def gathered(op: OpSpec) -> dict[str, int]:
    """Return the weights whose rows the op reads by itself, with the bytes of those rows."""
    return {name: size for name, size in op.gathers.items() if name not in op.reads}


def gather_link(machine: Machine, tier: str = "") -> Link | None:
    """Return the link that single rows come over from ``tier``; without one that of checkpoints."""
    return machine.link_from(tier) if tier else machine.checkpoint_link()


def gather_tiers(machine: Machine) -> tuple[str, ...]:
    """Return the tiers other than that of ``gather_link`` from which single rows may come: RAM beside a drive."""
    usual = gather_link(machine)
    links = machine.links_into(machine.compute_tier)
    others = (link.source_tier for link in links if usual and link.source_tier != usual.source_tier)
    return tuple(tier for tier in others if machine.tiers[tier].kind is PlaceKind.CPU)


def gather_room(workload: Workload) -> Mapping[str, int]:
    """Return what the tables take whose rows come from a tier of the planner's choice, by tier."""
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    tiers = {name: op.gather_tier for op in workload.ops for name in gathered(op) if op.gather_tier}
    table_bytes: dict[str, int] = {}
    for name, tier in tiers.items():
        table_bytes[tier] = table_bytes.get(tier, 0) + reserve_bytes(sizes[name])
    return table_bytes


def gather_time_s(size_bytes: int, machine: Machine, tier: str = "") -> float:
    """Return the seconds that an op waits for its rows from ``tier``, or from the usual one.

    ``latency * reads / threads + bytes / bandwidth``, with one read per page: rows are about as large.
    """
    link = gather_link(machine, tier)
    if link is None or not size_bytes:
        return 0.0
    num_reads = -(-size_bytes // PAGE_BYTES)
    num_turns = -(-num_reads // max(1, machine.io.num_threads))
    return link.latency_s * num_turns + size_bytes / link.bandwidth_bytes_per_s


def gather_link_bytes(ops: Iterable[OpSpec], machine: Machine) -> Mapping[str, int]:
    """Return the bytes of all gathered rows by link; empty where nothing is gathered."""
    link_bytes: dict[str, int] = {}
    for op in ops:
        link = gather_link(machine, op.gather_tier) if op.gathers else None
        if link is not None and (size_bytes := sum(gathered(op).values())):
            link_bytes[link.name] = link_bytes.get(link.name, 0) + size_bytes
    return link_bytes
