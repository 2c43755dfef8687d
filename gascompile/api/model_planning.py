"""Plans for models: captured with torch, without their weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import nn

from gascompile.api.compile import Job
from gascompile.api.sources import Source, open_source
from gascompile.capture.calls import ExampleInputs, normalize_call, split_inputs
from gascompile.capture.to_program import Capture
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import CaptureError
from gascompile.core.machine import Machine
from gascompile.core.model_libraries import register_pytrees
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.passes.graph.annotate import Annotation, annotate
from gascompile.passes.graph.leaving import other_sites


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A plan with what it was made of."""

    source: Source
    job: Job
    captured: Capture
    plan: Plan


def plan_model(
    source: nn.Module | str | os.PathLike[str],
    budget: Budget,
    machine: Machine,
    config: CompileConfig,
    *,
    example_inputs: ExampleInputs | None,
    dynamic_shapes: Any,
    shape: tuple[int, int],
) -> PlannedModel:
    """Capture a module, or what ``open_source`` opens, and plan it.

    Args:
        source: the module, or where it is.
        budget: bytes per tier.
        machine: what to plan for.
        config: options of the solver.
        example_inputs: tuple or dict; by default those that the source brings.
        dynamic_shapes: as ``torch.export.export`` takes it.
        shape: rows and tokens of made-up inputs.

    Raises:
        TypeError: the source is neither a module nor a path.
        CaptureError: there are no inputs to trace the model with, or it cannot be traced.
    """
    if not isinstance(source, (nn.Module, str, os.PathLike)):
        raise TypeError(
            f"a source is a torch.nn.Module, a Workload or a path, not {type(source).__name__}"
        )
    opened = _opened(source, shape)
    inputs = split_inputs(example_inputs) if example_inputs is not None else opened.inputs
    if inputs is None:
        raise CaptureError(
            f"{type(opened.model).__name__} needs example_inputs=, a tuple or dict of inputs to trace it with"
        )
    job = Job(
        model=opened.model,
        machine=machine,
        budget=budget,
        config=config,
        checkpoint_path=opened.checkpoint,
        dynamic_shapes=dynamic_shapes,
    )
    register_pytrees()
    args, kwargs = normalize_call(opened.model, *inputs)
    entry = job.entry(args, kwargs, job.open_checkpoint())
    captured = job.capture(args, kwargs, entry)
    made = job.place(captured.program, entry.prints)
    return PlannedModel(source=opened, job=job, captured=captured, plan=made)


def annotated_source(
    source: nn.Module | str | os.PathLike[str],
    machine: Machine,
    config: CompileConfig,
    *,
    shape: tuple[int, int],
) -> tuple[nn.Module, Program, Annotation]:
    """Capture what ``open_source`` opens, or a module, and cost its ops without planning; return all three.

    Raises:
        CaptureError: there are no inputs to trace the model with, or it cannot be traced.
    """
    opened = _opened(source, shape)
    if opened.inputs is None:
        raise CaptureError(
            f"{source} brings no example inputs to trace it with; let the callable return (module, example_inputs)"
        )
    register_pytrees()
    job = Job(model=opened.model, machine=machine, budget=Budget(), config=config)
    args, kwargs = normalize_call(opened.model, *opened.inputs)
    program = job.capture(args, kwargs, job.entry(args, kwargs, job.open_checkpoint())).program
    sites = other_sites(machine) if config.has_sites else ()
    parts = bool(sites) and config.has_parts
    return opened.model, program, annotate(program, machine, sites=sites, parts=parts)


def _opened(source: nn.Module | str | os.PathLike[str], shape: tuple[int, int]) -> Source:
    if isinstance(source, nn.Module):
        return Source(model=source, checkpoint=None, inputs=None)
    return open_source(source, batch=shape[0], tokens=shape[1])
