"""Place: the integer program that decides what stays in the compute tier, and its dual bound.

Sets: weights w with intervals j between their uses; links l; slots k: before each op s that reads a
weight a gap g(s) with the ops in between, then the op itself, c(s); g(S) follows the last one.
Variables: keep[w,j] in {0,1} (continuous for tiny weights), stay[w] (resident: all intervals kept),
load[w,j,l] >= 0 (streamed over l), home[w,l] in {0,1}; y[l,k] bytes delivered, b[l,k] bytes ahead of
their op at the end of k, T[k] time, Z time of an iteration, M[s], V[l,s] running sums.

    minimise Z, subject to
    total            Z >= sum_k T[k]                                                   _add_times
    occupied[l]      Z >= sum load[w,j,l] * transfer_s(w, l)                           _add_times
    pipe[p]          Z >= sum_{l in p} load[w,j,l] * bytes(w) / rate(p)                _add_times
    rate[l,k]        T[k] >= y[l,k] / rate(l);  T[k] >= compute(k), = for c(s)       _add_times
    choose[w,j]      keep[w,j] + sum_l load[w,j,l] = 1                                 _add_choices
    home[w,j,l]      load[w,j,l] <= home[w,l];  stay[w] + sum_l home[w,l] = 1          _add_choices
    stay[w,j]        stay[w] <= keep[w,j];  last interval: stay[w] = keep[w,last]      _add_choices
    tier[t]          sum_{l from t} bytes(w) home[w,l] <= room(t)                      _add_choices
    ahead_g[l,s]     b[l,g(s)] = b[l,c(s-1)] + y[l,g(s)]; g(0) after g(S) if repeating _add_flow
    ahead_c[l,s]     b[l,c(s)] = b[l,g(s)] + y[l,c(s)] - d[l,s]                        _add_flow
    due[l,s]         b[l,g(s)] >= d[l,s] = sum of load * bytes needed at s             _add_flow
    open_g, open_c   b[l,g(s)] <= V[l,s];  b[l,c(s)] <= V[l,s] - d[l,s]                _add_flow
    memory_g[s]      M[s] + sum_l b[l,g(s)] <= arena                                   _add_memory
    memory_c[s]      M[s] - (kept of s's own) + (all of s's own) + sum_l b[l,c(s)] <= arena
    buffer[s]        the same with the loads of the next ops for b; no part of the bound

M sums reserve(w) keep[w,j], V[l] sums bytes(w) load[w,j,l] over the intervals open at g(s): a load cannot
start before the previous use is over. Transfers may stop and resume and take no more than their
bytes so far, so every schedule of whole tensors is a solution: the dual bound bounds all of them.
Bytes and times are in units of a thousandth of the whole, so that coefficients stay near 1.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pulp

from gascompile.core.errors import SolverError
from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.bounds.shadow_prices import Solution, prices
from gascompile.passes.model.problem import Placement, Problem, slot_seconds

_WHOLE = 1000.0
"""All weights in the model's unit of bytes, and the longest possible iteration in its unit of time."""
_TINY = 1 / 2000
"""Weights below this share of all bytes are not worth a binary."""
_INTEGRAL = 1e-6
_TOLERANCE = 1e-6
"""The solver keeps rows and bounds up to this share."""
_BUILD_S = 4e-4
"""[Empirical] Building and passing the program takes about so long per use of a weight and link."""
_FEASIBLE_POINT = 2  # HiGHS's kSolutionStatusFeasible
# PuLP carries no types; its expressions and variables pass through as they are.
Expression = Any


def place(
    problem: Problem,
    arena_bytes: int,
    *,
    time_limit_s: float,
    mip_gap: float,
    buffers: int = 0,
    relaxed: bool = False,
) -> Solution:
    """Return the placement that the model finds best within an arena of ``arena_bytes``.

    Args:
        time_limit_s: seconds until the best known solution is returned; none where building takes half.
        mip_gap: the solver may stop at this share of the bound, or of the time of streaming everything.
        buffers: ops after each one whose loads must have room beside it. Whole tensors need such room,
            yet it is no part of the model: the bound then holds for this placement rule alone.
        relaxed: solve the linear relaxation; its placement is rounded.

    Raises:
        SolverError: there is no solver, or it ended in a state that is not understood.
    """
    if not pulp.HiGHS().available():
        raise SolverError("HiGHS is not installed; pip install highspy")
    uses = sum(len(weight.uses) for weight in problem.weights)
    if 2 * _BUILD_S * uses * len(problem.links) > time_limit_s:
        return Solution(None, (), 0.0, timed_out=True)
    begun_s = time.perf_counter()
    model = _build(problem, arena_bytes, buffers)
    solver = pulp.HiGHS(
        msg=False,
        mip=not relaxed,
        gapRel=mip_gap,
        gapAbs=mip_gap * problem.streaming_s / model.time_unit_s,
        timeLimit=max(0.05, time_limit_s - (time.perf_counter() - begun_s)),
        threads=1,
    )
    outcome = _solve(model, solver)
    if outcome is _Outcome.INFEASIBLE:
        return Solution(None, (), math.inf, timed_out=False)
    return _extract(model, timed_out=outcome is _Outcome.STOPPED, relaxed=relaxed)


class _Outcome(Enum):
    FINISHED = auto()
    STOPPED = auto()
    INFEASIBLE = auto()


@dataclass(slots=True)
class _Model:
    problem: Problem
    unit_bytes: float
    time_unit_s: float
    arena: float
    """In the model's unit of bytes, like ``size`` and ``reserved`` of each weight."""
    size: list[float]
    reserved: list[float]
    buffers: int
    program: Expression
    readers: list[int]
    """Ops that read weights."""
    ending: list[list[tuple[int, int]]]
    """Per reader the ``(weight, interval)`` that end at it."""
    starting: list[list[tuple[int, int]]]
    """Per reader the ``(weight, interval)`` that start at it."""
    keep: dict[tuple[int, int], Expression] = field(default_factory=dict)
    stay: dict[int, Expression] = field(default_factory=dict)
    load: dict[tuple[int, int, int], Expression] = field(default_factory=dict)
    home: dict[tuple[int, int], Expression] = field(default_factory=dict)
    times: list[Expression] = field(default_factory=list)
    rows: dict[str, Expression] = field(default_factory=dict)

    def add(self, row: Expression, name: str) -> None:
        self.program.addConstraint(row, name)
        self.rows[name] = row

    def variable(self, name: str, low: float = 0.0, *, binary: bool = False) -> Expression:
        """Return a new variable; a binary one is at most 1."""
        kind = pulp.LpInteger if binary else pulp.LpContinuous
        return self.program.add_variable(name, low, 1 if binary else None, kind)


def _build(problem: Problem, arena_bytes: int, buffers: int) -> _Model:
    readers = sorted({op for weight in problem.weights for op in weight.uses})
    rank = {op: s for s, op in enumerate(readers)}
    ending: list[list[tuple[int, int]]] = [[] for _ in readers]
    starting: list[list[tuple[int, int]]] = [[] for _ in readers]
    for w, weight in enumerate(problem.weights):
        for j, op in enumerate(weight.uses):
            ending[rank[op]].append((w, (j - 1) % len(weight.uses)))
            starting[rank[op]].append((w, j))
    program = pulp.LpProblem("place", pulp.LpMinimize)
    unit_bytes = max(1, sum(weight.size_bytes for weight in problem.weights)) / _WHOLE
    model = _Model(
        problem=problem,
        unit_bytes=unit_bytes,
        time_unit_s=(max(problem.compute_s, problem.streaming_s) or 1.0) / _WHOLE,
        arena=arena_bytes / unit_bytes,
        size=[weight.size_bytes / unit_bytes for weight in problem.weights],
        reserved=[weight.reserved_bytes / unit_bytes for weight in problem.weights],
        buffers=buffers,
        program=program,
        readers=readers,
        ending=ending,
        starting=starting,
    )
    _add_choices(model)
    ahead = [_add_flow(model, link) for link in range(len(problem.links))]
    _add_memory(model, [gap for gap, _, _ in ahead], [op for _, op, _ in ahead])
    _add_times(model, [delivered for _, _, delivered in ahead])
    return model


def _sum(terms: Sequence[tuple[Expression, float]]) -> Expression:
    total = pulp.LpAffineExpression()
    for term, factor in terms:
        total.addInPlace(term, factor)
    return total


def _add_choices(model: _Model) -> None:
    problem, links = model.problem, range(len(model.problem.links))
    total = sum(weight.size_bytes for weight in problem.weights)
    for w, weight in enumerate(problem.weights):
        binary = weight.size_bytes > total * _TINY
        last = max(len(weight.uses) - 1, 0)
        for j in range(last + 1):
            model.keep[w, j] = model.variable(f"keep_{w}_{j}", binary=binary)
            if not binary:
                model.keep[w, j].upBound = 1
        model.stay[w] = model.keep[w, last]
        for j in range(last):
            model.add(model.stay[w] <= model.keep[w, j], f"stay_{w}_{j}")
        for link in links:
            alone = len(links) == 1
            model.home[w, link] = (
                1 - model.stay[w] if alone else model.variable(f"home_{w}_{link}", binary=binary)
            )
            for j in range(last + 1):
                if alone:
                    model.load[w, j, link] = 1 - model.keep[w, j]
                    continue
                model.load[w, j, link] = model.variable(f"load_{w}_{j}_{link}")
                model.add(model.load[w, j, link] <= model.home[w, link], f"home_{w}_{j}_{link}")
        if len(links) != 1:
            streamed = _sum([(model.home[w, link], 1) for link in links])
            model.add(model.stay[w] + streamed == 1, f"home_{w}")
            for j in range(last + 1):
                one = _sum([(model.load[w, j, link], 1) for link in links])
                model.add(model.keep[w, j] + one == 1, f"choose_{w}_{j}")
    for tier, room in problem.room_bytes.items():
        terms = [
            (home, model.size[w])
            for (w, link), home in model.home.items()
            if problem.links[link].source_tier == tier
        ]
        if total > room:
            model.add(_sum(terms) <= room / model.unit_bytes, f"tier_{tier}")


def _loads(model: _Model, link: int, pairs: Sequence[tuple[int, int]]) -> Expression:
    return _sum([(model.load[w, j, link], model.size[w]) for w, j in pairs])


def _add_flow(
    model: _Model, link: int
) -> tuple[list[Expression], list[Expression], list[Expression]]:
    """Add the rows of one link; return its ``b`` of gaps, its ``b`` of ops and its ``y`` by slot."""
    count = len(model.readers)
    gap = [model.variable(f"b_{link}_g{s}") for s in range(count + 1)]
    after = [model.variable(f"b_{link}_c{s}") for s in range(count)]
    in_gap = [model.variable(f"y_{link}_g{s}") for s in range(count + 1)]
    in_op = [model.variable(f"y_{link}_c{s}") for s in range(count)]
    before = gap[count] if model.problem.repeats else 0
    model.add(gap[0] == before + in_gap[0], f"ahead_g_{link}_0")
    opened = _open_loads(model, link)
    for s in range(count):
        due = _loads(model, link, model.ending[s])
        model.add(gap[s] >= due, f"due_{link}_{s}")
        model.add(after[s] == gap[s] + in_op[s] - due, f"ahead_c_{link}_{s}")
        model.add(gap[s + 1] == after[s] + in_gap[s + 1], f"ahead_g_{link}_{s + 1}")
        model.add(gap[s] <= opened[s], f"open_g_{link}_{s}")
        model.add(after[s] <= opened[s] - due, f"open_c_{link}_{s}")
    model.add(gap[count] <= opened[count], f"open_g_{link}_{count}")
    delivered = [y for pair in zip(in_gap, in_op, strict=False) for y in pair]
    return gap, after, [*delivered, in_gap[count]]


def _open_loads(model: _Model, link: int) -> list[Expression]:
    """Return ``V``: the bytes of the loads whose interval is open at each gap."""
    problem = model.problem
    wrapping = [
        (w, len(weight.uses) - 1) for w, weight in enumerate(problem.weights) if weight.uses
    ]
    current = model.variable(f"V_{link}_0")
    model.add(current == _loads(model, link, wrapping), f"open_{link}_0")
    opened = [current]
    for s in range(len(model.readers)):
        begun = [
            (w, j)
            for w, j in model.starting[s]
            if problem.repeats or j + 1 < len(problem.weights[w].uses)
        ]
        if set(begun) != set(model.ending[s]):
            following = model.variable(f"V_{link}_{s + 1}")
            change = _loads(model, link, begun) - _loads(model, link, model.ending[s])
            model.add(following == current + change, f"open_{link}_{s + 1}")
            current = following
        opened.append(current)
    return opened


def _kept(model: _Model, pairs: Sequence[tuple[int, int]]) -> Expression:
    return _sum([(model.keep[w, j], model.reserved[w]) for w, j in pairs])


def _add_memory(
    model: _Model, gaps: Sequence[Sequence[Expression]], ops: Sequence[Sequence[Expression]]
) -> None:
    problem = model.problem
    current = model.variable("M_0")
    wrapping = [(w, max(len(weight.uses) - 1, 0)) for w, weight in enumerate(problem.weights)]
    model.add(current == _kept(model, wrapping), "held_0")
    for s in range(len(model.readers) + 1):
        ahead = _sum([(gap[s], 1) for gap in gaps])
        model.add(current + ahead <= model.arena, f"memory_g_{s}")
        if s == len(model.readers):
            return
        own = sum(model.reserved[w] for w, _ in model.ending[s])
        ahead = _sum([(op[s], 1) for op in ops])
        held = current - _kept(model, model.ending[s]) + own
        if model.buffers:
            pairs = [
                pair
                for k in range(s + 1, s + 1 + model.buffers)
                for pair in model.ending[k % len(model.readers)]
            ]
            room = sum(_loads(model, link, pairs) for link in range(len(problem.links)))
            model.add(held + room <= model.arena, f"buffer_{s}")
        model.add(held + ahead <= model.arena, f"memory_c_{s}")
        if set(model.starting[s]) != set(model.ending[s]):
            following = model.variable(f"M_{s + 1}")
            change = _kept(model, model.starting[s]) - _kept(model, model.ending[s])
            model.add(following == current + change, f"held_{s + 1}")
            current = following


def _add_times(model: _Model, delivered: Sequence[Sequence[Expression]]) -> None:
    problem = model.problem
    compute = slot_seconds(problem, model.readers)
    model.times = times = [
        model.variable(f"T_{k}", time_s / model.time_unit_s) for k, time_s in enumerate(compute)
    ]
    for k in range(1, len(times), 2):
        times[k].upBound = times[k].lowBound
    whole = model.variable("Z")
    model.program.setObjective(pulp.LpAffineExpression([(whole, 1)]))
    model.add(whole >= _sum([(slot, 1) for slot in times]), "total")
    for number, link in enumerate(problem.links):
        rate = link.bandwidth_bytes_per_s * model.time_unit_s / model.unit_bytes
        for k, slot in enumerate(times):
            # An op that has begun waits for nothing: what is slow lengthens the gap before it.
            taken = compute[k] / model.time_unit_s if k % 2 else slot
            model.add(taken * rate >= delivered[number][k], f"rate_{number}_{k}")
        terms = [
            (load, problem.transfer_s(w, number) / model.time_unit_s)
            for (w, _, over), load in model.load.items()
            if over == number and problem.weights[w].uses
        ]
        model.add(whole >= _sum(terms), f"occupied_{number}")
    for number, pipe in enumerate(problem.machine.pipes):
        rate = pipe_rate(problem.machine, pipe) * model.time_unit_s / model.unit_bytes
        terms = [
            (load, model.size[w] / rate)
            for (w, _, over), load in model.load.items()
            if pipe.name in problem.links[over].shared and problem.weights[w].uses
        ]
        model.add(whole >= _sum(terms), f"pipe_{number}")


def _solve(model: _Model, solver: Expression) -> _Outcome:
    model.program.solve(solver)
    match (model.program.status, model.program.sol_status):
        case (pulp.LpStatusOptimal, pulp.LpSolutionOptimal):
            return _Outcome.FINISHED
        # PuLP calls a search that the clock ended optimal; only the solution's status tells.
        case (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible):
            return _Outcome.STOPPED
        case (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound) if _out_of_time(model):
            return _Outcome.STOPPED
        case (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible):
            return _Outcome.INFEASIBLE
        case (status, solution):
            raise SolverError(
                f"HiGHS ended with status '{pulp.LpStatus.get(status, status)}' and solution "
                f"'{pulp.LpSolution.get(solution, solution)}' on {len(model.problem.weights)} weights"
            )


def _out_of_time(model: _Model) -> bool:
    """Whether the clock ended the search; PuLP has no pair of its own for one without a solution."""
    import highspy  # Not at the top: without HiGHS this module still loads.

    return bool(model.program.solverModel.getModelStatus() == highspy.HighsModelStatus.kTimeLimit)


def _extract(model: _Model, *, timed_out: bool, relaxed: bool) -> Solution:
    info = model.program.solverModel.getInfo()
    # A relaxation that was stopped has a value, but no bound.
    bound = info.objective_function_value if relaxed else info.mip_dual_bound
    if (relaxed and timed_out) or not math.isfinite(bound):
        bound = 0.0
    bound_s = max(0.0, bound) * model.time_unit_s * (1 - _TOLERANCE)
    if info.primal_solution_status != _FEASIBLE_POINT:
        return Solution(None, (), bound_s, timed_out)
    problem = model.problem
    link_of: list[int | None] = []
    kept: set[tuple[int, int]] = set()
    stay = [pulp.value(model.stay[w]) for w in range(len(problem.weights))]
    for w, weight in enumerate(problem.weights):
        if stay[w] > 1 - _INTEGRAL:
            link_of.append(None)
            continue
        shares = [pulp.value(model.home[w, link]) for link in range(len(problem.links))]
        link_of.append(shares.index(max(shares)))
        kept |= {
            (w, j)
            for j in range(len(weight.uses) - 1)
            if pulp.value(model.keep[w, j]) > 1 - _INTEGRAL
        }
    placement = Placement(strategy="ilp", link_of=tuple(link_of), kept=frozenset(kept))
    # Rounded, so that the order of equal shares is the order of use.
    order = sorted(range(len(stay)), key=lambda w: (-round(stay[w], 6), w))
    if not relaxed or timed_out:
        return Solution(placement, tuple(order), bound_s, timed_out)
    duals = {name: abs(row.pi or 0.0) for name, row in model.rows.items()}
    units = (model.time_unit_s, model.unit_bytes)
    priced = prices(problem, duals, model.times, model.load, *units)
    return Solution(placement, tuple(order), bound_s, timed_out, *priced)
