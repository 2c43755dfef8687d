"""The oracle's view of a planning problem: tensors by number, what each op needs, when a rerun is valid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gascompile.core.machine import Link, Machine
from gascompile.core.workload import TensorKind, Workload

PERSISTENT = (TensorKind.WEIGHT, TensorKind.STATE)


@dataclass(slots=True, kw_only=True)
class MoveProblem:
    """Tables over tensors ``x`` (``INPUT`` tensors have none), ops ``i`` and slow tiers ``t``."""

    workload: Workload
    machine: Machine
    limit_bytes: int
    names: list[str]
    size: list[int]
    persistent: list[bool]
    dirty: list[bool]
    is_output: list[bool]
    touched: list[list[int]] = field(default_factory=list)
    """Per op what it reads or writes."""
    born: list[list[int]] = field(default_factory=list)
    """Per op what it writes first of all."""
    writes: list[list[int]] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    reads: list[list[int]] = field(default_factory=list)
    rerun_until: list[int] = field(default_factory=list)
    """Per op the last place ``p`` (before op ``p``) at which it may run again; 0 where it never may."""
    wanted: list[frozenset[int]] = field(default_factory=list)
    """Per place the non-persistent tensors that a later step can still read."""
    slow: list[str] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    into: list[int] = field(default_factory=list)
    """Per slow tier its link to the compute tier, -1 for none; ``out_of`` is the other way."""
    out_of: list[int] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    pipes: list[float] = field(default_factory=list)
    link_pipes: list[list[int]] = field(default_factory=list)
    pipe_shares: list[float] = field(default_factory=list)
    """Per link what a byte takes of its pipes."""

    @property
    def num_ops(self) -> int:
        return len(self.workload.ops)

    @property
    def roomy(self) -> bool:
        """Whether every slow tier holds everything at once, so that its room need not be counted."""
        return all(room >= sum(self.size) for room in self.room)


def move_problem(
    workload: Workload, machine: Machine, limits_bytes: Mapping[str, int]
) -> MoveProblem:
    """Return the tables of a problem; ``ValueError`` for what the oracle does not model."""
    center = machine.compute_tier
    specs = [t for t in workload.tensors if t.kind is not TensorKind.INPUT]
    number = {t.name: x for x, t in enumerate(specs)}
    written = {name for op in workload.ops for name in op.writes}
    task = MoveProblem(
        workload=workload,
        machine=machine,
        limit_bytes=limits_bytes[center],
        names=[t.name for t in specs],
        size=[t.size_bytes for t in specs],
        persistent=[t.kind in PERSISTENT for t in specs],
        dirty=[t.name in written for t in specs],
        is_output=[t.kind is TensorKind.OUTPUT for t in specs],
    )
    for op in workload.ops:
        if set(op.time_s) & set(machine.tiers) != {center}:
            raise ValueError(f"{op.name} may run at several sites")
        task.reads.append([number[n] for n in dict.fromkeys(op.reads) if n in number])
        task.writes.append([number[n] for n in dict.fromkeys(op.writes) if n in number])
        task.touched.append(list(dict.fromkeys(task.reads[-1] + task.writes[-1])))
        task.time_s.append(op.time_s[center])
        seen = {x for done in task.touched[:-1] for x in done}
        fresh = [x for x in task.touched[-1] if not task.persistent[x] and x not in seen]
        if any(x in task.reads[-1] for x in fresh):
            raise ValueError(f"{op.name} reads what no op has written")
        task.born.append(fresh)
    _add_reruns(task)
    _add_machine(task, limits_bytes)
    return task


def _add_reruns(task: MoveProblem) -> None:
    for i, (reads, writes) in enumerate(zip(task.reads, task.writes, strict=True)):
        lasting = any(task.persistent[x] or task.is_output[x] for x in writes)
        to_input = len(writes) < len(set(task.workload.ops[i].writes))
        if lasting or to_input or not writes or set(reads) & set(writes):
            task.rerun_until.append(0)
            continue
        changed = [j for j in range(i + 1, task.num_ops) if set(task.writes[j]) & {*reads, *writes}]
        task.rerun_until.append(min(changed, default=task.num_ops))
    for place in range(task.num_ops + 1):
        before = {x for done in task.touched[:place] for x in done if not task.persistent[x]}
        later = {x for ahead in task.touched[place:] for x in ahead}
        wanted = {x for x in before if x in later or task.is_output[x]}
        while True:
            more = {
                x
                for source in reruns_at(task, place)
                if wanted & set(task.writes[source])
                for x in task.reads[source]
                if not task.persistent[x]
            }
            if more <= wanted:
                break
            wanted |= more
        task.wanted.append(frozenset(wanted))


def reruns_at(task: MoveProblem, place: int) -> list[int]:
    """Return the ops that may run again before op ``place``."""
    return [i for i in range(place) if task.rerun_until[i] >= place]


def may_vanish(task: MoveProblem, place: int, x: int) -> bool:
    """Whether a tensor that does not persist may be gone before op ``place``, with no copy anywhere."""
    needed = task.is_output[x] or any(x in touched for touched in task.touched[place:])
    return not needed or any(x in task.writes[source] for source in reruns_at(task, place))


def _add_machine(task: MoveProblem, limits_bytes: Mapping[str, int]) -> None:
    machine, center = task.machine, task.machine.compute_tier
    task.slow = [tier for tier in machine.tiers if tier != center]
    task.room = [limits_bytes[tier] for tier in task.slow]
    task.pipes = [pipe.bandwidth_bytes_per_s for pipe in machine.pipes]
    order = [pipe.name for pipe in machine.pipes]
    ends = {(link.source_tier, link.target_tier): link for link in machine.links}
    for tier in task.slow:
        for numbers, pair in ((task.into, (tier, center)), (task.out_of, (center, tier))):
            if pair not in ends:
                numbers.append(-1)
                continue
            numbers.append(len(task.links))
            task.links.append(ends[pair])
            task.link_pipes.append([order.index(name) for name in ends[pair].shared])
            task.pipe_shares.append(ends[pair].pipe_bytes_per_byte or 1.0)
