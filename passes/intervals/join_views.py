"""Join views: ops that only look at what the op beside them holds become a part of it.

A view takes microseconds and no memory. Half of a training step's ops are views, and between one and the op that it
is for there is nothing to move: planned one by one they cost twice the time, for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gascompile.core.steps import Compute, Recompute, Step
from gascompile.core.workload import OpSpec, TensorKind, Workload

_SHORT_S = 1e-5
"""What takes no longer may be a view: less than any transfer. [Empirical] 2 us on one core of a Xeon."""


@dataclass(frozen=True, slots=True)
class JoinedOps:
    """A workload whose views are parts of other ops."""

    workload: Workload
    members: tuple[tuple[int, ...], ...]
    """Per op those of the whole workload that it stands for, in their order."""
    main: tuple[int, ...]
    """Per op the one among them that is no view, or the only one."""
    views_s: tuple[float, ...]
    """Per op what the views take of its time."""

    def apart(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Return the steps of the whole workload: each op by itself, moves before the first of those that are one."""
        first = [*(members[0] for members in self.members), sum(map(len, self.members))]
        made: list[Step] = []
        for step in steps:
            match step:
                case Compute(op=op):
                    made.extend(Compute(op=member) for member in self.members[op])
                case Recompute(op=op, source=source):
                    made.append(Recompute(op=first[op], source=self.main[source]))
                case _:
                    made.append(replace(step, op=first[step.op]))
        return tuple(made)


def join_views(workload: Workload, site: str) -> JoinedOps:
    """Join each view to the op before or behind it that holds all that it looks at.

    Args:
        workload: any.
        site: the tier that computes; nothing is joined where an op has no time there.
    """
    given = frozenset(t.name for t in workload.tensors if t.kind == TensorKind.INPUT)
    if not all(site in op.time_s for op in workload.ops):
        return _joined(workload, site, [[i] for i in range(len(workload.ops))])
    groups: list[list[int]] = []
    held: list[frozenset[str] | None] = []
    """Per group what its op holds; nothing known of a view that stands alone, which may be for the op behind it."""
    for i, op in enumerate(workload.ops):
        seen = given.union(op.reads, op.writes)
        if _is_view(op, site):
            before = held[-1] if held else None
            if before is not None and seen <= before:
                groups[-1].append(i)
            else:
                groups.append([i])
                held.append(None)
            continue
        members = [i]
        while held and held[-1] is None and seen.issuperset(workload.ops[groups[-1][0]].reads):
            held.pop()
            members = groups.pop() + members
        groups.append(members)
        held.append(seen)
    return _joined(workload, site, groups)


def _is_view(op: OpSpec, site: str) -> bool:
    """Whether an op makes nothing, takes nothing, and is over at once."""
    takes = op.writes or op.workspace_bytes or op.splits or op.gathers or op.cuts or op.patches
    return not takes and op.time_s[site] <= _SHORT_S


def _joined(workload: Workload, site: str, groups: Sequence[Sequence[int]]) -> JoinedOps:
    ops: list[OpSpec] = []
    main: list[int] = []
    views_s: list[float] = []
    for members in groups:
        # Views that stand alone are groups of one.
        number = members[0]
        if len(members) > 1:
            number = next(i for i in members if not _is_view(workload.ops[i], site))
        op = workload.ops[number]
        beside_s = sum(workload.ops[i].time_s[site] for i in members if i != number)
        if beside_s:
            op = replace(op, time_s={**op.time_s, site: op.time_s[site] + beside_s})
        ops.append(op)
        main.append(number)
        views_s.append(beside_s)
    return JoinedOps(
        workload=replace(workload, ops=tuple(ops)),
        members=tuple(map(tuple, groups)),
        main=tuple(main),
        views_s=tuple(views_s),
    )
