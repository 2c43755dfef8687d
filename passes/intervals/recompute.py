"""Interval recompute: which intervals a recomputation can bridge, and what has to be run again for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.passes.model.interval_layout import NEVER, RunLayout
from gascompile.passes.model.interval_problem import IntervalProblem

_LONGEST = 12
"""Ops that are run again for one tensor."""


@dataclass(frozen=True, slots=True)
class IntervalRecompute:
    """How a tensor is there again at the end of an interval: ops are run again, nothing is moved."""

    dropped: frozenset[tuple[int, int]]
    """The tensor and, where the inputs of its op are dead by then, those it takes to make them again."""
    ops: frozenset[int]
    """What runs again."""


def interval_recompute(plan: RunLayout) -> Mapping[int, IntervalRecompute]:
    """Return per interval of a layout without recomputations how it can be bridged by one."""
    task = plan.task
    last_use = {
        tensor: run for tensor, run in plan.last_access.items() if not task.persistent[tensor]
    }
    recomputes: dict[int, IntervalRecompute] = {}
    for j, interval in enumerate(plan.intervals):
        tensor = interval.tensor
        if tensor not in task.repeatable or interval.end >= plan.num_runs:
            continue
        op = plan.runs[interval.end].op
        if tensor not in task.reads[op]:
            continue
        chain = _chain(task, last_use, tensor, op)
        if chain is not None:
            recomputes[j] = IntervalRecompute(
                dropped=frozenset({(tensor, op), *((other, NEVER) for other in chain[1:])}),
                ops=frozenset(task.repeatable[other] for other in chain),
            )
    return recomputes


def recompute_ops(plan: RunLayout) -> Mapping[int, int]:
    """Return per interval the op that makes its tensor anew, wherever any plan whatsoever may run it again.

    More than ``interval_recompute`` would do counts here: inputs that are overwritten meanwhile may be made
    anew themselves.
    """
    task = plan.task
    op_of: dict[int, int] = {}
    for j, interval in enumerate(plan.intervals if task.recompute else ()):
        op = interval.version[1]
        if task.persistent[interval.tensor] or op < 0:
            continue
        spec = task.workload.ops[op]
        lasting = any(
            task.persistent[tensor] or task.stays_to_end[tensor] for tensor in task.writes[op]
        )
        gone = any(
            task.persistent[needed] and op < writer <= interval.start
            for needed in task.reads[op]
            for writer in task.writers.get(needed, ())
        )
        if not lasting and not gone and not set(spec.reads) & set(spec.writes):
            op_of[j] = op
    return op_of


def may_run_again(task: IntervalProblem, source: int, place: int) -> bool:
    """Whether op ``source`` may run again before op ``place``: nothing of what it reads has changed by then."""
    spec = task.workload.ops[source]
    made = task.writes[source]
    # An op that writes one of the caller's inputs changes what is not the plan's.
    outside = len(made) < len(set(spec.writes))
    lasting = any(task.persistent[x] or task.stays_to_end[x] for x in made)
    if not task.recompute or outside or lasting or not made or set(spec.reads) & set(spec.writes):
        return False
    names = {*spec.reads, *spec.writes}
    return all(names.isdisjoint(op.writes) for op in task.workload.ops[source + 1 : place])


def _chain(
    task: IntervalProblem, last_use: Mapping[int, int], tensor: int, op: int
) -> list[int] | None:
    """Return what is made again for ``tensor`` before ``op``, itself first; ``None`` if that cannot be."""
    chain, pending = [tensor], [tensor]
    while pending:
        source = task.repeatable[pending.pop()]
        for needed in task.reads[source]:
            # The values have to be those of the first time.
            if any(source < writer < op for writer in task.writers.get(needed, ())):
                return None
            dead = not task.persistent[needed] and last_use[needed] < op
            if dead and needed in task.repeatable and needed not in chain:
                if len(chain) == _LONGEST:
                    return None
                chain.append(needed)
                pending.append(needed)
    return chain
