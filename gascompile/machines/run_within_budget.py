"""Runs a plan, and plans again where an op turns out to take more than the plan has for it; grades the plan's time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from gascompile.core.errors import BudgetExceededError
from gascompile.machines.op_memory import remember
from gascompile.machines.stale_profile import Grader

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from gascompile.api.unit import Unit
    from gascompile.bundles.bundle import Bundle
    from gascompile.core.plan import Plan
    from gascompile.runtime.run.executor import Executor

_log = logging.getLogger("gascompile")

_GRADERS: WeakKeyDictionary[Executor, Grader] = WeakKeyDictionary()
_SAID: WeakKeyDictionary[GraphModule, Plan] = WeakKeyDictionary()
"""By program the plan that a run disproved: it is said once, however often its session is opened again."""
T = TypeVar("T")
MOST_PLANS = 6
"""For one call: each may show more of what an op takes."""


def planned_again(
    run: Callable[[], T],
    remember: Callable[[BudgetExceededError], bool],
    plan_again: Callable[[BudgetExceededError], bool],
) -> T:
    """Return what ``run`` does, which is tried again where an op took more than its plan has for it.

    Args:
        run: with the plan of the moment; stopped, it has changed nothing unless its error says so.
        remember: keeps what was found for the next plan, whoever makes it; returns whether it is new.
        plan_again: plans with what was found; returns whether that may be tried.

    Raises:
        BudgetExceededError: nobody can plan again, or states had changed by then.
    """
    for number in range(MOST_PLANS + 1):
        try:
            return run()
        except BudgetExceededError as error:
            is_new = remember(error)
            if not is_new or number == MOST_PLANS or error.half_updated or not plan_again(error):
                raise
    raise AssertionError("the last run returns or raises")


def run_within_budget(
    unit: Unit,
    inputs: Sequence[Any],
    activate: Callable[[Unit], Executor],
    replan: Callable[[Unit], Unit] | None,
    cache_dir: Path,
) -> tuple[Unit, tuple[Any, ...]]:
    """Return the outputs of a run of ``inputs`` and the unit that ran in the end.

    Raises:
        BudgetExceededError: nobody can plan again, or states had changed by then.
        InfeasiblePlanError: with what the op takes no plan fits the budget; names the smallest one.
    """
    now = unit

    def run() -> tuple[Unit, tuple[Any, ...]]:
        executor = activate(now)
        outputs = executor.run(*inputs)
        _grade(executor, now.bundle, cache_dir)
        return now, outputs

    def again(error: BudgetExceededError) -> bool:
        nonlocal now
        if replan is None:
            return False
        log_replan(error)
        now = replan(now)
        return True

    def keep(error: BudgetExceededError) -> bool:
        return remember(now.bundle.program, now.bundle.plan, error, cache_dir)

    return planned_again(run, keep, again)


def log_replan(error: BudgetExceededError) -> None:
    """Say that a plan is made again, and why."""
    _log.warning(
        "op '%s' asks for %d bytes, planned were %d: the plan is made again",
        error.op,
        error.real_bytes,
        error.planned_bytes,
    )


def _grade(executor: Executor, bundle: Bundle, cache_dir: Path) -> None:
    """Compare the run with its plan: one that beats its limit disproves the machine's numbers."""
    grader = _GRADERS.get(executor)
    if grader is None:
        from gascompile.core.ranks import STAGE_OPS
        from gascompile.machines.resolve import profile_of

        plan, nodes = bundle.plan, bundle.program.graph_module.graph.nodes
        waits = any(str(node.target).startswith(STAGE_OPS) for node in nodes)
        grader = Grader(plan, lambda: profile_of(plan.machine, cache_dir), waits=waits)
        _GRADERS[executor] = grader
    graph, run = bundle.program.graph_module, executor.last_run
    is_new = _SAID.get(graph) is not bundle.plan
    if run is not None and is_new and grader.grade(run):
        _SAID[graph] = bundle.plan
