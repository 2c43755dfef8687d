"""Plan (``gascompile.plan/1``): a placement with its timed moves and its certificate, as plain data.

Frozen, and free of torch; ``serial`` turns it into JSON and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from os import PathLike
from typing import ClassVar

from gascompile.core import serial
from gascompile.core.machine import Machine
from gascompile.core.serial import json_name
from gascompile.core.steps import Step
from gascompile.core.workload import Forms, TensorKind, Workload


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
class Plan:
    """A placement with its timed moves, and all that is needed to check, replay and execute it.

    Steps describe one iteration. Where the workload repeats, a prefetch whose wait stands *earlier*
    in the list is for the next iteration; before the very first one the runtime issues those
    prefetches up front.
    """

    FORMAT: ClassVar[str] = "gascompile.plan/1"

    fingerprint: Mapping[str, str]
    """Digest of everything the plan was made from, by part: graph, machine, budget, options, versions and so on."""
    strategy: str
    """Which candidate won: ``ilp`` or the name of a heuristic."""
    budget_bytes: Mapping[str, int]
    arena_bytes: Mapping[str, int]
    """Size of the arena per tier; addresses in steps are offsets into it."""
    peak_bytes: Mapping[str, int]
    link_bytes: Mapping[str, int]
    """Bytes moved per link in one iteration."""
    tensors: Mapping[str, TensorPlan]
    ops: tuple[OpPlan, ...]
    steps: tuple[Step, ...]
    certificate: Certificate
    workload: Workload
    machine: Machine
    warnings: tuple[str, ...] = ()
    reserved_bytes: int = 0  # what is left of the tier that computes for libraries and buffers
    host_bytes: int = (
        0  # of a device's host, beside tensors: what transfers pass through, what slots take more
    )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON, whole or not at all; raises ``StorageError``."""
        serial.write_atomic(path, serial.dumps(self))

    @staticmethod
    def load(path: str | PathLike[str]) -> Plan:
        """Read a plan; raises ``FormatError`` or ``StorageError``. It is data: run ``verify`` before you trust it."""
        from gascompile.core.checks.plan import check_plan_content

        found = serial.load(Plan, path)
        check_plan_content(found, where=f"{path}: $")
        return found


def weights_elsewhere(plan: Plan) -> dict[str, int]:
    """Return the weights that ops read which run on another tier than the one that computes, with the first such op."""
    own = plan.machine.compute_tier
    found: dict[str, int] = {}
    for i, (spec, op) in enumerate(zip(plan.workload.ops, plan.ops, strict=True)):
        for name in spec.reads if op.site != own else ():
            if plan.tensors[name].kind == TensorKind.WEIGHT:
                found.setdefault(name, i)
    return found
