"""Runs whose memory is counted as it is taken, and stopped, or reported, where it passes the budget.

An op is measured only where it matters: a run that is stopped stands in the op that asked for too much.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.core.errors import BudgetExceededError
from gascompile.core.plan import Plan
from gascompile.core.workload import TensorKind
from gascompile.runtime.memory.counting import NO_LIMIT, Count, Counter
from gascompile.runtime.run.schedule import RunSchedule
from gascompile.runtime.run.session import Session
from gascompile.runtime.stores import Store

_log = logging.getLogger("gascompile")


class CountedRuns:
    """Counts the runs of one plan on a session."""

    def __init__(
        self, counter: Counter, session: Session, plan: Plan, on_exceed: str, *, draws: bool
    ) -> None:
        """Know what counts; ``draws`` says that ops draw random numbers, which a stopped run gives back."""
        self._counter = counter
        self._session = session
        self._plan = plan
        self._stops = on_exceed == "error"
        self._draws, self._random = draws, torch.default_generator
        self._count: Count | None = None
        self._num_changes = 0
        """Of what the store holds, before the run at hand."""
        self._said = False
        """Whether a run beyond the budget has been reported."""

    def prepared(self, schedule: RunSchedule) -> RunSchedule:
        """Return the steps without meters, which nobody needs; each is looked at where no run is stopped."""
        steps = tuple(step._replace(meter=None) for step in schedule.steps)
        if not self._stops:
            steps = tuple(
                step._replace(function=partial(self._looked_at, step.op, step.function))
                for step in steps
            )
        return replace(schedule, steps=steps)

    def run(self) -> Count:
        """Return the context that counts a run; who runs it gives it to ``begin``."""
        if self._draws:
            # No tensor, which would be memory of the budget.
            self._random = torch.default_generator.clone_state()
        store = self._session.store
        if store is None:
            return self._counter.counting()
        self._num_changes = store.num_changes
        return self._counter.counting(live_bytes=store.resident_bytes)

    def begin(self, count: Count) -> None:
        """Know the run at hand; who runs it sets ``enforced_bytes`` as its limit, and lifts it."""
        self._count = count

    @property
    def enforced_bytes(self) -> int:
        """Beyond what a run is stopped."""
        return self.limit_bytes if self._stops else NO_LIMIT

    @property
    def limit_bytes(self) -> int:
        """What the budget leaves for what runs allocate."""
        budget_bytes = self._plan.budget_bytes.get(self._plan.machine.compute_tier)
        if budget_bytes is None:
            return NO_LIMIT
        return budget_bytes - self._session.fixed_bytes

    def error(self, op: int, values: list[Any]) -> BudgetExceededError | None:
        """Return why the run at hand was stopped in ``op``; ``None`` where it was not the budget."""
        count = self._count
        wanted_bytes = count.wanted_bytes if count is not None else 0
        if count is None or not wanted_bytes:
            return None
        # The run is over, and what is put back takes memory, too.
        count.limit(NO_LIMIT)
        if self._draws:
            torch.set_rng_state(self._random.get_state())
        kept = {x.untyped_storage().data_ptr() for x in pytree.tree_leaves(values) if _is_dense(x)}
        before_bytes = sum(map(count.size_of, kept))
        store, half_updated = self._session.store, None
        if store is not None:
            half_updated = store.num_changes != self._num_changes
            before_bytes += self._uncounted_bytes(store, count)
        return budget_exceeded(
            self._plan, op, wanted_bytes - before_bytes, half_updated=half_updated
        )

    def _uncounted_bytes(self, store: Store, count: Count) -> int:
        """Return what the store has in memory from before the run at hand, or from elsewhere."""
        return sum(
            size_bytes
            for name, size_bytes in store.sizes.items()
            if not store.is_away(name)
            and not count.size_of(store.tensors[name].untyped_storage().data_ptr())
        )

    def _looked_at(self, op: int, function: Callable[..., Any], *values: Any) -> Any:
        """Make a step; report the first one that passes the budget."""
        count = self._count
        if count is None or self._said:
            return function(*values)
        before_bytes = count.live_bytes
        result = function(*values)
        if count.peak_bytes > self.limit_bytes:
            self._said = True
            log_excess(self._plan, op, count.peak_bytes - before_bytes)
        return result


def log_excess(plan: Plan, op: int, real_bytes: int) -> None:
    """Warn of an op that passed the budget, where that is let go."""
    excess = budget_exceeded(plan, op, real_bytes)
    _log.warning(
        "op '%s' took %d bytes, for which %d are planned: the run passed the budget of %d bytes for tier '%s'",
        excess.op,
        excess.real_bytes,
        excess.planned_bytes,
        excess.budget_bytes,
        excess.tier,
    )


def budget_exceeded(
    plan: Plan, op: int, real_bytes: int, *, half_updated: bool | None = None
) -> BudgetExceededError:
    """Return the error of a run of ``plan`` that was stopped in ``op``, which had asked for ``real_bytes``."""
    ops = plan.workload.ops
    tensors = {tensor.name: tensor for tensor in plan.workload.tensors}
    lasting = (TensorKind.STATE, TensorKind.INPUT, TensorKind.WEIGHT)
    written = {name for done in ops[: op + 1] for name in done.writes}
    if half_updated is None:
        half_updated = any(tensors[name].kind in lasting for name in written)
    planned_bytes = 0
    if op < len(ops):
        made = (tensors[name] for name in ops[op].writes)
        planned_bytes = sum(t.size_bytes for t in made if t.kind not in lasting)
        planned_bytes += ops[op].workspace_bytes
    tier = plan.machine.compute_tier
    return BudgetExceededError(
        op=ops[op].name if op < len(ops) else "output",
        planned_bytes=planned_bytes,
        real_bytes=real_bytes,
        budget_bytes=plan.budget_bytes[tier],
        tier=tier,
        half_updated=half_updated,
    )


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided
