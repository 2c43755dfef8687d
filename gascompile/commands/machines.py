"""``calibrate`` and ``doctor``: what this machine can do."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from gascompile.commands import options as opt
from gascompile.commands.output import emit, fields, grid, note, reserved_stdout
from gascompile.core import serial
from gascompile.core.machine import ComputeRate, Machine
from gascompile.core.sizes import format_rate, format_size


def calibrate(
    output: opt.Output = None,
    cache_dir: opt.CacheDir = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only the few seconds that a first compile takes.")
    ] = False,
    json: opt.JsonFlag = False,
) -> None:
    """Measure this machine in half a minute, in place of what was remembered, and print what was found.

    Every resource alone and beside others, then whole runs of a small model. Leave the machine idle.
    Example: [bold]gascompile calibrate -o this-machine.json[/bold]
    """
    from gascompile.api.calibrate import calibrate_machine, num_stages
    from gascompile.core.progress import stages, task
    from gascompile.machines.resolve import measure_briefly
    from gascompile.runtime.transfer.engine import read_blocks

    folder = opt.cache_dir_of(cache_dir)
    if quick:
        with reserved_stdout(json), task("Measuring this machine"):
            machine = measure_briefly(cache_dir=folder, read=read_blocks)
    else:
        with reserved_stdout(json), stages("Measuring this machine", num_stages()) as stage:
            machine = calibrate_machine(cache_dir=folder, read=read_blocks, stage=stage)
    if output is not None:
        serial.write_output(output, serial.dumps(machine))
    written = [note(f"The machine is in {output}.")] if output is not None else []
    emit(json, serial.to_json(machine), *machine_parts(machine), *written)


def machine_parts(machine: Machine) -> list[RenderableType]:
    """Return a machine for people: every number with its source."""
    rows = [
        (f"{name} memory", f"{format_size(tier.size_bytes)} ({tier.source})")
        for name, tier in machine.tiers.items()
    ]
    rows += [
        (
            link.name,
            f"{format_rate(link.bandwidth_bytes_per_s)}, {_us(link.latency_s)} ({link.source})",
        )
        for link in machine.links
    ]
    rows += [
        (f"pipe {pipe.name}", f"{format_rate(pipe.bandwidth_bytes_per_s)} ({pipe.source})")
        for pipe in machine.pipes
    ]
    rows += [
        (
            f"{rate.device} memory",
            f"{format_rate(rate.bandwidth_bytes_per_s)}, {_us(rate.op_overhead_s)} per op ({rate.source})",
        )
        for rate in machine.memory
    ]
    rows += [
        (f"{rate.device} {rate.dtype}", f"{_gflops(rate)} GFLOP/s ({rate.source})")
        for rate in machine.rates
    ]
    io = machine.io
    rows.append(
        ("reads", f"{io.num_threads} threads, {format_size(io.chunk_bytes)} each ({io.source})")
    )
    return [fields(machine.name, rows)]


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def _gflops(rate: ComputeRate) -> str:
    rates = [point.flops_per_s for point in rate.points] or [rate.flops_per_s]
    low, high = f"{min(rates) / 1e9:.0f}", f"{max(rates) / 1e9:.0f}"
    return high if low == high else f"{low} to {high}"


_STYLES = {"ok": "green", "warn": "yellow", "missing": "red"}


def doctor(cache_dir: opt.CacheDir = None, json: opt.JsonFlag = False) -> None:
    """Say what of this machine can be used and what to do about the rest.

    Example: [bold]gascompile doctor[/bold]
    """
    from gascompile.machines.doctor import examine

    with reserved_stdout(json):
        report = examine(opt.cache_dir_of(cache_dir))
    rows = []
    for finding in report.findings:
        detail = f"{finding.detail}\n-> {finding.remedy}" if finding.remedy else finding.detail
        status = Text(finding.status.value, style=_STYLES[finding.status.value])
        rows.append((finding.name, status, detail))
    columns = [("what", False), ("", False), ("found", False)]
    verdict = "ready" if report.healthy else "something required is missing; see above"
    data = {**_as_dict(serial.to_json(report)), "healthy": report.healthy}
    emit(json, data, grid("This machine", columns, rows), note(verdict))
    if not report.healthy:
        raise typer.Exit(1)


def _as_dict(data: serial.JsonValue) -> dict[str, serial.JsonValue]:
    assert isinstance(data, dict)
    return data
