"""``simulate``: what a plan does when, as a table, a trace file and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import counted, emit, fields, grid, note, reserved_stdout
from gascompile.commands.plans import PlanArgument, read_plan
from gascompile.commands.summary import sizes
from gascompile.core import serial
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall
from gascompile.core.sizes import format_size, format_time

if TYPE_CHECKING:  # numpy comes with it, which help and wrong usage need not wait for
    from gascompile.cost_models.simulate.trace import Trace

TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a trace for ui.perfetto.dev (trace-event JSON).",
        callback=opt.no_model,
    ),
]
PictureFile = Annotated[
    Path | None,
    typer.Option(
        "--picture", metavar="FILE", help="Draw ops, links and memory over time: .png or .svg."
    ),
]


def simulate(
    plan_path: PlanArgument,
    machine: opt.OtherMachineName = None,
    output: opt.Output = None,
    trace: TraceFile = None,
    picture: PictureFile = None,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Replay a plan without running it, on its own machine or on another one; show why ops wait.

    Example: [bold]gascompile simulate plan.json --trace trace.json --picture plan.png[/bold]
    """
    from gascompile.passes.verify.walk import verify

    with reserved_stdout(json):
        made = read_plan(plan_path)
        verify(made)
        target = opt.machine_of(machine, opt.cache_dir_of(cache_dir)) if machine else made.machine
        timeline = trace_of(made, target)
        written = _write(made, timeline, output, trace, picture)
    data = {
        "model": made.workload.name,
        "machine": target.name,
        "timeline": serial.to_json(timeline),
    }
    if target != made.machine:
        written.append(_kept_times(made.machine, target))
    emit(json, data, *_parts(made, timeline), *(note(line) for line in written))


def _kept_times(planned: Machine, target: Machine) -> str:
    return (
        f"Ops take what they take on {planned.name}; the links are those of {target.name}. For its ops, too, make a "
        "plan for it: gascompile plan SOURCE --machine"
    )


def trace_of(made: Plan, target: Machine) -> Trace:
    """Return the trace; a machine without a link that the plan uses is wrong usage."""
    from gascompile.cost_models.simulate.trace import trace

    try:
        return trace(made, target)
    except KeyError as error:
        raise typer.BadParameter(
            f"the machine '{target.name}' has no link {error}, which the plan uses; its links are "
            f"{', '.join(link.name for link in target.links) or 'none'}"
        ) from error


def _write(
    made: Plan, timeline: Trace, output: Path | None, trace_file: Path | None, picture: Path | None
) -> list[str]:
    """Write what was asked for; return what to say about it."""
    lines = []
    if picture is not None:
        from gascompile.report.picture import picture as draw

        with opt.usage_errors():
            draw(made, timeline, picture)
        lines.append(f"The picture is in {picture}.")
    if trace_file is not None:
        from gascompile.report.perfetto import perfetto

        serial.write_output(trace_file, serial.dumps(perfetto(made, timeline)))
        lines.append(f"The trace is in {trace_file}; open it at https://ui.perfetto.dev.")
    if output is not None:
        serial.write_output(output, serial.dumps(timeline))
        lines.append(f"The timeline is in {output}.")
    return lines


def _parts(made: Plan, timeline: Trace) -> list[RenderableType]:
    stalled_s = sum(stall.time_s for stall in timeline.stalls)
    rows = [
        ("machine", timeline.machine),
        ("one iteration", format_time(timeline.seconds)),
        ("first iteration", format_time(timeline.first_iteration_s)),
        (
            "stalled",
            f"{format_time(stalled_s)} in {counted(len(timeline.stalls), 'wait')}{_causes(timeline)}",
        ),
        ("peak", sizes({tier: curve.peak_bytes for tier, curve in timeline.memory.items()})),
        ("planned peak", sizes(timeline.peak_bytes)),
    ]
    for link, size in timeline.link_bytes.items():
        busy_s = timeline.link_busy_s[link]
        share = f" ({busy_s / timeline.seconds:.0%})" if timeline.seconds else ""
        rows.append((link, f"{format_size(size)}, busy {format_time(busy_s)}{share}"))
    parts: list[RenderableType] = [fields(f"Replay of {made.workload.name}", rows)]
    worst = sorted(timeline.stalls, key=lambda stall: -stall.time_s)[:8]
    if worst:
        columns = [("before op", False), ("waiting for", False), ("time", True), ("why", False)]
        names = [*(op.name for op in made.ops), "(end of the iteration)"]
        lines = [(names[s.op], s.tensor, format_time(s.time_s), why_late(s)) for s in worst]
        parts.append(grid("Longest stalls", columns, lines))
    return parts


def _causes(timeline: Trace) -> str:
    totals: dict[str, float] = {}
    for stall in timeline.stalls:
        totals[stall.cause] = totals.get(stall.cause, 0.0) + stall.time_s
    shown = ", ".join(f"{cause} {format_time(time_s)}" for cause, time_s in totals.items())
    return f" ({shown})" if shown else ""


def why_late(stall: Stall) -> str:
    """Return the cause of a stall in a few words."""
    if stall.cause == "link busy":
        return f"{stall.link} was busy with {stall.blocker}"
    if stall.cause == "memory":
        return f"no room until {stall.blocker} was released"
    return f"bandwidth of {stall.link}"
