"""A unit: what runs for one kind of batch, and what it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gascompile.bundles.bundle import Bundle
from gascompile.bundles.reuse import Basis, CachedPlan
from gascompile.capture.saved.call_types import unflatten
from gascompile.capture.saved.program_io import load_treespec
from gascompile.core.kernels import FusedReport
from gascompile.core.model_libraries import register_pytrees
from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.machines.stale_profile import Grader
from gascompile.runtime.run.executor import Executor
from gascompile.training.planning.step_program import StepProgram

if TYPE_CHECKING:
    from gascompile.runtime.run.recording import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUnit:
    """The step, the evaluation or the call of the model, for one kind of batch."""

    program: StepProgram
    plan: Plan
    graph_module: torch.fx.GraphModule
    executor: Executor
    trains: bool
    calls: bool
    """Whether its outputs are what a call of the model returns."""
    grader: Grader
    basis: Basis
    """What the program was made from beside the model's tensors and the batch."""
    place: CachedPlan
    """Where it is kept, or would be."""
    bundle: Bundle
    """As it is kept there."""
    fused: FusedReport | None
    """What of it runs as compiled kernels; ``None`` where fusing is off."""
    entry: str = ""
    """Key in the cache of a program that was kept by an earlier capture: it lacks the layouts of values."""

    def run(
        self, inputs: Sequence[Any], recording: Recording | None = None
    ) -> tuple[tuple[Any, ...], RunReport]:
        """Run it and compare what it took with the plan: see ``Executor.run``."""
        executor = self.executor
        run = executor.run if recording is None else partial(executor.run_recorded, recording)
        outputs = run(*inputs)
        assert executor.last_run is not None, "each run is measured"
        self.grader.grade(executor.last_run)
        # A device's memory is the budget's: what the user gets lies with the user.
        on_host = (
            x.to("cpu", copy=True)
            if isinstance(x, torch.Tensor) and not executor.computes_on_host
            else x
            for x in outputs
        )
        return tuple(on_host), executor.last_run

    def result(self, outputs: Sequence[Any]) -> Any:
        """Return what a call of the model returns, of outputs of ``run``."""
        register_pytrees()
        return unflatten(outputs, load_treespec(self.program.program.out_spec))
