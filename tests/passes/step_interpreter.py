"""Execute a plan's steps one by one: values, memory per tier in program order, transfers and the clock.

Nothing is derived in closed form. Values carry their history, so an op that reads something wrong, stale or
not yet arrived is found; the steady time of a repeating plan is what many iterations in a row take.
Every violation raises ``AssertionError`` with the step and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gascompile.core.machine import Link, Machine
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
)
from gascompile.core.workload import TensorKind, Workload
from tests.passes.step_values import PERSISTENT, Values
from tests.passes.step_world import Flight, HalfWay, Place, World, is_from_middle, set_up

MAX_ITERATIONS = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What executing the steps takes."""

    seconds: float
    peak_bytes: dict[str, int]
    link_bytes: dict[str, int]


def simulate(
    workload: Workload,
    machine: Machine,
    steps: Sequence[Step],
    homes: Mapping[str, str],
    *,
    arena_bytes: int = 0,
    residents: Mapping[str, int] | None = None,
    sites: Sequence[str] | None = None,
    limits_bytes: Mapping[str, int] | None = None,
    middle_bytes: Mapping[str, int] | None = None,
) -> Simulated:
    """Execute ``steps`` until nothing new happens.

    Args:
        workload: what the steps compute.
        machine: tiers, links and pipes.
        steps: one iteration.
        homes: tier of each persistent tensor; what is not named is at home on the compute tier.
        arena_bytes: size of the arena, counted as a whole.
        residents: arena addresses of the tensors that stay there.
        sites: tier at which each op runs; by default the compute tier.
        limits_bytes: per tier what the peak must not exceed.
        middle_bytes: sizes of the arenas on other tiers, each counted as a whole.

    Raises:
        AssertionError: the steps break a rule.
    """
    world = World(
        workload,
        machine,
        tuple(steps),
        homes,
        arena_bytes,
        residents or {},
        tuple(sites or [machine.compute_tier] * len(workload.ops)),
        Values(workload),
    )
    world.peak_bytes = dict.fromkeys(machine.tiers, 0)
    world.middle_bytes = dict(middle_bytes or {})
    set_up(world)
    seconds = _steady_seconds(world) if workload.repeats else _one_iteration(world)
    for tier, limit in (limits_bytes or {}).items():
        peak = world.peak_bytes[tier]
        assert peak <= limit, f"{tier}: {peak} bytes in use, {limit} allowed"
    return Simulated(seconds=seconds, peak_bytes=world.peak_bytes, link_bytes=world.link_bytes)


def _steady_seconds(world: World) -> float:
    """Repeat until links and arrivals stand to the clock as they did before."""
    seen: dict[object, tuple[int, float]] = {}
    begun = _shape(world)
    ends: list[float] = []
    fresh: object = None
    for iteration in range(MAX_ITERATIONS):
        _one_iteration(world)
        assert _shape(world) == begun, f"the end differs from the start: {_shape(world)} {begun}"
        was, fresh = fresh, _freshness(world)
        assert iteration == 0 or was == fresh, "what is up to date changes from end to end"
        ends.append(world.now_s)
        late = (
            *world.free_s.items(),
            *((k, f.arrival_s) for k, f in world.flights.items()),
            *((k, m.arrival_s) for k, m in world.middle.items()),
        )
        ahead = tuple((key, round(max(0.0, at - world.now_s), 9)) for key, at in late)
        if ahead in seen and iteration >= 3:
            before, at_s = seen[ahead]
            return (world.now_s - at_s) / (iteration - before)
        seen.setdefault(ahead, (iteration, world.now_s))
    half = len(ends) // 2
    return (ends[-1] - ends[half - 1]) / (len(ends) - half)


def _shape(world: World) -> object:
    middle = sorted((name, m.address) for name, m in world.middle.items())
    return sorted(map(str, world.near)), sorted(map(str, world.flights)), middle


def _freshness(world: World) -> object:
    current = world.values.current
    return sorted(key for key, value in world.far.items() if value == current[key[0]])


def _one_iteration(world: World) -> float:
    """Execute the steps once and check what is there at the end; return how long it took."""
    begun_s = world.now_s
    world.values.begin()
    world.born.clear()
    world.next_op = 0
    world.link_bytes = {link.name: 0 for link in world.machine.links}
    _count(world)
    for index, step in enumerate(world.steps):
        try:
            _execute(world, step)
            _free_dead(world, index)
        except AssertionError as error:
            raise AssertionError(f"step {index}, {step}: {error}") from error
    assert world.next_op == len(world.workload.ops), "not every op has run"
    _check_end(world)
    return world.now_s - begun_s


def _execute(world: World, step: Step) -> None:
    if isinstance(step, Compute):
        assert step.op == world.next_op, f"op {world.next_op} is next"
        _compute(world, step.op)
        world.next_op += 1
        return
    assert step.op == world.next_op, f"stands before op {world.next_op}"
    if isinstance(step, Recompute):
        _recompute(world, step.source)
    elif isinstance(step, Wait):
        place = step.tensor, step.address
        assert place in world.flights, "nothing is in flight"
        flight = world.flights.pop(place)
        world.now_s = max(world.now_s, flight.arrival_s)
        if flight.target_tier != world.center:
            world.far[step.tensor, flight.target_tier] = flight.value
    elif isinstance(step, Release):
        _release(world, step)
    elif isinstance(step, Fetch):
        _fetch(world, step)
    elif isinstance(step, Evict):
        _evict(world, step)
    else:
        _transfer(world, step)


def _release(world: World, step: Release) -> None:
    name, place = step.tensor, (step.tensor, step.address)
    assert place in world.near, "no copy to release"
    assert place not in world.flights, "a transfer is in flight"
    fresh = any(
        copy == name and value == world.values.current[name]
        for (copy, _), value in world.far.items()
    )
    assert fresh or world.kind(name) not in PERSISTENT, "the only up-to-date copy"
    del world.near[place]


def _fetch(world: World, step: Fetch) -> None:
    name, link = step.tensor, world.machine.link(step.link)
    assert world.kind(name) is TensorKind.WEIGHT, "only weights wait half the way"
    assert (link.source_tier, link.target_tier) == (world.homes[name], step.place), "wrong way"
    assert step.place != world.center and step.size_bytes == world.size(name)
    assert name not in world.middle, "is there already"
    end = step.address + step.size_bytes
    assert end <= world.middle_bytes[step.place], "behind the end of the arena in between"
    for other, there in world.middle.items():
        apart = end <= there.address or there.address + world.size(other) <= step.address
        assert there.place != step.place or apart, f"{other} is at {there.address}"
    arrival_s = _enqueue(world, link, step.size_bytes, world.now_s)
    value = world.far[name, link.source_tier]
    assert value is not None, "the home has no copy"
    world.middle[name] = HalfWay(
        place=step.place, address=step.address, value=value, arrival_s=arrival_s
    )


def _evict(world: World, step: Evict) -> None:
    there = world.middle[step.tensor]
    assert (there.place, there.address) == (step.place, step.address), "is not there"
    leaving = [f for (name, _), f in world.flights.items() if name == step.tensor and f.pushed]
    assert not leaving, "is still being pushed on"
    del world.middle[step.tensor]


def _transfer(world: World, step: Offload | Reload | Prefetch) -> None:
    name, place = step.tensor, (step.tensor, step.address)
    link = world.machine.link(step.link)
    assert world.kind(name) is not TensorKind.INPUT, "inputs are the caller's"
    assert step.size_bytes == world.size(name), "size"
    assert place not in world.flights, "another transfer is in flight"
    ready_s, pushed = world.now_s, is_from_middle(world, step)
    if isinstance(step, Offload):
        assert link.source_tier == world.center, "wrong way"
        assert place in world.near, "no copy to offload"
        value = world.near[place]
        world.far[name, link.target_tier] = None
    else:
        assert link.target_tier == world.center, "wrong way"
        assert place not in world.near, "is there already"
        found = world.far.get((name, link.source_tier))
        if pushed:
            there = world.middle[name]
            found, ready_s = there.value, max(ready_s, there.arrival_s)
        assert found is not None, f"no copy on {link.source_tier}"
        _check_room(world, place)
        value = world.near[place] = found
    arrival_s = _enqueue(world, link, step.size_bytes, ready_s)
    world.flights[place] = Flight(
        value=value, arrival_s=arrival_s, target_tier=link.target_tier, pushed=pushed
    )
    _count(world)


def _enqueue(world: World, link: Link, size_bytes: int, ready_s: float) -> float:
    rates = {pipe.name: pipe.bandwidth_bytes_per_s for pipe in world.machine.pipes}
    begun_s = max([ready_s, *(world.free_s.get(key, 0.0) for key in (link.name, *link.shared))])
    arrival_s = begun_s + link.latency_s + size_bytes / link.bandwidth_bytes_per_s
    world.free_s[link.name] = arrival_s
    for pipe in link.shared:
        taken_bytes = size_bytes * (link.pipe_bytes_per_byte or 1)
        world.free_s[pipe] = begun_s + taken_bytes / rates[pipe]
    world.link_bytes[link.name] += size_bytes
    return arrival_s


def _check_room(world: World, place: Place) -> None:
    name, address = place
    if address is None:
        return
    end = address + world.size(name)
    assert end <= world.arena_bytes, "behind the end of the arena"
    for other, start in world.near:
        if start is not None:
            apart = end <= start or start + world.size(other) <= address
            assert apart, f"{other} is at {start}"


def _compute(world: World, number: int) -> None:
    """Run an op where its plan says, on the values that sequential execution would give it."""
    op, site = world.workload.ops[number], world.sites[number]
    for name in dict.fromkeys((*op.reads, *op.writes)):
        if world.kind(name) is not TensorKind.INPUT and name in world.values.current:
            _check_copy(world, name, site, world.values.current[name])
    world.values.run(number)
    _write(world, number, site)


def _recompute(world: World, source: int) -> None:
    """Run an op again: on what it read the first time, where it ran then."""
    op, site = world.workload.ops[source], world.sites[source]
    assert source in world.values.first_run, "has not run yet"
    assert not set(op.reads) & set(op.writes), "writes what it reads"
    assert all(world.kind(n) not in PERSISTENT for n in op.writes), "writes what persists"
    for name in op.reads:
        if world.kind(name) is not TensorKind.INPUT:
            _check_copy(world, name, site, world.values.first_run[source][name])
    _write(world, source, site)


def _check_copy(world: World, name: str, site: str, value: int) -> None:
    if site != world.center:
        assert world.far.get((name, site)) == value, f"{name} is not on {site}"
        return
    places = [place for place in world.near if place[0] == name]
    assert places, f"{name} is not there"
    for place in places:
        flight = world.flights.get(place)
        if not flight or flight.target_tier != world.center:
            assert world.near[place] == value, f"{name} is out of date"
            return
    raise AssertionError(f"{name} has not arrived")


def _write(world: World, number: int, site: str) -> None:
    op = world.workload.ops[number]
    for name, value in world.values.results(number).items():
        if site != world.center:
            world.far[name, site] = value
            continue
        places = [place for place in world.near if place[0] == name] or [(name, None)]
        for place in places:
            assert place not in world.flights, f"{name} is written while it is in flight"
            world.near[place] = value
    world.born |= set(op.writes)
    _count(world, {site: op.workspace_bytes})
    world.now_s += op.time_s[site]


def _free_dead(world: World, index: int) -> None:
    """Free what no later step of the iteration computes with."""
    for spec in world.workload.tensors:
        kept = spec.kind in PERSISTENT or spec.kind is TensorKind.OUTPUT
        if kept or world.last_access.get(spec.name) != index:
            continue
        flying = [place for place in world.flights if place[0] == spec.name]
        assert not flying, f"{spec.name} is in flight after its last use"
        _forget(world, spec.name)


def _forget(world: World, name: str) -> None:
    world.near = {place: value for place, value in world.near.items() if place[0] != name}
    world.far = {key: value for key, value in world.far.items() if key[0] != name}


def _check_end(world: World) -> None:
    current = world.values.current
    for spec in world.workload.tensors:
        name = spec.name
        if spec.kind is TensorKind.OUTPUT and name in world.born:
            assert not any(place[0] == name for place in world.flights), f"{name} is in flight"
            assert world.near.get((name, None)) == current[name], f"{name} is wrong at the end"
            _forget(world, name)
        elif spec.kind in PERSISTENT:
            home = world.homes.get(name, world.center)
            near = [value for place, value in world.near.items() if place[0] == name]
            far = [value for key, value in world.far.items() if key[0] == name]
            if world.workload.repeats:
                assert current[name] in (*near, *far), f"the value of {name} is lost"
                continue
            assert not any(place[0] == name for place in world.flights), f"{name} is in flight"
            at_home = near if home == world.center else [world.far.get((name, home))]
            assert current[name] in at_home, f"{name} is not at home at the end"


def _count(world: World, extra: Mapping[str, int] | None = None) -> None:
    """Note the bytes in use on each tier."""
    size = {t.name: t.size_bytes for t in world.workload.tensors}
    used = dict.fromkeys(world.machine.tiers, 0)
    used[world.center] = world.arena_bytes
    used[world.center] += sum(size[name] for name, address in world.near if address is None)
    for name, tier in world.far:
        used[tier] += size[name]
    for tier, size_bytes in world.middle_bytes.items():
        used[tier] += size_bytes
    for tier, count in used.items():
        total = count + (extra or {}).get(tier, 0)
        world.peak_bytes[tier] = max(world.peak_bytes[tier], total)
