"""Step planner: captures of steps, their plans, and the places of both in the cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from gascompile.bundles import plan_cache
from gascompile.bundles.bundle import Bundle
from gascompile.bundles.reuse import CachedPlan
from gascompile.codegen.allocator_library import page_memory
from gascompile.core import serial
from gascompile.core.collection import no_collection
from gascompile.core.errors import (
    BudgetExceededError,
    FormatError,
    InfeasiblePlanError,
    PlanVerificationError,
)
from gascompile.core.plan import Plan
from gascompile.core.progress import task
from gascompile.core.sizes import SPILL_BUFFER_BYTES
from gascompile.passes.graph.leaving import other_sites
from gascompile.runtime.memory.pinned import HOST
from gascompile.training.capture.shapes import with_shapes
from gascompile.training.capture.traced_call import call_of
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.division import Stages
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.optimizers.unplanned import state_bytes
from gascompile.training.pipeline.kept_plans import kept_plan
from gascompile.training.pipeline.stage_planner import StagePlanner
from gascompile.training.planning import rank_overlap
from gascompile.training.planning.packed_nodes import with_packed
from gascompile.training.planning.rank_means import require_mean
from gascompile.training.planning.rank_overlap import overlapped, with_moves
from gascompile.training.planning.row_draws import draw_by_rows, draws_of, with_more_rows
from gascompile.training.planning.step_costs import costed_workload, remember
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.train_state import States
from gascompile.training.step_cache import (
    PlannedStep,
    bound_step,
    bundle_of,
    divisible,
    place_of_step,
    rules_of,
)
from gascompile.training.step_job import StepJob
from gascompile.training.unit import StepUnit

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint
    from gascompile.training.pipeline.pipeline import Pipeline, PipelineStage
    from gascompile.training.rank_step import RankStep

_BUFFERS = 4
"""Parts of the transfer buffers: out and in, of what persists and of activations."""


class StepPlanner(StagePlanner):
    """Plans the steps of one model and optimizer; of several ranks, those of this one."""

    transfer_bytes = _BUFFERS * SPILL_BUFFER_BYTES
    """Of the budget, for transfers."""

    def __init__(self, job: StepJob) -> None:
        """Change nothing yet."""
        self._job, machine = job, job.machine
        self._model, self.optimizer = job.model, job.optimizer
        self._budget, self._machine, self._config = job.budget, job.machine, job.config
        self._settings, self._values, self._saved = job.settings, job.values, job.saved
        self.ranks: RankStep | None = None
        """That train the model together; ``None`` where this process is alone."""
        self.pipeline: Pipeline | None = None
        """Where ranks are stages of the model."""
        self.states: States | None = None
        """Values that were taken over, from the first unit on."""
        self._waiting: tuple[object, tuple[StepProgram, Rules, Joint, Plan]] | None = None
        """What was planned last whose sums wait for other ranks, until all have chosen."""
        self._traced_once: tuple[object, Joint] | None = None
        """The trace of the first step, until all have chosen."""
        self._reserved_bytes = self.transfer_bytes if machine.compute_tier == HOST else 0
        # What stands for the memory of an emulated device is the host's, too.
        self._in_ram = machine.compute_backend != "cuda"
        self.pages = page_memory(job.config.cache_dir, job.limit_bytes) if self._in_ram else None

    def planned(
        self, name: str, batch: Any, options: StepOptions, storages: Storages
    ) -> tuple[CachedPlan, PlannedStep]:
        """Return a step, and its place in the cache; of several ranks the first decides which parameters are divided.

        Raises:
            CaptureError: the loss cannot be traced, or depends on no parameter.
            InfeasiblePlanError: the budget is too small; names the smallest feasible one.
            RankError: another rank has failed.
        """
        if self.pipeline is not None and not options.calls:
            with no_collection():
                return self._staged(name, batch, options, storages, self.pipeline)
        attempt = partial(self._made, name, batch, options, storages)
        if self.ranks is None or self.states is not None:
            return attempt(self._settings.stages, self._settings.beside)
        sizes, config = self._divisible(storages), self._config
        # Of all that any plan of this rank depends on, and of what it is compared with.
        all_of = serial.digest([self._place(batch, options, storages).prints, config.mip_gap])
        path = config.cache_dir / "ranks" / f"division-{all_of[:32]}.json"
        try:
            place, made, best = self.ranks.divided(attempt, sizes, path, config.mip_gap)
        finally:
            # Another batch may have the number of one that is gone.
            self._waiting = self._traced_once = None
        self._settings = replace(self._settings, stages=best.stages, beside=best.beside)
        return place, made

    def _divisible(self, storages: Storages) -> dict[str, int]:
        look = partial(divisible, self._model, self.optimizer, storages, self._settings)
        sizes = with_shapes(None, storages, look)
        files = sizes if self._values is None else self._values.sources
        return {name: size for name, size in sizes.items() if name in files}

    def _made(
        self,
        name: str,
        batch: Any,
        options: StepOptions,
        storages: Storages,
        stages: Stages,
        beside: bool,
    ) -> tuple[CachedPlan, PlannedStep]:
        """Return a step in which the parameters of ``stages`` are divided, and its place in the cache."""
        self._settings = replace(self._settings, stages=stages, beside=beside)
        with no_collection():
            place, made = self._looked_up(batch, options, storages)
        if made is not None and self.ranks is not None:
            self.ranks.timing.skip()
        return place, made or self._planned(name, batch, options, storages, place)

    def _looked_up(
        self, batch: Any, options: StepOptions, storages: Storages
    ) -> tuple[CachedPlan, PlannedStep | None]:
        """Return the place of a step in the cache, and what is kept there."""
        own = self._job, storages, self._settings
        place = self._place(batch, options, storages)
        saved = self._saved
        bundle = place.read(self._outdated) if saved is None else saved.find(place)
        if bundle is None:
            return place, None
        with task("Reading the plan"):
            try:
                step = with_shapes(self.states, storages, lambda: bound_step(place, bundle, *own))
            except (PlanVerificationError, FormatError) as error:
                if self._saved is not None:
                    raise
                place.refuse(error)
                return place, None
            if self._saved is not None:
                self._saved.check(step)
        return place, step

    def _place(self, batch: Any, options: StepOptions, storages: Storages) -> CachedPlan:
        look = partial(
            place_of_step,
            self._job,
            self._traced(options),
            batch,
            options,
            storages=storages,
            settings=self._settings,
            has_pages=self.pages is not None,
            network=self.ranks.network if self.ranks is not None else "",
        )
        return with_shapes(self.states, storages, look)

    def _traced(self, options: StepOptions) -> LossFunction:
        return call_of if options.calls else self._job.loss_fn

    @no_collection()
    def _planned(
        self, name: str, batch: Any, options: StepOptions, storages: Storages, place: CachedPlan
    ) -> PlannedStep:
        """Plan a step of the capture that is kept of it, or of a new one."""
        from gascompile.training.kept_joints import NewJoint, joint_of

        kept = place.captured()  # Outside, as where plans are compared.

        def captured() -> tuple[StepProgram, Rules, Joint, NewJoint | None]:
            capture = partial(self._drawing, batch, options, storages)
            joint, new = joint_of(place, kept, self._model, capture)
            trained = list(joint.gradients) if options.trains else []
            rules = rules_of(self.optimizer, joint.tensors, storages, trained, self._settings)
            made = step_program(joint, rules, name=name, options=options)
            return with_packed(made, self._job.packed), rules, joint, new

        is_beside = rank_overlap.is_wanted(self._settings.beside) and not options.calls
        what = id(batch), options, self._settings.stages
        before, self._waiting = self._waiting, None
        if is_beside and before is not None and before[0] == what:
            program, rules, joint, plan = before[1]
        else:
            with task(f"Capturing a {name}"):
                program, rules, joint, new = with_shapes(self.states, storages, captured)
            if new is not None:
                new.keep(place, joint)
            with task("Planning"):
                plan = self._plan(program, place.prints)
        if self.ranks is not None and is_beside:
            program, plan = self._beside_ops(program, plan, place.prints)
        elif self.ranks is not None and self.states is None:
            self._waiting = what, (program, rules, joint, plan)
        return PlannedStep(
            program=program,
            plan=plan,
            rules=rules,
            tensors=dict(joint.tensors),
            bundle=bundle_of(program, plan, place.printed)[0],
            record=joint.record,
        )

    def _captured(self, batch: Any, options: StepOptions, storages: Storages) -> Joint:
        from gascompile.training.capture.joint import capture_joint

        kind = {"trains": options.trains, "calls": options.calls}
        return capture_joint(self._model, self._traced(options), batch, storages, **kind)

    def _drawing(self, batch: Any, options: StepOptions, storages: Storages) -> Joint:
        """Return a trace; of several ranks one that draws what one process draws, made once for all divisions.

        A batch of another size shows where rows are.
        """
        from gascompile.training.kept_joints import copied

        what = id(batch), options
        if self._traced_once is not None and self._traced_once[0] == what:
            return copied(self._traced_once[1])
        joint = self._captured(batch, options, storages)
        if options.layout is None or options.calls:
            return joint

        made: list[tuple[Any, Any, Joint]] = []

        def more(batch: Any) -> tuple[Any, Joint]:
            for of, wide, traced in made:
                if of is batch:
                    return wide, traced
            wide = with_more_rows(batch)
            made.append((batch, wide, self._captured(wide, options, storages)))
            return wide, made[-1][2]

        require_mean(joint, batch, more, warns=options.layout.rank == 0)
        if draws_of(joint.graph_module.graph):
            draw_by_rows(joint, more(batch)[1], options.layout.size)
        if self.states is None:
            self._traced_once = what, copied(joint)
        return joint

    def _beside_ops(
        self, program: StepProgram, plan: Plan, prints: Mapping[str, str]
    ) -> tuple[StepProgram, Plan]:
        """Return the step whose exchanges go on beside ops, and its plan; later batches without room for it wait."""
        wide = overlapped(program)
        if wide is None:
            return program, plan
        try:
            return wide, self._plan(wide, prints)
        except InfeasiblePlanError:
            if self.states is None and rank_overlap.forced is None:
                raise
            return program, plan

    def _outdated(self, bundle: Bundle) -> str:
        if bundle.fusion is None:
            return ""
        from gascompile.codegen.fuse import outdated

        return outdated(bundle, cache_dir=self._config.cache_dir)

    def learns(self, unit: StepUnit, error: BudgetExceededError) -> bool:
        """Keep what a stopped run of ``unit`` has taught for the next plan; False where it taught nothing."""
        if self._saved is not None:
            return False
        if unit.entry:
            # Its ops are known by name alone: a capture will tell what kind the one is of.
            plan_cache.remove(self._config.cache_dir, unit.entry)
            return True
        return remember(unit.program.program, unit.plan, error, self._config.cache_dir)

    def _plan(
        self, program: StepProgram, prints: Mapping[str, str], stage: PipelineStage | None = None
    ) -> Plan:
        # Here: a step that is found in the cache needs no solver.
        from gascompile.training.planning.step_plan import step_plan

        sites = other_sites(self._machine) if self._config.sites == "all" else ()
        ladder = self.ranks.ladder if self.ranks is not None else None
        workload = costed_workload(
            program,
            self._machine,
            self._budget,
            cache_dir=self._config.cache_dir,
            pages=self.pages,
            sites=sites,
            ladder=ladder,
            together=self.ranks.timing if self.ranks is not None else None,
        )
        sent_bytes = stage.reserved_bytes if stage is not None else 0
        if stage is not None and self.pipeline is not None:
            workload = self.pipeline.with_waits(workload, stage, self._machine.compute_tier)

        machine = self._machine
        if ladder is not None:
            machine = with_moves(machine, workload, program, ladder)

        def planned(kept_bytes: int) -> Plan:
            reserved_bytes = self._reserved_bytes + kept_bytes + sent_bytes
            given = workload, machine, self._budget, self._config
            make = partial(step_plan, *given, fingerprint=prints, reserved_bytes=reserved_bytes)
            if stage is None:
                return make()
            # Of budget and options all that shapes a plan is in the prints.
            others = [machine, prints, reserved_bytes, self._config.search_limits]
            return kept_plan(self._config.cache_dir, workload, others, make)

        state = state_bytes(self.optimizer) if self._settings.unplanned else 0
        try:
            return planned(state)
        except InfeasiblePlanError:
            if not state or self.states is None:
                raise
            # Steps go on beyond the budget, with a warning, once the optimizer has made its state: so does the rest.
            return planned(0)
