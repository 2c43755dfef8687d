"""Runs a plan, and plans again where an op turns out to take more than the plan has for it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.errors import BudgetExceededError
from gascompile.op_memory import remember

if TYPE_CHECKING:
    from gascompile.compiled import Unit
    from gascompile.runtime.executor import Executor

_log = logging.getLogger("gascompile")

_MOST_PLANS = 6
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
    for number in range(_MOST_PLANS + 1):
        try:
            return unit, activate(unit).run(*inputs)
        except BudgetExceededError as error:
            bundle = unit.bundle
            learnt = remember(bundle.program, bundle.plan.machine, error, cache_dir)
            if not learnt or number == _MOST_PLANS or error.half_updated or replan is None:
                raise
            _log.warning(
                "op '%s' asks for %d bytes, planned were %d: the plan is made again",
                error.op,
                error.real_bytes,
                error.planned_bytes,
            )
            unit = replan(unit)
    raise AssertionError("the last run returns or raises")
