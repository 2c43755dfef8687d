"""The fastest plan of the move model, by exhaustive search, for problems of a few tensors and ops.

What is searched: all lists of compute, wait, release, offload, reload and recompute steps over tensors
on the heap. A search state is the place in the iteration and one ``Status`` per tensor; a label adds
*when*: for the clock, each link, each pipe and each transfer in flight a row of the (max, +) matrix that
maps the times at the start of an iteration to the times here. Rows only grow with their inputs, so of two
labels with the same state the one that is nowhere later makes the other useless. Labels are taken in the
order of a lower bound on the time of an iteration: the first complete one is the optimum. Where the
workload repeats, an iteration is a cycle: it is cut behind the op with the fewest possible states, every
one of them is a start, and the time is the largest cycle mean of the matrix.

Left out because it never helps:
- waiting for a reload before its first use, or for an offload before its release (waits only delay);
- releasing while everything that could be allocated next still fits (a release can stand later);
- reloading what is released unused, or offloading what is written before it is released;
- keeping what no later op or rerun can read.

Restricted: ops run on the compute tier, and nothing lies in an arena. A tensor uses one slow tier in an
iteration where a slow tier is too small to hold everything at once; else a dirty one may change it. Clean
persistent tensors have one home, to which there is a link. An op that writes an output is not rerun; a
rerun makes slow copies of what it writes stale. A plan that does not repeat starts and ends with every
persistent tensor at its home; what is at home on the compute tier is there from the start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import le

from gascompile.core.machine import Machine
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import Workload
from tests.passes.max_plus import Row, largest_cycle_mean, later, unit
from tests.passes.move_actions import (
    ABSENT,
    ARRIVING,
    END,
    LEAVING,
    Actions,
    Node,
    Status,
)
from tests.passes.move_problem import MoveProblem, move_problem
from tests.passes.move_starts import options_at_home, options_behind

State = tuple[Status, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The fastest plan there is; ``seconds`` is infinite where no plan keeps the limits."""

    seconds: float
    """Of one iteration, in the steady state where the workload repeats."""
    steps: tuple[Step, ...] = ()
    homes: Mapping[str, str]
    """Tier at which each persistent tensor is between its uses."""
    num_labels: int


def move_optimum(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    *,
    max_labels: int = 60_000,
) -> Optimum | None:
    """Return the optimum, or ``None`` where the search would take more than ``max_labels`` labels."""
    task = move_problem(workload, machine, limits_bytes)
    search = _Search(task, timed=True)
    return search.run(max_labels)


def least_limit(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    *,
    max_labels: int = 60_000,
) -> int | None:
    """Return the smallest feasible limit of the compute tier; ``None`` where it would take too long.

    More memory never makes a plan infeasible, so the limit is bisected. Returns -1 where none is enough.
    """
    low, high = 0, sum(t.size_bytes for t in workload.tensors) + 1
    high += max(op.workspace_bytes for op in workload.ops)
    if not _feasible(workload, machine, limits_bytes, high, max_labels):
        return -1
    while low < high:
        middle = (low + high) // 2
        found = _feasible(workload, machine, limits_bytes, middle, max_labels)
        if found is None:
            return None
        low, high = (low, middle) if found else (middle + 1, high)
    return low


def _feasible(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    size_bytes: int,
    max_labels: int,
) -> bool | None:
    limits = {**limits_bytes, machine.compute_tier: size_bytes}
    found = _Search(move_problem(workload, machine, limits), timed=False).run(max_labels)
    return None if found is None else found.seconds < math.inf


class _Search:
    """Best first over labels; with ``timed=False`` all times are dropped and only feasibility is left."""

    def __init__(self, task: MoveProblem, *, timed: bool) -> None:
        self.task = task
        self.timed = timed
        self.repeats = task.workload.repeats
        ops = list(range(task.num_ops))
        if self.repeats:
            cut = min(ops, key=lambda op: math.prod(map(len, options_behind(task, op))))
            self.events = [*ops[cut + 1 :], END, *ops[: cut + 1]]
            self.options = options_behind(task, cut)
        else:
            self.events = [*ops, END]
            self.options = [options_at_home(task, x) for x in range(len(task.size))]
        self.actions = Actions(task, self.events)
        seconds = [0.0 if event == END else task.time_s[event] for event in self.events]
        self.left_s = [sum(seconds[turn:]) for turn in range(len(seconds) + 1)]
        self.homes: list[State] = []

    def run(self, max_labels: int) -> Optimum | None:
        """Return the best label that completes an iteration."""
        if math.prod(map(len, self.options)) > max_labels:
            return None
        queue: list[tuple[float, int, int, Node]] = []
        known: dict[tuple[int, int, State], list[tuple[Row, ...]]] = {}
        num_labels = 0
        for state in self._starts():
            self.homes.append(state)
            node = self._start(len(self.homes) - 1, state)
            queue.append((self._bound(node), 0, node.start, node))
        heapq.heapify(queue)
        while queue:
            bound, _, _, node = heapq.heappop(queue)
            if node.turn == len(self.events):
                return self._optimum(bound, node, num_labels)
            key = (node.start, node.turn, node.held)
            if node.parent and (*node.core, *node.flights.values()) not in known[key]:
                continue
            for child in self.actions.successors(node, self.homes[node.start]):
                if not self._closes(child) or not _is_new(child, known):
                    continue
                num_labels += 1
                entry = (self._bound(child), -child.turn, -num_labels, child)
                heapq.heappush(queue, entry)
            if num_labels > max_labels:
                return None
        return Optimum(seconds=math.inf, homes={}, num_labels=num_labels)

    def _starts(self) -> Iterator[State]:
        """Yield every state behind the cut that memory and the slow tiers' room allow."""
        task = self.task
        limit = task.limit_bytes
        if self.repeats:
            cut = self.events[-1]
            limit -= task.workload.ops[cut].workspace_bytes
            kept = task.wanted[cut + 1]
            limit -= sum(
                task.size[x] for x in task.touched[cut] if not task.persistent[x] and x not in kept
            )

        def extend(state: State, free: int, rooms: tuple[int, ...]) -> Iterator[State]:
            x = len(state)
            if x == len(task.size):
                yield state
                return
            for status in self.options[x]:
                left = free - (task.size[x] if status[0] != ABSENT else 0)
                room = list(rooms)
                if status[1] >= 0:
                    room[status[1]] -= task.size[x]
                if left >= 0 and min(room, default=0) >= 0:
                    yield from extend((*state, status), left, tuple(room))

        yield from extend((), limit, tuple(task.room))

    def _start(self, number: int, state: State) -> Node:
        task = self.task
        flying = [x for x, status in enumerate(state) if status[0] in {ARRIVING, LEAVING}]
        num_core = 1 + len(task.links) + len(task.pipes)
        columns = num_core + len(flying) if self.repeats else 1
        if not self.timed:
            rows: list[Row] = [()] * (num_core + len(flying))
        elif self.repeats:
            rows = [unit(c, columns) for c in range(columns)]
        else:
            rows = [(0.0,)] * num_core
        core = tuple(later(row, rows[0]) for row in rows[:num_core])
        flights = dict(zip(flying, rows[num_core:], strict=True))
        return Node(start=number, turn=0, held=state, core=core, flights=flights)

    def _closes(self, node: Node) -> bool:
        """Whether a label goes on, or has completed an iteration where it began."""
        if node.turn < len(self.events) or not self.repeats:
            return True
        return node.held == self.homes[node.start]

    def _bound(self, node: Node) -> float:
        """Return a time that no completion of the label falls below; the time itself of a complete one."""
        if not self.timed:
            return 0.0
        left_s = self.left_s[node.turn]
        core = node.core
        if node.turn == len(self.events):
            return (
                largest_cycle_mean((*core, *node.flights.values())) if self.repeats else core[0][0]
            )
        needed = self._needed_s(node)
        bound = core[0][0] + left_s
        for link, need in enumerate(needed):
            row = core[1 + link]
            if self.repeats:
                bound = max(bound, row[1 + link] + need)
                bound = max(bound, (core[0][1 + link] + left_s + row[0] + need) / 2)
            elif need:
                bound = max(bound, row[0] + need)
        return bound

    def _needed_s(self, node: Node) -> list[float]:
        """Return seconds of each link that the moves still to come take at least."""
        task, home = self.task, self.homes[node.start]
        needed = [0.0] * len(task.links)
        ahead = [event for event in self.events[node.turn :] if event != END]
        for x, (loc, tier, _) in enumerate(node.held):
            if not task.persistent[x] or loc != ABSENT:
                continue
            back = home[x][0] != ABSENT or any(x in task.touched[op] for op in ahead)
            if back and task.into[tier] >= 0:
                link = task.links[task.into[tier]]
                needed[task.into[tier]] += link.transfer_time_s(task.size[x])
        if len(task.slow) == 1 and task.out_of[0] >= 0:
            for x, (loc, _, fresh) in enumerate(node.held):
                stale = not fresh or any(x in task.writes[op] for op in ahead)
                if task.persistent[x] and home[x][2] and stale and loc != LEAVING:
                    link = task.links[task.out_of[0]]
                    needed[task.out_of[0]] += link.transfer_time_s(task.size[x])
        return needed

    def _optimum(self, seconds: float, node: Node, num_labels: int) -> Optimum:
        task, home = self.task, self.homes[node.start]
        before, behind = list[Step](), list[Step]()
        at: Node | None = node
        while at is not None and at.parent is not None:
            crossing = len(at.steps) - at.wrapped
            if at.parent.turn > self.events.index(END):
                behind = [*at.steps, *behind]
            else:
                before = [*at.steps[:crossing], *before]
                behind = [*at.steps[crossing:], *behind]
            at = at.parent
        steps = _needed_steps(task, [*behind, *before] if self.repeats else [*before, *behind])
        slow = {step.tensor: step.link for step in steps if isinstance(step, Reload | Offload)}
        homes = {}
        for x, name in enumerate(task.names):
            if task.persistent[x]:
                tier = home[x][1] if self.repeats or home[x][0] == ABSENT else -1
                homes[name] = task.slow[tier] if tier >= 0 else task.machine.compute_tier
                if tier < 0 and name in slow and self.repeats:
                    ends = task.machine.link(slow[name])
                    away = {ends.source_tier, ends.target_tier} - {task.machine.compute_tier}
                    homes[name] = away.pop()
        return Optimum(seconds=seconds, steps=tuple(steps), homes=homes, num_labels=num_labels)


def _is_new(node: Node, known: dict[tuple[int, int, State], list[tuple[Row, ...]]]) -> bool:
    """Keep the label unless one of the same state is nowhere later; drop those that it beats."""
    rows = (*node.core, *node.flights.values())
    kept = known.setdefault((node.start, node.turn, node.held), [])
    if any(_nowhere_later(other, rows) for other in kept):
        return False
    kept[:] = [other for other in kept if not _nowhere_later(rows, other)]
    kept.append(rows)
    return True


def _nowhere_later(first: tuple[Row, ...], second: tuple[Row, ...]) -> bool:
    return all(all(map(le, a, b)) for a, b in zip(first, second, strict=True))


def _needed_steps(task: MoveProblem, steps: list[Step]) -> list[Step]:
    """Return the steps without moves of what nothing computes with any more."""
    ops, ahead = task.workload.ops, dict[str, int]()
    for index, step in enumerate(steps):
        if isinstance(step, Compute | Recompute):
            op = ops[step.op if isinstance(step, Compute) else step.source]
            ahead |= dict.fromkeys((*op.reads, *op.writes), index)
    for x, name in enumerate(task.names):
        if task.persistent[x] or task.is_output[x]:
            ahead[name] = len(steps)
    useless: set[int] = set()
    released: set[str] = set()
    for index in reversed(range(len(steps))):
        step = steps[index]
        if isinstance(step, Compute | Recompute):
            continue
        kept = task.persistent[task.names.index(step.tensor)] or step.tensor in released
        if isinstance(step, Release):
            if index > ahead[step.tensor]:
                useless.add(index)
            else:
                released.add(step.tensor)
        elif isinstance(step, Offload) and not kept:
            after = range(index, len(steps))
            wait = next(i for i in after if _waits(steps[i], step.tensor))
            useless |= {index, wait}
    return [step for index, step in enumerate(steps) if index not in useless]


def _waits(step: Step, name: str) -> bool:
    return isinstance(step, Wait) and step.tensor == name
