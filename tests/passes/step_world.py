"""The machine while the step interpreter executes, and what it looks like before the first iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gascompile.core.machine import Machine
from gascompile.core.steps import (
    Compute,
    Evict,
    Fetch,
    Offload,
    Prefetch,
    Recompute,
    Reload,
    Step,
    Wait,
)
from gascompile.core.workload import TensorKind, Workload
from tests.passes.step_values import PERSISTENT, Values

Place = tuple[str, int | None]
"""A tensor's copy on the compute tier: on the heap, or at an address of the arena."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A transfer that no step has waited for."""

    value: int
    arrival_s: float
    target_tier: str
    pushed: bool = False
    """Whether it comes from half the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfWay:
    """A copy in an arena of a slow tier."""

    place: str
    address: int
    value: int
    arrival_s: float


@dataclass(slots=True)
class World:
    """The machine while it executes."""

    workload: Workload
    machine: Machine
    steps: tuple[Step, ...]
    homes: Mapping[str, str]
    arena_bytes: int
    residents: Mapping[str, int]
    sites: tuple[str, ...]
    values: Values
    near: dict[Place, int] = field(default_factory=dict)
    """Copies on the compute tier with their values; what is still arriving is in ``flights``."""
    far: dict[tuple[str, str], int | None] = field(default_factory=dict)
    """Copies by (tensor, slow tier); ``None`` while one is being written."""
    flights: dict[Place, Flight] = field(default_factory=dict)
    born: set[str] = field(default_factory=set)
    now_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)
    """When each link and pipe is free."""
    next_op: int = 0
    peak_bytes: dict[str, int] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    last_access: dict[str, int] = field(default_factory=dict)
    middle: dict[str, HalfWay] = field(default_factory=dict)
    middle_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def center(self) -> str:
        return self.machine.compute_tier

    def kind(self, name: str) -> TensorKind:
        return next(t.kind for t in self.workload.tensors if t.name == name)

    def size(self, name: str) -> int:
        return next(t.size_bytes for t in self.workload.tensors if t.name == name)


def set_up(world: World) -> None:
    """Put everything where the steps expect it when an iteration begins."""
    for index, step in enumerate(world.steps):
        if isinstance(step, Compute | Recompute):
            op = world.workload.ops[step.op if isinstance(step, Compute) else step.source]
            world.last_access |= dict.fromkeys((*op.reads, *op.writes), index)
    for spec in world.workload.tensors:
        if spec.kind not in PERSISTENT:
            continue
        name, value = spec.name, world.values.current[spec.name]
        home = world.homes.get(name, world.center)
        if home != world.center:
            world.far[name, home] = value
        if name in world.residents:
            world.near[name, world.residents[name]] = value
        elif not world.workload.repeats:
            if home == world.center:
                world.near[name, None] = value
        else:
            _set_up_repeating(world, name, value)


def is_from_middle(world: World, step: Step) -> bool:
    """Whether a load comes from where its tensor waits half the way, not from its home."""
    return isinstance(step, Prefetch) and any(
        isinstance(s, Fetch) and s.tensor == step.tensor and step.link.startswith(f"{s.place}->")
        for s in world.steps
    )


def _set_up_middle(world: World, name: str, value: int) -> None:
    """Put half the way what is pushed or given up before an iteration has read it."""
    fetches = [s for s in world.steps if isinstance(s, Fetch) and s.tensor == name]
    first = next(
        (
            s
            for s in world.steps
            if isinstance(s, Fetch | Evict | Prefetch)
            and s.tensor == name
            and (not isinstance(s, Prefetch) or is_from_middle(world, s))
        ),
        None,
    )
    if fetches and not isinstance(first, Fetch):
        last = fetches[-1]
        world.middle[name] = HalfWay(
            place=last.place, address=last.address, value=value, arrival_s=0.0
        )


def _set_up_repeating(world: World, name: str, value: int) -> None:
    _set_up_middle(world, name, value)
    named = [
        s
        for s in world.steps
        if not isinstance(s, Compute | Recompute | Fetch | Evict) and s.tensor == name
    ]
    for address in dict.fromkeys(step.address for step in named) or [None]:
        first: Step | None = next((s for s in named if s.address == address), None)
        if not isinstance(first, Wait):
            first = _first_event(world, name, address)
        moves = [
            s for s in named if s.address == address and isinstance(s, Offload | Reload | Prefetch)
        ]
        if isinstance(first, Wait):
            assert moves, f"{first} waits for nothing"
            link = world.machine.link(moves[-1].link)
            world.near[name, address] = value
            pushed = is_from_middle(world, moves[-1])
            world.flights[name, address] = Flight(
                value=value, arrival_s=0.0, target_tier=link.target_tier, pushed=pushed
            )
            if pushed:
                continue
            other = link.source_tier if link.target_tier == world.center else link.target_tier
            world.far[name, other] = value if link.target_tier == world.center else None
        elif isinstance(first, Reload | Prefetch):
            if is_from_middle(world, first):
                continue
            world.far[name, world.machine.link(first.link).source_tier] = value
        elif first is not None or world.homes.get(name, world.center) == world.center:
            world.near[name, address] = value


def _first_event(world: World, name: str, address: int | None) -> Step | None:
    """Return the first step about a copy: one that names it or, on the heap, an op that needs it."""
    for step in world.steps:
        if isinstance(step, Compute | Recompute):
            number = step.op if isinstance(step, Compute) else step.source
            op = world.workload.ops[number]
            if world.sites[number] != world.center or address is not None:
                continue
            if name in (*op.reads, *op.writes) and not _in_arena(world, name):
                return step
        elif isinstance(step, Fetch | Evict):
            continue
        elif step.tensor == name and step.address == address:
            return step
    return None


def _in_arena(world: World, name: str) -> bool:
    return any(isinstance(s, Prefetch) and s.tensor == name for s in world.steps)
