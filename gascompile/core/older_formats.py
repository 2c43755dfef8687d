"""Formats of before, as they were: each reads its files by its own fields, and says what they are in today's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gascompile.core.errors import FormatError
from gascompile.core.machine import (
    ComputeRate,
    Interference,
    IoSettings,
    Link,
    Machine,
    MemoryRate,
    Pipe,
    Place,
    PlaceKind,
)
from gascompile.core.plan import Certificate, LinkAccount, OpPlan, Plan, TensorPlan, accounts
from gascompile.core.serial import json_name
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOne:
    """A memory of ``gascompile.machine/1``, whose name was its kind."""

    size_bytes: int = field(metadata=json_name("bytes"))
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOne:
    """``gascompile.machine/1``: memories by name, of which ``gpu`` and ``cpu`` alone could compute."""

    FORMAT: ClassVar[str] = "gascompile.machine/1"

    name: str
    tiers: Mapping[str, TierOne]
    links: tuple[Link, ...]
    pipes: tuple[Pipe, ...] = ()
    rates: tuple[ComputeRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    io: IoSettings = field(default_factory=IoSettings)
    interference: Interference = field(default_factory=Interference)
    backend: str = ""

    def now(self) -> Machine:
        """Return the machine with its memories as places."""
        return Machine(
            name=self.name,
            places=tuple(
                Place(
                    name=name,
                    kind=next((kind for kind in PlaceKind if kind == name), PlaceKind.OTHER),
                    size_bytes=tier.size_bytes,
                    source=tier.source,
                )
                for name, tier in self.tiers.items()
            ),
            links=self.links,
            pipes=self.pipes,
            rates=self.rates,
            memory=self.memory,
            io=self.io,
            interference=self.interference,
            backend=self.backend,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeOne:
    """The step ``compute`` of ``gascompile.plan/1``."""

    TAG: ClassVar[str] = "compute"

    op: int

    def now(self) -> Step:
        """Return today's step."""
        return Compute(op=self.op)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOne:
    """The step ``prefetch``, always to an address of the arena."""

    TAG: ClassVar[str] = "prefetch"

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int

    def now(self) -> Step:
        """Return today's step."""
        return Prefetch(
            op=self.op,
            tensor=self.tensor,
            link=self.link,
            size_bytes=self.size_bytes,
            address=self.address,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOne:
    """The step ``wait``."""

    TAG: ClassVar[str] = "wait"

    op: int
    tensor: str
    address: int | None = None

    def now(self) -> Step:
        """Return today's step."""
        return Wait(op=self.op, tensor=self.tensor, address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseOne:
    """The step ``release``."""

    TAG: ClassVar[str] = "release"

    op: int
    tensor: str
    address: int | None = None

    def now(self) -> Step:
        """Return today's step."""
        return Release(op=self.op, tensor=self.tensor, address=self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadOne:
    """The step ``offload``, whose address was for what never came: no plan had one that could run."""

    TAG: ClassVar[str] = "offload"

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int | None = None

    def now(self) -> Step:
        """Return today's step; raises ``FormatError`` where it has an address."""
        _require_heap(self.tensor, self.address)
        return Offload(op=self.op, tensor=self.tensor, link=self.link, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadOne:
    """The step ``reload``, with an address as ``OffloadOne`` has it."""

    TAG: ClassVar[str] = "reload"

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int | None = None

    def now(self) -> Step:
        """Return today's step; raises ``FormatError`` where it has an address."""
        _require_heap(self.tensor, self.address)
        return Reload(op=self.op, tensor=self.tensor, link=self.link, size_bytes=self.size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOne:
    """The step ``recompute``."""

    TAG: ClassVar[str] = "recompute"

    op: int
    source: int

    def now(self) -> Step:
        """Return today's step."""
        return Recompute(op=self.op, source=self.source)


def _require_heap(tensor: str, address: int | None) -> None:
    if address is not None:
        raise FormatError(
            f"the plan moves {ascii(tensor)[:200]} out of the arena at {address}, which nothing does; plan again"
        )


StepOne = ComputeOne | PrefetchOne | WaitOne | ReleaseOne | OffloadOne | ReloadOne | RecomputeOne


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOne:
    """``gascompile.plan/1``: accounts as one mapping for each number, what is beside tensors for one host."""

    FORMAT: ClassVar[str] = "gascompile.plan/1"

    fingerprint: Mapping[str, str]
    strategy: str
    budget_bytes: Mapping[str, int]
    arena_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    link_bytes: Mapping[str, int]
    tensors: Mapping[str, TensorPlan]
    ops: tuple[OpPlan, ...]
    steps: tuple[StepOne, ...]
    certificate: Certificate
    workload: Workload
    machine: Machine
    warnings: tuple[str, ...] = ()
    reserved_bytes: int = 0
    host_bytes: int = 0

    def now(self) -> Plan:
        """Return the plan with its accounts by place; raises ``FormatError`` for what it cannot say of today's."""
        computing = next((n for n in ("gpu", "cpu") if n in self.machine.tiers), "cpu")
        return Plan(
            fingerprint=self.fingerprint,
            strategy=self.strategy,
            places=accounts(
                self.machine.tiers,
                budget_bytes=self.budget_bytes,
                arena_bytes=self.arena_bytes,
                peak_bytes=self.peak_bytes,
                reserved_bytes={computing: self.reserved_bytes},
                beside_bytes={"cpu": self.host_bytes} if self.host_bytes else {},
            ),
            links=tuple(
                LinkAccount(name=name, moved_bytes=size) for name, size in self.link_bytes.items()
            ),
            tensors=self.tensors,
            ops=self.ops,
            steps=tuple(step.now() for step in self.steps),
            certificate=self.certificate,
            workload=self.workload,
            machine=self.machine,
            warnings=self.warnings,
        )
