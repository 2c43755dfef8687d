"""Machines with an emulated accelerator, and programs for it."""

from __future__ import annotations

from gascompile.core.machine import IoSettings, Link, Machine, Pipe, Place
from gascompile.core.sizes import GIB, MIB

IO = IoSettings(num_threads=2, chunk_bytes=16 << 10)


def accelerator(
    *,
    up: float = 2e9,
    down: float = 1e9,
    nvme: float = 1e9,
    latency_s: float = 1e-5,
    gpu_bytes: int = 64 * MIB,
    io: IoSettings = IO,
) -> Machine:
    """Return three tiers: ``up`` into the accelerator, ``down`` out of it, ``nvme`` from the drive."""

    def link(source: str, target: str, rate: float, *shared: str) -> Link:
        return Link(
            source_tier=source,
            target_tier=target,
            bandwidth_bytes_per_s=rate,
            latency_s=latency_s,
            shared=shared,
        )

    return Machine(
        name="toy accelerator",
        places=(
            Place.named("gpu", gpu_bytes),
            Place.named("cpu", 4 * GIB),
            Place.named("nvme", 64 * GIB),
        ),
        links=(
            link("cpu", "gpu", up, "gpu-in"),
            link("nvme", "gpu", nvme, "gpu-in", "nvme-read"),
            link("gpu", "cpu", down, "gpu-out"),
            link("nvme", "cpu", nvme, "nvme-read"),
        ),
        pipes=(
            Pipe(name="gpu-in", bandwidth_bytes_per_s=up),
            Pipe(name="gpu-out", bandwidth_bytes_per_s=down),
            Pipe(name="nvme-read", bandwidth_bytes_per_s=nvme),
        ),
        io=io,
        backend="emulated",
    )
