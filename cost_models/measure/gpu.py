"""Measures a GPU through a small protocol: its bus both ways, its products, its memory, and what reads reach it.

Every rate is fitted on two sizes, so that the fixed cost of a call is told apart from its rate, and is
typical of a few repetitions (``measure_compute.typical``). Whoever holds the stop watch stands behind
``GpuTimer``: the real one, or one whose rates are known beforehand and have to be found again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Protocol

from gascompile.core.machine import (
    ComputeRate,
    Interference,
    IoSettings,
    Link,
    Machine,
    MemoryRate,
    Pipe,
    Place,
    RatePoint,
)
from gascompile.core.sizes import KIB, MIB, format_rate, format_size
from gascompile.cost_models.measure.compute import DTYPES, product_point, typical
from gascompile.cost_models.measure.disk import ProbeFile, ProbeReader, best_setting, read_through

READS = "reads"
_BUS, _IN, _DRIVE = "gpu-bus", "gpu-in", "nvme-read"
_SMALL_BYTES = 64 * KIB
_LARGE_BYTES = 64 * MIB
_NUM_CALLS = 256  # of tiny ops; twice as many tell one call's time from what all have once
_SHARES_A_BUS = 0.9
"""Both directions at once that reach less than this share of their sum go over one bus."""
_AS_GOOD = 0.95
"""Reads through RAM win within 5 %: they need nothing that can fall back in silence."""
_MAX_PRODUCT_S = 0.1
"""After a product that takes longer, no larger one is tried."""


class GpuTimer(Protocol):
    """Times one thing once, in seconds, with nothing else under way on the device."""

    @property
    def name(self) -> str: ...

    @property
    def total_bytes(self) -> int:
        """All memory of the device."""
        ...

    @property
    def width(self) -> int:
        """Rows and columns of the weights of a product: more than the caches hold."""
        ...

    def copy_s(self, size_bytes: int, *, into: bool, out: bool) -> float:
        """Copy between pinned memory and the device, in one direction or in both at once."""
        ...

    def pass_s(self, size_bytes: int) -> float:
        """Copy within the device, which reads and writes ``size_bytes`` each."""
        ...

    def product_s(self, dtype: str, rows: int) -> float:
        """Multiply ``rows`` with square weights of ``width``."""
        ...

    def calls_s(self, num_calls: int) -> float:
        """Call as many ops with next to no work, one after the other."""
        ...

    def library_bytes(self) -> int:
        """Memory of the device that the libraries of products keep for themselves."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of the bus."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What a GPU reached."""

    name: str
    total_bytes: int
    into: Direction
    out: Direction
    both_bytes_per_s: float
    """Of both directions at once, together."""
    points: Mapping[str, tuple[RatePoint, ...]]
    memory_bytes_per_s: float
    op_overhead_s: float
    library_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """How fast one engine brings bytes from a drive to the device, with the settings that suit it best."""

    io: IoSettings
    bytes_per_s: float
    latency_s: float
    path: str
    """The path that reads really took, in the engine's words."""


def measure_gpu(
    timer: GpuTimer, *, rows: Sequence[int], num_repeats: int, dtypes: Sequence[str] = DTYPES
) -> GpuFigures:
    """Return what the device behind ``timer`` reaches; a second or two on a real one.

    Args:
        timer: what is asked.
        rows: numbers of rows of the products, growing.
        num_repeats: how often each thing is timed.
        dtypes: torch's names without the ``torch.`` prefix.
    """

    def repeated(call: Callable[[], float]) -> float:
        call()  # the first pays for what is loaded once
        return typical([call() for _ in range(num_repeats)])

    def direction(*, into: bool) -> Direction:
        return _line(lambda size: repeated(lambda: timer.copy_s(size, into=into, out=not into)))

    both_s = repeated(lambda: timer.copy_s(_LARGE_BYTES, into=True, out=True))
    within = _line(lambda size: repeated(lambda: timer.pass_s(size)))
    few_s, many_s = (repeated(lambda n=n: timer.calls_s(n)) for n in (_NUM_CALLS, 2 * _NUM_CALLS))  # type: ignore[misc]
    return GpuFigures(
        name=timer.name,
        total_bytes=timer.total_bytes,
        into=direction(into=True),
        out=direction(into=False),
        both_bytes_per_s=2 * _LARGE_BYTES / both_s,
        points={dtype: _points(timer, dtype, rows, repeated) for dtype in dtypes},
        memory_bytes_per_s=2 * within.bytes_per_s,
        op_overhead_s=max(many_s - few_s, 0.0) / _NUM_CALLS,
        library_bytes=timer.library_bytes(),
    )


def _line(seconds: Callable[[int], float]) -> Direction:
    """Return rate and fixed cost of something that takes ``seconds`` of a size, by two sizes."""
    small_s, large_s = seconds(_SMALL_BYTES), seconds(_LARGE_BYTES)
    rate = (_LARGE_BYTES - _SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return Direction(bytes_per_s=rate, latency_s=max(small_s - _SMALL_BYTES / rate, 0.0))


def _points(
    timer: GpuTimer,
    dtype: str,
    rows: Sequence[int],
    repeated: Callable[[Callable[[], float]], float],
) -> tuple[RatePoint, ...]:
    itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
    points: list[RatePoint] = []
    for count in rows:
        time_s = repeated(lambda count=count: timer.product_s(dtype, count))  # type: ignore[misc]
        points.append(
            product_point(rows=count, itemsize=itemsize, time_s=time_s, width=timer.width)
        )
        if time_s > _MAX_PRODUCT_S:
            break
    return tuple(points)


def measure_engine(
    name: str, file: ProbeFile, read: ProbeReader, *, limit_s: float
) -> EngineFigures:
    """Return what ``read``, which brings bytes of a file to the device, reaches with its best settings.

    Args:
        name: of the engine, as ``IoSettings.engine`` has it.
        file: what is read.
        read: it may leave the host buffer that it is given alone.
        limit_s: for the search of settings, and for the pass over the file after it.
    """
    file.read_paths.clear()
    latency_s = file.latency_s(read)
    io, size_bytes, _ = best_setting(file, read, limit_s=limit_s)
    rates = sorted(read_through(file, read, io, size_bytes, limit_s=limit_s), reverse=True)
    return EngineFigures(
        io=replace(io, engine=name),
        bytes_per_s=rates[len(rates) // 5],
        latency_s=latency_s,
        path=" and ".join(sorted(file.read_paths)),
    )


def fastest(engines: Sequence[EngineFigures]) -> EngineFigures:
    """Return the engine to read with: the fastest, or reads through RAM where they are as good."""
    best = max(engines, key=lambda figures: figures.bytes_per_s)
    plain = (figures for figures in engines if figures.io.engine == READS)
    return next((p for p in plain if p.bytes_per_s >= _AS_GOOD * best.bytes_per_s), best)


def least_bytes(chosen: EngineFigures, engines: Sequence[EngineFigures]) -> int:
    """Return the size from which ``chosen`` brings a tensor sooner than reads through RAM; 0 for every size.

    A fast path may start slowly: below that size reads win, whatever the rates.
    """
    plain = next((figures for figures in engines if figures.io.engine == READS), None)
    if plain is None or plain is chosen or chosen.latency_s <= plain.latency_s:
        return 0
    gained_s_per_byte = 1 / plain.bytes_per_s - 1 / chosen.bytes_per_s
    return math.ceil((chosen.latency_s - plain.latency_s) / gained_s_per_byte)


def named_with_gpu(host_name: str, gpu_name: str) -> str:
    """Return the name of a host together with its GPU."""
    return f"{host_name}, {gpu_name}"


def gpu_machine(
    host: Machine, gpu: GpuFigures, engines: Sequence[EngineFigures], *, effort: str
) -> Machine:
    """Return ``host`` with a GPU that computes: places ``gpu``, ``cpu`` and ``nvme``, and the links between.

    Args:
        host: the processor, its memory and its drive, measured.
        gpu: what the device reached.
        engines: what brings bytes from the drive to it; one at least.
        effort: how it was measured, for the sources.
    """
    measured = f"measured {date.today().isoformat()} {effort}:"  # noqa: DTZ011 - the user's own day
    chosen = fastest(engines)
    reads = f"{measured} {_compared(engines, chosen)}"
    place = Place.named("gpu", gpu.total_bytes, source=f"{measured} all of it")
    settings = f"{measured} fastest settings of the engine '{chosen.io.engine}'"
    return replace(
        host,
        name=named_with_gpu(host.name, gpu.name),
        places=(place, *host.places),
        links=_links(host, gpu, chosen, measured=measured, reads=reads),
        pipes=(*host.pipes, *_pipes(host, gpu, chosen, measured)),
        rates=(*_rates(gpu, measured), *host.rates),
        memory=(_memory(gpu, measured), *host.memory),
        io=replace(
            chosen.io,
            source=settings,
            path=chosen.path,
            least_bytes=least_bytes(chosen, engines),
        ),
        # What ops of the processor take from its readers says nothing about those of a GPU.
        interference=Interference(),
        contention=None,
    )


def _bus(gpu: GpuFigures) -> tuple[str, ...]:
    """Return the pipe that both directions share; none where they are independent."""
    alone = gpu.into.bytes_per_s + gpu.out.bytes_per_s
    return (_BUS,) if gpu.both_bytes_per_s < _SHARES_A_BUS * alone else ()


def _pipes(
    host: Machine, gpu: GpuFigures, chosen: EngineFigures, measured: str
) -> tuple[Pipe, ...]:
    in_rate = max(gpu.into.bytes_per_s, chosen.bytes_per_s)
    drive_rate = max(host.link("nvme->cpu").bandwidth_bytes_per_s, chosen.bytes_per_s)
    both_rate = max(gpu.both_bytes_per_s, in_rate)
    pinned = f"{measured} copies of {format_size(_LARGE_BYTES)} from pinned memory"
    rates = {
        _DRIVE: (drive_rate, f"{measured} the faster of reads into RAM and reads to the GPU"),
        _IN: (in_rate, pinned),
        **{name: (both_rate, f"{measured} {_both(gpu)}") for name in _bus(gpu)},
    }
    return tuple(
        Pipe(name=name, bandwidth_bytes_per_s=rate, source=source)
        for name, (rate, source) in rates.items()
    )


def _links(
    host: Machine, gpu: GpuFigures, chosen: EngineFigures, *, measured: str, reads: str
) -> tuple[Link, ...]:
    read, bus = host.link("nvme->cpu"), _bus(gpu)
    pinned = f"{measured} {format_size(_LARGE_BYTES)} of pinned memory; {_both(gpu)}"
    direct = Direction(bytes_per_s=chosen.bytes_per_s, latency_s=chosen.latency_s)
    return (
        _link("nvme", "gpu", direct, (*read.shared, _DRIVE, _IN, *bus), reads),
        _link("cpu", "gpu", gpu.into, (_IN, *bus), pinned),
        _link("gpu", "cpu", gpu.out, bus, pinned),
        *(
            replace(link, shared=(*link.shared, _DRIVE)) if link.name == read.name else link
            for link in host.links
        ),
    )


def _both(gpu: GpuFigures) -> str:
    return f"{format_rate(gpu.both_bytes_per_s)} in both directions at once"


def _link(
    source_tier: str, target_tier: str, direction: Direction, shared: tuple[str, ...], source: str
) -> Link:
    return Link(
        source_tier=source_tier,
        target_tier=target_tier,
        bandwidth_bytes_per_s=direction.bytes_per_s,
        latency_s=direction.latency_s,
        shared=shared,
        source=source,
    )


def _rates(gpu: GpuFigures, measured: str) -> tuple[ComputeRate, ...]:
    return tuple(
        ComputeRate(
            device="gpu",
            dtype=dtype,
            flops_per_s=max(point.flops_per_s for point in points),
            points=points,
            source=f"{measured} products with square weights from the device's memory",
        )
        for dtype, points in gpu.points.items()
    )


def _memory(gpu: GpuFigures, measured: str) -> MemoryRate:
    return MemoryRate(
        device="gpu",
        bandwidth_bytes_per_s=gpu.memory_bytes_per_s,
        op_overhead_s=gpu.op_overhead_s,
        source=f"{measured} copies of {format_size(_LARGE_BYTES)} within the device; {_NUM_CALLS} calls of small ops",
        library_bytes=gpu.library_bytes,
    )


def _compared(engines: Sequence[EngineFigures], chosen: EngineFigures) -> str:
    """Return what each engine reached and by which path, the chosen one first."""
    order = sorted(engines, key=lambda figures: figures is not chosen)
    return ", ".join(
        f"{figures.io.engine} by {figures.path or 'an unknown path'} {format_rate(figures.bytes_per_s)}"
        for figures in order
    )
