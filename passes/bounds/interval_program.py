"""Interval program: the linear relaxation of all moves, its bound and what it would do with each interval.

Slots s: stretches of short runs, which may wait and recompute, in turn with single long runs. Per interval j,
route t: leave[j,t], recomputed[j], in [0, 1] together. Per slot and route: out, back (bytes moved), P (bytes still
to be written out), G (bytes away), E (bytes that are back early), all >= 0; T[s] seconds.

    minimise sum_s T[s] + U, subject to
    T[s] >= compute + recomputing;  = compute for a long run                             _add_times
    T[s] >= bytes over a link / its rate;  sum T >= all transfers, all bytes of a pipe _add_times
    sum T + U >= compute + recomputing + what processors take to move bytes              _add_moving
    P[s] = P[s-1] + dirty intervals whose value is written by s - out[s]               _add_flows
    G[s] = G[s-1] + out[s] + clean intervals that begin in s - back[s]                 _add_flows
    E[s] = E[s-1] + back[s] - intervals that end in s                                  _add_flows
    kept(i) - sum_t (G[s-1] - back[s]) - recomputed(i) <= limit, i a long run in s           _add_memory
    kept(i) - sum_t (G[s-1] + out[s] + clean of s) - recomputed(i) <= limit, i a short run    _add_memory
    kept(i) - sum over intervals open at i of leave and recomputed <= limit                  _add_memory

Bytes on a link are fungible, inputs of a recomputation need not be there, and within a stretch of short runs
bytes count as away as soon as they could be: whatever the exact model allows is allowed here.
Where the workload repeats, slots follow each other around the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.bounds.interval_columns import Model, interval_columns
from gascompile.passes.bounds.interval_recompute_columns import interval_recompute_columns
from gascompile.passes.bounds.linear_program import INFINITY
from gascompile.passes.model.interval_layout import RunLayout

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
    recomputed: Mapping[int, float]
    prices_s: Mapping[int, float]
    """Seconds by which the optimum would grow without the room that an interval's recomputing leaves."""
    solver: str
    pivots: int
    """Iterations of the solver."""


def interval_program(
    plan: RunLayout,
    recomputable: Mapping[int, int],
    *,
    num_slots: int,
    time_limit_s: float,
    max_pivots: int | None = None,
) -> Relaxation:
    """Solve the relaxation.

    Args:
        plan: a layout without recomputations.
        recomputable: op per interval that may be bridged by running that op again.
        num_slots: about how many long runs get a slot of their own.
        time_limit_s: wall seconds.
        max_pivots: iterations that the solver may take.

    Raises:
        SolverError: the solver ended in a state that is not understood.
    """
    model = _build(plan, recomputable, num_slots)
    solution = model.program.solve(time_limit_s=time_limit_s, relaxed=True, max_pivots=max_pivots)
    bound_s = (solution.bound - model.preferred) * model.unit_s
    if bound_s > 0 and bound_s < INFINITY:
        bound_s *= 1 - _TOLERANCE
    values = solution.values
    return Relaxation(
        bound_s=max(0.0, bound_s),
        leave={
            j: tuple(
                sum(values[column] / (2 if column in model.part else 1) for column in columns)
                for columns in routes
            )
            for j, routes in model.leave.items()
        }
        if values
        else {},
        recomputed={j: values[column] for j, column in model.recomputed.items()} if values else {},
        prices_s=_prices_s(model, solution.duals) if solution.duals else {},
        solver=solution.solver,
        pivots=solution.pivots,
    )


def _prices_s(model: Model, duals: tuple[float, ...]) -> Mapping[int, float]:
    """Return what the room of each interval that can be recomputed costs by the duals of the memory rows."""
    plan = model.plan
    prices = [0.0]
    for rows in model.memory_rows:
        prices.append(prices[-1] + sum(abs(duals[row]) for row in rows))
    prices_s: dict[int, float] = {}
    for j in model.recomputed:
        size = plan.task.sizes[plan.intervals[j].tensor] / model.unit_bytes
        spans = [model.row_range(*span) for span in plan.spans(plan.intervals[j])]
        price = sum(prices[high] - prices[low] for low, high in spans if low < high)
        prices_s[j] = size * price * model.unit_s
    return prices_s


def _build(plan: RunLayout, recomputable: Mapping[int, int], num_slots: int) -> Model:
    model = interval_columns(plan, recomputable, num_slots)
    interval_recompute_columns(model, recomputable)
    for route in range(len(plan.task.routes)):
        _add_flows(model, route)
    _add_memory(model)
    _add_times(model)
    return model


def _add_flows(model: Model, route: int) -> None:
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


def _add_memory(model: Model) -> None:
    """Add the rows of memory, with running sums of what is open at each of them."""
    plan, program = model.plan, model.program
    # What no run accesses is elsewhere all the time.
    away_bytes = sum(plan.task.sizes[i.tensor] for i in plan.intervals if i.unused)
    limit = (plan.task.limit_bytes + away_bytes) / model.unit_bytes
    changes: list[list[tuple[int, float]]] = [[] for _ in range(len(model.rows) + 1)]
    recomputed: list[list[tuple[int, float]]] = [[] for _ in range(len(model.rows) + 1)]
    for j, routes in model.leave.items():
        interval = plan.intervals[j]
        size = plan.task.sizes[interval.tensor] / model.unit_bytes
        for part, span in enumerate(plan.spans(interval)):
            low, high = model.row_range(*span)
            if low >= high:
                continue
            for column in (column for columns in routes for column in columns):
                if model.part.get(column, part) == part:
                    changes[low].append((column, -size))
                    changes[high].append((column, size))
            if j in model.recomputed:
                recomputed[low].append((model.recomputed[j], -size))
                recomputed[high].append((model.recomputed[j], size))
    open_before: list[tuple[int, float]] = []
    made_before: list[tuple[int, float]] = []
    for k, run in enumerate(model.rows):
        opened, made = program.add_variable(), program.add_variable()
        program.add_row(0.0, 0.0, [(opened, 1.0), *changes[k], *open_before])
        program.add_row(0.0, 0.0, [(made, 1.0), *recomputed[k], *made_before])
        open_before, made_before = [(opened, -1.0)], [(made, -1.0)]
        least = float(plan.kept[run]) / model.unit_bytes - limit
        model.memory_rows.append([])
        if least <= 0:
            continue
        for away in ([(opened, 1.0)], _away_at(model, run)):
            model.memory_rows[-1].append(program.add_row(least, INFINITY, [(made, 1.0), *away]))


def _away_at(model: Model, run: int) -> list[tuple[int, float]]:
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


def _add_times(model: Model) -> None:
    plan, program = model.plan, model.program
    machine = plan.task.machine
    compute = [
        float(plan.seconds[slot.first : slot.end].sum()) / model.unit_s for slot in model.slots
    ]
    times = [
        program.add_variable(seconds, seconds if slot.long else INFINITY, cost=1.0)
        for seconds, slot in zip(compute, model.slots, strict=True)
    ]
    carried: dict[str, list[tuple[int, int, float]]] = {}
    for route_number, route in enumerate(plan.task.routes):
        for which, link_number in ((0, route.link_out), (1, route.link_in)):
            if link_number is not None:
                link = machine.links[link_number]
                rate = link.bandwidth_bytes_per_s * model.unit_s / model.unit_bytes
                for s, time in enumerate(times):
                    flow = model.flows[route_number, s][which]
                    program.add_row(0.0, INFINITY, [(time, rate), (flow, -1.0)])
                for name in link.shared:
                    carried.setdefault(name, []).append((route_number, which, link.pipe_bytes(1)))
    for pipe in machine.pipes:
        rate = pipe_rate(machine, pipe) * model.unit_s / model.unit_bytes
        users = carried.get(pipe.name, [])
        # Not per slot: a pipe admits the next transfer while the one before is still on its own, slower link.
        flows = [
            (model.flows[route, s][which], -share)
            for route, which, share in users
            for s in range(len(times))
        ]
        program.add_row(0.0, INFINITY, [*((time, rate) for time in times), *flows])
    _add_preference(model, sum(compute))
    for terms in model.transfers.values():
        spent = [(column, -seconds) for column, seconds in terms]
        program.add_row(0.0, INFINITY, [*((time, 1.0) for time in times), *spent])
    _add_recomputing(model, times, compute)
    _add_moving(model, times, sum(compute))


def _add_preference(model: Model, compute: float) -> None:
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


def _add_recomputing(model: Model, times: list[int], compute: list[float]) -> None:
    """Let ops run again in the slots in which they may."""
    program = model.program
    if not model.recomputations:
        return
    ready: dict[int, list[tuple[int, float]]] = {}
    due: dict[int, list[tuple[int, float]]] = {}
    for column, seconds, first, last in model.recomputations:
        ready.setdefault(first, []).append((column, -seconds))
        due.setdefault(last, []).append((column, seconds))
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


def _add_moving(model: Model, times: list[int], compute: float) -> None:
    """Let the whole take as long as the processors need for ops, recomputations and moves."""
    program = model.program
    rate = model.plan.task.op_s_per_byte * model.unit_bytes / model.unit_s
    if not rate:
        return
    extra = program.add_variable(cost=1.0)
    moved = [(column, -rate) for out, back, _ in model.flows.values() for column in (out, back)]
    again = [(column, -seconds) for column, seconds, _, _ in model.recomputations]
    spent = [(time, 1.0) for time in times]
    program.add_row(compute, INFINITY, [(extra, 1.0), *spent, *moved, *again])
