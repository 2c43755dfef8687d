"""``report``: a plan, and what a run of it measured, as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gascompile import __version__
from gascompile.commands import options as opt
from gascompile.commands.output import emit, note, reserved_stdout
from gascompile.commands.plans import read_plan
from gascompile.commands.simulation import trace_of
from gascompile.core import serial
from gascompile.core.errors import FormatError
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size

if TYPE_CHECKING:  # numpy comes with it, which help and wrong usage need not wait for
    from gascompile.core.reports import RunReport

Subject = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|BUNDLE|RUN",
        help="A plan file, a bundle, or what 'gascompile run --save DIR --json' printed.",
        show_default=False,
    ),
]
Page = Annotated[
    Path, typer.Option("-o", "--output", metavar="FILE", help="The .html file to write.")
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run", metavar="FILE", help="What 'gascompile run --json' printed, to be shown beside it."
    ),
]
WhatIf = Annotated[
    bool,
    typer.Option("--whatif/--no-whatif", help="Plan what more memory or bandwidth would be worth."),
]
Why = Annotated[
    int,
    typer.Option(
        "--why", min=0, max=10_000, metavar="N", help="Tensors to price the alternatives of."
    ),
]


def report(
    subject: Subject,
    output: Page,
    run: Run = None,
    whatif: WhatIf = True,
    why: Why = 8,
    time_limit: opt.TimeLimit = 5.0,
    json: opt.JsonFlag = False,
) -> None:
    """Write a plan as one HTML file: certificate, timeline, memory, tensors, what-if, predicted beside measured.

    Example: [bold]gascompile report plan.json -o plan.html[/bold]
    """
    from gascompile.core.progress import task
    from gascompile.passes.explain.whatif import whatif as variants_of
    from gascompile.passes.verify.walk import verify
    from gascompile.report.page import page

    with reserved_stdout(json):
        if output.suffix.lower() not in (".html", ".htm"):
            raise typer.BadParameter(f"a report is an .html file, not '{output.name}'")
        made, measured = read_subject(subject, run)
        verify(made)
        timeline = trace_of(made, made.machine)
        variants = None
        if whatif:
            with task("Planning variants"):
                variants = variants_of(made, time_limit_s=time_limit)
        with task("Pricing alternatives"):
            text = page(
                made,
                timeline,
                whatif=variants,
                run=measured,
                num_explained=why,
                made_by=f"GASCompile {__version__}",
            )
        serial.write_output(output, text)
    data = {
        "model": made.workload.name,
        "report": str(output),
        "bytes": len(text.encode()),
        "variants": 0 if variants is None else len(variants.variants),
        "run": measured is not None,
    }
    said = f"The report is in {output} ({format_size(len(text.encode()))}); open it in a browser."
    emit(json, data, note(said))


def read_subject(subject: Path, run: Path | None) -> tuple[Plan, RunReport | None]:
    """Return the plan, and the run if there is one.

    Raises:
        FormatError: a file holds something else, or a run that names no bundle stands for a plan.
    """
    if run is not None:
        made = read_plan(subject)
        return made, _run_of(_printed(run), made, run)
    if opt.is_bundle(subject) or serial.reads(Plan, opt.format_of(subject)) or subject.is_dir():
        return read_plan(subject), None
    printed = _printed(subject)
    if not isinstance(printed.get("bundle"), str):
        raise FormatError(
            f"{subject} is a run whose plan was not saved; name the plan: gascompile report PLAN --run {subject}"
        )
    made = read_plan(Path(printed["bundle"]))
    return made, _run_of(printed, made, subject)


def _printed(path: Path) -> dict[str, Any]:
    printed = serial.read_json(path)
    if not isinstance(printed, dict) or not isinstance(printed.get("run"), dict):
        raise FormatError(
            f"{path} is neither a plan nor a run; write them with 'gascompile plan -o FILE' and "
            "'gascompile run --json > FILE'"
        )
    return printed


def _run_of(printed: dict[str, Any], made: Plan, path: Path) -> RunReport:
    from gascompile.core.reports import RunReport

    if printed.get("model") != made.workload.name:
        raise FormatError(
            f"{path} is a run of {printed.get('model')}, and the plan is of {made.workload.name}"
        )
    return serial.from_json(RunReport, printed["run"], where=f"{path}: $.run")
