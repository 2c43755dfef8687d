"""Measures this machine once, in under four seconds and 200 MiB: a ``Machine`` of RAM and the disk.

Interference only ever slows a run down, so each number is the best of a few repetitions of the resource
alone: a plan's limit must be one that no run can beat. What is left of the two bandwidths when a read and
a product run together is stated in their ``source`` texts.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date

import torch

from gascompile.cost_models.host import capacity_bytes, cpu_model, memory_limit
from gascompile.cost_models.measure_compute import (
    NUM_ROWS,
    WeightStream,
    matrix_rates,
    op_overhead_s,
)
from gascompile.cost_models.measure_disk import (
    ProbeFile,
    Reader,
    best_setting,
    probe_file,
    read_through,
)
from gascompile.ir import ComputeRate, IoSettings, Link, Machine, MemoryRate, Tier
from gascompile.units import MIB, format_size

_MATRIX_LIMIT_S = 0.8
_SEARCH_LIMIT_S = 0.6
_SUSTAINED_LIMIT_S = 0.4
_OVERLAP_LIMIT_S = 0.2
_OVERLAP_READ_BYTES = 32 * MIB
_OVERLAP_STREAM_BYTES = 96_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compute:
    flops_per_s: Mapping[str, float]
    bytes_per_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    io: IoSettings
    read_size_bytes: int
    read_bytes_per_s: float
    latency_s: float
    write_bytes_per_s: float
    read_path: str
    write_path: str
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Bytes/s of the disk and of a one-row product while both run."""

    disk_bytes_per_s: float
    stream_bytes_per_s: float


def measure_machine(*, folder: str | os.PathLike[str], read: Reader) -> Machine:
    """Return this machine, measured: tiers ``cpu`` and ``nvme``, the links between them, CPU rates.

    Blocks for up to four seconds, takes up to 200 MiB of memory, and writes a temporary file of up to
    512 MiB (at most half the free space) in ``folder``, which is deleted in every case.

    Args:
        folder: a folder on the disk that will be read, for example the cache.
        read: the reader that will run plans; ``io`` of the result is what suits it best.

    Raises:
        StorageError: ``folder`` cannot be written to or has too little free space.
    """
    # In this order, so that the large weights and the large read buffer never exist together.
    compute = _Compute(
        flops_per_s=matrix_rates(limit_s=_MATRIX_LIMIT_S),
        overhead_s=op_overhead_s(),
        bytes_per_s=WeightStream().bytes_per_s(),
    )
    with probe_file(folder) as file:
        disk = _measure_disk(file, read)
        together = _measure_together(file, read, disk)
    return _machine(folder, compute, disk, together)


def machine_name() -> str:
    """Return the name that this machine's measurement carries: processor and torch's threads."""
    return f"this machine: {cpu_model()}, {torch.get_num_threads()} threads"


def _measure_disk(file: ProbeFile, read: Reader) -> _Disk:
    latency_s = file.latency_s(read)
    io, size_bytes = best_setting(file, read, limit_s=_SEARCH_LIMIT_S)
    rates = read_through(file, read, io, size_bytes, limit_s=_SUSTAINED_LIMIT_S)
    return _Disk(
        io=io,
        read_size_bytes=size_bytes,
        read_bytes_per_s=max(rates),
        latency_s=latency_s,
        write_bytes_per_s=file.write_bytes_per_s,
        read_path=" and ".join(sorted(file.read_paths)),
        write_path="O_DIRECT" if file.direct else "page cache",
        file_bytes=file.size_bytes,
    )


def _measure_together(file: ProbeFile, read: Reader, disk: _Disk) -> _Together:
    """Read in one thread while another streams weights through the processor."""
    size_bytes = min(disk.read_size_bytes, _OVERLAP_READ_BYTES)
    file.shrink_buffer(_OVERLAP_READ_BYTES)
    stream = WeightStream(_OVERLAP_STREAM_BYTES)
    with ThreadPoolExecutor(max_workers=1) as pool:
        reading = pool.submit(
            read_through,
            file,
            read,
            disk.io,
            size_bytes,
            limit_s=_OVERLAP_LIMIT_S,
        )
        times_s = [stream.pass_s()]
        while not reading.done():
            times_s.append(stream.pass_s())
    return _Together(
        disk_bytes_per_s=statistics.harmonic_mean(reading.result()),
        stream_bytes_per_s=stream.weights.nbytes * len(times_s) / sum(times_s),
    )


def _machine(
    folder: str | os.PathLike[str], compute: _Compute, disk: _Disk, together: _Together
) -> Machine:
    measured = f"measured {date.today().isoformat()}:"  # noqa: DTZ011 - the user's own calendar day
    num_threads = torch.get_num_threads()
    limit = memory_limit()
    return Machine(
        name=machine_name(),
        tiers={
            "cpu": Tier(size_bytes=limit.size_bytes, source=f"{measured} {limit.origin}"),
            "nvme": Tier(
                size_bytes=capacity_bytes(folder), source=f"{measured} capacity of the file system"
            ),
        },
        links=_links(measured, disk, together),
        rates=tuple(
            ComputeRate(
                device="cpu",
                dtype=dtype,
                flops_per_s=rate,
                source=f"{measured} best product of {NUM_ROWS} rows, {num_threads} threads",
            )
            for dtype, rate in compute.flops_per_s.items()
        ),
        memory=(
            MemoryRate(
                device="cpu",
                bandwidth_bytes_per_s=compute.bytes_per_s,
                op_overhead_s=compute.overhead_s,
                source=(
                    f"{measured} one-row product with 128 MB of float32 weights, {num_threads} "
                    f"threads; {_gb(together.stream_bytes_per_s)} while the disk was read"
                ),
            ),
        ),
        io=IoSettings(
            num_threads=disk.io.num_threads,
            chunk_bytes=disk.io.chunk_bytes,
            source=f"{measured} fastest of up to 6 settings, fewer threads preferred within 5 %",
        ),
    )


def _links(measured: str, disk: _Disk, together: _Together) -> tuple[Link, ...]:
    return (
        Link(
            source_tier="nvme",
            target_tier="cpu",
            bandwidth_bytes_per_s=disk.read_bytes_per_s,
            latency_s=disk.latency_s,
            source=(
                f"{measured} best of {format_size(disk.read_size_bytes)} reads with {disk.io.num_threads} "
                f"threads x {format_size(disk.io.chunk_bytes)} chunks in a file of "
                f"{format_size(disk.file_bytes)} by {disk.read_path}; latency of 4 KiB; "
                f"{_gb(together.disk_bytes_per_s)} beside a one-row product"
            ),
        ),
        Link(
            source_tier="cpu",
            target_tier="nvme",
            bandwidth_bytes_per_s=disk.write_bytes_per_s,
            latency_s=disk.latency_s,
            source=f"{measured} one thread writing 16 MiB pieces, then fsync, by {disk.write_path}; latency of a read",
        ),
    )


def _gb(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"
