"""Stage planner: the steps of one rank of a pipeline, which all ranks capture and plan at the same time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gascompile.bundles.reuse import CachedPlan
from gascompile.core import serial
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.progress import task
from gascompile.core.workload import Workload
from gascompile.runtime.memory.pages import Pages
from gascompile.training.capture.shapes import with_shapes
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.planning.step_costs import costed_workload
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.settings import Settings
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.train_state import States
from gascompile.training.step_cache import PlannedStep, bundle_of, rules_of, updates_of
from gascompile.training.step_job import StepJob

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint
    from gascompile.training.pipeline.agreement import StageMemory
    from gascompile.training.pipeline.pipeline import Pipeline, PipelineStage
    from gascompile.training.rank_step import RankStep


class StagePlanner:
    """What plans the steps of a stage; ``StepPlanner`` has the rest."""

    _job: StepJob
    _model: nn.Module
    optimizer: torch.optim.Optimizer
    _machine: Machine
    _settings: Settings
    _reserved_bytes: int
    pages: Pages | None
    states: States | None
    ranks: RankStep | None

    def _place(self, batch: Any, options: StepOptions, storages: Storages) -> CachedPlan:
        raise NotImplementedError

    def _plan(
        self, program: StepProgram, prints: Mapping[str, str], stage: PipelineStage | None = None
    ) -> Plan:
        raise NotImplementedError

    def _staged(
        self, name: str, batch: Any, options: StepOptions, storages: Storages, pipeline: Pipeline
    ) -> tuple[CachedPlan, PlannedStep]:
        """Return this rank's part of a step of a pipeline, which is captured and planned anew in each process."""
        from gascompile.training.capture.joint import capture_joint

        place = self._place(batch, options, storages)
        self._compare_options(options)
        model, trains = self._model, options.trains

        def capture(part: Any) -> Joint:
            return capture_joint(model, self._job.loss_fn, part, storages, trains=trains)

        def captured() -> tuple[StepProgram, Rules, PipelineStage]:
            stage = pipeline.stage(capture, batch, self._op_costs, self._memory(), trains=trains,
                                   every=self._updatable, num_states=self._num_states())  # fmt: skip
            self._settings = replace(self._settings, placed=stage.layout)
            joint, trained = stage.joint, list(stage.joint.trained)
            rules = rules_of(self.optimizer, joint.tensors, storages, trained, self._settings)
            return step_program(joint, rules, name=name, options=options), rules, stage

        with task(f"Capturing a {name}"):
            program, rules, stage = with_shapes(self.states, storages, captured)
        with task("Planning"):
            plan = self._plan(program, place.prints, stage)
            self._meet("a plan of its stage on each rank", b"")
        bundle, _ = bundle_of(program, plan, place.printed)
        pipeline.staged[program.program.graph_module] = stage
        known = rules.slots.keys() | program.program.bound.keys()
        tensors = {name: x for name, x in stage.joint.tensors.items() if name in known}
        return place, PlannedStep(
            program=program,
            plan=plan,
            rules=rules,
            tensors=tensors,
            bundle=bundle,
            record=stage.joint.record,
        )

    def _compare_options(self, options: StepOptions) -> None:
        """Return once all ranks are about to plan the same step.

        Raises:
            RankMismatchError: they are not.
        """
        updates = updates_of(self._model, self.optimizer, self._settings)
        asked = {**asdict(options), "pending": sorted(options.pending)}
        self._meet("the options of a step", serial.digest([asked, updates]).encode())

    def _meet(self, what: str, facts: bytes) -> None:
        assert self.ranks is not None, "only ranks make a pipeline"
        self.ranks.meet_for(what, facts)

    def _updatable(self, joint: Joint) -> list[str]:
        """Return the names of the optimizer's parameters."""
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return [name for name, tensor in joint.tensors.items() if id(tensor) in own]

    def _num_states(self) -> int:
        """Return the vectors of a parameter's size beside it: its gradient, and moments."""
        return 1 + (1 if isinstance(self.optimizer, torch.optim.SGD) else 2)

    def _memory(self) -> StageMemory:
        from gascompile.training.pipeline.agreement import StageMemory

        return StageMemory.of(self._machine, self._job.limit_bytes - self._reserved_bytes)

    def _op_costs(self, joint: Joint) -> Workload:
        """Return what the ops of a captured step take here."""
        from gascompile.training.pipeline.stage_problem import program_of

        program = program_of(joint, "forward and backward")
        return costed_workload(
            program,
            self._machine,
            self._job.budget,
            cache_dir=self._job.config.cache_dir,
            pages=self.pages,
            together=self.ranks.timing if self.ranks is not None else None,
        )
