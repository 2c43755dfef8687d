"""Plan (``gascompile.plan/2``): a placement with its timed moves and its certificate, as plain data.

Frozen, and free of torch; ``serial`` turns it into JSON and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain
from os import PathLike
from types import MappingProxyType
from typing import ClassVar

from gascompile.core import serial
from gascompile.core.machine import Machine
from gascompile.core.reports import Energy
from gascompile.core.serial import json_name
from gascompile.core.steps import Step
from gascompile.core.workload import Forms, TensorKind, Workload

_NOTHING: Mapping[str, int] = MappingProxyType({})


class SolverStatus(StrEnum):
    """How the search ended, in our words."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """Where one tensor lives."""

    home: str
    """Tier that holds the tensor between its uses. A weight whose home is the compute tier is resident."""
    kind: TensorKind
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int | None = None
    """Arena address of a resident weight; ``None`` for everything that is not in the arena all the time."""
    forms: Forms | None = field(default=None, metadata={"left_out": True})
    """Set where the tensor moves in another form than it is computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpPlan:
    """Where one op runs and how long that is expected to take."""

    name: str
    site: str
    time_s: float = field(metadata=json_name("seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What is proven about a plan's time per iteration."""

    predicted_s: float
    """Seconds of one iteration as the replay found them; the steady state where the workload repeats."""
    lower_bound_s: float
    """The best bound proven (at least ``limit_s``): nothing that ``holds_over`` names is faster."""
    limit_s: float
    """The physical limit: the largest of compute time and, per link, unavoidable bytes over bandwidth."""
    gap: float
    """``(predicted_s - lower_bound_s) / predicted_s``."""
    status: SolverStatus
    solve_s: float
    binding: str
    """The resource that sets ``limit_s``: ``compute`` or a link's name."""
    solver: str = ""
    """``highs`` or ``cbc``; ``none`` where heuristics alone made the plan."""
    holds_over: str = "weights"  # or "everything": the decisions that ``lower_bound_s`` bounds
    lower_bound_all_s: float = 0.0  # no plan whatsoever is faster; 0 where that was not asked


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceAccount:
    """What a plan may take of one place, and takes."""

    name: str
    budget_bytes: int | None = field(default=None, metadata={"left_out": True})
    """``None``: none was given, so nothing may be taken."""
    arena_bytes: int | None = field(default=None, metadata={"left_out": True})
    """Size of the arena, into which addresses in steps are offsets; ``None`` where there is none."""
    peak_bytes: int | None = field(default=None, metadata={"left_out": True})
    reserved_bytes: int = 0
    """Left of the budget for libraries and buffers."""
    beside_bytes: int = 0
    """Taken beside tensors: what transfers pass through, what slots take more. It is part of the peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAccount:
    """What a plan moves over one link in one iteration."""

    name: str
    moved_bytes: int = field(metadata=json_name("bytes"))


def accounts(
    order: Iterable[str] = (),
    *,
    budget_bytes: Mapping[str, int] = _NOTHING,
    arena_bytes: Mapping[str, int] = _NOTHING,
    peak_bytes: Mapping[str, int] = _NOTHING,
    reserved_bytes: Mapping[str, int] = _NOTHING,
    beside_bytes: Mapping[str, int] = _NOTHING,
) -> tuple[PlaceAccount, ...]:
    """Return an account for each place that one of the mappings names, those of ``order`` first."""
    named = (budget_bytes, arena_bytes, peak_bytes, reserved_bytes, beside_bytes)
    names = set().union(*named)
    listed = dict.fromkeys(name for name in (*order, *chain(*named)) if name in names)
    return tuple(
        PlaceAccount(
            name=name,
            budget_bytes=budget_bytes.get(name),
            arena_bytes=arena_bytes.get(name),
            peak_bytes=peak_bytes.get(name),
            reserved_bytes=reserved_bytes.get(name, 0),
            beside_bytes=beside_bytes.get(name, 0),
        )
        for name in listed
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement with its timed moves, and all that is needed to check, replay and execute it.

    Steps describe one iteration. Where the workload repeats, a prefetch whose wait stands *earlier*
    in the list is for the next iteration; before the very first one the runtime issues those
    prefetches up front.
    """

    FORMAT: ClassVar[str] = "gascompile.plan/2"

    fingerprint: Mapping[str, str]
    """Digest of everything the plan was made from, by part: graph, machine, budget, options, versions and so on."""
    strategy: str
    """Which candidate won: ``ilp`` or the name of a heuristic."""
    places: tuple[PlaceAccount, ...]
    links: tuple[LinkAccount, ...]
    tensors: Mapping[str, TensorPlan]
    ops: tuple[OpPlan, ...]
    steps: tuple[Step, ...]
    certificate: Certificate
    workload: Workload
    machine: Machine
    warnings: tuple[str, ...] = ()
    energy: Energy | None = field(default=None, metadata={"left_out": True})
    """Of one iteration; ``None`` where the machine does not say what it takes."""

    @staticmethod
    def older(named: str) -> type | None:
        """Return what reads the format ``named``, one of before; see ``serial``."""
        from gascompile.core.older_formats import PlanOne

        return {PlanOne.FORMAT: PlanOne}.get(named)

    @property
    def budget_bytes(self) -> Mapping[str, int]:
        """What may be taken of each place that has a budget."""
        return {p.name: p.budget_bytes for p in self.places if p.budget_bytes is not None}

    @property
    def arena_bytes(self) -> Mapping[str, int]:
        """Size of the arena of each place that has one."""
        return {p.name: p.arena_bytes for p in self.places if p.arena_bytes is not None}

    @property
    def peak_bytes(self) -> Mapping[str, int]:
        """The most that is held at once, of each place."""
        return {p.name: p.peak_bytes for p in self.places if p.peak_bytes is not None}

    @property
    def link_bytes(self) -> Mapping[str, int]:
        """Bytes moved per link in one iteration."""
        return {link.name: link.moved_bytes for link in self.links}

    @property
    def reserved_bytes(self) -> int:
        """What is left of the place that computes for libraries and buffers."""
        site = self.machine.compute_tier
        return sum(place.reserved_bytes for place in self.places if place.name == site)

    @property
    def beside_bytes(self) -> Mapping[str, int]:
        """What is taken beside tensors, of each place where something is."""
        return {p.name: p.beside_bytes for p in self.places if p.beside_bytes}

    def with_accounts(
        self,
        *,
        budget_bytes: Mapping[str, int] | None = None,
        arena_bytes: Mapping[str, int] | None = None,
        peak_bytes: Mapping[str, int] | None = None,
        link_bytes: Mapping[str, int] | None = None,
        beside_bytes: Mapping[str, int] | None = None,
    ) -> Plan:
        """Return the plan with other accounts; each that is given says all there is to say."""
        links = self.link_bytes if link_bytes is None else link_bytes
        places = accounts(
            (place.name for place in self.machine.places),
            budget_bytes=self.budget_bytes if budget_bytes is None else budget_bytes,
            arena_bytes=self.arena_bytes if arena_bytes is None else arena_bytes,
            peak_bytes=self.peak_bytes if peak_bytes is None else peak_bytes,
            reserved_bytes={p.name: p.reserved_bytes for p in self.places if p.reserved_bytes},
            beside_bytes=self.beside_bytes if beside_bytes is None else beside_bytes,
        )
        moved = (LinkAccount(name=name, moved_bytes=size) for name, size in links.items())
        return replace(self, places=places, links=tuple(moved))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all; raises ``StorageError``."""
        serial.write_output(path, serial.dumps(self))

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read a plan; raises ``FormatError`` or ``StorageError``. It is data: run ``verify`` before you trust it."""
        from gascompile.core.checks.plan import check_plan_content

        plan = serial.load(Plan, path)
        check_plan_content(plan, where=f"{path}: $")
        return plan


def weights_elsewhere(plan: Plan) -> dict[str, int]:
    """Return the weights that ops read which run on another tier than the one that computes, with the first such op."""
    own = plan.machine.compute_tier
    first_op: dict[str, int] = {}
    for i, (spec, op) in enumerate(zip(plan.workload.ops, plan.ops, strict=True)):
        for name in spec.reads if op.site != own else ():
            if plan.tensors[name].kind == TensorKind.WEIGHT:
                first_op.setdefault(name, i)
    return first_op
