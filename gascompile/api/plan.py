"""``plan`` and ``simulate``: everything that needs neither weights nor the runtime.

Planning a workload for a machine that is named needs no torch either, and loads none.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.api.costed import plan_costed
from gascompile.api.objective import planned, require_model
from gascompile.capture.fingerprint.target import target_prints
from gascompile.core import model_libraries, serial
from gascompile.core.budget import Budget
from gascompile.core.checks.machine import source_warnings
from gascompile.core.checks.machine_files import named_machine
from gascompile.core.checks.workload import check_times, check_workload
from gascompile.core.checks.workload_files import is_workload_file, load_workload
from gascompile.core.config import CompileConfig
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.progress import task
from gascompile.core.reports import Timeline
from gascompile.core.workload import TensorKind, Workload
from gascompile.cost_models.simulate.trace import trace
from gascompile.machines.emulated import EMULATED
from gascompile.passes.plan.make_plan import make_plan, require_known
from gascompile.passes.plan.move_anything import OnHeap
from gascompile.passes.verify.walk import verify
from gascompile.runtime.memory.lasting_accounts import TRANSFER_BYTES
from gascompile.runtime.memory.pinned import HOST

_KINDS = (".json", ".pt2", ".onnx", ".gguf")
"""Of files that may be a source; what they hold is looked at when they are opened."""

if TYPE_CHECKING:
    from torch import nn

    from gascompile.api.model_planning import PlannedModel
    from gascompile.capture.calls import ExampleInputs


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
    weights: str | None = None,
    sites: str = "one",
    objective: str = "time",
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
        cache_dir: where the machine profile and captures of models are kept.
        time_limit_s: wall clock for the solver.
        mip_gap: relative gap at which the solver may stop.
        strategy: force one candidate plan.
        weights: the form that weights move in, as ``compile`` takes it; for models.
        sites: as ``compile`` takes it; a workload says itself where its ops can run.
        objective: ``"energy"`` plans for the fewest joules, by what the machine says that its work takes.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.

    Raises:
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
        UnsupportedOpError: no weight of the model can have the form that ``weights`` asks for.
        ValueError: an option has no such value.
        FormatError: the source is none of the above or a damaged file, or the workload or the machine makes
            no sense; names the place.
    """
    _require_plannable(source, strategy)
    config = CompileConfig.of(
        cache_dir,
        budget,
        time_limit_s=time_limit_s,
        mip_gap=mip_gap,
        strategy=strategy,
        weights=weights,
        sites=sites,
        objective=objective,
    )
    resolved, limits = _target(machine, budget, config)
    if weights is not None and (isinstance(source, Workload) or is_workload_file(source)):
        raise ValueError(
            f"weights={weights!r} is for models: a workload says how many bytes move; leave weights= out"
        )
    if isinstance(source, Workload):
        where = f"workload '{source.name}': $"
        check_workload(source, where=where)
        check_times(source, resolved, where=where)
        return _plan_workload(source, resolved, limits, config)
    if is_workload_file(source):
        workload = load_workload(source, resolved)
        return _plan_workload(workload, resolved, limits, config)
    if not _has_torch():
        given = weights or dynamic_shapes or example_inputs or (None if sites == "one" else sites)
        return _plan_without_torch(source, resolved, limits, config, (batch, tokens), given)
    from gascompile.api.model_planning import plan_model

    return plan_model(
        source,
        limits,
        resolved,
        config,
        example_inputs=example_inputs,
        dynamic_shapes=dynamic_shapes,
        shape=(batch, tokens),
    ).plan


def _has_torch() -> bool:
    """Return whether torch is loaded, or is there to be."""
    try:
        return "torch" in sys.modules or importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def _plan_without_torch(
    source: Any,
    machine: Machine,
    budget: Budget,
    config: CompileConfig,
    shape: tuple[int, int],
    given: Any,
) -> Plan:
    """Plan a file whose library costs it without torch.

    Raises:
        UnsupportedOpError: there is none, or the options that are ``given`` need the model to be traced.
    """
    path = Path(source) if isinstance(source, (str, os.PathLike)) else None
    workload = None
    if path is not None and given is None:
        with task(f"Reading {path.name}"):
            workload = model_libraries.workload_of_file(
                path, machine, batch=shape[0], tokens=shape[1]
            )
    if workload is None:
        raise UnsupportedOpError(
            "torch is not installed: without it ONNX and workload files alone are planned, with the sizes of --batch "
            "and --tokens, weights as they are stored and all ops on one processor; install torch"
        )
    is_host = machine.compute_tier == HOST
    states = frozenset(t.name for t in workload.tensors if t.kind is TensorKind.STATE)
    may_move = OnHeap(
        reserved_bytes=TRANSFER_BYTES if is_host else 0,
        staying=states,
        gathers=is_host,
        gains=is_host,
    )
    with task("Planning"):
        return plan_costed(
            workload,
            machine,
            budget,
            config,
            prints=_prints(workload, machine, budget, config),
            warnings=source_warnings(machine),
            may_move=may_move if is_host or HOST in machine.tiers else None,
            has_hops=True,
        )


def plan_with_program(
    source: nn.Module | str | os.PathLike[str],
    budget: Budget | int | str | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    example_inputs: ExampleInputs | None = None,
    *,
    dynamic_shapes: Any = None,
    cache_dir: str | os.PathLike[str] | None = None,
    shape: tuple[int, int] = (1, 128),
    **options: Any,
) -> PlannedModel:
    """Return the plan of a model with the program that it is of; arguments and errors as those of ``plan``.

    ``shape`` are rows and tokens of made-up inputs; ``options`` are those of ``CompileConfig``.
    """
    _require_plannable(source, options.get("strategy"))
    if isinstance(source, Workload) or is_workload_file(source):
        raise ValueError("a workload is costs of ops without a program; give the model itself")
    from gascompile.api.model_planning import plan_model

    config = CompileConfig.of(cache_dir, budget, **options)
    resolved, limits = _target(machine, budget, config)
    return plan_model(
        source,
        limits,
        resolved,
        config,
        example_inputs=example_inputs,
        dynamic_shapes=dynamic_shapes,
        shape=shape,
    )


def _require_plannable(source: Any, strategy: str | None) -> None:
    require_known(strategy)
    require_source(source)


def _target(machine: Any, budget: Any, config: CompileConfig) -> tuple[Machine, Budget]:
    """Return the machine and the budget on it, of which no size is refused later."""
    resolved = machine_of(machine, config.cache_dir)
    require_model(resolved, config)
    limits = Budget.of(budget, resolved)
    limits.limits_bytes(resolved)  # refuses what is no size, before anything is read or captured
    return resolved, limits


def require_source(source: Any) -> None:
    """Refuse a path to nothing, or to a file of no kind that is known, before this machine is measured.

    Raises:
        FormatError: it is one.
    """
    if not isinstance(source, (str, os.PathLike)) or is_workload_file(source):
        return
    if os.path.isdir(source):
        return
    kind = os.path.splitext(source)[1]
    if ":" not in os.fspath(source) and not (os.path.exists(source) and kind in _KINDS):
        from gascompile.api.sources import open_source

        open_source(source)


def machine_of(machine: Machine | str | os.PathLike[str] | None, cache_dir: Path) -> Machine:
    """Return the machine to plan for; torch is loaded where this one computes, to measure it.

    Raises:
        ValueError: a name that is neither a preset nor a file.
        FormatError: the file is not a machine, or its numbers make no sense.
        StorageError: the file cannot be read, or ``cache_dir`` cannot be written to.
        UnsupportedOpError: this machine is asked for, and torch is not installed.
    """
    if machine is not None and machine != EMULATED:
        return named_machine(machine)
    if not _has_torch():
        raise UnsupportedOpError(
            "torch is not installed, and without it this machine cannot be measured; name one with --machine (machine=)"
        )
    from gascompile.machines.resolve import resolve_machine
    from gascompile.runtime.transfer.engine import read_blocks

    return resolve_machine(machine, cache_dir=cache_dir, read=read_blocks)


def _prints(
    workload: Workload, machine: Machine, budget: Budget, config: CompileConfig
) -> dict[str, str]:
    target = target_prints(machine, budget.limits_bytes(machine), config)
    return {"graph": serial.digest(workload), **target}


def _plan_workload(
    workload: Workload, machine: Machine, budget: Budget, config: CompileConfig
) -> Plan:
    prints = _prints(workload, machine, budget, config)

    def make(workload: Workload, *, strategy: str | None) -> Plan:
        return make_plan(
            workload,
            machine,
            budget,
            fingerprint=prints,
            **config.search_limits,
            strategy=strategy,
            warnings=source_warnings(machine),
            move_all=strategy is None,
        )

    return planned(make, workload, machine, config)


def simulate(plan: Plan, machine: Machine | str | os.PathLike[str] | None = None) -> Timeline:
    """Replay a plan on its own machine, or on another given by object, preset name or file.

    The timeline is a ``cost_models.trace.Trace``: ops, transfers, stalls with their cause, memory over time.

    Raises:
        PlanVerificationError: the plan breaks a budget or a dependency.
    """
    verify(plan)
    return trace(plan, None if machine is None else named_machine(machine))
