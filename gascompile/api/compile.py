"""The pipeline: capture, annotate, place, verify, insert; and the cache that skips all of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from gascompile.api.compiled import CompiledModel
from gascompile.api.looked_up import LookedUp
from gascompile.api.moved_states import require_own_values
from gascompile.api.objective import require_model
from gascompile.api.planning import Args, Kwargs
from gascompile.api.sources import model_of, require_sense
from gascompile.api.unit import Unit
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.calls import ExampleInputs, call_names, split_inputs
from gascompile.capture.fingerprint.fingerprint import (
    CAPTURED,
    ModulePrint,
    module_print,
    plan_prints,
    versions,
)
from gascompile.capture.later.history import History
from gascompile.capture.plain_tensors import require_plain_inputs
from gascompile.capture.torch_settings import require_castable
from gascompile.codegen.fuse import fused_unit, has_other_products, outdated, with_kernels
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.checks.machine import source_warnings
from gascompile.core.config import CompileConfig
from gascompile.core.errors import FormatError, InfeasiblePlanError, PlanVerificationError
from gascompile.core.machine import Machine
from gascompile.core.model_libraries import register_pytrees, set_at_first_call
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.core.progress import task
from gascompile.machines.admission import admit, admit_model
from gascompile.machines.op_memory import annotate_memory, lacks_memory, unknown_ops
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.weights.checkpoint import Checkpoint, open_checkpoint_of
from gascompile.weights.resolve import Resolved, resolve_weights
from gascompile.weights.store import STORE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gascompile.capture.record.record import Recorded
    from gascompile.capture.to_program import Capture
    from gascompile.passes.graph.annotate import Annotation


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Everything but the inputs that a plan is made from."""

    model: nn.Module
    machine: Machine
    budget: Budget
    config: CompileConfig
    checkpoint_path: Path | None = None
    dynamic_shapes: Any = None
    reserved_bytes: int = 0
    arena_of: Plan | None = None
    in_arena: bool = False  # whether weights have to be in one, which others share
    weighs: bool = False  # whether forms of weights may depend on their values, which are there
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # that calls mutate: one for all
    history: History = field(default_factory=History)
    shares_memory = False  # with processes that run the same plans
    why_not_kept: ClassVar[str | None] = None  # of plans that hold for this run alone

    @property
    def may_wait_half_way(self) -> bool:
        """Whether weights may, in an arena of the host: not where several processes share one of the device."""
        return not self.in_arena

    def parts(self) -> dict[str, Any]:
        """Return what a job is made of, for one of another kind."""
        return {of.name: getattr(self, of.name) for of in fields(Job)}

    def open_checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint's headers, under the names that the model uses."""
        path = self.checkpoint_path
        return open_checkpoint_of(self.model, path) if path is not None else None

    def without_loss(self) -> Job:
        """Return the job of the same model, inputs and budget whose weights move as they are stored."""
        config = replace(self.config, weights=None, fuse="off")
        return replace(self, config=config, arena_of=None, buffers={})

    def ranged(self, dynamic_shapes: Any) -> Job:
        """Return the job of the same model and budget for ranges of sizes."""
        return replace(self, dynamic_shapes=dynamic_shapes)

    def leaving(self, taken_bytes: int) -> Job:
        """Return the job of the same model with so much of the budget for others."""
        return replace(self, reserved_bytes=self.reserved_bytes + taken_bytes)

    @property
    def limit_bytes(self) -> int:
        """Bytes that the budget allows in the tier that computes."""
        return self.budget.limits_bytes(self.machine)[self.machine.compute_tier]

    def prepare(self, args: Args, kwargs: Kwargs, planned: Callable[[Unit], object] = bool) -> Unit:
        """Return the verified plan for one input signature, from the cache where it is there."""
        looked_up = self.look_up(args, kwargs)
        return looked_up.unit or self.plan_anew(looked_up, args, kwargs, planned)

    def look_up(self, args: Args, kwargs: Kwargs) -> LookedUp:
        """Return the plan for one input signature, if the cache has it, and what it is looked up by."""
        require_own_values((*self.model.parameters(), *self.model.buffers()))
        require_plain_inputs(args, kwargs)
        require_castable(self.config.weights)
        checkpoint = self.open_checkpoint()
        entry = self.entry(args, kwargs, checkpoint)
        unit = self._cached(entry, checkpoint)
        holds = unit is not None and self.history.admit(entry.inert, args, kwargs)
        return LookedUp(entry, checkpoint, unit if holds else None)

    def entry(self, args: Args, kwargs: Kwargs, checkpoint: Checkpoint | None) -> CachedPlan:
        """Return the place in the cache of the plan for one input signature, and of its capture."""
        register_pytrees()
        set_at_first_call(self.model, kwargs)
        printed = module_print(self.model)
        prints = self.fingerprint(args, kwargs, checkpoint, printed)
        traced = serial.digest([prints[part] for part in CAPTURED])
        return CachedPlan(self.config.cache_dir, self.model, printed, prints, traced=traced)

    def plan_anew(
        self,
        looked_up: LookedUp,
        args: Args,
        kwargs: Kwargs,
        planned: Callable[[Unit], object] = bool,
    ) -> Unit:
        """Return the plan that the cache did not have, and keep it; ``planned`` hears of it before it has kernels."""
        bundle, record = self._plan(args, kwargs, looked_up)
        planned(unit := Unit.of(bundle, graphs=self.config.graphs))
        unit = fused_unit(unit, self.config)
        unit.basis = looked_up.entry.keep(self._kept(unit.bundle), record, self.why_not_kept)
        return unit

    def _cached(self, entry: CachedPlan, checkpoint: Checkpoint | None) -> Unit | None:
        """Return the plan that is kept, ready to run; ``None`` where none holds."""
        cached = entry.read(self._outdated)
        if cached is None:
            return None
        try:
            unit = Unit.of(self._with_weights(cached, checkpoint), graphs=self.config.graphs)
            unit.basis, unit.is_kept = entry.basis(), True
            return with_kernels(unit, self.config)
        except (PlanVerificationError, FormatError) as error:
            entry.refuse(error)
            return None

    def _kept(self, bundle: Bundle) -> Bundle:
        """Return what is kept of a plan: the model's own states are bound to the model of the day."""
        return replace(bundle, held=self._constants(bundle))

    def _outdated(self, cached: Bundle) -> str:
        folder = self.config.cache_dir
        return outdated(cached, cache_dir=folder) or lacks_memory(cached, cache_dir=folder)

    def planned_again(self, unit: Unit) -> Unit:
        """Return ``unit`` with a plan that has what its runs have taught about the memory of ops."""
        before, prints = unit.bundle, unit.bundle.plan.fingerprint
        bundle = replace(before, plan=self.place(before.program, prints), fusion=None)
        fused = fused_unit(Unit.of(bundle, graphs=self.config.graphs), self.config)
        if unit.basis is not None:
            fused.basis = unit.basis.rewrite(self.config.cache_dir, self._kept(fused.bundle))
        return fused

    def fingerprint(
        self,
        args: Args,
        kwargs: Kwargs,
        checkpoint: Checkpoint | None,
        printed: ModulePrint | None = None,
    ) -> dict[str, str]:
        """Return the digest of every input of the plan, by part."""
        return plan_prints(self, (args, kwargs), checkpoint, printed or module_print(self.model))

    def _with_weights(self, cached: Bundle, checkpoint: Checkpoint | None) -> Bundle:
        """Bind a cached program to the model's weights of today."""
        from gascompile.capture.fake_twin import canonical_names

        parts = (cached.program, canonical_names(self.model), self._constants(cached))
        resolved = self.resolve(*parts, checkpoint)
        return replace(cached, weights=resolved.weights, held=resolved.held)

    def _constants(self, bundle: Bundle) -> dict[str, torch.Tensor]:
        """Return the held tensors that are part of the graph and not of the model."""
        own = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        own |= {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        return {name: tensor for name, tensor in bundle.held.items() if name not in own}

    def resolve(
        self,
        program: Any,
        canonical: Mapping[str, str],
        constants: Mapping[str, torch.Tensor],
        checkpoint: Checkpoint | None,
    ) -> Resolved:
        """Find the weights of a program; see ``resolve_weights``."""
        resolved = resolve_weights(
            self.model,
            program,
            canonical=canonical,
            constants=constants,
            checkpoint=checkpoint,
            store=self.config.cache_dir / STORE,
            where=str(self.checkpoint_path or "the checkpoint"),
            lossy=self.config.weights is not None,
        )
        own = {id(tensor) for tensor in self.model.buffers()}
        # What the model has itself it may have got since the last plan was made.
        self.buffers.update({n: t for n, t in resolved.held.items() if id(t) in own})
        held = {
            name: tensor if name in constants else self.buffers.setdefault(name, tensor)
            for name, tensor in resolved.held.items()
        }
        return replace(resolved, held=held)

    def _plan(
        self, args: Args, kwargs: Kwargs, looked_up: LookedUp
    ) -> tuple[Bundle, Recorded | None]:
        captured = self.capture(args, kwargs, looked_up.entry)
        parts = (captured.program, captured.canonical, captured.constants)
        with task("Finding weights"):
            resolved = self.resolve(*parts, looked_up.checkpoint)
        bundle = Bundle(
            program=captured.program,
            plan=self.place(captured.program, looked_up.entry.prints),
            weights=resolved.weights,
            held=resolved.held,
            positional=call_names(self.model),
            versions=versions(),
        )
        return bundle, captured.record

    def capture(self, args: Args, kwargs: Kwargs, entry: CachedPlan | None = None) -> Capture:
        """Trace the model, unless ``entry`` has a capture of it, and give its weights their forms."""
        from gascompile.api.traced import formed, traced

        return formed(self, traced(self, args, kwargs, entry), args, kwargs)

    def annotated(self, program: Program, sites: Sequence[str] = ()) -> Annotation:
        """Return the costs of a captured program; see ``annotate_memory``."""
        parts = bool(sites) and self.config.has_parts
        return annotate_memory(program, self.machine, self.config, sites=sites, parts=parts)

    def place(self, program: Program, prints: Mapping[str, str]) -> Plan:
        """Annotate and plan a captured program."""
        try:
            return self._placed(program, prints)
        except InfeasiblePlanError:
            if not has_other_products(self.config, self.machine):
                raise
        # Torch's own take no memory beside their results.
        config = replace(self.config, other_products=False)
        return replace(self, config=config)._placed(program, prints)

    def _placed(self, program: Program, prints: Mapping[str, str]) -> Plan:
        from gascompile.api.costed import plan_costed
        from gascompile.api.on_heap import on_heap
        from gascompile.machines.op_times import retimed
        from gascompile.passes.graph.leaving import other_sites

        with task("Planning"):
            machine, config = self.machine, self.config
            sites = other_sites(machine) if config.has_sites else ()
            annotation = self.annotated(program, sites)
            warnings = unknown_ops(annotation, machine, config.cache_dir) + source_warnings(machine)
            return plan_costed(
                retimed(program, annotation.workload, machine, config),
                machine,
                self.budget,
                config,
                prints=prints,
                warnings=warnings,
                may_move=None if self.in_arena or sites else on_heap(program, annotation, machine),
                reserved_bytes=self.reserved_bytes,
                arena_of=self.arena_of,
                has_hops=self.may_wait_half_way and not sites,
            )


def make_job(
    model: nn.Module | str | os.PathLike[str],
    budget: Budget | int | str | None,
    *,
    checkpoint: str | os.PathLike[str] | None,
    dynamic_shapes: Any,
    machine: Machine | str | os.PathLike[str] | None,
    config: CompileConfig,
) -> Job:
    """Check the arguments of a compile and resolve the machine and the budget."""
    require_sense(budget, config.strategy)
    model, checkpoint = model_of(model, checkpoint)
    with task("Measuring this machine" if machine is None else "Reading the machine"):
        resolved = admit(resolve_machine(machine, cache_dir=config.cache_dir, read=read_blocks))
    admit_model(model, resolved)
    require_model(resolved, config)
    return Job(
        model=model,
        machine=resolved,
        budget=Budget.of(budget, resolved),
        config=config,
        checkpoint_path=Path(checkpoint) if checkpoint is not None else None,
        dynamic_shapes=dynamic_shapes,
        weighs=True,
    )


def compile(  # noqa: A001 - the public name, as in torch.compile
    model: nn.Module | str | os.PathLike[str],
    budget: Budget | int | str | None = None,
    example_inputs: ExampleInputs | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    dynamic_shapes: Any = None,
    machine: Machine | str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    *,
    time_limit_s: float = 20.0,
    mip_gap: float = 0.01,
    strategy: str | None = None,
    weights: str | None = None,
    fuse: str = "auto",
    fuse_runs: float = 1000.0,
    graphs: str = "auto",
    sites: str = "one",
    objective: str = "time",
    on_exceed: str = "error",
    mesh: DeviceMesh | Literal[False] | None = None,
) -> CompiledModel:
    """Plan ``model`` for ``budget`` and return it ready to run.

    Args:
        model: a module that ``torch.export`` can trace, on the meta device with ``checkpoint``; or a model's path.
        budget: memory to allocate in the tier that computes (``"8GiB"``, bytes), or a ``Budget``; by default all of it.
        example_inputs: tuple or dict of inputs to plan for now. Without it, plans are made at first calls.
        checkpoint: .safetensors, .gguf or .bin file, sharded or Hugging Face directory; read in place, never whole.
        dynamic_shapes: as ``torch.export.export`` takes it; the plan holds for the upper bounds. Without it and without
            ``example_inputs``, dimensions that change from call to call get a range by themselves; ``False``: none.
        machine: by default this one, measured once; a preset's name or a file; ``"emulated"`` runs on one made of RAM.
        cache_dir: where plans, the machine profile and spilled weights are kept.
        time_limit_s: wall clock for the solver, which may stop at the relative gap ``mip_gap``.
        strategy: force one candidate plan, such as ``"first_fit"``, for comparison.
        weights: ``None`` moves weights as they are stored, which loses nothing. ``"bf16"``, ``"int8"`` and
            ``"int4"`` move fewer bytes and lose precision; ``"auto"`` plans with each and takes the fastest.
        fuse: ``"auto"`` compiles the ops between two transfers where that pays, ``"exact"`` those among them whose
            results are the same bits, ``"off"`` none.
        fuse_runs: compiling kernels may take as long as they save in so many runs; infinity fuses what gains anything.
        graphs: ``"auto"`` gives a GPU the ops between two moves in one call, as a CUDA graph; ``"off"`` one by one.
        sites: ``"all"`` lets ops run on the host's processor while an accelerator does the rest; ``"parts"`` also parts
            of linear layers, whose sums may round otherwise.
        objective: ``"time"``, or ``"energy"`` for the fewest joules by what the machine says that its work takes.
        on_exceed: where an op takes more than the budget has, ``"error"`` plans again or stops, ``"warn"`` goes on.
        mesh: the ranks that run the model on rows of their own, in step, with one copy of the weights per host; by
            default those that ``torchrun`` has started. ``False``: this process alone. Of a dimension named ``pp``
            each rank has a stage of the model, and all are called with the same inputs.

    Raises:
        CaptureError: the model cannot be traced.
        CheckpointError: weights are missing, extra, corrupt or do not fit the model.
        DeviceError: the machine computes on a GPU that cannot be used here, or whose memory others hold.
        InfeasiblePlanError: the budget is too small; names the smallest feasible one.
        RankError: another rank has failed, or differs.
        StorageError: a file cannot be read or written.
    """
    from gascompile.api.compiled_for import compiled_for

    config = CompileConfig.of(
        cache_dir,
        budget,
        time_limit_s=time_limit_s,
        mip_gap=mip_gap,
        strategy=strategy,
        weights=weights,
        fuse=fuse,
        fuse_runs=fuse_runs,
        graphs=graphs,
        sites=sites,
        objective=objective,
        on_exceed=on_exceed,
    )
    given = split_inputs(example_inputs) if example_inputs is not None else None
    source = {"checkpoint": checkpoint, "dynamic_shapes": dynamic_shapes}
    make = partial(make_job, model, config=config, **source)
    return compiled_for(mesh, make, budget, machine, given)
