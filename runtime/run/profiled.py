"""Ranges of ``torch.profiler`` around what a run does: each op, load, store, wait and release under its own name.

A run that nobody profiles makes the plain calls, so ranges cost it nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.profiler import record_function

from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Recompute
from gascompile.runtime.devices.graph_rules import ARRIVAL
from gascompile.runtime.run.schedule import RunSchedule, RunStep

PREFIX = "gascompile"
"""Of all names, so that a trace can be searched for them."""


class ProfiledRanges:
    """Schedules of one plan with ranges, made once each while there is a profiler."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._latest: tuple[RunSchedule, RunSchedule] | None = None
        """As it is given, and with ranges."""

    def of(self, schedule: RunSchedule) -> RunSchedule:
        """Return ``schedule`` with a range around each call where this thread is profiled; else as it is."""
        if not torch._C._autograd._profiler_enabled():
            return schedule
        if self._latest is None or self._latest[0] is not schedule:
            self._latest = (schedule, with_ranges(schedule, self._plan))
        return self._latest[1]

    def clear(self) -> None:
        """Let go of what schedules hold."""
        self._latest = None


def with_ranges(schedule: RunSchedule, plan: Plan) -> RunSchedule:
    """Return ``schedule`` with a range around each call that ``range_name`` has a name for; pure."""
    steps, elsewhere = (
        tuple(_with_range(step, range_name(step, plan)) for step in steps)
        for steps in (schedule.steps, schedule.elsewhere)
    )
    return replace(schedule, steps=steps, elsewhere=elsewhere)


def range_name(step: RunStep, plan: Plan) -> str | None:
    """Return what a call is named in a trace, in the words of plan files: ``gascompile run OP``, ``load TENSOR``.

    ``None`` for what takes no time of its own: views, and outputs on their way out.
    """
    if step.trait.host is ARRIVAL:
        return f"{PREFIX} wait for resident weights"
    if step.planned < 0:
        return None
    of = plan.steps[step.planned]
    if not isinstance(of, Compute | Recompute):
        return f"{PREFIX} {of.TAG} {of.tensor}"
    op = plan.ops[of.op if isinstance(of, Compute) else of.source].name
    if not step.trait.num_ops:
        return f"{PREFIX} beside {op}"
    more = f" and {step.trait.num_ops - 1} more" if step.trait.num_ops > 1 else ""
    return f"{PREFIX} run {op}{more}{' again' if isinstance(of, Recompute) else ''}"


def _with_range(step: RunStep, name: str | None) -> RunStep:
    return step if name is None else step._replace(function=partial(_ranged, name, step.function))


def _ranged(name: str, function: Callable[..., Any], *values: Any) -> Any:
    with record_function(name):
        return function(*values)
