"""Layout: the runs of a workload, recomputations included, and the intervals between their accesses.

Memory in program order is a sum over tensors: what a run accesses is there, what no interval has sent
away is there too. So a choice of intervals fits if the curve of everything kept, less the intervals
that leave, stays within the limit at each run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from gascompile.passes.model.interval_problem import IntervalProblem

NEVER = -1
"""Stands for the op of a recomputation that nothing asked for by name: the tensor's life was over."""
Key = tuple[int, int, int]
"""``(tensor, op, source)`` of the run that ends an interval; the same in every layout that has it."""


@dataclass(frozen=True, slots=True)
class Run:
    """One execution: of op ``source``, before op ``op`` or as that op itself.

    The last run of a layout, of no op, stands for the end of the list: it needs the outputs.
    """

    op: int
    source: int

    @property
    def again(self) -> bool:
        """Whether the op has run before."""
        return self.op != self.source


@dataclass(frozen=True, slots=True)
class Interval:
    """A tensor between two accesses, or around the end of the iteration."""

    tensor: int
    start: int
    """Run after which the interval begins; -1 where that is none."""
    end: int
    """Run that needs the tensor again; the number of runs where none does."""
    wraps: bool
    """Lies around the end: from ``start`` to the last run and from the first one to ``end``."""
    version: tuple[int, int]
    """Tensor and run whose value the interval carries; -1 for the value from before the iteration."""
    age: int
    """How many intervals carried the same value before."""
    behind: bool = False
    """Of a list that runs once the part behind the last use, at whose end the tensor is back in its place."""
    ahead: bool = False
    """Of a list that runs once the part before the first use, of a tensor that was in its place."""

    @property
    def unused(self) -> bool:
        """Whether no run accesses the tensor."""
        return self.start < 0 and not self.ahead


@dataclass(frozen=True, slots=True)
class RunLayout:
    """Runs in program order and their intervals."""

    task: IntervalProblem
    runs: tuple[Run, ...]
    seconds: npt.NDArray[np.float64]
    clock: npt.NDArray[np.float64]
    """Start of each run if nothing ever waits; one entry more for the end."""
    intervals: tuple[Interval, ...]
    keys: tuple[Key, ...]
    sizes: tuple[int, ...]
    """Bytes of each interval's tensor."""
    kept: npt.NDArray[np.int64]
    """Bytes at each run when nothing ever leaves, workspace included."""
    made: npt.NDArray[np.int64]
    """Of these what is there from the start of the run on and no earlier: new results and workspace."""
    dropped: Mapping[int, Sequence[int]]
    """Tensors that are released for a recomputation, by the boundary where that stands."""
    last_access: Mapping[int, int]
    idle_s: tuple[float, ...]
    """How long each interval lasts if nothing ever waits."""

    @property
    def num_runs(self) -> int:
        """Number of runs."""
        return len(self.runs)

    def spans(self, interval: Interval) -> tuple[tuple[int, int], ...]:
        """Return the half-open ranges of runs during which the tensor of ``interval`` is idle."""
        if not interval.wraps:
            return ((interval.start + 1, interval.end),)
        return ((interval.start + 1, self.num_runs), (0, interval.end))


def layout(
    task: IntervalProblem, recomputed: AbstractSet[tuple[int, int]] = frozenset()
) -> RunLayout:
    """Lay out the runs of ``task``.

    Args:
        recomputed: ``(tensor, op)``: the tensor is dropped before the interval that ends at ``op`` and
            recomputed when it is needed next; with ``NEVER`` for ``op`` after its last regular access.
    """
    num_ops = len(task.reads)
    runs = _runs(task, recomputed) if recomputed else [Run(i, i) for i in range(num_ops)]
    return layout_of(task, [*runs, Run(num_ops, num_ops)])


def layout_of(task: IntervalProblem, runs: Sequence[Run]) -> RunLayout:
    """Lay out ``runs``: each op once in its place, others before some of them, and the end of the list.

    A tensor that a recomputation makes anew is gone from its access before that one on.
    """
    num_ops = len(task.reads)
    accesses = _accesses(task, runs)
    count = len(runs)
    change = np.zeros(count + 1, dtype=np.int64)
    for tensor, uses in enumerate(accesses):
        first, last = 0, count
        if not task.persistent[tensor]:
            if not uses:
                continue
            first = uses[0][0] if uses[0][1] else 0
            last = uses[-1][0] + 1
        change[first] += task.sizes[tensor]
        change[last] -= task.sizes[tensor]
    intervals: list[Interval] = []
    keys: list[Key] = []
    for tensor, uses in enumerate(accesses):
        for interval in _intervals(task, tensor, uses, runs):
            if interval.wraps or interval.end > interval.start + 1:
                intervals.append(interval)
                until = runs[interval.end] if interval.end < count else Run(num_ops, NEVER)
                keys.append((tensor, until.op if interval.start >= 0 else NEVER, until.source))
    seconds = np.array([*(task.op_times_s[run.source] for run in runs[:-1]), 0.0])
    ops = task.workload.ops
    workspace = np.array([*(ops[run.source].workspace_bytes for run in runs[:-1]), 0], np.int64)
    made = workspace.copy()
    for tensor, uses in enumerate(accesses):
        if uses and uses[0][1] and not task.persistent[tensor]:
            made[uses[0][0]] += task.sizes[tensor]
    dropped: dict[int, list[int]] = {}
    for tensor, start, end in _dropped(runs, accesses, task):
        change[start] -= task.sizes[tensor]
        change[end] += task.sizes[tensor]
        made[end] += task.sizes[tensor]
        dropped.setdefault(start, []).append(tensor)
    clock = np.concatenate([[0.0], np.cumsum(seconds)])
    return RunLayout(
        task=task,
        runs=tuple(runs),
        seconds=seconds,
        clock=clock,
        intervals=tuple(intervals),
        keys=tuple(keys),
        sizes=tuple(task.sizes[interval.tensor] for interval in intervals),
        kept=np.cumsum(change)[:count] + workspace,
        made=made,
        dropped=dropped,
        last_access={t: used[-1][0] for t, used in enumerate(accesses) if used},
        idle_s=_idle_s(intervals, clock.tolist()),
    )


def _idle_s(intervals: Sequence[Interval], clock: Sequence[float]) -> tuple[float, ...]:
    around_s = clock[-1]
    return tuple(
        clock[i.end] - clock[i.start + 1] + (around_s if i.wraps else 0.0) for i in intervals
    )


def _dropped(
    runs: Sequence[Run], accesses: list[list[tuple[int, bool]]], task: IntervalProblem
) -> list[tuple[int, int, int]]:
    """Return ``(tensor, start, end)``: it is gone from run ``start`` on until run ``end`` makes it anew."""
    gone: list[tuple[int, int, int]] = []
    if len(runs) == len(task.reads) + 1:
        return gone
    for tensor, uses in enumerate(accesses):
        for (before, _), (run, is_write) in pairwise(uses):
            if is_write and runs[run].again:
                gone.append((tensor, before + 1, run))
    return gone


def _accesses(task: IntervalProblem, runs: Sequence[Run]) -> list[list[tuple[int, bool]]]:
    """Return ``(run, whether it writes)`` per tensor."""
    accesses: list[list[tuple[int, bool]]] = [[] for _ in task.sizes]
    for number, run in enumerate(runs[:-1]):
        for tensor in task.reads[run.source]:
            accesses[tensor].append((number, False))
        for tensor in task.writes[run.source]:
            accesses[tensor].append((number, True))
    for tensor, stays in enumerate(task.stays_to_end):
        if stays and accesses[tensor]:
            accesses[tensor].append((len(runs) - 1, False))
    return accesses


def _intervals(
    task: IntervalProblem, tensor: int, accesses: list[tuple[int, bool]], runs: Sequence[Run]
) -> list[Interval]:
    """Return the intervals of one tensor in the order of the list, the wrapping one last."""
    if task.persistent[tensor]:
        return _persistent_intervals(task, tensor, accesses, len(runs))
    intervals: list[Interval] = []
    version, age = -1, 0
    for (start, is_write), (end, rewritten) in pairwise(accesses):
        if is_write:
            version, age = start, 0
        # A recomputation makes the value anew: what lies before it is no interval.
        if rewritten and runs[end].again:
            continue
        intervals.append(Interval(tensor, start, end, False, (tensor, version), age))
        age += 1
    return intervals


def _persistent_intervals(
    task: IntervalProblem, tensor: int, accesses: list[tuple[int, bool]], count: int
) -> list[Interval]:
    if not accesses:
        return [Interval(tensor, -1, count, False, (tensor, -1), 0)]
    last_write = max((run for run, is_write in accesses if is_write), default=-1)
    start, end = accesses[-1][0], accesses[0][0]
    # Where iterations follow each other, the value around the end is the one of the last write.
    carried = last_write if task.workload.repeats else -1
    after = sum(1 for run, _ in accesses if run >= last_write) if last_write >= 0 else 0
    intervals: list[Interval] = []
    version, age = carried, after if task.workload.repeats else 1
    for (begin, is_write), (until, _) in pairwise(accesses):
        if is_write:
            version, age = begin, 0
        intervals.append(Interval(tensor, begin, until, False, (tensor, version), age))
        age += 1
    wrapping = Interval(tensor, start, end, True, (tensor, last_write), max(0, after - 1))
    if task.workload.repeats:
        return [*intervals, wrapping]
    age = after - 1 if last_write >= 0 else age
    behind = Interval(tensor, start, count - 1, False, (tensor, last_write), age, behind=True)
    # What is never written comes from a copy that is given, for nothing.
    ahead = Interval(tensor, -1, end, False, (tensor, -1), 0, ahead=True)
    return [*intervals, *([ahead] if last_write >= 0 else []), behind, wrapping]


def _runs(task: IntervalProblem, recomputed: AbstractSet[tuple[int, int]]) -> list[Run]:
    """Insert a run of the writer before each op that needs a dropped tensor, and of what that needs."""
    wanted: dict[int, list[int]] = {}
    for tensor, op in recomputed:
        wanted.setdefault(tensor, []).append(op)
    uses: dict[int, list[int]] = {tensor: [] for tensor in task.repeatable}
    for op in range(len(task.reads)):
        for tensor in task.reads[op]:
            if tensor in uses:
                uses[tensor].append(op)
    runs: list[Run] = []
    present_until: dict[int, int] = {}

    def absent(tensor: int, op: int) -> bool:
        """Whether the tensor was dropped before op ``op`` and has not come back since."""
        if tensor not in wanted or task.repeatable[tensor] >= op:
            return False
        following = next((use for use in uses[tensor] if use >= op), NEVER)
        if following not in wanted[tensor]:
            return False
        earlier = max((use for use in uses[tensor] if use < op), default=task.repeatable[tensor])
        return present_until.get(tensor, -1) <= earlier

    def bring(tensor: int, op: int) -> None:
        pending = [tensor]
        while pending:
            newest = pending[-1]
            if not absent(newest, op):
                pending.pop()
                continue
            source = task.repeatable[newest]
            missing = [t for t in task.reads[source] if absent(t, op)]
            if missing:
                pending.extend(missing)
                continue
            runs.append(Run(op, source))
            present_until.update(dict.fromkeys(task.writes[source], op))
            pending.pop()

    for op, reads in enumerate(task.reads):
        for tensor in reads:
            if tensor in wanted:
                bring(tensor, op)
        runs.append(Run(op, op))
    return runs
