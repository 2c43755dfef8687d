"""Prove all: a time that no plan of any planner beats, whatever tensors it keeps, moves or computes again.

The programs behind ``prove`` speak of weights that stream past activations in their place. Here a *loose*
problem stands in for each form: activations take no memory, states count as weights that stream, nothing is
rounded to pages, and what is resident is whatever an iteration never loads. Every plan that leaves ops where
they are and weights in one of the given forms is a solution of one of the loose problems.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gascompile.core.errors import SolverError
from gascompile.core.workload import TensorKind
from gascompile.passes.bounds.certify import problem_limit
from gascompile.passes.bounds.interval_program import interval_program
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.intervals.recompute import recompute_ops
from gascompile.passes.model.interval_layout import layout
from gascompile.passes.model.interval_problem import IntervalProblem, interval_problem
from gascompile.passes.model.problem import Problem, Weight
from gascompile.passes.model.ways import every_way
from gascompile.passes.search.strategies import MANY_WEIGHTS

_MOST_PIVOTS = 100_000
"""Iterations of the solver after which the relaxation of all moves proves nothing, on any machine."""
BOUND_SLOTS = 150
"""Long runs with a slot of their own in the relaxation that bounds all moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What no plan beats, over all forms."""

    limit_s: float
    """The physical limit."""
    binding: str
    """What sets it: ``compute`` or a link's name."""
    bound_s: float
    """The best bound found, at least the limit."""


def prove_all(
    tasks: Sequence[Problem], predicted_s: float, *, time_limit_s: float, mip_gap: float
) -> Floor:
    """Return a time that no plan in any of the forms beats, stopping when it is good enough.

    Args:
        tasks: one problem per form.
        predicted_s: time of the plan at hand; a bound within ``mip_gap`` of it needs no improving.
        time_limit_s: wall seconds; the physical limit takes none of them.
        mip_gap: relative gap to stop at.
    """
    deadline_s = time.perf_counter() + time_limit_s
    enough_s = (1 - mip_gap) * predicted_s
    loose = [_loosened(task) for task in tasks]
    limits = [problem_limit(task) for task in loose]
    open_bounds = [(limit_s, number, 0) for number, (limit_s, _) in enumerate(limits)]
    heapq.heapify(open_bounds)
    # The lowest bound of a form is the bound of all, so only that one is worth improving.
    while True:
        bound_s, number, method = open_bounds[0]
        left_s = deadline_s - time.perf_counter()
        # Of many weights the relaxation takes long and says little beyond occupancy.
        methods = _METHODS[:1] if len(tasks[number].weights) >= MANY_WEIGHTS else _METHODS
        if bound_s >= enough_s or left_s <= 0 or method == len(methods):
            break
        method_s = methods[method](tasks[number], loose[number], enough_s, left_s)
        heapq.heapreplace(open_bounds, (max(bound_s, method_s), number, method + 1))
    limit_s, binding = min(limits)
    return Floor(limit_s=limit_s, binding=binding, bound_s=bound_s)


def relaxed_bound_s(task: IntervalProblem, time_limit_s: float) -> float:
    """Return the optimum of the linear relaxation of all moves; 0 where the clock or the solver ends it."""
    base = layout(task)
    try:
        relaxation = interval_program(
            base,
            recompute_ops(base),
            num_slots=BOUND_SLOTS,
            time_limit_s=time_limit_s,
            max_pivots=_MOST_PIVOTS,
        )
    except SolverError:
        return 0.0
    return relaxation.bound_s


def _loosened(task: Problem) -> Problem:
    """Return a problem whose bounds hold for every plan of this form: states are weights, activations take nothing."""
    sizes = {t.name: t.size_bytes for t in task.workload.tensors if t.kind == TensorKind.STATE}
    touched: dict[str, list[int]] = {name: [] for name in sizes}
    for i, op in enumerate(task.workload.ops):
        for name in {*op.reads, *op.writes} & sizes.keys():
            touched[name].append(i)
    weights = [replace(w, reserved_bytes=w.size_bytes) for w in task.weights if w.uses]
    weights += [
        Weight(name, sizes[name], sizes[name], tuple(ops)) for name, ops in touched.items() if ops
    ]
    return replace(
        task,
        live=replace(task.live, peak_bytes=0, state_bytes=0),
        weights=tuple(sorted(weights, key=lambda weight: weight.uses[:1])),
        unread_homes={},
        room_bytes={link.source_tier: task.limits_bytes[link.source_tier] for link in task.links},
    )


def _by_occupancy(task: Problem, loose: Problem, enough_s: float, left_s: float) -> float:
    del task
    return occupancy(
        loose,
        loose.arena_limit_bytes,
        enough_s=enough_s,
        time_limit_s=left_s,
        choices=[every_way(loose)],
    )


def _by_intervals(task: Problem, loose: Problem, enough_s: float, left_s: float) -> float:
    del loose, enough_s
    # Weights that come in two hops are not at home where they come from.
    every = sum(tensor.size_bytes for tensor in task.workload.tensors)
    endless = {push.source_tier: every for _, push in task.machine.two_hops()}
    limits_bytes = {**task.limits_bytes, **endless}
    numbered = interval_problem(
        task.workload, task.machine, limits_bytes, reserved_bytes=task.reserved_bytes
    )
    return relaxed_bound_s(numbered, left_s)


_METHODS: tuple[Callable[[Problem, Problem, float, float], float], ...] = (
    _by_occupancy,
    _by_intervals,
)
