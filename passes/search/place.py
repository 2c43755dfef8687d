"""Place: the integer program that decides what stays in the compute tier, and its dual bound.

Sets: weights w with intervals j between their uses; links l; ways l over one of them, directly from home or, for a
bound of such, in two hops of which another link f carries the first; slots k: before each op s that reads a weight a
gap g(s) with the ops in between, then the op itself, c(s); g(S) follows the last one.
Variables: keep[w,j] in {0,1} (continuous for tiny weights), stay[w] (resident: all intervals kept), load[w,j,l] >= 0
(streamed over l), home[w,l] in {0,1}; y[l,k] bytes delivered, b[l,k] bytes ahead of their op at the end of k, T[k]
time, Z time of an iteration, M[s], V[l,s] running sums.

    minimise Z, subject to
    total            Z >= sum_k T[k]                                                   _add_times
    occupied[l]      Z >= sum load[w,j,l] * transfer_s(w, l)                           _add_times
    pipe[p]          Z >= sum_{l in p} load[w,j,l] * bytes(w) / rate(p), f as below    _add_times
    rate[l,k]        T[k] >= y[ways over l,k] / rate(l);  T[k] >= compute(k), = for c(s)   _add_times
    fed[f]           Z >= sum load[w,last,l] * transfer_s(w, f), l in two hops over f   _add_times
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

M sums reserve(w) keep[w,j], V[l] sums bytes(w) load[w,j,l] over the intervals open at g(s): a load cannot start
before the previous use is over. Transfers may stop and resume and take no more than their bytes so far, so every
schedule of whole tensors is a solution: the dual bound bounds all of them. Bytes and times are in units of a
thousandth of the whole, so that coefficients stay near 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gascompile.core.errors import SolverError
from gascompile.core.machine import Link
from gascompile.passes.bounds.certify import pipe_rate
from gascompile.passes.bounds.linear_program import INFINITY, Ending, LinearProgram, solver_name
from gascompile.passes.bounds.shadow_prices import Solution, shadow_prices
from gascompile.passes.model.effort import Pivots
from gascompile.passes.model.problem import Placement, Problem, slot_seconds
from gascompile.passes.model.ways import Way, direct_ways

_WHOLE = 1000.0
"""All weights in the model's unit of bytes, and the longest possible iteration in its unit of time."""
_TINY = 1 / 2000
"""Weights below this share of all bytes are not worth a binary."""
_INTEGRAL = 1e-6  # as far as the solver's solutions are off whole numbers
_TOLERANCE = 1e-6
"""The solver keeps rows and bounds up to this share."""
_MOST_PIVOTS = 200_000  # of a relaxation that is a bound
_MOST_NODES = 200
"""Iterations of a relaxation and nodes of an integer search, after which it is stopped on any machine."""
_MOST_USES = 40_000
"""Uses of weights by links of a program that is built at all."""

Sum = list[tuple[int, float]]
"""A sum of columns, each with its factor."""


def place(
    problem: Problem,
    arena_bytes: int,
    *,
    time_limit_s: float,
    mip_gap: float,
    buffers: int = 0,
    relaxed: bool = False,
    max_nodes: int = _MOST_NODES,
    ways: Sequence[Way] | None = None,
    pivots: Pivots | None = None,
) -> Solution:
    """Return the placement that the model finds best within an arena of ``arena_bytes``.

    Args:
        time_limit_s: seconds until the best known solution is returned.
        mip_gap: the solver may stop at this share of the bound, or of the time of streaming everything.
        buffers: ops after each one whose loads must have room beside it. Whole tensors need such room,
            yet it is no part of the model: the bound then holds for this placement rule alone.
        relaxed: solve the linear relaxation; its placement is rounded.
        max_nodes: nodes after which an integer search is stopped.
        ways: how weights come, so that the bound holds for that; directly where none are given.
        pivots: what may be taken, which gets less; without, what one relaxation may take.

    Raises:
        SolverError: HiGHS is not installed, or it ended in a state that is not understood.
    """
    if solver_name() != "highs":
        raise SolverError("HiGHS is not installed; pip install highspy")
    uses = sum(len(weight.uses) for weight in problem.weights)
    pivots = Pivots(_MOST_PIVOTS) if pivots is None else pivots
    timed_out = uses * len(problem.links) > _MOST_USES or time_limit_s <= 0
    if timed_out or pivots.left <= 0:
        return Solution(None, (), 0.0, timed_out)
    model = _build(problem, arena_bytes, buffers, direct_ways(problem) if ways is None else ways)
    outcome = model.program.solve(
        time_limit_s=time_limit_s,
        gap=mip_gap,
        gap_abs=mip_gap * problem.streaming_s / model.time_unit_s,
        relaxed=relaxed,
        max_pivots=min(_MOST_PIVOTS, pivots.left) if relaxed else None,
        max_nodes=None if relaxed else max_nodes,
    )
    pivots.left -= outcome.pivots
    if outcome.ending is Ending.INFEASIBLE:
        return Solution(None, (), math.inf, timed_out=False)
    timed_out = outcome.ending is Ending.OUT_OF_TIME
    bound_s = max(0.0, outcome.bound) * model.time_unit_s * (1 - _TOLERANCE)
    if not outcome.values or (relaxed and outcome.ending is not Ending.OPTIMAL):
        return Solution(None, (), bound_s, timed_out)
    placement, order = _extract(model, outcome.values)
    if not outcome.duals or any(way.feed is not None for way in model.ways):
        return Solution(placement, order, bound_s, timed_out)
    duals = {name: abs(outcome.duals[row]) for name, row in model.rows.items()}
    loads = {key: _value(terms, outcome.values) for key, terms in model.load.items()}
    slots = [outcome.values[column] for column in model.times]
    priced = shadow_prices(problem, duals, slots, loads, model.time_unit_s, model.unit_bytes)
    return Solution(placement, order, bound_s, timed_out, *priced)


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
    ways: Sequence[Way]
    program: LinearProgram
    one: int
    """A column that is always 1, so that sums need no constants."""
    readers: list[int]
    """Ops that read weights."""
    ending: list[list[tuple[int, int]]]
    """Per reader the ``(weight, interval)`` that end at it."""
    starting: list[list[tuple[int, int]]]
    """Per reader the ``(weight, interval)`` that start at it."""
    keep: dict[tuple[int, int], int] = field(default_factory=dict)
    stay: dict[int, int] = field(default_factory=dict)
    load: dict[tuple[int, int, int], Sum] = field(default_factory=dict)
    home: dict[tuple[int, int], Sum] = field(default_factory=dict)
    times: list[int] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)

    def most(self, name: str, terms: Sum, most: float = 0.0) -> None:
        """Add a row: the sum is at most ``most``."""
        self.rows[name] = self.program.add_row(-INFINITY, most, terms)

    def equal(self, name: str, terms: Sum, value: float = 0.0) -> None:
        """Add a row: the sum is ``value``."""
        self.rows[name] = self.program.add_row(value, value, terms)


def _build(problem: Problem, arena_bytes: int, buffers: int, ways: Sequence[Way]) -> _Model:
    readers = sorted({op for weight in problem.weights for op in weight.uses})
    rank = {op: s for s, op in enumerate(readers)}
    ending: list[list[tuple[int, int]]] = [[] for _ in readers]
    starting: list[list[tuple[int, int]]] = [[] for _ in readers]
    for w, weight in enumerate(problem.weights):
        for j, op in enumerate(weight.uses):
            ending[rank[op]].append((w, (j - 1) % len(weight.uses)))
            starting[rank[op]].append((w, j))
    program = LinearProgram("place")
    unit_bytes = max(1, sum(weight.size_bytes for weight in problem.weights)) / _WHOLE
    model = _Model(
        problem=problem,
        unit_bytes=unit_bytes,
        time_unit_s=(max(problem.compute_s, problem.streaming_s) or 1.0) / _WHOLE,
        arena=arena_bytes / unit_bytes,
        size=[weight.size_bytes / unit_bytes for weight in problem.weights],
        reserved=[weight.reserved_bytes / unit_bytes for weight in problem.weights],
        buffers=buffers,
        ways=ways,
        program=program,
        one=program.add_variable(1.0, 1.0),
        readers=readers,
        ending=ending,
        starting=starting,
    )
    _add_choices(model)
    ahead = [_add_flow(model, way) for way in range(len(ways))]
    _add_memory(model, [gap for gap, _, _ in ahead], [op for _, op, _ in ahead])
    _add_times(model, [delivered for _, _, delivered in ahead])
    return model


def _times(terms: Sum, factor: float) -> Sum:
    return [(column, each * factor) for column, each in terms]


def _value(terms: Sum, values: Sequence[float]) -> float:
    return sum(values[column] * factor for column, factor in terms)


def _add_choices(model: _Model) -> None:
    problem, program = model.problem, model.program
    links = range(len(model.ways))
    total = sum(weight.size_bytes for weight in problem.weights)
    for w, weight in enumerate(problem.weights):
        binary = weight.size_bytes > total * _TINY
        last = max(len(weight.uses) - 1, 0)
        for j in range(last + 1):
            model.keep[w, j] = program.add_variable(0.0, 1.0, integer=binary)
        model.stay[w] = stay = model.keep[w, last]
        for j in range(last):
            model.most(f"stay_{w}_{j}", [(stay, 1.0), (model.keep[w, j], -1.0)])
        if len(links) == 1:
            model.home[w, 0] = [(model.one, 1.0), (stay, -1.0)]
            for j in range(last + 1):
                model.load[w, j, 0] = [(model.one, 1.0), (model.keep[w, j], -1.0)]
            continue
        for link in links:
            high = 1.0 if binary else INFINITY
            model.home[w, link] = [(program.add_variable(0.0, high, integer=binary), 1.0)]
            for j in range(last + 1):
                model.load[w, j, link] = load = [(program.add_variable(), 1.0)]
                model.most(f"home_{w}_{j}_{link}", [*load, *_times(model.home[w, link], -1.0)])
        streamed = [term for link in links for term in model.home[w, link]]
        model.equal(f"home_{w}", [(stay, 1.0), *streamed], 1.0)
        for j in range(last + 1):
            one = [term for link in links for term in model.load[w, j, link]]
            model.equal(f"choose_{w}_{j}", [(model.keep[w, j], 1.0), *one], 1.0)
    for tier, room in problem.room_bytes.items():
        terms = [
            term
            for (w, link), home in model.home.items()
            if model.ways[link].home == tier
            for term in _times(home, model.size[w])
        ]
        if total > room:
            model.most(f"tier_{tier}", terms, room / model.unit_bytes)


def _loads(model: _Model, link: int, pairs: Sequence[tuple[int, int]], factor: float = 1.0) -> Sum:
    return [
        term for w, j in pairs for term in _times(model.load[w, j, link], factor * model.size[w])
    ]


def _add_flow(model: _Model, link: int) -> tuple[list[int], list[int], list[int]]:
    """Add the rows of one link; return its ``b`` of gaps, its ``b`` of ops and its ``y`` by slot."""
    count, program = len(model.readers), model.program
    gap = [program.add_variable() for _ in range(count + 1)]
    after = [program.add_variable() for _ in range(count)]
    in_gap = [program.add_variable() for _ in range(count + 1)]
    in_op = [program.add_variable() for _ in range(count)]
    before = [(gap[count], -1.0)] if model.problem.repeats else []
    model.equal(f"ahead_g_{link}_0", [(gap[0], 1.0), *before, (in_gap[0], -1.0)])
    opened = _open_loads(model, link)
    for s in range(count):
        due = _loads(model, link, model.ending[s])
        model.most(f"due_{link}_{s}", [*due, (gap[s], -1.0)])
        model.equal(
            f"ahead_c_{link}_{s}", [(after[s], 1.0), (gap[s], -1.0), (in_op[s], -1.0), *due]
        )
        step = [(gap[s + 1], 1.0), (after[s], -1.0), (in_gap[s + 1], -1.0)]
        model.equal(f"ahead_g_{link}_{s + 1}", step)
        model.most(f"open_g_{link}_{s}", [(gap[s], 1.0), (opened[s], -1.0)])
        model.most(f"open_c_{link}_{s}", [(after[s], 1.0), (opened[s], -1.0), *due])
    model.most(f"open_g_{link}_{count}", [(gap[count], 1.0), (opened[count], -1.0)])
    delivered = [y for pair in zip(in_gap, in_op, strict=False) for y in pair]
    return gap, after, [*delivered, in_gap[count]]


def _open_loads(model: _Model, link: int) -> list[int]:
    """Return ``V``: the bytes of the loads whose interval is open at each gap."""
    problem = model.problem
    wrapping = [
        (w, len(weight.uses) - 1) for w, weight in enumerate(problem.weights) if weight.uses
    ]
    current = model.program.add_variable()
    model.equal(f"open_{link}_0", [(current, 1.0), *_loads(model, link, wrapping, -1.0)])
    opened = [current]
    for s in range(len(model.readers)):
        begun = [
            (w, j)
            for w, j in model.starting[s]
            if problem.repeats or j + 1 < len(problem.weights[w].uses)
        ]
        if set(begun) != set(model.ending[s]):
            following = model.program.add_variable()
            change = _loads(model, link, begun, -1.0) + _loads(model, link, model.ending[s])
            model.equal(f"open_{link}_{s + 1}", [(following, 1.0), (current, -1.0), *change])
            current = following
        opened.append(current)
    return opened


def _kept(model: _Model, pairs: Sequence[tuple[int, int]], factor: float = 1.0) -> Sum:
    return [(model.keep[w, j], factor * model.reserved[w]) for w, j in pairs]


def _add_memory(model: _Model, gaps: Sequence[Sequence[int]], ops: Sequence[Sequence[int]]) -> None:
    problem = model.problem
    current = model.program.add_variable()
    wrapping = [(w, max(len(weight.uses) - 1, 0)) for w, weight in enumerate(problem.weights)]
    model.equal("held_0", [(current, 1.0), *_kept(model, wrapping, -1.0)])
    for s in range(len(model.readers) + 1):
        ahead = [(gap[s], 1.0) for gap in gaps]
        model.most(f"memory_g_{s}", [(current, 1.0), *ahead], model.arena)
        if s == len(model.readers):
            return
        own = sum(model.reserved[w] for w, _ in model.ending[s])
        ahead = [(op[s], 1.0) for op in ops]
        held = [(current, 1.0), *_kept(model, model.ending[s], -1.0)]
        if model.buffers:
            pairs = [
                pair
                for k in range(s + 1, s + 1 + model.buffers)
                for pair in model.ending[k % len(model.readers)]
            ]
            room = [term for link in range(len(model.ways)) for term in _loads(model, link, pairs)]
            model.most(f"buffer_{s}", [*held, *room], model.arena - own)
        model.most(f"memory_c_{s}", [*held, *ahead], model.arena - own)
        if set(model.starting[s]) != set(model.ending[s]):
            following = model.program.add_variable()
            change = _kept(model, model.starting[s], -1.0) + _kept(model, model.ending[s])
            model.equal(f"held_{s + 1}", [(following, 1.0), (current, -1.0), *change])
            current = following


def _add_times(model: _Model, delivered: Sequence[Sequence[int]]) -> None:
    problem, program = model.problem, model.program
    compute = [time_s / model.time_unit_s for time_s in slot_seconds(problem, model.readers)]
    # An op that has begun waits for nothing: what is slow lengthens the gap before it.
    model.times = times = [
        program.add_variable(time_s, time_s if k % 2 else INFINITY)
        for k, time_s in enumerate(compute)
    ]
    whole = program.add_variable(cost=1.0)
    model.most("total", [(whole, -1.0), *((slot, 1.0) for slot in times)])
    for number, link in enumerate(problem.links):
        over = [i for i, way in enumerate(model.ways) if way.position == number]
        rate = link.bandwidth_bytes_per_s * model.time_unit_s / model.unit_bytes
        for k, slot in enumerate(times):
            moved = [(delivered[i][k], 1.0) for i in over]
            model.most(f"rate_{number}_{k}", [*moved, (slot, -rate)])
        terms = _carried(model, dict.fromkeys(over, link))
        model.most(f"occupied_{number}", [(whole, -1.0), *terms])
    for feed in dict.fromkeys(way.feed for way in model.ways if way.feed is not None):
        led = [i for i, way in enumerate(model.ways) if way.feed == feed]
        terms = _carried(model, dict.fromkeys(led, feed), once=True)
        model.most(f"fed_{feed.name}", [(whole, -1.0), *terms])
    for number, pipe in enumerate(problem.machine.pipes):
        rate = pipe_rate(problem.machine, pipe) * model.time_unit_s / model.unit_bytes
        last: list[Link | None] = [way.link for way in model.ways]
        first = [way.feed for way in model.ways]
        terms = [(whole, -1.0)]
        for links in (last, first):
            passing = {i: rate for i, link in enumerate(links) if link and pipe.name in link.shared}
            terms += _carried(model, passing, once=links is first)
        model.most(f"pipe_{number}", terms)


def _carried(model: _Model, over: Mapping[int, float | Link], *, once: bool = False) -> Sum:
    """Return the seconds of loads by some ways, each or ``once`` per weight: at a rate, or what each keeps a link."""
    problem = model.problem
    terms: Sum = []
    for (w, j, way), load in model.load.items():
        uses = len(problem.weights[w].uses)
        # What waits half the way is fetched once for several uses; over the last interval all that has a home comes.
        if way in over and uses and (not once or j == uses - 1):
            rate = over[way]
            seconds = (
                rate.transfer_time_s(problem.weights[w].size_bytes) / model.time_unit_s
                if isinstance(rate, Link)
                else model.size[w] / rate
            )
            terms += _times(load, seconds)
    return terms


def _extract(model: _Model, values: Sequence[float]) -> tuple[Placement, tuple[int, ...]]:
    """Return the placement, and the weights from those that should stay most on."""
    problem = model.problem
    link_of: list[int | None] = []
    kept: set[tuple[int, int]] = set()
    stay = [values[model.stay[w]] for w in range(len(problem.weights))]
    for w, weight in enumerate(problem.weights):
        if stay[w] > 1 - _INTEGRAL:
            link_of.append(None)
            continue
        shares = [_value(model.home[w, way], values) for way in range(len(model.ways))]
        link_of.append(model.ways[shares.index(max(shares))].direct)
        kept |= {
            (w, j) for j in range(len(weight.uses) - 1) if values[model.keep[w, j]] > 1 - _INTEGRAL
        }
    # Rounded, so that the order of equal shares is the order of use.
    order = sorted(range(len(stay)), key=lambda w: (-round(stay[w], 6), w))
    return Placement(strategy="ilp", link_of=tuple(link_of), kept=frozenset(kept)), tuple(order)
