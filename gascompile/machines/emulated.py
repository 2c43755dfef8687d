"""The machine called ``emulated``: the links of its preset, and this host's own speed as the accelerator's.

The accelerator is a bounded piece of RAM behind paced copies, on which the processor computes. So an op takes
what it was measured to take here, on the accelerator as on the host, and a link carries what the preset says, or
what the drive behind it gives where that is less.
"""

from __future__ import annotations

from dataclasses import replace

from gascompile.core.checks.machine_files import preset
from gascompile.core.machine import Interference, Link, Machine

EMULATED = "emulated"


def emulated_name(host_name: str) -> str:
    """Return the name that plans for the emulated accelerator of a host carry."""
    return f"{EMULATED} on {host_name}"


def emulated_machine(host: Machine) -> Machine:
    """Return the emulated accelerator on ``host``, of which only the processor and the drive count.

    Nothing slows its links down beside ops: they are paced below what the host's memory carries.
    """
    made = preset(EMULATED)
    return replace(
        made,
        name=emulated_name(host.name),
        places=tuple(
            host.tiers[own.name] if own.name in {"cpu", "nvme"} else own for own in made.places
        ),
        links=tuple(_behind_drive(link, host) for link in made.links),
        rates=tuple(
            replace(rate, device=device)
            for device in ("gpu", "cpu")
            for rate in host.rates
            if rate.device == "cpu"
        ),
        memory=tuple(
            replace(rate, device=device)
            for device in ("gpu", "cpu")
            for rate in host.memory
            if rate.device == "cpu"
        ),
        io=replace(host.io, engine="reads"),
        interference=Interference(),
        # Its processor is the host's own.
        contention=host.contention,
    )


def _behind_drive(link: Link, host: Machine) -> Link:
    """Return ``link`` no faster than the host's drive, where it leads to or from one."""
    ends = {"gpu": "cpu", "cpu": "cpu", "nvme": "nvme"}
    name = f"{ends[link.source_tier]}->{ends[link.target_tier]}"
    drive = next((own for own in host.links if own.name == name), None)
    if drive is None:
        return link
    slower = drive.bandwidth_bytes_per_s < link.bandwidth_bytes_per_s
    return replace(
        link,
        bandwidth_bytes_per_s=min(drive.bandwidth_bytes_per_s, link.bandwidth_bytes_per_s),
        latency_s=max(drive.latency_s, link.latency_s),
        source=drive.source if slower else link.source,
    )
