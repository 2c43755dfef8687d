"""``whatif --ranks`` and ``explain --hosts``: other numbers of ranks, and why a step over ranks is sharded so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gascompile.commands import options as opt
from gascompile.commands.hosts import as_json, hosts_of
from gascompile.commands.output import emit, fields, grid, note, reserved_stdout
from gascompile.commands.plans import read_plan
from gascompile.core import serial
from gascompile.core.machine import Machine
from gascompile.core.sizes import format_size, format_time
from gascompile.report.phrases import signed

if TYPE_CHECKING:  # torch comes with it, which help and wrong usage need not wait for
    from gascompile.api.other_ranks import RanksVariant
    from gascompile.core.workload import Workload
    from gascompile.passes.explain.shards import OtherShards


def whatif_over(asked: opt.Asked, ranks: str, *, json: bool) -> None:
    """Say what a model takes over other numbers of ``ranks``."""
    from gascompile.api.other_ranks import other_ranks

    source, train, (batch, tokens) = asked.source, asked.train, asked.shape
    try:
        counts = [int(part) for part in ranks.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--ranks is {ranks!r}; give numbers, as in 1,2,4,8") from error
    with reserved_stdout(json), opt.usage_errors():
        planned, own = _source_of(source)
        if own is None or asked.machine is not None:
            own = opt.machine_of(asked.machine, asked.cache_dir, source)
        variants = other_ranks(
            planned,
            own,
            counts,
            train=train,
            batch=batch,
            tokens=tokens,
            cache_dir=asked.cache_dir,
        )
    unit = "rows of a rank" if train else "tokens of a request"
    columns = [
        ("ranks", True), ("step" if train else "token", True), ("a second", True), ("per rank", True),
        ("between ranks", True), ("planned peak", False), ("what binds", False),
    ]  # fmt: skip
    data = {
        "machine": own.name,
        "train": train,
        "variants": [serial.to_json(variant) for variant in variants],
    }
    title = f"{source} over ranks on {own.name}: {unit} a second"
    emit(json, data, grid(title, columns, [_cells(variant) for variant in variants]))


def _cells(variant: RanksVariant) -> tuple[str, ...]:
    if variant.predicted_s is None:
        return (
            str(variant.ranks),
            f"needs {format_size(variant.required_bytes or 0)}",
            "",
            "",
            "",
            "",
            "",
        )
    return (
        str(variant.ranks),
        format_time(variant.predicted_s),
        f"{variant.per_second:.4g}",
        f"{variant.efficiency:.0%}",
        format_time(variant.exchange_s or 0.0),
        ", ".join(f"{kind} {format_size(size)}" for kind, size in variant.peak_bytes.items()),
        variant.binding,
    )


def explain_over(asked: opt.Asked, subject: str, *, json: bool) -> None:
    """Say why a step over ranks is sharded as it is."""
    from gascompile.api.plan_hosts import chain_of
    from gascompile.passes.explain.shards import explain_shards
    from gascompile.passes.parallel.shard_options import Training

    if not asked.train or (asked.hosts is None and asked.ranks is None):
        raise typer.BadParameter(
            "what is sharded over ranks is explained of training steps: --train with --hosts or --ranks"
        )
    with reserved_stdout(json), opt.usage_errors():
        resolved = hosts_of(asked)
        planned, _ = _source_of(asked.source)
        machine = resolved.hosts[0].machine
        workload, width = chain_of(planned, machine, asked.shape, asked.cache_dir)
        explained = explain_shards(subject, workload, resolved, Training.adam(width or 2))
    data = {
        "subject": subject,
        "why": explained.reason,
        "plan": as_json(explained.plan),
        "others": [serial.to_json(other) for other in explained.others],
    }
    rows = [
        ("hosts", f"{resolved.name}: {resolved.num_ranks} ranks"),
        ("step", format_time(explained.plan.predicted_s)),
        ("why", explained.reason),
    ]
    columns = [
        ("all layers", False), ("planned so", True), ("step", True), ("change", True), ("binds", False),
        ("why not", False),
    ]  # fmt: skip
    lines = [_choice(other) for other in explained.others]
    parts = [fields(subject, rows), grid("Each line is a plan made for it", columns, lines)]
    emit(json, data, *parts, note("Layers are alike and ranks equal: what one has all have."))


def _choice(other: OtherShards) -> tuple[str, ...]:
    planned = str(other.layers) if other.layers else ""
    if other.predicted_s is None or other.change_s is None:
        return other.choice, planned, "", "", "", other.obstacle
    times = (format_time(other.predicted_s), signed(other.change_s))
    return other.choice, planned, *times, other.binding, ""


def _source_of(source: str) -> tuple[Workload | str, Machine | None]:
    """Return what is planned, and the machine where that is of a plan."""
    path = Path(source)
    if not opt.is_finished(path):
        return source, None
    made = read_plan(path)
    return made.workload, made.machine
