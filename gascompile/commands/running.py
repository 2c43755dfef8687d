"""``run``: compile a source (or open a bundle), run it, and say how close to the limit it came."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import counted, emit, fields, note, reserved_stdout, warnings_block
from gascompile.commands.summary import sizes
from gascompile.core import serial
from gascompile.core.config import WEIGHT_FORMS
from gascompile.core.errors import CheckpointError
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size, format_time

if TYPE_CHECKING:  # torch comes with these, which help and wrong usage need not wait for
    from gascompile.api.compiled import CompiledModel
    from gascompile.commands.eager import Difference
    from gascompile.core.reports import RunReport
    from gascompile.precision.report import FormatReport, MeasuredError

RunSource = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE|BUNDLE",
        help="Hugging Face directory with weights, .pt2 file, package.module:callable, or a saved bundle.",
        show_default=False,
    ),
]
Repeat = Annotated[
    int,
    typer.Option(
        "--repeat", min=1, max=1 << 40, metavar="N", help="Runs; the last one is reported."
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option(
        "--inputs", metavar="FILE", help="Inputs by argument name in a .safetensors file."
    ),
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="DIR", help="Save the compiled model as a bundle.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Compare with eager, where the model fits in memory.")
]

WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="FORM|DIR",
        help="Form that weights move in: bf16, int8, int4 or auto. Of a bundle: the folder of its weight files "
        "now (./int8 for one of such a name).",
    ),
]
MeasureError = Annotated[
    bool,
    typer.Option(
        "--measure-error", help="Compare with the weights as stored, run in the same budget."
    ),
]
AnyMachine = Annotated[
    bool, typer.Option("--any-machine", help="Run a bundle that was made on another machine.")
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run the machine code of a bundle, and ops of your own; only if you trust who made it.",
    ),
]


UNLIKELY_SPEED = 1.5
"""Where measured and predicted seconds differ by this factor, people are told what may be behind it."""


@dataclass(slots=True)
class _Job:
    """A compiled model ready to be called."""

    compiled: CompiledModel
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    error: MeasuredError | None = None
    formats: FormatReport | None = None


def run(
    source: RunSource,
    budget: opt.BudgetSize = None,
    cpu: opt.CpuSize = None,
    nvme: opt.NvmeSize = None,
    machine: opt.MachineName = None,
    repeat: Repeat = 1,
    inputs: Inputs = None,
    save: Save = None,
    check: Check = False,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    strategy: opt.Strategy = None,
    time_limit: opt.TimeLimit = 20.0,
    weights: WeightsOption = None,
    measure_error: MeasureError = False,
    any_machine: AnyMachine = False,
    allow_code: AllowCode = False,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Compile a model for a budget, run it, and report what was measured.

    Example: [bold]gascompile run all-MiniLM-L6-v2/ --budget 32MiB --repeat 5 --check[/bold]
    """
    with reserved_stdout(json):
        if opt.is_bundle(Path(source)):
            if (
                check
                or measure_error
                or any(given is not None for given in (budget, cpu, nvme, machine, strategy))
            ):
                raise typer.BadParameter(
                    f"{source} is a bundle: its plan is made, and it holds no eager model; leave out --budget, --cpu, "
                    "--nvme, --machine, --strategy, --check and --measure-error, or name the source it was made from"
                )
            trust = (any_machine, allow_code)
            folder = opt.cache_dir_of(cache_dir)
            job, difference = _load(source, inputs, weights, folder, trust), None
            _repeat(job, repeat)
        else:
            _require_form(source, weights, for_bundles=any_machine or allow_code)
            asked = opt.Asked(
                source=source,
                limits=opt.Limits(budget, cpu, nvme),
                machine=machine,
                shape=(batch, tokens),
                cache_dir=opt.cache_dir_of(cache_dir),
                time_limit_s=time_limit,
                strategy=strategy,
                weights=weights,
            )
            job, difference = _compile(asked, inputs, repeat, check=check)
        job.formats = job.compiled.format_report
        if save is not None:
            job.compiled.save(save)
        report = job.compiled.last_run
        if measure_error:
            job.error = job.compiled.measure_error(*job.args, **job.kwargs)
        job.compiled.close()
    _report(job, report, difference, save, json)


def _require_form(source: str, weights: str | None, *, for_bundles: bool) -> None:
    """Refuse what is for bundles alone, and plans, which hold neither a program nor weights."""
    if serial.reads(Plan, opt.format_of(Path(source))):
        raise typer.BadParameter(
            f"{source} is a plan, which holds neither the model nor its weights; name the source it was made from, or "
            "a bundle of 'gascompile run SOURCE --save DIR'"
        )
    if for_bundles:
        raise typer.BadParameter(
            f"{source} is no bundle; --any-machine and --allow-code are for bundles"
        )
    if weights is not None and weights not in WEIGHT_FORMS:
        raise typer.BadParameter(
            f"{source} is no bundle, so --weights is one of {', '.join(WEIGHT_FORMS)}, not {weights!r}; a folder "
            "of moved weight files is for bundles"
        )


def _load(
    source: str,
    inputs: Path | None,
    weights: str | None,
    cache_dir: Path,
    trust: tuple[bool, bool],
) -> _Job:
    if weights in WEIGHT_FORMS:
        raise typer.BadParameter(
            f"{source} is a bundle: the form of its weights is part of its plan; compile the source again with "
            f"--weights {weights}, or write ./{weights} for a folder of that name"
        )
    from gascompile.api.load import load
    from gascompile.commands.eager import inputs_of_program, with_given_inputs

    any_machine, allow_code = trust
    compiled = load(
        source,
        checkpoint=weights,
        any_machine=any_machine,
        allow_code=allow_code,
        cache_dir=cache_dir,
    )
    args, kwargs = inputs_of_program(compiled.program)
    if inputs is not None:
        kwargs = with_given_inputs(kwargs, inputs)
    return _Job(compiled, args, kwargs)


def _compile(
    asked: opt.Asked, inputs: Path | None, repeat: int, *, check: bool
) -> tuple[_Job, Difference | None]:
    from gascompile.api.compile import compile as compile_model
    from gascompile.api.sources import open_source
    from gascompile.capture.calls import normalize_call
    from gascompile.commands.eager import compare, require_room, with_given_inputs

    source, (batch, tokens) = asked.source, asked.shape
    opened = open_source(source, batch=batch, tokens=tokens)
    if opened.checkpoint is None and Path(source).is_dir():
        raise CheckpointError(
            f"{source} holds no .safetensors file and no pytorch_model.bin, and running needs weights; add them, or "
            "use 'gascompile plan', which needs none"
        )
    args, kwargs = normalize_call(opened.model, *(opened.inputs or ((), {})))
    if inputs is not None:
        kwargs = with_given_inputs(kwargs, inputs)
    if not args and not kwargs:
        raise CheckpointError(
            f"{source} brings no example inputs; name a file with --inputs, or let the callable return "
            "(module, example_inputs)"
        )
    if check:
        require_room(opened.model)
    machine, budget = asked.target()
    with opt.usage_errors():
        compiled = compile_model(
            opened.model, budget, checkpoint=opened.checkpoint, machine=machine, **asked.config
        )
    job = _Job(compiled, args, kwargs)
    outputs = _repeat(job, repeat)
    return job, compare(opened, args, kwargs, outputs) if check else None


def _repeat(job: _Job, repeat: int) -> Any:
    import torch

    from gascompile.core.progress import task

    outputs = None
    for number in range(repeat):
        with task(f"Run {number + 1} of {repeat}"), torch.no_grad():
            outputs = job.compiled(*job.args, **job.kwargs)
        report = job.compiled.last_run
        assert report is not None
        job.seconds.append(report.seconds)
    return outputs


def _report(
    job: _Job,
    report: RunReport | None,
    difference: Difference | None,
    save: Path | None,
    as_json: bool,
) -> None:
    plan = job.compiled.plan
    assert report is not None
    assert job.formats is not None
    data = {
        "model": plan.workload.name,
        "run": serial.to_json(report),
        "all_seconds": job.seconds,
        "budget_bytes": dict(plan.budget_bytes),
        "predicted_s": plan.certificate.predicted_s,
        "limit_s": plan.certificate.limit_s,
        "warnings": list(plan.warnings),
        "formats": serial.to_json(job.formats),
        "error": serial.to_json(job.error) if job.error is not None else None,
        "check": serial.to_json(difference) if difference is not None else None,
        "bundle": str(save) if save is not None else None,
    }
    rows = [*_rows(plan, report, job.seconds), *_form_rows(job.formats, job.error)]
    parts: list[RenderableType] = [fields(f"Run of {plan.workload.name}", rows)]
    if said := advice(plan, report, job.seconds):
        parts.append(note(said))
    if difference is not None:
        parts.append(note(difference.sentence()))
    if save is not None:
        parts.append(note(f"The bundle is in {save}."))
    emit(as_json, data, *parts, *warnings_block(plan.warnings))
    if difference is not None and not difference.ok:
        raise typer.Exit(1)


def advice(plan: Plan, report: RunReport, seconds: list[float]) -> str:
    """Return why a run and its prediction are far apart, where that is known."""
    if report.seconds < plan.certificate.limit_s / UNLIKELY_SPEED:
        return (
            "The run was faster than its limit, so the machine's numbers are too low, as when it was measured while it "
            "was busy. Measure it again: gascompile calibrate"
        )
    if len(seconds) == 1 and report.seconds > UNLIKELY_SPEED * plan.certificate.predicted_s:
        return "A first run also loads the resident weights: --repeat 3 shows a warm one."
    return ""


def _form_rows(formats: FormatReport, error: MeasuredError | None) -> list[tuple[str, str]]:
    rows = [("weights", sizes(formats.size_bytes))]
    if formats.relative_error:
        num_rounded = sum(weight.relative_error > 0 for weight in formats.weights)
        text = f"at most {formats.relative_error:.2%} of a weight's norm, {counted(num_rounded, 'weight')}"
        rows.append(("rounded", text))
    if error is not None:
        rows.append(("outputs off by", f"{error.relative_error:.2%} of their norm"))
    return rows


def _rows(plan: Plan, report: RunReport, seconds: list[float]) -> list[tuple[str, str]]:
    tier = plan.machine.compute_tier
    rows = [
        (
            "last run",
            f"{format_time(report.seconds)}, predicted {format_time(plan.certificate.predicted_s)}",
        ),
        (
            "share of limit",
            f"{report.share_of_limit:.1%} of {format_time(plan.certificate.limit_s)}",
        ),
        ("stalled", f"{format_time(report.stall_s)} in {counted(len(report.stalls), 'wait')}"),
        ("moved", sizes(report.link_bytes)),
        (
            "peak",
            f"{sizes(report.peak_bytes)}; budget {format_size(plan.budget_bytes[tier])} of {tier}",
        ),
        ("whole process", format_size(report.process_peak_bytes)),
        ("I/O path", ", ".join(f"{link}: {path}" for link, path in report.paths.items()) or "none"),
    ]
    if len(seconds) > 1:
        middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
        text = f"median {format_time(middle)}, {format_time(low)} to {format_time(high)}"
        rows.insert(1, (f"all {len(seconds)} runs", text))
    return rows
