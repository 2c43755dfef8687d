"""Measures this machine: a ``Machine`` of RAM and the disk, with what each resource reaches alone and beside others.

In short it takes a few seconds, before a first plan; thoroughly some fifteen. Each number is typical of
undisturbed repetitions of the resource alone (``measure_compute.typical``). What is left of the bandwidths
when two run together is stated in their ``source`` texts, and as a pipe where reads and writes share one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date

import torch

from gascompile.core.machine import (
    ComputeRate,
    Contention,
    InterferencePoint,
    IoSettings,
    Link,
    Machine,
    MemoryRate,
    Pipe,
    Place,
    RatePoint,
)
from gascompile.core.sizes import MIB, format_rate, format_size
from gascompile.cost_models.measure.compute import (
    FEW_ROWS,
    ROWS,
    WIDTH,
    ColdWeights,
    matrix_rates,
    op_overhead_s,
)
from gascompile.cost_models.measure.contention import contention_points
from gascompile.cost_models.measure.disk import (
    UNIT_BYTES,
    ProbeFile,
    ProbeReader,
    best_setting,
    probe_file,
    read_through,
)
from gascompile.cost_models.measure.host import capacity_bytes, machine_name, memory_limit
from gascompile.cost_models.measure.in_turns import DriveRates, in_turns

_TOGETHER_BYTES = 32 * MIB
_SHARES_A_PIPE = 0.9
"""Reads and writes at once that reach less than this share of their sum go through one pipe."""
DISK_PIPE = "disk"

Stage = Callable[[str], None]
"""Told what is measured next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringEffort:
    """How long to measure."""

    name: str
    weights_bytes: int
    """Several times the caches."""
    rows: Sequence[int]
    num_calls: int
    matrix_limit_s: float
    file_bytes: int
    num_reads: int
    disk_limit_s: float
    """For the search of the best setting, and for each pass over the file."""
    together_s: float


SHORT = MeasuringEffort(
    name="in short",
    weights_bytes=96 * MIB,
    rows=FEW_ROWS,
    num_calls=7,
    matrix_limit_s=1.2,
    file_bytes=256 * MIB,
    num_reads=1,
    disk_limit_s=0.4,
    together_s=0.2,
)
THOROUGH = MeasuringEffort(
    name="thoroughly",
    weights_bytes=128 * MIB,
    rows=ROWS,
    num_calls=15,
    matrix_limit_s=8.0,
    file_bytes=512 * MIB,
    num_reads=3,
    disk_limit_s=1.5,
    together_s=0.5,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compute:
    points: Mapping[str, tuple[RatePoint, ...]]
    bytes_per_s: float
    weights_bytes: int
    overhead_s: float
    contention: tuple[InterferencePoint, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Disk:
    io: IoSettings
    read_size_bytes: int
    setting_rates: tuple[float, ...]
    first_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    write_bytes_per_s: float
    rewrite_bytes_per_s: float
    read_path: str
    write_path: str
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Together:
    """Bytes/s while two run: the disk beside a one-row product, reads beside writes."""

    disk_bytes_per_s: float
    stream_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float


def measure_machine(
    *,
    folder: str | os.PathLike[str],
    read: ProbeReader,
    effort: MeasuringEffort = SHORT,
    stage: Stage = lambda name: None,
) -> Machine:
    """Return this machine, measured: tiers ``cpu`` and ``nvme``, the links between them, CPU rates.

    Takes up to 256 MiB of memory and writes a temporary file of up to 512 MiB (at most half the free
    space) in ``folder``, which is deleted in every case.

    Args:
        folder: a folder on the disk that will be read, for example the cache.
        read: the reader that will run plans; ``io`` of the result is what suits it best.
        effort: how long to measure; ``SHORT`` blocks for up to six seconds.
        stage: told what is measured next.

    Raises:
        StorageError: ``folder`` cannot be written to or has too little free space.
    """
    stage("processor")
    weights = ColdWeights(effort.weights_bytes)
    compute = _Compute(
        points=matrix_rates(
            weights, rows=effort.rows, num_calls=effort.num_calls, limit_s=effort.matrix_limit_s
        ),
        overhead_s=op_overhead_s(),
        bytes_per_s=weights.bytes_per_s(),
        weights_bytes=weights.size_bytes,
        contention=contention_points(weights, limit_s=2 * effort.together_s),
    )
    stage("disk")
    with (
        probe_file(folder, most_bytes=effort.file_bytes) as file,
        # The runtime refuses to read a file that is written to.
        probe_file(folder, most_bytes=2 * _TOGETHER_BYTES, buffer_bytes=UNIT_BYTES) as target,
    ):
        disk = _measure_disk(file, target, read, effort)
        stage("disk and processor at once")
        together = _measure_together(file, target, read, disk, weights, effort)
    return _machine(folder, f"measured {_today()} {effort.name}:", compute, disk, together)


def _today() -> str:
    return date.today().isoformat()  # noqa: DTZ011 - the user's own calendar day


def _measure_disk(
    file: ProbeFile, target: ProbeFile, read: ProbeReader, effort: MeasuringEffort
) -> _Disk:
    latency_s = file.latency_s(read)
    limit_s = effort.disk_limit_s
    # The search comes second: it reads the beginning of the file, which is then no longer new.
    first = read_through(file, read, IoSettings(), 16 * MIB, limit_s=limit_s)
    io, size_bytes, rates = best_setting(file, read, limit_s=limit_s, num_reads=effort.num_reads)
    again = [
        rate
        for _ in range(effort.num_reads)
        for rate in read_through(file, read, io, size_bytes, limit_s=limit_s / effort.num_reads)
    ]
    return _Disk(
        io=io,
        read_size_bytes=size_bytes,
        setting_rates=tuple(rates.values()),
        first_bytes_per_s=statistics.harmonic_mean(first),
        read_bytes_per_s=_typical_rate(again),
        latency_s=latency_s,
        write_bytes_per_s=file.write_bytes_per_s,
        rewrite_bytes_per_s=_typical_rate(
            [target.rewrite_rate(target.size_bytes) for _ in range(effort.num_reads)]
        ),
        read_path=" and ".join(sorted(file.read_paths)),
        write_path="O_DIRECT" if file.direct else "page cache",
        file_bytes=file.size_bytes,
    )


def _typical_rate(rates: Sequence[float]) -> float:
    """Return the rate that a fifth of ``rates`` exceed, as ``typical`` does with times."""
    return sorted(rates, reverse=True)[len(rates) // 5]


def _measure_together(
    file: ProbeFile,
    target: ProbeFile,
    read: ProbeReader,
    disk: _Disk,
    weights: ColdWeights,
    effort: MeasuringEffort,
) -> _Together:
    """Read in one thread while another streams weights through the processor, then while another writes."""
    size_bytes = min(disk.read_size_bytes, _TOGETHER_BYTES, target.size_bytes)

    def reading() -> list[float]:
        return read_through(file, read, disk.io, size_bytes, limit_s=effort.together_s)

    with ThreadPoolExecutor(max_workers=1) as pool:
        beside_product = pool.submit(reading)
        times_s = _while_running(beside_product, weights.pass_s)
        beside_writes = pool.submit(reading)
        write_rates = _while_running(beside_writes, lambda: target.rewrite_rate(size_bytes))
    return _Together(
        disk_bytes_per_s=statistics.harmonic_mean(beside_product.result()),
        stream_bytes_per_s=weights.size_bytes * len(times_s) / sum(times_s),
        read_bytes_per_s=statistics.harmonic_mean(beside_writes.result()),
        write_bytes_per_s=statistics.harmonic_mean(write_rates),
    )


def _while_running(other: Future[list[float]], call: Callable[[], float]) -> list[float]:
    results = [call()]
    while not other.done():
        results.append(call())
    return results


def _machine(
    folder: str | os.PathLike[str],
    measured: str,
    compute: _Compute,
    disk: _Disk,
    together: _Together,
) -> Machine:
    limit = memory_limit()
    pipes = _pipes(measured, disk, together)
    return Machine(
        name=machine_name(),
        places=(
            Place.named("cpu", limit.size_bytes, source=f"{measured} {limit.origin}"),
            Place.named(
                "nvme", capacity_bytes(folder), source=f"{measured} capacity of the file system"
            ),
        ),
        links=_links(measured, disk, together, tuple(pipe.name for pipe in pipes)),
        pipes=pipes,
        rates=_rates(measured, compute),
        memory=(
            MemoryRate(
                device="cpu",
                bandwidth_bytes_per_s=compute.bytes_per_s,
                op_overhead_s=compute.overhead_s,
                source=(
                    f"{measured} one-row product with {format_size(compute.weights_bytes)} of float32 "
                    f"weights, {torch.get_num_threads()} threads; "
                    f"{format_rate(together.stream_bytes_per_s)} while the disk was read"
                ),
            ),
        ),
        io=IoSettings(
            num_threads=disk.io.num_threads,
            chunk_bytes=disk.io.chunk_bytes,
            source=(
                f"{measured} fastest of {len(disk.setting_rates)} settings, which reached "
                f"{format_rate(min(disk.setting_rates))} to {format_rate(max(disk.setting_rates))}; fewer threads "
                f"preferred within 5 %"
            ),
        ),
        contention=Contention(
            points=compute.contention,
            source=(
                f"{measured} products on two threads of the program at once, each with "
                f"{torch.get_num_threads()} of its own, beside one alone"
            ),
        ),
    )


def _rates(measured: str, compute: _Compute) -> tuple[ComputeRate, ...]:
    num_threads = torch.get_num_threads()
    return tuple(
        ComputeRate(
            device="cpu",
            dtype=dtype,
            flops_per_s=max(point.flops_per_s for point in points),
            points=points,
            source=(
                f"{measured} products of 1 to {ROWS[-1]} rows with {WIDTH} x {WIDTH} weights from "
                f"memory, {num_threads} threads"
            ),
        )
        for dtype, points in compute.points.items()
    )


def _pipes(measured: str, disk: _Disk, together: _Together) -> tuple[Pipe, ...]:
    both = together.read_bytes_per_s + together.write_bytes_per_s
    if both >= _SHARES_A_PIPE * (disk.read_bytes_per_s + disk.rewrite_bytes_per_s):
        return ()
    source = (
        f"{measured} reads at {format_rate(together.read_bytes_per_s)} beside writes at "
        f"{format_rate(together.write_bytes_per_s)}"
    )
    rates = _in_turns(disk, together)
    rate = max(rates.read_bytes_per_s, rates.write_bytes_per_s)
    return (Pipe(name=DISK_PIPE, bandwidth_bytes_per_s=rate, source=source),)


def _in_turns(disk: _Disk, together: _Together) -> DriveRates:
    return in_turns(
        DriveRates(
            read_bytes_per_s=disk.read_bytes_per_s, write_bytes_per_s=disk.rewrite_bytes_per_s
        ),
        DriveRates(
            read_bytes_per_s=together.read_bytes_per_s,
            write_bytes_per_s=together.write_bytes_per_s,
        ),
    )


def _links(
    measured: str, disk: _Disk, together: _Together, shared: tuple[str, ...]
) -> tuple[Link, ...]:
    rates = _in_turns(disk, together)
    reads, writes = rates.read_bytes_per_s, rates.write_bytes_per_s
    reads_take, writes_take = (max(reads, writes) / rate for rate in (reads, writes))
    return (
        Link(
            source_tier="nvme",
            target_tier="cpu",
            bandwidth_bytes_per_s=disk.read_bytes_per_s,
            latency_s=disk.latency_s,
            shared=shared,
            pipe_bytes_per_byte=reads_take if shared and reads_take > 1 else None,
            source=(
                f"{measured} {format_size(disk.read_size_bytes)} reads with {disk.io.num_threads} "
                f"threads x {format_size(disk.io.chunk_bytes)} chunks in a file of "
                f"{format_size(disk.file_bytes)} by {disk.read_path} that had been read before "
                f"({format_rate(disk.first_bytes_per_s)} the first time); latency of 4 KiB; "
                f"{format_rate(together.disk_bytes_per_s)} beside a one-row product"
            ),
        ),
        Link(
            source_tier="cpu",
            target_tier="nvme",
            bandwidth_bytes_per_s=disk.rewrite_bytes_per_s,
            latency_s=disk.latency_s,
            shared=shared,
            pipe_bytes_per_byte=writes_take if shared and writes_take > 1 else None,
            source=(
                f"{measured} one thread writing 1 MiB pieces over old ones by {disk.write_path} "
                f"({format_rate(disk.write_bytes_per_s)} into a new file); latency of a read"
            ),
        ),
    )
