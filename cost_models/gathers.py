"""Gathers: ops that read single rows of a weight from its slow tier while they run, such as embeddings.

``OpSpec.gathers`` says which rows an op needs. As long as the op reads the weight, it finds them there;
where the weight is not among its reads, the rows come over the link that checkpoints come over.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gascompile.ir import Link, Machine, OpSpec
from gascompile.units import PAGE_BYTES


def gathered(op: OpSpec) -> dict[str, int]:
    """Return the weights whose rows the op reads by itself, with the bytes of those rows."""
    return {name: size for name, size in op.gathers.items() if name not in op.reads}


def gather_link(machine: Machine) -> Link | None:
    """Return the link that single rows come over: the one from NVMe, else the fastest."""
    links = machine.links_into(machine.compute_tier)
    return next((link for link in links if link.source_tier == "nvme"), next(iter(links), None))


def gather_time_s(size_bytes: int, machine: Machine) -> float:
    """Return the seconds that an op waits for its rows.

    ``latency * reads / threads + bytes / bandwidth``, with one read per page: rows are about as large.
    """
    link = gather_link(machine)
    if link is None or not size_bytes:
        return 0.0
    num_reads = -(-size_bytes // PAGE_BYTES)
    num_turns = -(-num_reads // max(1, machine.io.num_threads))
    return link.latency_s * num_turns + size_bytes / link.bandwidth_bytes_per_s


def gather_link_bytes(ops: Iterable[OpSpec], machine: Machine) -> Mapping[str, int]:
    """Return the bytes of all gathered rows by link; empty where nothing is gathered."""
    total = sum(size for op in ops for size in gathered(op).values())
    link = gather_link(machine)
    return {link.name: total} if link is not None and total else {}
