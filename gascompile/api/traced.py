"""Traced: the program of a model, from the cache where one is kept of it, whatever it was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gascompile.bundles.kept_captures import trace_data
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.calls import named_shapes
from gascompile.capture.fake_twin import canonical_names
from gascompile.capture.record.record import CaptureRecord
from gascompile.capture.to_program import Capture
from gascompile.core.program import Program
from gascompile.core.progress import task
from gascompile.machines.admission import as_computed
from gascompile.machines.op_memory import build_counter
from gascompile.weights.resolve import with_held_tensors

if TYPE_CHECKING:
    from gascompile.api.compile import Job
    from gascompile.precision.sensitivity import Sensitivity


def traced(
    job: Job, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: CachedPlan | None
) -> Capture:
    """Return the capture of a job's model.

    Args:
        job: of the model.
        args: of the call that is planned, by place.
        kwargs: and by name.
        entry: where captures are kept; ``None`` for a new one.

    Raises:
        CaptureError: the model cannot be traced.
        UnsupportedOpError: it does what has no place in a plan.
    """
    from gascompile.capture.export import capture

    build_counter(job.machine, job.config.cache_dir)
    kept = entry.captured() if entry is not None else None
    if kept is not None and job.history.admit(frozenset(kept.known.inert), args, kwargs):
        return Capture(
            program=kept.program,
            constants=kept.held,
            canonical=canonical_names(job.model),
            record=kept.known,
        )
    with task(f"Capturing {type(job.model).__name__}"):
        shapes = named_shapes(job.model, args, job.dynamic_shapes)
        new = capture(job.model, args, kwargs, dynamic_shapes=shapes, history=job.history)
    if entry is not None and isinstance(new.record, CaptureRecord):
        entry.keep_capture(trace_data(new.program), new.constants, new.record)
    return new


def formed(
    job: Job, captured: Capture, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Capture:
    """Return a capture as the job's machine computes it, with weights in the forms that its options ask for.

    Raises:
        UnsupportedOpError: no weight can have the form.
        InfeasiblePlanError: of ``auto``, where the budget is too small in every form.
    """
    from gascompile.precision.calibration import calibrate
    from gascompile.precision.choice import stored_sources
    from gascompile.precision.trials import Forming

    program = as_computed(captured.program, job.machine)
    program = with_held_tensors(program, job.model, captured.constants)
    checkpoint = job.open_checkpoint()
    sources = stored_sources(program, captured.canonical, checkpoint)
    stored = {name: bound.dtype for name, bound in program.bound.items()}
    stored |= {name: source.dtype for name, source in sources.items()}
    heads = {n: s.interleaved_heads for n, s in sources.items() if s.interleaved_heads}

    def measured(exact: Program) -> Mapping[str, Sensitivity] | None:
        resolved = job.resolve(exact, captured.canonical, captured.constants, checkpoint)
        return calibrate(program, resolved, (args, kwargs), job.config, job.limit_bytes)

    def predicted_s(candidate: Program) -> float:
        return job.place(candidate, {}).certificate.predicted_s

    forming = Forming(program, stored, measured if job.weighs else None, heads)
    return replace(captured, program=forming.formed(job.config.weights, predicted_s))
