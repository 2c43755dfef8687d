"""``compile_step``: what users call to train under a budget."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import DeviceError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.model_libraries import set_at_first_call
from gascompile.distributed.ranks import Ranks
from gascompile.distributed.stage_ops import is_pipeline
from gascompile.machines.admission import admit
from gascompile.machines.resolve import made_folder, resolve_machine
from gascompile.runtime.memory.host_slots import FILE
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.training.capture.requirements import prepared, require_followed
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.optimizers.lent_memory import require_apart
from gascompile.training.optimizers.optimizers import SUPPORTED, StateForm, require_rule
from gascompile.training.optimizers.unplanned import require_step
from gascompile.training.rank_drives import own_share
from gascompile.training.rank_step import ROWS, RankStep, Rows, joined, ranks_for
from gascompile.training.saved_plans import SavedPlans
from gascompile.training.settings import OnNan, Settings
from gascompile.training.state.file_values import FileValues
from gascompile.training.step import TrainingStep
from gascompile.training.step_job import StepJob
from gascompile.weights.store import STORE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile_step(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    budget: Budget | int | str | None = None,
    example_batch: Any = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    plan: str | os.PathLike[str] | None = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    max_grad_norm: float | None = None,
    grad_norm: bool = False,
    accumulate: int = 1,
    on_nan: OnNan = "raise",
    replan: bool = True,
    states: StateForm = "fp32",
    unplanned_optimizer: bool = False,
    on_exceed: str = "error",
    fuse: str = "off",
    fuse_runs: float = 1000.0,
    graphs: str = "off",
    sites: str = "one",
    mesh: DeviceMesh | None = None,
    rows: Rows = "auto",
    time_limit_s: float = 20.0,
    mip_gap: float = 0.01,
) -> TrainingStep:
    """Plan whole training steps of ``model`` for ``budget`` and return the step to call.

    Args:
        model: any module whose loss can be traced; its parameters are taken over until ``close``.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar tensor.
        optimizer: one with planned updates (see docs/training.md) over the model's parameters, or any with
            ``unplanned_optimizer``; also as accelerate has prepared it. Its ``param_groups`` are read at every step,
            so schedulers work as always.
        budget: memory the step may take in the tier that computes (``"2GiB"``, bytes), or a ``Budget``.
        example_batch: any pytree; planned for now. Without it, at the first call.
        checkpoint: .safetensors, .bin or .pt file, sharded or Hugging Face directory with the model's weights; the
            model may be on the meta device, and never stands whole in memory.
        plan: a folder that ``TrainingStep.save_plan`` has written: nothing is captured or planned, and what it has no
            plan for is refused. Its machine has to be this one, or ``machine``; its budget is taken, or is ``budget``.
        machine: ``None`` for this machine, measured once and remembered; or a preset's name or a file. ``emulated``
            is an accelerator of bounded memory behind links of set bandwidths.
        cache_dir: where the machine profile is kept and what leaves memory goes.
        max_grad_norm: clip gradients by their global norm, as ``torch.nn.utils.clip_grad_norm_`` does with the
            optimizer's parameters.
        grad_norm: let ``last_run`` say the norm of all gradients of each update; where they are clipped it always
            does.
        accumulate: batches per update. Gradients are summed as by repeated ``loss.backward()``, and every
            ``accumulate``-th call updates; divide the loss in ``loss_fn`` where a mean is wanted.
        on_nan: ``raise`` ends a step whose loss is NaN before anything has changed; ``locate`` looks at every
            result and names the first op that makes a NaN, which takes time and memory beside the budget, and in
            the backward pass may come after some updates; ``ignore`` goes on as eager does.
        replan: plan for batches of a new kind when they come; refuse them otherwise. Tensors differ in kind by
            dtype, shape and strides, all else by value.
        states: ``8bit`` keeps moments of parameters with 4096 elements or more in 8 bits, in memory, on the wire and
            on the drive: about a quarter of the bytes. Updates are computed in float32; losses differ slightly.
        unplanned_optimizer: let torch's own ``optimizer.step()`` update, whichever optimizer it is. Forward and
            backward passes are planned; parameters and gradients are all in memory for an update, and the
            optimizer's state all the time. A warning gives the numbers where that is more than the budget.
        on_exceed: where an op asks for more than the budget has, ``"error"`` plans again or stops, ``"warn"`` goes on.
        fuse: ``"off"`` runs every op by itself. ``"exact"`` compiles element-wise ops between two moves into one kernel
            where that pays and gives the same bits; ``"auto"`` more of them, and reductions, within rounding. Steps
            that ``on_nan="locate"`` looks at are not fused.
        fuse_runs: compiling kernels may take as long as they are predicted to save in so many steps. Infinity
            fuses whatever gains anything.
        graphs: ``"auto"`` gives a GPU the ops between two moves in one call, as CUDA graphs, where the budget has room
            for what these keep.
        sites: ``"all"`` lets the host's processor update parameters whose moments rest in its memory, while an
            accelerator goes on with the backward pass, where that is predicted to be faster.
        mesh: ranks of ``torch.distributed`` that train the model together, each on rows of its own, as under DDP: a
            mesh of one dimension. By default all ranks that ``torchrun`` has started; a process by itself is alone.
            Of a dimension named ``pp`` each rank runs a stage of the model, and all take the same batch; of two, ``dp``
            and ``pp``, pipelines are beside each other, each with rows of its own.
        rows: ``"auto"`` weighs each rank's loss by the rows of its batch, and ``step.ranks.rows()`` says how many rows
            balance the ranks; ``"equal"`` takes it that ranks have as many.
        time_limit_s: wall clock for the solver.
        mip_gap: relative gap at which the solver may stop.

    Raises:
        CaptureError: the loss cannot be traced, is no scalar or depends on no parameter; a parameter has no
            values.
        CheckpointError: ``checkpoint`` cannot be read or is of another model; a buffer on the meta device is not
            in it.
        DeviceError: the machine's device is not here, or has less memory than the budget.
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
        UnsupportedOpError: an optimizer or an option without a rule; names those that have one. Parameters
            that are not in float32 or not on the CPU. Models of several processes, or with hooks on gradients.
        NanLossError: at a call; see ``on_nan``.
        FormatError: ``plan`` holds none, or a damaged one.
        PlanMismatchError: ``plan`` has none for this model, optimizer, batch, machine or budget; says what differs.
        RankError: a rank has failed; a RankMismatchError where models or optimizers differ.
        StorageError: a file cannot be written.
    """
    ranks = ranks_for(mesh, unplanned_optimizer=unplanned_optimizer, sites=sites, plan=plan)
    with ranks.together() if ranks is not None else nullcontext():
        settings = Settings(
            max_grad_norm=max_grad_norm,
            grad_norm=grad_norm,
            accumulate=accumulate,
            on_nan=on_nan,
            replan=replan,
            states=states,
            unplanned=unplanned_optimizer,
            layout=ranks.layout if ranks is not None else None,
            is_pipeline=ranks is not None and is_pipeline(mesh),
        )
        optimizer = _ruled(model, loss_fn, optimizer, settings)
        set_at_first_call(model, {})
        together = _together(ranks, model, loss_fn, optimizer, rows, settings)
        config = CompileConfig.of(
            cache_dir,
            budget,
            time_limit_s=time_limit_s,
            mip_gap=mip_gap,
            fuse=fuse if on_nan != "locate" else "off",
            fuse_runs=fuse_runs,
            graphs=graphs,
            sites=sites,
            on_exceed=on_exceed,
        )
        saved = SavedPlans(Path(plan)) if plan is not None else None
        with together.one_by_one() if together is not None else nullcontext():
            resolved, limits = _planned_for(saved, machine, budget, config.cache_dir)
        _require_runnable(resolved, limits, settings, config)
        job = StepJob(
            model=model,
            loss_fn=together.loss if together is not None and not settings.is_pipeline else loss_fn,
            optimizer=optimizer,
            budget=limits,
            machine=admit(_own_part(resolved, config.cache_dir, together)),
            config=config,
            settings=settings,
            values=_in_files(model, checkpoint, together, config.cache_dir),
            saved=saved,
        )
        step = TrainingStep(job, together)
        if example_batch is not None:
            try:
                step.prepare(example_batch)
            except BaseException:
                step.close()
                raise
        return step


def _together(
    ranks: Ranks | None,
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    settings: Settings,
) -> RankStep | None:
    """Return what this process does with others, if there are any; they have the same values from here on."""
    if rows not in ROWS:
        raise ValueError(f"rows={rows!r}; it is one of {', '.join(ROWS)}")
    if ranks is None:
        return None
    if not settings.is_pipeline:
        return joined(ranks, model, loss_fn, optimizer, rows, settings)
    from gascompile.training.pipeline.pipeline_step import PipelineStep, require_plain

    require_plain(settings)
    step = PipelineStep(ranks, loss_fn)
    with step.together():
        step.share_values(model, optimizer)
    return step


def _own_part(machine: Machine, folder: Path, together: RankStep | None) -> Machine:
    """Return what of a machine this process plans with, beside other ranks."""
    if together is None:
        return machine
    return own_share(machine, made_folder(folder), together.gathered)


def _in_files(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | None,
    together: RankStep | None,
    cache_dir: Path,
) -> FileValues | None:
    """Return the values that are in files, which are the same on all ranks."""
    store = cache_dir / STORE
    values = FileValues(model, checkpoint, store) if checkpoint is not None else None
    if together is not None:
        together.require_same_files(values, cache_dir)
    return values


def _require_order(model: object, loss_fn: object, optimizer: object) -> None:
    """Refuse what is none of what a step is made of, mostly as its order is another one.

    Raises:
        UnsupportedOpError: says which argument is what.
    """
    for name, given, is_so in (
        ("model", model, isinstance(model, nn.Module)),
        ("loss_fn", loss_fn, callable(loss_fn)),
        ("optimizer", optimizer, hasattr(optimizer, "param_groups")),
    ):
        if not is_so:
            shown = f"class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise UnsupportedOpError(
                f"a {shown} was given as {name}; the order is compile_step(model, loss_fn, optimizer, budget), with "
                "loss_fn(model, batch) and one optimizer that is made, with its param_groups"
            )


def _ruled(
    model: nn.Module, loss_fn: LossFunction, optimizer: torch.optim.Optimizer, settings: Settings
) -> torch.optim.Optimizer:
    """Return the optimizer itself, after checking that a step can do what it does."""
    _require_order(model, loss_fn, optimizer)
    optimizer = prepared(optimizer)
    if settings.unplanned:
        require_step(optimizer)
        require_apart(optimizer)
    else:
        require_rule(optimizer, settings.states)
    require_followed(model, optimizer, settings.layout)
    return optimizer


def _planned_for(
    saved: SavedPlans | None,
    machine: Machine | str | os.PathLike[str] | None,
    budget: Budget | int | str | None,
    cache_dir: Path,
) -> tuple[Machine, Budget]:
    """Return the machine and the budget of a step."""
    if saved is None or machine is not None:
        resolved = resolve_machine(machine, cache_dir=cache_dir, read=read_blocks)
        if saved is None:
            return resolved, Budget.of(budget, resolved)
        resolved = saved.machine(resolved)
    else:
        resolved = saved.machine(None)
    if budget is None:
        return resolved, saved.budget
    limits = Budget.of(budget, resolved)
    saved.require_budget(limits.limits_bytes(resolved))
    return resolved, limits


def _require_runnable(
    machine: Machine, budget: Budget, settings: Settings, config: CompileConfig
) -> None:
    """Refuse what steps do not do at all, or on a device with memory of its own.

    Raises:
        DeviceError: the budget is more than an emulated device has.
        UnsupportedOpError: says what to do.
    """
    if config.has_parts:
        raise UnsupportedOpError(
            "sites='parts' divides layers of compiled models alone; a step has sites='all', for updates on the host"
        )
    site = machine.compute_tier
    if site == HOST:
        return
    if missing := {HOST, FILE} - machine.tiers.keys():
        raise UnsupportedOpError(
            f"'{machine.name}' has no tier '{min(missing)}', where values of a step go that leave '{site}'; pass a "
            "machine that has one"
        )
    if settings.unplanned:
        raise UnsupportedOpError(
            f"unplanned_optimizer updates in the host's memory, and '{machine.name}' computes on '{site}'; use "
            f"one of {SUPPORTED}, or a machine that computes on the processor"
        )
    limit_bytes, size_bytes = budget.limits_bytes(machine)[site], machine.tiers[site].size_bytes
    if machine.compute_backend == "emulated" and limit_bytes > size_bytes:
        raise DeviceError(
            f"the emulated accelerator of '{machine.name}' has {size_bytes} bytes, the budget for '{site}' is "
            f"{limit_bytes}; pass a smaller budget, or a machine file with a larger tier"
        )
