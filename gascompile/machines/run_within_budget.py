"""Runs a plan, and plans again where an op turns out to take more than the plan has for it; grades the plan's time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from gascompile.core.errors import BudgetExceededError
from gascompile.machines.op_memory import remember
from gascompile.machines.stale_profile import Grader

if TYPE_CHECKING:
    from gascompile.api.compiled import Unit
    from gascompile.core.plan import Plan
    from gascompile.runtime.run.executor import Executor

_log = logging.getLogger("gascompile")

_GRADERS: WeakKeyDictionary[Executor, Grader] = WeakKeyDictionary()
MOST_PLANS = 6
"""For one call: each may show more of what an op takes."""


def run_within_budget(
    unit: Unit,
    inputs: Sequence[Any],
    activate: Callable[[Unit], Executor],
    replan: Callable[[Unit], Unit] | None,
    cache_dir: Path,
) -> tuple[Unit, tuple[Any, ...]]:
    """Return the outputs of a run of ``inputs`` and the unit that ran in the end.

    A run that is stopped has changed nothing when it is repeated: else its error goes to the caller.

    Raises:
        BudgetExceededError: nobody can plan again, or states had changed by then.
        InfeasiblePlanError: with what the op takes no plan fits the budget; names the smallest one.
    """
    for number in range(MOST_PLANS + 1):
        try:
            executor = activate(unit)
            outputs = executor.run(*inputs)
        except BudgetExceededError as error:
            bundle = unit.bundle
            learnt = remember(bundle.program, bundle.plan.machine, error, cache_dir)
            if not learnt or number == MOST_PLANS or error.half_updated or replan is None:
                raise
            log_replan(error)
            unit = replan(unit)
        else:
            _grade(executor, unit.bundle.plan, cache_dir)
            return unit, outputs
    raise AssertionError("the last run returns or raises")


def log_replan(error: BudgetExceededError) -> None:
    """Say that a plan is made again, and why."""
    _log.warning(
        "op '%s' asks for %d bytes, planned were %d: the plan is made again",
        error.op,
        error.real_bytes,
        error.planned_bytes,
    )


def _grade(executor: Executor, plan: Plan, cache_dir: Path) -> None:
    """Compare the run with its plan: one that beats its limit disproves the machine's numbers."""
    grader = _GRADERS.get(executor)
    if grader is None:
        from gascompile.machines.resolve import profile_of

        grader = Grader(plan, lambda: profile_of(plan.machine, cache_dir))
        _GRADERS[executor] = grader
    if executor.last_run is not None:
        grader.grade(executor.last_run)
