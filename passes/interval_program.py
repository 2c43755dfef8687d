"""Interval program: the linear relaxation of all moves, its bound and what it would do with each interval.

Slots s: stretches of short runs, which may wait and recompute, in turn with single long runs. Per interval j,
route t: leave[j,t], remade[j], in [0, 1] together. Per slot and route: out, back (bytes moved), P (bytes still
to be written out), G (bytes away), E (bytes that are back early), all >= 0; T[s] seconds.

    minimise sum_s T[s], subject to
    T[s] >= compute + remaking;  = compute for a long run                             _add_times
    T[s] >= bytes over a link / its rate;  the same for pipes; sum T >= all transfers _add_times
    P[s] = P[s-1] + dirty intervals whose value is written by s - out[s]               _add_flows
    G[s] = G[s-1] + out[s] + clean intervals that begin in s - back[s]                 _add_flows
    E[s] = E[s-1] + back[s] - intervals that end in s                                  _add_flows
    kept(i) - sum_t (G[s-1] - back[s]) - remade(i) <= limit, i a long run in s           _add_memory
    kept(i) - sum_t (G[s-1] + out[s] + clean of s) - remade(i) <= limit, i a short run    _add_memory
    kept(i) - sum over intervals open at i of leave and remade <= limit                  _add_memory

Bytes on a link are fungible, inputs of a recomputation need not be there, and within a stretch of short runs
bytes count as away as soon as they could be: whatever the exact model allows is allowed here.
Where the workload repeats, slots follow each other around the end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gascompile.passes.interval_layout import Interval, Layout
from gascompile.passes.linear_program import INFINITY, Ending, LinearProgram

_WHOLE = 1000.0
"""The largest amount of bytes, and all compute, in the program's own units."""
_PREFERENCE = 1e-4
"""Share of the compute time that moving everything costs beside the time."""
_TOLERANCE = 2e-6
"""The solver keeps rows up to this share of the whole."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """What the relaxation would do."""

    bound_s: float
    """No schedule is faster; infinite when there is none, 0 where nothing is known."""
    leave: Mapping[int, tuple[float, ...]]
    """Share of each interval that leaves, per route; those that count for no slot are left out."""
    remade: Mapping[int, float]
    solver: str
    timed_out: bool


@dataclass(frozen=True, slots=True)
class _Slot:
    first: int
    end: int
    """Runs from ``first`` up to ``end``, which is not one of them."""
    long: bool


@dataclass(slots=True)
class _Model:
    plan: Layout
    program: LinearProgram
    slots: list[_Slot]
    slot_of: list[int]
    rows: list[int]
    """Runs whose memory is looked at."""
    unit_bytes: float
    unit_s: float
    leave: dict[int, list[list[int]]] = field(default_factory=dict)
    """Per interval and route the columns that add up to its share."""
    remade: dict[int, int] = field(default_factory=dict)
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

    def row_range(self, start: int, end: int) -> tuple[int, int]:
        """Return the range of rows among the runs from ``start`` up to ``end``."""
        return bisect_left(self.rows, start), bisect_left(self.rows, end)


def interval_program(
    plan: Layout,
    remakable: Mapping[int, float],
    *,
    away_bytes: int,
    num_slots: int,
    time_limit_s: float,
) -> Relaxation:
    """Solve the relaxation.

    Args:
        plan: a layout without recomputations.
        remakable: intervals that may be bridged by a recomputation, with its seconds.
        away_bytes: bytes of tensors that no run accesses and that are elsewhere all the time.
        num_slots: about how many long runs get a slot of their own.
        time_limit_s: wall seconds.

    Raises:
        SolverError: the solver ended in a state that is not understood.
    """
    model = _build(plan, remakable, away_bytes, num_slots)
    found = model.program.solve(time_limit_s=time_limit_s, relaxed=True)
    bound_s = (found.bound - model.preferred) * model.unit_s
    if bound_s > 0 and bound_s < INFINITY:
        bound_s *= 1 - _TOLERANCE
    values = found.values
    return Relaxation(
        bound_s=max(0.0, bound_s),
        leave={
            j: tuple(sum(values[column] for column in columns) for columns in routes)
            for j, routes in model.leave.items()
        }
        if values
        else {},
        remade={j: values[column] for j, column in model.remade.items()} if values else {},
        solver=found.solver,
        timed_out=found.ending is Ending.STOPPED,
    )


def _build(plan: Layout, remakable: Mapping[int, float], away_bytes: int, num_slots: int) -> _Model:
    slots = _slots(plan, num_slots)
    slot_of = [0] * plan.num_runs
    for number, slot in enumerate(slots):
        slot_of[slot.first : slot.end] = [number] * (slot.end - slot.first)
    most = max(1, int(plan.kept.max()) if plan.num_runs else 1)
    model = _Model(
        plan=plan,
        program=LinearProgram("intervals"),
        slots=slots,
        slot_of=slot_of,
        rows=_rows(plan, slots),
        unit_bytes=most / _WHOLE,
        unit_s=max(plan.task.compute_s, 1e-9) / _WHOLE,
    )
    _add_choices(model, remakable)
    for route in range(len(plan.task.routes)):
        _add_flows(model, route)
    _add_memory(model, away_bytes)
    _add_times(model, remakable)
    return model


def _slots(plan: Layout, num_slots: int) -> list[_Slot]:
    """Give the longest runs slots of their own, and what lies between them one each."""
    order = np.argsort(-plan.seconds, kind="stable")[:num_slots]
    slots: list[_Slot] = []
    reached = 0
    for run in sorted(int(run) for run in order):
        slots += [_Slot(reached, run, long=False), _Slot(run, run + 1, long=True)]
        reached = run + 1
    return [*slots, _Slot(reached, plan.num_runs, long=False)]


def _rows(plan: Layout, slots: list[_Slot]) -> list[int]:
    """Return the runs whose memory is looked at: all long ones, the fullest of each stretch."""
    rows: set[int] = set()
    for slot in slots:
        if slot.end > slot.first:
            rows.add(slot.first + int(np.argmax(plan.kept[slot.first : slot.end])))
    return sorted(run for run in rows if plan.kept[run] > plan.task.limit_bytes)


def _add_choices(model: _Model, remakable: Mapping[int, float]) -> None:
    plan, program = model.plan, model.program
    longest: dict[tuple[int, int], int] = {}
    relevant: list[int] = []
    for j, interval in enumerate(plan.intervals):
        if interval.start < 0:
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
            takes = plan.task.can_take(tensor, route)
            columns.append(_leave(model, j, route, shared) if takes else [])
        model.leave[j] = columns
        if j in remakable:
            model.remade[j] = program.add_variable(0.0, 1.0)
        terms = [column for found in columns for column in found]
        terms += [model.remade[j]] if j in remakable else []
        if len(terms) > 1:
            program.add_row(-INFINITY, 1.0, [(column, 1.0) for column in terms])


def _length(plan: Layout, interval: Interval) -> int:
    return sum(end - start for start, end in plan.spans(interval))


def _leave(model: _Model, j: int, route: int, shared: list[int]) -> list[int]:
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
    for free in kinds:
        column = program.add_variable(0.0, 1.0)
        columns.append(column)
        if free:
            model.begun.setdefault((route, model.after(interval.start)), []).append((column, size))
            if not (clean or given):
                terms = [(column, 1.0), *((other, -1.0) for other in shared)]
                program.add_row(-INFINITY, 0.0, terms)
        else:
            link_out = task.routes[route].link_out
            assert link_out is not None, "what is dirty takes routes with a way out"
            written = interval.version[1]
            # A value is written out at the earliest when it is there; one that is not replaced in
            # a list that does not repeat, at any time.
            since = -1 if interval.wraps and not task.workload.repeats else written
            model.written.setdefault((route, model.after(since)), []).append((column, size))
            store_s = task.store_s(interval.tensor, route) / model.unit_s
            model.transfers.setdefault(link_out, []).append((column, store_s))
            if written > interval.start:
                model.around.setdefault(route, []).append((column, size))
        if interval.end < plan.num_runs or not interval.wraps:
            model.due.setdefault((route, model.enter(interval.end)), []).append((column, size))
        model.transfers.setdefault(link_in, []).append((column, load_s))
        if interval.wraps:
            model.around.setdefault(route, []).append((column, size))
    return columns


def _add_flows(model: _Model, route: int) -> None:
    program, task = model.program, model.plan.task
    room = task.routes[route].room_bytes / model.unit_bytes
    has_way_out = task.routes[route].link_out is not None
    outs, backs, waiting, away, early = (
        [program.add_variable() for _ in model.slots] for _ in range(5)
    )
    for column in away:
        program.highs[column] = room
    around = [(column, -factor) for column, factor in model.around.get(route, ())]
    repeats = task.workload.repeats
    for s in range(len(model.slots)):
        if not has_way_out:
            program.highs[outs[s]] = 0.0
        model.flows[route, s] = (outs[s], backs[s], away[s])
        before = s - 1 if s else model.last
        carried = s > 0 or repeats
        written = [(column, -factor) for column, factor in model.written.get((route, s), ())]
        begun = [(column, -factor) for column, factor in model.begun.get((route, s), ())]
        start = [] if carried else around
        if carried:
            written.append((waiting[before], -1.0))
            begun.append((away[before], -1.0))
        program.add_row(0.0, 0.0, [(waiting[s], 1.0), (outs[s], 1.0), *written])
        program.add_row(
            0.0, 0.0, [(away[s], 1.0), (outs[s], -1.0), (backs[s], 1.0), *begun, *start]
        )
        used = model.due.get((route, s), [])
        held = [(early[before], -1.0)] if carried else []
        program.add_row(0.0, 0.0, [(early[s], 1.0), (backs[s], -1.0), *used, *held])
    last = [(waiting[-1], 1.0), (away[-1], 1.0), (early[-1], 1.0)]
    if repeats:
        program.add_row(0.0, 0.0, [*last, *around])
    else:
        program.highs[waiting[-1]] = program.highs[early[-1]] = 0.0


def _add_memory(model: _Model, away_bytes: int) -> None:
    """Add the rows of memory, with running sums of what is open at each of them."""
    plan, program = model.plan, model.program
    limit = (plan.task.limit_bytes + away_bytes) / model.unit_bytes
    changes: list[list[tuple[int, float]]] = [[] for _ in range(len(model.rows) + 1)]
    remade: list[list[tuple[int, float]]] = [[] for _ in range(len(model.rows) + 1)]
    for j, routes in model.leave.items():
        interval = plan.intervals[j]
        size = plan.task.sizes[interval.tensor] / model.unit_bytes
        for span in plan.spans(interval):
            low, high = model.row_range(*span)
            if low >= high:
                continue
            for column in (column for columns in routes for column in columns):
                changes[low].append((column, -size))
                changes[high].append((column, size))
            if j in model.remade:
                remade[low].append((model.remade[j], -size))
                remade[high].append((model.remade[j], size))
    open_before: list[tuple[int, float]] = []
    made_before: list[tuple[int, float]] = []
    for k, run in enumerate(model.rows):
        opened, made = program.add_variable(), program.add_variable()
        program.add_row(0.0, 0.0, [(opened, 1.0), *changes[k], *open_before])
        program.add_row(0.0, 0.0, [(made, 1.0), *remade[k], *made_before])
        open_before, made_before = [(opened, -1.0)], [(made, -1.0)]
        least = float(plan.kept[run]) / model.unit_bytes - limit
        if least <= 0:
            continue
        program.add_row(least, INFINITY, [(opened, 1.0), (made, 1.0)])
        program.add_row(least, INFINITY, [(made, 1.0), *_away_at(model, run)])


def _away_at(model: _Model, run: int) -> list[tuple[int, float]]:
    """Return the most that can be away at ``run``."""
    s = model.slot_of[run]
    terms: list[tuple[int, float]] = []
    for route in range(len(model.plan.task.routes)):
        out, back, _ = model.flows[route, s]
        if s or model.plan.task.workload.repeats:
            terms.append((model.flows[route, s - 1 if s else model.last][2], 1.0))
        else:
            terms += model.around.get(route, ())
        if model.slots[s].long:
            # What comes back during a run has its memory already when the run starts.
            terms.append((back, -1.0))
        else:
            terms.append((out, 1.0))
            terms += model.begun.get((route, s), ())
    return terms


def _add_times(model: _Model, remakable: Mapping[int, float]) -> None:
    plan, program = model.plan, model.program
    machine = plan.task.machine
    compute = [
        float(plan.seconds[slot.first : slot.end].sum()) / model.unit_s for slot in model.slots
    ]
    times = [
        program.add_variable(seconds, seconds if slot.long else INFINITY, cost=1.0)
        for seconds, slot in zip(compute, model.slots, strict=True)
    ]
    carried: dict[str, list[tuple[int, int]]] = {}
    for route_number, route in enumerate(plan.task.routes):
        for which, link_number in ((0, route.link_out), (1, route.link_in)):
            if link_number is not None:
                link = machine.links[link_number]
                rate = link.bandwidth_bytes_per_s * model.unit_s / model.unit_bytes
                for s, time in enumerate(times):
                    flow = model.flows[route_number, s][which]
                    program.add_row(0.0, INFINITY, [(time, rate), (flow, -1.0)])
                for name in link.shared:
                    carried.setdefault(name, []).append((route_number, which))
    for pipe in machine.pipes:
        rate = pipe.bandwidth_bytes_per_s * model.unit_s / model.unit_bytes
        users = carried.get(pipe.name, [])
        for s, time in enumerate(times if users else []):
            flows = [(model.flows[route, s][which], -1.0) for route, which in users]
            program.add_row(0.0, INFINITY, [(time, rate), *flows])
    _add_preference(model, sum(compute))
    for terms in model.transfers.values():
        spent = [(column, -seconds) for column, seconds in terms]
        program.add_row(0.0, INFINITY, [*((time, 1.0) for time in times), *spent])
    _add_remaking(model, remakable, times, compute)


def _add_preference(model: _Model, compute: float) -> None:
    """Of solutions that take the same time, prefer short transfers; ``preferred`` bounds the cost.

    A tensor holds all its memory during its transfer, of which the flows know nothing: hence the square.
    """
    whole = sum(seconds**2 for terms in model.transfers.values() for _, seconds in terms)
    if not whole:
        return
    model.preferred = _PREFERENCE * compute
    for terms in model.transfers.values():
        for column, seconds in terms:
            model.program.costs[column] += model.preferred * seconds**2 / whole


def _add_remaking(
    model: _Model, remakable: Mapping[int, float], times: list[int], compute: list[float]
) -> None:
    """Let recomputations take place in the slots between the two ends of their interval."""
    program, plan = model.program, model.plan
    if not model.remade:
        return
    ready: dict[int, list[tuple[int, float]]] = {}
    due: dict[int, list[tuple[int, float]]] = {}
    for j, column in model.remade.items():
        seconds = remakable[j] / model.unit_s
        ready.setdefault(model.after(plan.intervals[j].start), []).append((column, -seconds))
        due.setdefault(model.enter(plan.intervals[j].end), []).append((column, seconds))
    before: tuple[int, int] | None = None
    for s, slot in enumerate(model.slots):
        spent = program.add_variable(0.0, 0.0 if slot.long else INFINITY)
        pending, done = program.add_variable(), program.add_variable()
        old = [(before[0], -1.0)] if before else []
        program.add_row(0.0, 0.0, [(pending, 1.0), (spent, 1.0), *ready.get(s, ()), *old])
        old = [(before[1], -1.0)] if before else []
        program.add_row(0.0, 0.0, [(done, 1.0), (spent, -1.0), *due.get(s, ()), *old])
        program.add_row(compute[s], INFINITY, [(times[s], 1.0), (spent, -1.0)])
        before = (pending, done)
