"""Step cache: the plan of a training step in the plan cache, as plans of forward passes are.

The program, the plan and a few facts are a bundle; values are none of it, as they are the model's and the
optimizer's of the day. A step is found again only where all that a capture and a plan look at is as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.bundles.bundle import Bundle
from gascompile.bundles.files import StepFacts, Weights
from gascompile.bundles.reuse import Basis, CachedPlan
from gascompile.capture.batch_classes import program_parts
from gascompile.capture.fingerprint.fingerprint import (
    CAPTURED,
    ModulePrint,
    made_by,
    step_print,
    versions,
)
from gascompile.capture.fingerprint.target import target_prints
from gascompile.capture.record.record import CaptureRecord, Recorded
from gascompile.capture.saved.ops import OPS_OF_LIBRARIES
from gascompile.capture.torch_settings import SETTINGS, settings_now
from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.errors import FormatError
from gascompile.core.plan import Plan
from gascompile.core.signature import same_memory, same_tensors
from gascompile.distributed.stage_ops import is_of_stages
from gascompile.passes.verify.walk import verify
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.optimizers.optimizers import Rules, fixed
from gascompile.training.optimizers.unplanned import UnplannedRules, state_bytes
from gascompile.training.planning.kinds import kind_of
from gascompile.training.planning.step_costs import learnt_digest
from gascompile.training.planning.step_program import StepOptions, StepProgram
from gascompile.training.settings import Settings
from gascompile.training.state.aliasing import Storages, named_tensors
from gascompile.training.step_job import StepJob

if TYPE_CHECKING:
    from gascompile.codegen.fuse import LoadedFusion

_OWN = ("aten.", "prims.", "gascompile_", "gascompile.wire_")
"""Beginnings of the names of ops whose gradients are torch's or ours."""
_CONSTANT = -1  # in place of a number: it is held with the program
_CAPTURED = (*CAPTURED, "storages", "weights", "process")
"""Parts of a step's key that the trace of its loss was made of, as well."""


def rules_of(
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, torch.Tensor],
    storages: Storages,
    trained: list[str],
    settings: Settings,
) -> Rules:
    """Return how the optimizer updates the parameters among ``tensors``, and those that are views of them."""
    names = {id(tensor): name for name, tensor in tensors.items()}
    names.update((id(view.tensor), name) for name, view in storages.views.items())
    kind = UnplannedRules if settings.unplanned else Rules
    layout = None if settings.is_pipeline else settings.layout
    how = settings.states, layout, settings.stages, settings.placed
    return kind(optimizer, names, trained, *how)


def divisible(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    storages: Storages,
    settings: Settings,
) -> dict[str, int]:
    """Return the elements of the parameters that ranks can divide: large, trained, and in memory of their own."""
    _, tensors = named_tensors(model)
    rules = rules_of(optimizer, tensors, storages, [], settings)
    shared = {*storages.views, *(view.owner for view in storages.views.values())}
    return {
        slot.name: slot.bounds[-1][-1]
        for slot in rules.slots.values()
        if slot.bounds and not slot.is_frozen and slot.name not in shared
    }


def place_of_step(
    job: StepJob,
    traced: LossFunction,
    batch: Any,
    options: StepOptions,
    *,
    storages: Storages,
    settings: Settings,
    has_pages: bool,
    network: str,
) -> CachedPlan:
    """Return where the plan of a step lies in the cache, if there is one."""
    parts = program_parts(batch)
    printed = step_print(job.model, traced, {*storages.left, *storages.followed}, parts)
    leaves = pytree.tree_leaves(batch)
    kind = kind_of(job.model, batch, trains=options.trains, calls=options.calls)
    prints = {
        "graph": printed.key,
        "inputs": serial.digest([kind, same_tensors(leaves), same_memory(leaves)]),
        "storages": serial.digest(
            {name: [view.owner, repr(view.layout)] for name, view in storages.views.items()}
        ),
        "optimizer": serial.digest(updates_of(job.model, job.optimizer, settings)),
        "weights": serial.digest({n: [v.form, v.heads] for n, v in sorted(job.packed.items())}),
        "step": serial.digest({**asdict(options), "pending": sorted(options.pending)}),
        SETTINGS: settings_now(),
        "process": serial.digest([*_process(), has_pages, network]),
        "memory": learnt_digest(job.config.cache_dir),
        **target_prints(job.machine, job.budget.limits_bytes(job.machine), job.config),
        "versions": made_by(),
    }
    return CachedPlan(
        job.config.cache_dir,
        job.model,
        printed,
        prints,
        (traced, *parts),
        traced=""
        if options.calls or options.layout
        else serial.digest([prints[part] for part in _CAPTURED]),
    )


def updates_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings
) -> list[object]:
    """Return what of an optimizer a program has in it; hyperparameters are inputs."""
    canonical, tensors = named_tensors(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    groups = [
        [
            [names.get(id(parameter), "") for parameter in group["params"]],
            [] if settings.unplanned else fixed(optimizer, group),
        ]
        for group in optimizer.param_groups
    ]
    kept_bytes = state_bytes(optimizer) if settings.unplanned else 0
    stages = sorted(settings.stages.items())
    return [kind, groups, canonical, settings.states, settings.unplanned, kept_bytes, stages,
            settings.beside]  # fmt: skip


def _process() -> list[object]:
    return [
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """A program with its plan, and what both are of."""

    program: StepProgram
    plan: Plan
    rules: Rules
    tensors: Mapping[str, torch.Tensor]
    """Of the model, by the names that the program has for them."""
    bundle: Bundle
    """As it is kept, but for the kernels of a new one."""
    record: Recorded | None = None
    """Of the capture, or what a kept one depends on; a kept step has none."""


def bound_step(
    place: CachedPlan,
    bundle: Bundle,
    job: StepJob,
    storages: Storages,
    settings: Settings,
) -> PlannedStep:
    """Bind a kept step to the model and the optimizer of today.

    Raises:
        FormatError: they do not fit.
        PlanVerificationError: its plan breaks a budget or a dependency.
    """
    verify(bundle.plan)
    program, facts = bundle.program, bundle.step
    if facts is None:
        raise FormatError("it is of no training step")
    _, known = named_tensors(job.model)
    tensors = {
        name: known[name]
        for name in dict.fromkeys([*program.bindings.values(), *settings.stages])
        if name in known
    }
    rules = rules_of(job.optimizer, tensors, storages, list(facts.gradients), settings)
    accumulates = settings.accumulate > 1 or settings.unplanned
    tiles = {tile.name: tile for tile in rules.tiles(accumulates=accumulates)}
    for name, bound in program.bound.items():
        tile = tiles.get(name)
        if tile is None and name not in known:
            raise FormatError(f"'{name}' is no tensor of the model or the optimizer")
        shape: tuple[int, ...]
        if tile is not None:
            shape, dtype = (tile.length,), tile.dtype
        else:
            own = job.packed[name].outline() if name in job.packed else known[name]
            shape, dtype = tuple(own.shape), own.dtype
        if (bound.shape, bound.dtype) != (shape, str(dtype).removeprefix("torch.")):
            raise FormatError(f"'{name}' is another tensor in it than in the model")
    if [node.name for node in program.op_nodes()] != [op.name for op in bundle.plan.ops]:
        raise FormatError("its plan is of another program")
    if max(facts.outside, default=_CONSTANT) >= len(place.printed.tensors):
        raise FormatError("it uses a tensor to which no name leads from the model and the loss")
    first = len(program.inputs) - facts.num_groups - len(facts.outside)
    outside = tuple(
        bundle.held[spec.name] if number == _CONSTANT else place.printed.tensors[number]
        for spec, number in zip(program.inputs[first:], facts.outside, strict=False)
    )
    step = StepProgram(
        program=program,
        tiles={name: tiles[name] for name in program.bound if name in tiles},
        outside=outside,
        num_constants=facts.outside.count(_CONSTANT),
        num_groups=facts.num_groups,
        gradients=frozenset(facts.gradients),
    )
    return PlannedStep(program=step, plan=bundle.plan, rules=rules, tensors=tensors, bundle=bundle)


def with_kernels(
    place: CachedPlan, made: PlannedStep, graph_module: fx.GraphModule, config: CompileConfig
) -> tuple[PlannedStep, Basis, LoadedFusion | None]:
    """Return a step whose bundle says which ops run as compiled kernels, what it rests on, and the kernels.

    A new one is kept, unless another capture may give another one.
    """
    bundle, fusion = made.bundle, None
    if config.fuse != "off":
        from gascompile.codegen.fuse import fuse, load_kernels

        folder, is_new = config.cache_dir, made.record is not None
        # The casts of an autocast are ops of the step: they are not to be made once more of its kernels.
        with torch.autocast("cpu", enabled=False):
            if is_new:
                exact, runs = config.fuse == "exact", config.fuse_runs
                bundle = fuse(bundle, graph_module, cache_dir=folder, runs=runs, exact=exact)
        compile_s = bundle.fusion.compile_s if is_new and bundle.fusion is not None else 0.0
        fusion = load_kernels(bundle, cache_dir=folder, compile_s=compile_s)
    made = replace(made, bundle=bundle)
    basis = place.basis() if made.record is None else keep(place, made, made.record)
    return made, basis, fusion


def keep(place: CachedPlan, made: PlannedStep, record: Recorded) -> Basis:
    """Keep a new step, unless another capture may give another one; return what it rests on."""
    _, why = bundle_of(made.program, made.plan, place.printed)
    if isinstance(record, CaptureRecord):
        # Recorded is what runs in the forward pass.
        why = why or next(iter(record.running.backward), None)
    basis = place.keep(made.bundle, record, why)
    assert basis is not None, "there is a record"
    return basis


def unknown_code(node: fx.Node) -> str | None:
    """Return why a program that has this op is not kept; ``None`` where nothing is against it."""
    target = node.target
    if is_of_stages(target):
        return "ranks agree on the stages of a pipeline each time"
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if not str(target).startswith(_OWN) and str(target) not in OPS_OF_LIBRARIES:
        return f"the gradient of {target} is code that is not compared"
    return None


def bundle_of(step: StepProgram, plan: Plan, printed: ModulePrint) -> tuple[Bundle, str | None]:
    """Return what is kept of a step, and why it cannot be kept after all."""
    program = step.program
    num_read = len(step.outside) - step.num_constants
    numbers = {id(tensor): number for number, tensor in enumerate(printed.tensors)}
    outside = [numbers.get(id(tensor)) for tensor in step.outside[:num_read]]
    first = len(program.inputs) - step.num_groups - step.num_constants
    constants = zip(program.inputs[first:], step.outside[num_read:], strict=False)
    why = None
    if None in outside:
        why = "the loss uses a tensor to which no name leads from the model and the loss"
    for node in program.op_nodes():
        why = unknown_code(node) or why
    return Bundle(
        program=program,
        plan=plan,
        weights=Weights(sources={}, stamps=()),
        held={spec.name: tensor for spec, tensor in constants},
        positional=(),
        versions=versions(),
        step=StepFacts(
            gradients=tuple(sorted(step.gradients)),
            num_groups=step.num_groups,
            outside=tuple(_CONSTANT if n is None else n for n in outside)
            + (_CONSTANT,) * step.num_constants,
        ),
    ), why
