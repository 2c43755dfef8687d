"""``plan`` and ``simulate``: everything that needs neither weights nor the runtime."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn

from gascompile import serial
from gascompile.calls import normalize_call
from gascompile.config import CompileConfig
from gascompile.cost_models.replay import replay_plan
from gascompile.errors import CaptureError
from gascompile.integrations.huggingface import register_pytrees
from gascompile.ir import Budget, Machine, Plan, Timeline, Workload
from gascompile.machine import resolve_machine
from gascompile.passes.make_plan import make_plan
from gascompile.passes.verify import verify
from gascompile.pipeline import ExampleInputs, Job, split_inputs
from gascompile.runtime.engine import read_blocks
from gascompile.sources import Source, open_source


def plan(
    source: nn.Module | Workload | str | os.PathLike[str],
    budget: Budget | int | str | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    example_inputs: ExampleInputs | None = None,
    *,
    dynamic_shapes: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    time_limit_s: float = 20.0,
    mip_gap: float = 0.01,
    strategy: str | None = None,
    batch: int = 1,
    tokens: int = 128,
) -> Plan:
    """Return a verified plan for a source, without its weights.

    Args:
        source: a module, a ``Workload``, or the path of a Hugging Face directory, a ``.pt2`` file, a
            workload file, or ``package.module:callable``.
        budget: memory of the tier that computes, or a ``Budget``.
        machine: ``None`` for this machine; a preset's name or a machine file for another one.
        example_inputs: tuple or dict; made up for Hugging Face directories from ``batch`` and ``tokens``.
        dynamic_shapes: as ``torch.export.export`` takes it.
        cache_dir: where the machine profile is kept.
        time_limit_s: wall clock for the solver.
        mip_gap: relative gap at which the solver may stop.
        strategy: force one candidate plan.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.

    Raises:
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
        FormatError: the source is none of the above or a damaged file.
    """
    options: dict[str, Any] = {"cache_dir": Path(cache_dir)} if cache_dir is not None else {}
    config = CompileConfig(time_limit_s=time_limit_s, mip_gap=mip_gap, strategy=strategy, **options)
    resolved = resolve_machine(machine, cache_dir=config.cache_dir, read=read_blocks)
    limits = Budget.of(budget, resolved)
    if not isinstance(source, (nn.Module, Workload)) and str(source).endswith(".json"):
        source = serial.load(Workload, source)
    if isinstance(source, Workload):
        return _plan_workload(source, resolved, limits, config)
    opened = (
        Source(model=source, checkpoint=None, inputs=None)
        if isinstance(source, nn.Module)
        else open_source(source, batch=batch, tokens=tokens)
    )
    inputs = split_inputs(example_inputs) if example_inputs is not None else opened.inputs
    if inputs is None:
        raise CaptureError(
            f"{type(opened.model).__name__} needs example_inputs=, a tuple or dict of inputs to trace it with"
        )
    job = Job(
        model=opened.model,
        machine=resolved,
        budget=limits,
        config=config,
        checkpoint_path=opened.checkpoint,
        dynamic_shapes=dynamic_shapes,
    )
    register_pytrees()
    args, kwargs = normalize_call(opened.model, *inputs)
    captured = job.capture(args, kwargs)
    return job.place(captured, job.fingerprint(args, kwargs, job.open_checkpoint()))


def _plan_workload(
    workload: Workload, machine: Machine, budget: Budget, config: CompileConfig
) -> Plan:
    prints = {
        "graph": serial.digest(workload),
        "machine": serial.digest(machine),
        "budget": serial.digest(budget.limits_bytes(machine)),
        "options": serial.digest(config.fingerprint_fields()),
    }
    return make_plan(
        workload,
        machine,
        budget,
        fingerprint=prints,
        time_limit_s=config.time_limit_s,
        mip_gap=config.mip_gap,
        strategy=config.strategy,
    )


def simulate(plan: Plan, machine: Machine | str | os.PathLike[str] | None = None) -> Timeline:
    """Replay a plan on its own machine, or on another given by object, preset name or file.

    Raises:
        PlanVerificationError: the plan breaks a budget or a dependency.
    """
    verify(plan)
    if machine is None:
        return replay_plan(plan)
    if not isinstance(machine, Machine):
        machine = resolve_machine(machine, cache_dir=CompileConfig().cache_dir, read=read_blocks)
    return replay_plan(plan, machine)
