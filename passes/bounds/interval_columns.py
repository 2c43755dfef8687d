"""Interval columns: the slots of the interval program, and a column per interval and way to leave.

See ``interval_program`` for what the columns mean; its rows take what is collected here per slot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from gascompile.passes.bounds.linear_program import INFINITY, LinearProgram
from gascompile.passes.model.interval_layout import Interval, RunLayout

WHOLE = 1000.0
"""The largest amount of bytes, and all compute, in the program's own units."""


@dataclass(frozen=True, slots=True)
class IntervalSlot:
    """A stretch of runs, or a single long one."""

    first: int
    end: int
    """Runs from ``first`` up to ``end``, which is not one of them."""
    long: bool


@dataclass(slots=True)
class Model:
    """The program while it is built, and what its rows are made of."""

    plan: RunLayout
    program: LinearProgram
    slots: list[IntervalSlot]
    slot_of: list[int]
    rows: list[int]
    """Runs whose memory is looked at."""
    unit_bytes: float
    unit_s: float
    memory_rows: list[list[int]] = field(default_factory=list)
    """Rows of the program that keep the limit at each run that is looked at."""
    leave: dict[int, list[list[int]]] = field(default_factory=dict)
    """Per interval and route the columns that add up to its share."""
    recomputed: dict[int, int] = field(default_factory=dict)
    recomputations: list[tuple[int, float, int, int]] = field(default_factory=list)
    """Columns of ops that run again, their seconds, and the first and last slot in which they may."""
    part: dict[int, int] = field(default_factory=dict)
    """The only span of its interval that a column stands for; others stand for all of them."""
    written: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    """Per route and slot what becomes ready to be written out; likewise below."""
    begun: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    due: dict[tuple[int, int], list[tuple[int, float]]] = field(default_factory=dict)
    around: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Per route what is away around the end."""
    transfers: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Per link the seconds of all its transfers."""
    preferred: float = 0.0
    """The most that the preference for moving less can add to the objective."""
    flows: dict[tuple[int, int], tuple[int, int, int]] = field(default_factory=dict)
    """Per route and slot the columns ``out``, ``back``, ``G``."""

    @property
    def last(self) -> int:
        """The last slot."""
        return len(self.slots) - 1

    def enter(self, run: int) -> int:
        """Return the slot by whose end the inputs of ``run`` have arrived."""
        if run >= self.plan.num_runs:
            return self.last
        slot = self.slot_of[run]
        return slot - 1 if self.slots[slot].long else slot

    def after(self, run: int) -> int:
        """Return the first slot in which something may follow ``run``."""
        if run < 0:
            return 0
        slot = self.slot_of[run]
        return slot + 1 if self.slots[slot].long else slot

    def write(self, column: int, tensor: int, route: int) -> None:
        """Let ``column`` take the seconds of writing a tensor out."""
        task = self.plan.task
        link_out = task.routes[route].link_out
        assert link_out is not None, "what is dirty takes routes with a way out"
        store_s = task.store_s(tensor, route) / self.unit_s
        self.transfers.setdefault(link_out, []).append((column, store_s))

    def row_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of rows among the runs from ``start`` up to ``end``."""
        return bisect_left(self.rows, start), bisect_left(self.rows, end)


def interval_columns(plan: RunLayout, recomputable: Collection[int], num_slots: int) -> Model:
    """Return the program with its columns of decisions, and no rows but those that bind them together."""
    slots = _slots(plan, num_slots)
    slot_of = [0] * plan.num_runs
    for number, slot in enumerate(slots):
        slot_of[slot.first : slot.end] = [number] * (slot.end - slot.first)
    most = max(1, int(plan.kept.max()) if plan.num_runs else 1)
    model = Model(
        plan=plan,
        program=LinearProgram("intervals"),
        slots=slots,
        slot_of=slot_of,
        rows=_rows(plan, slots),
        unit_bytes=most / WHOLE,
        unit_s=max(plan.task.compute_s, 1e-9) / WHOLE,
    )
    _add_decisions(model, recomputable)
    return model


def _slots(plan: RunLayout, num_slots: int) -> list[IntervalSlot]:
    """Give the longest runs slots of their own, and what lies between them one each."""
    order = np.argsort(-plan.seconds, kind="stable")[:num_slots]
    slots: list[IntervalSlot] = []
    reached = 0
    for run in sorted(int(run) for run in order):
        slots += [IntervalSlot(reached, run, long=False), IntervalSlot(run, run + 1, long=True)]
        reached = run + 1
    return [*slots, IntervalSlot(reached, plan.num_runs, long=False)]


def _rows(plan: RunLayout, slots: list[IntervalSlot]) -> list[int]:
    """Return the runs whose memory is looked at: all long ones, the fullest of each stretch."""
    rows: set[int] = set()
    for slot in slots:
        if slot.end > slot.first:
            rows.add(slot.first + int(np.argmax(plan.kept[slot.first : slot.end])))
    return sorted(run for run in rows if plan.kept[run] > plan.task.limit_bytes)


def _add_decisions(model: Model, recomputable: Collection[int]) -> None:
    plan, program = model.plan, model.program
    longest: dict[tuple[int, int], int] = {}
    relevant: list[int] = []
    for j, interval in enumerate(plan.intervals):
        # The columns of the wrapping interval are those of both ends, each by itself.
        if interval.unused or interval.behind or interval.ahead:
            continue
        if any(low < high for low, high in (model.row_range(*s) for s in plan.spans(interval))):
            relevant.append(j)
            best = longest.get(interval.version)
            if best is None or _length(plan, interval) > _length(plan, plan.intervals[best]):
                longest[interval.version] = j
    for j in sorted(relevant, key=lambda j: longest[plan.intervals[j].version] != j):
        interval = plan.intervals[j]
        tensor = interval.tensor
        columns: list[list[int]] = []
        for route in range(len(plan.task.routes)):
            first = longest[interval.version]
            shared = model.leave[first][route] if first != j else []
            if not plan.task.can_take(tensor, route):
                columns.append([])
            elif interval.wraps and not plan.task.workload.repeats:
                columns.append(_leave_ends(model, j, route))
            else:
                columns.append(_leave(model, j, route, shared))
        model.leave[j] = columns
        if j in recomputable:
            model.recomputed[j] = program.add_variable(0.0, 1.0)
        terms = [column for of_route in columns for column in of_route]
        terms += [model.recomputed[j]] if j in recomputable else []
        for part in (0, 1):
            same = [column for column in terms if model.part.get(column, part) == part]
            if len(same) > 1:
                program.add_row(-INFINITY, 1.0, [(column, 1.0) for column in same])


def _length(plan: RunLayout, interval: Interval) -> int:
    return sum(end - start for start, end in plan.spans(interval))


def _leave(model: Model, j: int, route: int, shared: list[int]) -> list[int]:
    """Add the columns of an interval that leaves over ``route``: with a copy at hand, or to be written."""
    plan, program, task = model.plan, model.program, model.plan.task
    interval = plan.intervals[j]
    size = task.sizes[interval.tensor] / model.unit_bytes
    clean = task.persistent[interval.tensor] and not task.written[interval.tensor]
    # What a list that does not repeat begins with has a copy at home, if that is where it comes from.
    given = interval.version[1] < 0 and not task.workload.repeats
    columns: list[int] = []
    load_s = task.load_s(interval.tensor, route) / model.unit_s
    link_in = task.routes[route].link_in
    kinds = [True] if clean or given else [True, False] if shared else [False]
    # Of what changes in parts the rest has a copy: all but the time of what is written out is as for a clean one.
    in_parts = task.changed_bytes[interval.tensor] < task.sizes[interval.tensor]
    for free in kinds:
        column = program.add_variable(0.0, 1.0)
        columns.append(column)
        if free or in_parts:
            model.begun.setdefault((route, model.after(interval.start)), []).append((column, size))
        if free and not (clean or given):
            terms = [(column, 1.0), *((other, -1.0) for other in shared)]
            program.add_row(-INFINITY, 0.0, terms)
        if not free:
            model.write(column, interval.tensor, route)
        if not (free or in_parts):
            written = interval.version[1]
            model.written.setdefault((route, model.after(written)), []).append((column, size))
            if written > interval.start:
                model.around.setdefault(route, []).append((column, size))
        model.due.setdefault((route, model.enter(interval.end)), []).append((column, size))
        model.transfers.setdefault(link_in, []).append((column, load_s))
        if interval.wraps:
            model.around.setdefault(route, []).append((column, size))
    return columns


def _leave_ends(model: Model, j: int, route: int) -> list[int]:
    """Add the columns of a list that does not repeat: away behind the last use, and before the first."""
    program, task = model.program, model.plan.task
    interval = model.plan.intervals[j]
    size = task.sizes[interval.tensor] / model.unit_bytes
    behind, ahead = program.add_variable(0.0, 1.0), program.add_variable(0.0, 1.0)
    model.part |= {behind: 0, ahead: 1}
    if task.written[interval.tensor]:
        ready = (route, model.after(interval.version[1]))
        model.written.setdefault(ready, []).append((behind, size))
        model.write(behind, interval.tensor, route)
    else:
        begun = (route, model.after(interval.start))
        model.begun.setdefault(begun, []).append((behind, size))
    model.around.setdefault(route, []).append((ahead, size))
    model.due.setdefault((route, model.enter(interval.end)), []).append((ahead, size))
    load_s = task.load_s(interval.tensor, route) / model.unit_s
    model.transfers.setdefault(task.routes[route].link_in, []).append((ahead, load_s))
    return [behind, ahead]
