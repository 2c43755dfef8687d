"""The simulator: what a list of steps takes on a machine, without running it.

One thread walks the steps, one per site where ops run on several, see ``op_sites``. ``Compute`` and
``Recompute`` take their op's seconds; ``Fetch``, ``Prefetch``, ``Offload`` and ``Reload`` put a transfer on its
link and cost nothing; ``Wait`` blocks until the transfer has arrived. What is pushed on from a place in between
takes its turn on the link when it is issued, and begins no earlier than it has come there. A link serves its
transfers one after the other in the order of their steps; a pipe that links share admits a transfer when the
bytes of the one before would have passed at the pipe's own bandwidth. While an op runs, links lose the share of
their speed that the machine's ``interference`` says, and ops lose the processors' time that it takes to move bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from gascompile.core.crossing import crossing
from gascompile.core.machine import Machine
from gascompile.core.op_sites import OpSites, lasting_of, op_sites
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall, Timeline
from gascompile.core.steps import (
    Compute,
    Evict,
    Fetch,
    Offload,
    Prefetch,
    Recompute,
    Release,
    Reload,
    Step,
    Wait,
    fetched_to,
    is_push,
)
from gascompile.core.workload import OpSpec, TensorKind
from gascompile.cost_models.formulas.contention import contended, giving_s
from gascompile.cost_models.formulas.gathers import gather_link_bytes
from gascompile.cost_models.formulas.interference import lost_share, with_moving
from gascompile.cost_models.simulate.clock import Pipes, pipe_times
from gascompile.cost_models.simulate.events import (
    ARRIVE,
    COMPUTE,
    CROSS,
    ELSEWHERE,
    FOLLOW,
    MEET,
    PREFETCH,
    PUSH,
    WAIT,
    Event,
    EventProgram,
    running_sums,
    steady_iteration,
    steady_seconds,
)

_TRANSFERS = (Fetch, Prefetch, Offload, Reload)
_Move = Fetch | Evict | Prefetch | Wait | Release | Offload | Reload
_Key = tuple[str, int | str | None]
"""A tensor and where: an address of the arena, ``None`` for the heap, or the name of a place in between."""


def replay(
    steps: Sequence[Step],
    ops: Sequence[OpSpec],
    op_times_s: Sequence[float],
    machine: Machine,
    *,
    repeats: bool,
    resident_bytes: Mapping[str, int] | None = None,
    peak_bytes: Mapping[str, int] | None = None,
    sites: Sequence[str] | None = None,
    lasting: Collection[str] = (),
) -> Timeline:
    """Return the timeline of ``steps``; pure.

    Args:
        steps: one iteration in program order.
        ops: what each op reads decides when a resident is first needed.
        op_times_s: contention-free seconds of each op at its site.
        machine: its links and pipes are simulated.
        repeats: iterations follow each other, and the steady one is reported.
        resident_bytes: weights that are read once before the first iteration, with their sizes.
        peak_bytes: handed through to the timeline.
        sites: where each op runs; by default all on the tier that computes.
        lasting: tensors that outlive iterations, which ops elsewhere may change.

    Raises:
        KeyError: a step names a link that ``machine`` does not have.
        ValueError: a wait has no prefetch of that tensor to that address.
    """
    op_times_s = contended(ops, op_times_s, sites, machine) if sites is not None else op_times_s
    quick_s = contention_free(ops, op_times_s, machine)
    where = op_sites(ops, sites, machine, lasting) if sites is not None else None
    events = compile_events(steps, quick_s, machine, repeats=repeats, sites=where)
    seconds, stalls = steady_iteration(events)
    first = _first_iteration(steps, ops, machine, resident_bytes or {}, repeats)
    first_s = steady_seconds(compile_events(first, quick_s, machine, repeats=False, sites=where))
    lost_s = lost_seconds(steps, ops, op_times_s, machine)
    waits = [step for step in steps if isinstance(step, Wait) and step.site is None]
    link_busy_s: dict[str, float] = {}
    for step in steps:
        if isinstance(step, _TRANSFERS):
            busy_s = machine.link(step.link).transfer_time_s(step.size_bytes)
            link_busy_s[step.link] = link_busy_s.get(step.link, 0.0) + busy_s
    moved = link_bytes(steps, ops, machine)
    # Of the tier that computes: the others do not move its bytes.
    ops_s = sum(op_times_s[op] for op in runs(steps) if where is None or not where.clock(op))
    return Timeline(
        seconds=with_moving(
            seconds + lost_s, ops_s=ops_s, moved_bytes=sum(moved.values()), machine=machine
        ),
        first_iteration_s=first_s + lost_s,
        stalls=tuple(
            Stall(op=waits[i].op, tensor=waits[i].tensor, time_s=time_s) for i, time_s in stalls
        ),
        link_busy_s=link_busy_s,
        link_bytes=moved,
        peak_bytes=dict(peak_bytes or {}),
    )


def link_bytes(steps: Sequence[Step], ops: Sequence[OpSpec], machine: Machine) -> dict[str, int]:
    """Return the bytes that an iteration moves per link, rows that ops gather included."""
    moved: dict[str, int] = {}
    for step in steps:
        if isinstance(step, _TRANSFERS):
            moved[step.link] = moved.get(step.link, 0) + step.size_bytes
    for name, size_bytes in gather_link_bytes(ops, machine).items():
        moved[name] = moved.get(name, 0) + size_bytes
    return moved


def contention_free(
    ops: Sequence[OpSpec], op_times_s: Sequence[float], machine: Machine
) -> list[float]:
    """Return the seconds of ops in contention-free time, in which no op slows a link down.

    While an op runs for ``t``, links move what they move in ``(1 - lost share) * t`` otherwise. Counted in
    that time links are never slowed down, and every iteration is shorter by ``lost_seconds``.
    """
    if not machine.interference.points:
        return list(op_times_s)
    return [
        time_s * (1 - lost_share(op, machine)) for op, time_s in zip(ops, op_times_s, strict=True)
    ]


def lost_seconds(
    steps: Sequence[Step], ops: Sequence[OpSpec], op_times_s: Sequence[float], machine: Machine
) -> float:
    """Return by how much an iteration is longer than in contention-free time."""
    if not machine.interference.points:
        return 0.0
    return sum(lost_share(ops[op], machine) * op_times_s[op] for op in runs(steps))


def runs(steps: Sequence[Step]) -> Iterator[int]:
    """Yield the op of each step that runs one."""
    for step in steps:
        if isinstance(step, (Compute, Recompute)):
            yield step.op if isinstance(step, Compute) else step.source


def replay_plan(plan: Plan, machine: Machine | None = None) -> Timeline:
    """Return the timeline of ``plan`` on ``machine``, by default the one it was made for.

    Op times stay those of the plan: on another machine only the links change.
    """
    resident_bytes = {
        name: tensor.size_bytes
        for name, tensor in plan.tensors.items()
        if tensor.kind == TensorKind.WEIGHT and tensor.home == plan.machine.compute_tier
    }
    return replay(
        plan.steps,
        plan.workload.ops,
        [op.time_s for op in plan.ops],
        machine or plan.machine,
        repeats=plan.workload.repeats,
        resident_bytes=resident_bytes,
        peak_bytes=plan.peak_bytes,
        sites=[op.site for op in plan.ops],
        lasting=lasting_of(plan),
    )


def up_front_transfers(steps: Sequence[Step]) -> list[int]:
    """Return the indices of the transfers to issue before the first iteration, by first use.

    They are those that are waited for, in the arena also released, earlier in the list than they start. What comes
    from a place in between follows what comes there.
    """
    newest = {_key(step): i for i, step in enumerate(steps) if isinstance(step, _TRANSFERS)}
    middle = fetched_to(steps)
    touches: list[tuple[_Key, bool]] = []
    for step in steps:
        if isinstance(step, (Compute, Recompute)):
            continue
        if is_push(step, middle):
            touches.append(((step.tensor, middle[step.tensor]), False))
        # On the heap a release ends another stay, whose bytes are there.
        ends = Wait if _key(step)[1] is None else (Wait, Release, Evict)
        touches.append((_key(step), not isinstance(step, ends)))
    order = [newest[key] for key in crossing(touches) if key in newest]
    return sorted(order, key=lambda i: is_push(steps[i], middle))


def _key(step: _Move) -> _Key:
    return step.tensor, step.place if isinstance(step, (Fetch, Evict)) else step.address


def compile_events(
    steps: Sequence[Step],
    op_times_s: Sequence[float],
    machine: Machine,
    *,
    repeats: bool,
    sites: OpSites | None = None,
    ops_apart: bool = False,
) -> EventProgram:
    """Return the events of ``steps``; ops between two moves become one event, but for ``ops_apart``."""
    links = {link.name: i for i, link in enumerate(machine.links)}
    number: dict[int, int] = {}
    link_of: list[int] = []
    pipes_of: list[Pipes] = []
    site_of: list[int] = []
    give_s: list[float] = []
    for i, step in enumerate(steps):
        if isinstance(step, _TRANSFERS):
            number[i] = len(number)
            site_of.append(_partner(step, sites, machine))
            link_of.append(links[step.link])
            pipes_of.append(pipe_times(machine, machine.link(step.link), step.size_bytes))
            give_s.append(giving_s(machine, step.size_bytes))
    sources = _sources(steps, number, repeats=repeats)
    events, step_of = _events(
        steps,
        number,
        op_times_s,
        machine,
        sites,
        site_of,
        sources,
        repeats=repeats,
        ops_apart=ops_apart,
    )
    return EventProgram(
        events=events,
        link_of=link_of,
        pipes_of=pipes_of,
        repeats=repeats,
        num_links=len(machine.links),
        num_pipes=len(machine.pipes),
        num_sites=1 + len(sites.others) if sites is not None else 1,
        site_of=site_of,
        step_of=step_of,
        give_s=give_s,
        source_of=sources,
        start_s=machine.contention.start_s if machine.contention is not None else 0.0,
        wake_s=machine.contention.wake_s if machine.contention is not None else 0.0,
    )


def _partner(
    step: Fetch | Prefetch | Offload | Reload, sites: OpSites | None, machine: Machine
) -> int:
    """Return the clock at the other end of a copy between sites that goes beside its link's others; 0 for others."""
    if sites is None or isinstance(step, (Fetch, Prefetch)) or step.tensor in sites.queued:
        return 0
    return sites.partner(step, machine)


def _events(
    steps: Sequence[Step],
    number: Mapping[int, int],
    op_times_s: Sequence[float],
    machine: Machine,
    sites: OpSites | None,
    site_of: Sequence[int],
    sources: Mapping[int, int],
    *,
    repeats: bool,
    ops_apart: bool,
) -> tuple[list[Event], list[int]]:
    """Return the events and their steps; ``number`` has the number of the transfer that each step starts."""
    sums = running_sums(op_times_s)
    events: list[Event] = []
    step_of: list[int] = []
    newest: dict[_Key, int] = {}
    if repeats:
        # What a wait before it means is the last transfer of the iteration before.
        newest = {
            _key(step): number[i] for i, step in enumerate(steps) if isinstance(step, _TRANSFERS)
        }
    written: dict[str, int] = {}
    begun, reached, away = 0, 0, 0
    for i, step in enumerate(steps):
        step_of.extend([i - 1] * (len(events) - len(step_of)))
        is_here = isinstance(step, Compute) and (sites is None or not sites.clock(step.op))
        if isinstance(step, Compute) and is_here:
            reached = step.op + 1
        if isinstance(step, (Release, Evict)) or (is_here and not ops_apart):
            continue
        if reached > begun:
            events.append((COMPUTE, begun, sums[reached] - sums[begun]))
            begun = reached
        if is_here:
            continue
        if isinstance(step, (Compute, Recompute)):
            op = step.op if isinstance(step, Compute) else step.source
            clock = sites.clock(op) if sites is not None else 0
            if isinstance(step, Compute):
                begun = reached = op + 1
            events.append(
                (ELSEWHERE, clock, op_times_s[op]) if clock else (COMPUTE, op, op_times_s[op])
            )
            if sites is not None and clock:
                written.update(dict.fromkeys(sites.changed.get(op, ()), away))
                away += 1
        elif isinstance(step, Wait):
            key = _key(step)
            if key not in newest:
                raise ValueError(f"the wait for '{step.tensor}' at {step.address} has no transfer")
            events += _arrivals(step, newest[key], sites, site_of)
        else:
            copy = newest[_key(step)] = number[i]
            if step.tensor in written and isinstance(step, Reload):
                events.append((FOLLOW, written[step.tensor], 0.0))
            time_s = machine.link(step.link).transfer_time_s(step.size_bytes)
            kind = PUSH if copy in sources else CROSS if site_of[copy] else PREFETCH
            events.append((kind, copy, time_s))
    if reached > begun:
        events.append((COMPUTE, begun, sums[reached] - sums[begun]))
    step_of.extend([len(steps) - 1] * (len(events) - len(step_of)))
    return events, step_of


def _sources(steps: Sequence[Step], number: Mapping[int, int], *, repeats: bool) -> dict[int, int]:
    """Return per transfer from a place in between the one to there that it follows."""
    middle = fetched_to(steps)
    newest: dict[str, int] = {}
    if repeats:
        newest = {step.tensor: number[i] for i, step in enumerate(steps) if isinstance(step, Fetch)}
    sources: dict[int, int] = {}
    for i, step in enumerate(steps):
        if isinstance(step, Fetch):
            newest[step.tensor] = number[i]
        elif isinstance(step, Prefetch) and is_push(step, middle):
            if step.tensor not in newest:
                raise ValueError(f"the push of '{step.tensor}' over {step.link} has no fetch")
            sources[number[i]] = newest[step.tensor]
    return sources


def _arrivals(
    step: Wait, copy: int, sites: OpSites | None, site_of: Sequence[int]
) -> Iterator[Event]:
    """Yield the events of a wait for a copy."""
    if sites is not None and (step.site is not None or step.tensor in sites.queued):
        # Whatever is queued goes to where ops change what lasts.
        other = step.site or sites.others[0]
        yield MEET, copy, float(1 + sites.others.index(other))
    if step.site is None:
        yield ARRIVE if site_of[copy] else WAIT, copy, 0.0


def _first_iteration(
    steps: Sequence[Step],
    ops: Sequence[OpSpec],
    machine: Machine,
    resident_bytes: Mapping[str, int],
    repeats: bool,
) -> list[Step]:
    """Return the steps of the first iteration: all that is loaded up front, then the body."""
    link = machine.checkpoint_link()
    if link is None:
        resident_bytes = {}
    order: list[tuple[int, Step]] = []
    needed: dict[int, list[Wait]] = {}
    seen: set[str] = set()
    for i, op in enumerate(ops):
        for name in op.reads:
            if link and name in resident_bytes and name not in seen:
                seen.add(name)
                size = resident_bytes[name]
                load = Prefetch(op=0, tensor=name, link=link.name, size_bytes=size, address=-1)
                order.append((i, load))
                needed.setdefault(i, []).append(Wait(op=i, tensor=name, address=-1))
    first_wait = {_key(step): step.op for step in reversed(steps) if isinstance(step, Wait)}
    for i in up_front_transfers(steps) if repeats else ():
        step = steps[i]
        if isinstance(step, _TRANSFERS):
            order.append((first_wait.get(_key(step), 0), step))
    body = [load for _, load in sorted(order, key=lambda item: item[0])]
    for step in steps:
        if isinstance(step, Compute):
            body.extend(needed.get(step.op, ()))
        body.append(step)
    return body
