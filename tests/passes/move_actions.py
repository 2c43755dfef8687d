"""What can happen next in a search state of the oracle: one method per kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from tests.passes.max_plus import Row, later, shifted
from tests.passes.move_problem import MoveProblem, may_vanish, reruns_at

ABSENT, PRESENT, ARRIVING, LEAVING = range(4)
Status = tuple[int, int, bool]
"""Where a tensor is, the slow tier that it uses (-1: none), whether the copy there is up to date."""
NOTHING: Status = (ABSENT, -1, False)
END = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """A label: a state, the times at which it is reached, and the steps that lead to it."""

    start: int
    turn: int
    held: tuple[Status, ...]
    core: tuple[Row, ...]
    """Rows of the clock, of the links and of the pipes; the last ones never before the clock."""
    flights: dict[int, Row]
    """Row of the arrival of each transfer in flight, by tensor, in the order of tensors."""
    parent: Node | None = None
    steps: tuple[Step, ...] = ()
    """Steps since ``parent``; ``wrapped`` of them stand behind the end of the iteration."""
    wrapped: int = 0


class Actions:
    """The successors of a node; ``events`` is the order of ops, with ``END`` for the iteration's end."""

    def __init__(self, task: MoveProblem, events: list[int]) -> None:
        self.task = task
        self.events = events
        self.roomy = task.roomy
        self.repeats = task.workload.repeats

    def place(self, turn: int) -> int:
        """Return the op before which a step at ``turn`` stands."""
        event = self.events[turn % len(self.events)]
        return self.task.num_ops if event == END else event

    def successors(self, node: Node, home: tuple[Status, ...]) -> Iterator[Node]:
        """Yield the nodes that one action leads to; ``home`` is the state at the start."""
        task, place = self.task, self.place(node.turn)
        free = task.limit_bytes - sum(
            size for size, held in zip(task.size, node.held, strict=True) if held[0] != ABSENT
        )
        reloads = [x for x in range(len(task.size)) if self._may_reload(node, x, home)]
        reruns = {s: self._rerun_bytes(node, s) for s in reruns_at(task, place)}
        event = self.events[node.turn]
        needs = [task.size[x] for x in reloads] + [need for need in reruns.values() if need]
        if event != END:
            needs.append(self._compute_bytes(event))
        for x in range(len(task.size)):
            for tier in self._offload_tiers(node, x):
                yield from self._offload(node, x, tier)
            if max(needs, default=0) > free and self._may_release(node, x):
                yield from self._release(node, x)
        for x in reloads:
            if task.size[x] <= free:
                yield from self._reload(node, x)
        for source, need in reruns.items():
            if 0 < need <= free:
                yield from self._run(node, source, again=True)
        if event == END:
            yield from self._end(node, home)
        elif self._compute_bytes(event) <= free:
            yield from self._run(node, event, again=False)

    def _compute_bytes(self, op: int) -> int:
        size = self.task.size
        space = self.task.workload.ops[op].workspace_bytes
        return sum(size[x] for x in self.task.born[op]) + space

    def _rerun_bytes(self, node: Node, source: int) -> int:
        """Return what a rerun allocates, 0 where it brings nothing back."""
        task, wanted = self.task, self.task.wanted[self.place(node.turn)]
        gone = [x for x in task.writes[source] if node.held[x][0] == ABSENT]
        if not wanted.intersection(gone):
            return 0
        return sum(task.size[x] for x in gone) + task.workload.ops[source].workspace_bytes

    def _may_reload(self, node: Node, x: int, home: tuple[Status, ...]) -> bool:
        loc, tier, fresh = node.held[x]
        if loc != ABSENT or not fresh or self.task.into[tier] < 0:
            return False
        if not self.task.persistent[x]:
            return True
        ahead = self.events if self.repeats else self.events[node.turn :]
        used = any(event != END and x in self.task.touched[event] for event in ahead)
        return used or (not self.repeats and home[x][0] == PRESENT)

    def _may_release(self, node: Node, x: int) -> bool:
        loc, _, fresh = node.held[x]
        if loc == LEAVING or (loc == PRESENT and fresh):
            return True
        if loc != PRESENT or self.task.persistent[x]:
            return False
        return may_vanish(self.task, self.place(node.turn), x)

    def _offload_tiers(self, node: Node, x: int) -> list[int]:
        task = self.task
        loc, tier, fresh = node.held[x]
        if loc != PRESENT or fresh:
            return []
        if task.persistent[x]:
            settled = self.repeats and not task.dirty[x]
            if settled or (tier < 0 and not self.roomy):
                return []
        tiers = [tier] if tier >= 0 else list(range(len(task.slow)))
        return [t for t in tiers if self._link_back(t) and (tier == t or self._room(node, t, x))]

    def _link_back(self, tier: int) -> bool:
        return self.task.out_of[tier] >= 0 and self.task.into[tier] >= 0

    def _room(self, node: Node, tier: int, x: int) -> bool:
        if self.roomy:
            return True
        sizes = zip(self.task.size, node.held, strict=True)
        taken = sum(size for size, held in sizes if held[1] == tier)
        return taken + self.task.size[x] <= self.task.room[tier]

    def _offload(self, node: Node, x: int, tier: int) -> Iterator[Node]:
        link = self.task.out_of[tier]
        step = Offload(
            op=self.place(node.turn),
            tensor=self.task.names[x],
            link=self.task.links[link].name,
            size_bytes=self.task.size[x],
        )
        yield from self._transfer(node, x, link, (LEAVING, tier, False), step)

    def _reload(self, node: Node, x: int) -> Iterator[Node]:
        tier = node.held[x][1]
        link = self.task.into[tier]
        step = Reload(
            op=self.place(node.turn),
            tensor=self.task.names[x],
            link=self.task.links[link].name,
            size_bytes=self.task.size[x],
        )
        yield from self._transfer(node, x, link, (ARRIVING, tier, True), step)

    def _transfer(
        self, node: Node, x: int, number: int, status: Status, step: Step
    ) -> Iterator[Node]:
        """Queue a transfer: it starts when the clock, its link and all its pipes allow it."""
        task, core = self.task, list(node.core)
        link, pipes = task.links[number], task.link_pipes[number]
        row, size = 1 + number, task.size[x]
        begin = later(core[0], core[row])
        for pipe in pipes:
            begin = later(begin, core[1 + len(task.links) + pipe])
        core[row] = shifted(begin, link.transfer_time_s(size))
        for pipe in pipes:
            passed_s = size * task.pipe_shares[number] / task.pipes[pipe]
            core[1 + len(task.links) + pipe] = shifted(begin, passed_s)
        flights = {**node.flights, x: core[row]}
        held = _with(node.held, x, status)
        yield from self._settled(node, node.turn, held, core, flights, [step])

    def _release(self, node: Node, x: int) -> Iterator[Node]:
        place, name = self.place(node.turn), self.task.names[x]
        loc, tier, fresh = node.held[x]
        core, flights, steps = list(node.core), dict(node.flights), list[Step]()
        if loc == LEAVING:
            core[0] = later(core[0], flights.pop(x))
            steps.append(Wait(op=place, tensor=name))
            fresh = True
        steps.append(Release(op=place, tensor=name))
        gone = self.roomy and not fresh
        status = NOTHING if gone else (ABSENT, tier, fresh)
        held = _with(node.held, x, status)
        yield from self._settled(node, node.turn, held, core, flights, steps)

    def _run(self, node: Node, op: int, *, again: bool) -> Iterator[Node]:
        task, place = self.task, self.place(node.turn)
        held, core, flights = list(node.held), list(node.core), dict(node.flights)
        steps: list[Step] = []
        for x in task.reads[op] if again else task.touched[op]:
            loc, tier, fresh = held[x]
            if loc == ABSENT and (again or x not in task.born[op]):
                return
            if loc == ARRIVING:
                core[0] = later(core[0], flights.pop(x))
                held[x] = (PRESENT, tier, fresh)
                steps.append(Wait(op=place, tensor=task.names[x]))
        for x in task.writes[op]:
            if x in flights:
                return
            held[x] = (PRESENT, -1 if self.roomy else held[x][1], False)
        steps.append(Recompute(op=place, source=op) if again else Compute(op=op))
        core[0] = shifted(core[0], task.time_s[op])
        turn = node.turn + (not again)
        yield from self._settled(node, turn, tuple(held), core, flights, steps)

    def _end(self, node: Node, home: tuple[Status, ...]) -> Iterator[Node]:
        task = self.task
        held, core, flights = list(node.held), list(node.core), dict(node.flights)
        steps: list[Step] = []
        for x, row in node.flights.items():
            if self.repeats and task.persistent[x]:
                continue
            if not task.persistent[x] and not (task.is_output[x] and held[x][0] == ARRIVING):
                return
            core[0] = later(core[0], row)
            del flights[x]
            held[x] = (PRESENT, held[x][1], True)
            steps.append(Wait(op=task.num_ops, tensor=task.names[x]))
        for x in range(len(held)):
            if not task.persistent[x]:
                if x in task.wanted[task.num_ops] and task.is_output[x] and held[x][0] == ABSENT:
                    return
                held[x] = NOTHING
            elif not self.repeats:
                begun = home[x]
                kept = held[x][0] == PRESENT if begun[0] == PRESENT else held[x][1:] == begun[1:]
                if not kept:
                    return
        after = node.turn + 1
        yield from self._settled(node, after, tuple(held), core, flights, steps, wraps=True)

    def _settled(
        self,
        node: Node,
        turn: int,
        held: tuple[Status, ...],
        core: list[Row],
        flights: dict[int, Row],
        steps: list[Step],
        *,
        wraps: bool = False,
    ) -> Iterator[Node]:
        """Yield the node in its simplest form: arrived is arrived, and what nothing reads is gone."""
        task, place, states = self.task, self.place(turn), list(held)
        num_steps = len(steps)
        for x, status in enumerate(states):
            if status == NOTHING or task.persistent[x] or x in task.wanted[place]:
                continue
            if x in flights:
                return
            states[x] = NOTHING
        flights = {x: later(flights[x], core[0]) for x in sorted(flights)}
        for x in [x for x, row in flights.items() if row == core[0]]:
            del flights[x]
            states[x] = (PRESENT, states[x][1], True)
            steps.append(Wait(op=place, tensor=task.names[x]))
        yield Node(
            start=node.start,
            turn=turn,
            held=tuple(states),
            core=tuple(later(row, core[0]) for row in core),
            flights=flights,
            parent=node,
            steps=tuple(steps),
            wrapped=len(steps) - num_steps if wraps else 0,
        )


def _with(held: tuple[Status, ...], x: int, status: Status) -> tuple[Status, ...]:
    return (*held[:x], status, *held[x + 1 :])
