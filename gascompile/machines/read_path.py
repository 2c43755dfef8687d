"""Whether reads can reach the device by the path that a machine was measured with; what becomes of it if not.

KvikIO may be gone since, or fall back in silence to reads through RAM: in a container without /run/udev, without
its kernel module. Plans are then made for aligned reads through pinned memory, whose speed the other links tell,
and say so in their warnings.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from gascompile.core.checks.machine import RECOSTED
from gascompile.core.errors import DeviceError
from gascompile.core.machine import Link, Machine
from gascompile.core.sizes import format_rate
from gascompile.runtime.devices.probe import NO_GDS, NO_KVIKIO, GpuFacts, look, storage_faults

_log = logging.getLogger(__name__)

_READS, _KVIKIO = "reads", "kvikio"


def readable_here(machine: Machine, *, facts: GpuFacts | None = None) -> Machine:
    """Return ``machine`` as this process can read for it: itself, or re-costed with aligned reads.

    Args:
        machine: which engine brings bytes to it, and by which path when that was measured.
        facts: about this machine; looked at by default, where that matters.

    Raises:
        DeviceError: its engine cannot be had, and its links do not tell what another one gives.
    """
    if machine.io.engine != _KVIKIO or machine.compute_backend == "cpu":
        return machine
    from gascompile.runtime.transfer.kvikio_path import GPU_DIRECT, import_kvikio, path_taken

    try:
        kvikio = import_kvikio()
    except DeviceError as error:
        return _with_reads(machine, str(error), cause=NO_KVIKIO)
    facts_here = facts or look()
    taken = path_taken(kvikio, facts_here)
    was_direct = not machine.io.path or GPU_DIRECT in machine.io.path
    if taken.is_direct or not was_direct:
        return machine
    remedies = "; ".join(fault.remedy for fault in storage_faults(facts_here))
    why = f"GPUDirect Storage is not active, KvikIO takes {taken}. What to do: {remedies or 'gascompile doctor'}"
    return _with_reads(machine, why, cause=NO_GDS)


def _with_reads(machine: Machine, why: str, *, cause: str) -> Machine:
    """Return ``machine`` with the speed that reads into RAM and copies from there have, one after the other."""
    tier = machine.compute_tier
    links = {link.name: link for link in machine.links}
    direct, read, copy = (links.get(x) for x in (f"nvme->{tier}", "nvme->cpu", f"cpu->{tier}"))
    if direct is None:
        now = machine
        speed = ""
    elif read is None or copy is None:
        raise DeviceError(
            f"the machine '{machine.name}' reads with KvikIO, which cannot be done here: {why}. Its links do not tell "
            "how fast aligned reads are; measure it here: gascompile calibrate",
            cause=cause,
        )
    else:
        slower = _slower(direct, read, copy)
        now = replace(machine, links=tuple(slower if x is direct else x for x in machine.links))
        speed = f", {format_rate(slower.bandwidth_bytes_per_s)} instead of {format_rate(direct.bandwidth_bytes_per_s)}"
    note = f"{RECOSTED}: reads to the {tier} are aligned reads through pinned memory{speed}: {why}"
    _log.warning("%s", note)
    return replace(now, io=replace(machine.io, engine=_READS, path="", least_bytes=0, source=note))


def _slower(direct: Link, read: Link, copy: Link) -> Link:
    rates = (link.bandwidth_bytes_per_s for link in (direct, read, copy))
    return replace(
        direct,
        bandwidth_bytes_per_s=min(rates),
        latency_s=max(direct.latency_s, read.latency_s + copy.latency_s),
        source=f"{RECOSTED}: the slower of {read.name} and {copy.name}",
    )
