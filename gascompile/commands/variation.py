"""``whatif``: what more memory, more bandwidth or another drive would be worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.explanation import PlanOrSource
from gascompile.commands.output import emit, fields, grid, note, reserved_stdout, warnings_block
from gascompile.commands.plans import Train, plan_to_look_at
from gascompile.core import serial
from gascompile.core.checks.workload_files import is_workload_file
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, format_size, format_time
from gascompile.report.phrases import change_of, signed

if TYPE_CHECKING:  # numpy comes with it, which help and wrong usage need not wait for
    from gascompile.passes.explain.whatif import Variant, WhatIf

Gib = Annotated[
    float | None,
    typer.Option(
        "--gib", min=1e-6, max=1e6, metavar="N", help="Memory to add to each tier, in GiB."
    ),
]
Gbps = Annotated[
    float | None,
    typer.Option(
        "--gbps", min=1e-6, max=1e6, metavar="N", help="Bandwidth to add to each link, in GB/s."
    ),
]


RankCounts = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N,...",
        help="What the model takes over so many equal ranks, in place of more memory and bandwidth.",
    ),
]


def whatif_verb(
    source: PlanOrSource,
    gib: Gib = None,
    gbps: Gbps = None,
    budget: opt.BudgetSize = None,
    cpu: opt.CpuSize = None,
    nvme: opt.NvmeSize = None,
    place: opt.PlaceSizes = None,
    machine: opt.MachineName = None,
    ranks: RankCounts = None,
    train: Train = False,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    time_limit: opt.TimeLimit = 10.0,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Say what more memory or bandwidth would be worth; every time shown is that of a plan made for it.

    Example: [bold]gascompile whatif plan.json --gib 4 --gbps 2[/bold]
    Over ranks: [bold]gascompile whatif gpt.workload.json --ranks 1,2,4,8 --train --machine h100-gen5[/bold]
    """
    asked = opt.Asked(
        source=source,
        limits=opt.Limits(budget, cpu, nvme, place or ()),
        machine=machine,
        shape=(batch, tokens),
        train=train,
        time_limit_s=time_limit,
        cache_dir=opt.cache_dir_of(cache_dir),
    )
    if ranks is not None or train:
        from gascompile.commands.over_ranks import whatif_over

        if any(x is not None for x in (gib, gbps, budget, cpu, nvme, place)) or ranks is None:
            raise typer.BadParameter(
                "other numbers of ranks take --ranks, --train, --machine, --batch and --tokens alone"
            )
        whatif_over(asked, ranks, json=json)
        return
    from gascompile.core.progress import task
    from gascompile.passes.explain.whatif import whatif

    with reserved_stdout(json):
        made, finished = plan_to_look_at(asked)
        with task("Planning variants"):
            variants = whatif(
                made,
                step_bytes=None if gib is None else round(gib * GIB),
                step_bytes_per_s=None if gbps is None else gbps * 1e9,
                # Workload files are planned with everything movable; of a plan its steps tell.
                move_all=True if is_workload_file(source) and not finished else None,
                time_limit_s=time_limit,
            )
    data: dict[str, Any] = {"model": made.workload.name, "machine": made.machine.name}
    whole = serial.to_json(variants)
    assert isinstance(whole, dict)
    for variant, entry in zip(variants.variants, whole["variants"], strict=True):
        entry["speedup"] = variant.speedup(variants.base_s)
    emit(json, {**data, **whole}, *_parts(made, variants))


def _parts(made: Plan, variants: WhatIf) -> list[RenderableType]:
    rows = [
        ("machine", made.machine.name),
        ("one iteration", format_time(variants.base_s)),
        ("set by", variants.binding),
    ]
    columns = [
        ("what if", False),
        ("iteration", True),
        ("change", True),
        ("speed", True),
        ("at most", True),
    ]
    lines = [(change_of(made, v), *_cells(v, variants.base_s)) for v in variants.variants]
    parts: list[RenderableType] = [
        fields(f"What if, for {made.workload.name}", rows),
        grid("Each line is a plan made for it", columns, lines),
    ]
    if not variants.of("next"):
        parts.append(note("No larger budget saves 1 % or more."))
    return [*parts, *warnings_block(variants.notes)]


def _cells(variant: Variant, base_s: float) -> tuple[str, str, str, str]:
    if variant.predicted_s is None or variant.change_s is None:
        needed = variant.required_bytes or 0
        return f"needs {format_size(needed)}", "", "", ""
    speedup = variant.speedup(base_s)
    return (
        format_time(variant.predicted_s),
        signed(variant.change_s),
        "" if speedup is None else f"{speedup:+.1%}",
        "" if variant.proven_change_s is None else signed(variant.proven_change_s),
    )
