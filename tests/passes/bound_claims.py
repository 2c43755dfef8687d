"""What certificates claim about a problem, and every plan of it that anyone finds.

Plans come from the planner with its strategies, from intervals planned in every form, and from an exact
search that shares no code with them. A claim is a certificate's bound with the plans that it speaks of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.steps import Compute, Prefetch, Release, Wait
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.intervals.plan_intervals import plan_intervals
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.tiling import forms
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.strategies import NAMES
from tests.passes.move_oracle import move_optimum
from tests.passes.random_workloads import Case, draw_case

SLACK = 1e-9
STREAMING = (Compute, Prefetch, Wait, Release)


@dataclass(frozen=True, slots=True)
class Claim:
    """A bound: of all plans, or of those alone that stream weights past everything else."""

    who: str
    bound_s: float
    everything: bool


@dataclass(frozen=True, slots=True)
class Known:
    """A plan that someone found."""

    who: str
    seconds: float
    only_streams: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a problem showed."""

    claims: tuple[Claim, ...]
    known: tuple[Known, ...]

    def margins(self) -> Iterator[tuple[float, Claim, Known]]:
        """Yield by which share of its time each plan is above each bound that speaks of it."""
        for claim in self.claims:
            for plan in self.known:
                if claim.everything or plan.only_streams:
                    yield (plan.seconds - claim.bound_s) / max(plan.seconds, 1e-300), claim, plan

    @property
    def violations(self) -> list[tuple[float, Claim, Known]]:
        """Return the claims that a plan disproves."""
        return [found for found in self.margins() if found[0] < -SLACK]


def draw_problem(seed: int) -> Case:
    """Return a small problem in whole pages; some of its weights come in rows that can be divided or gathered."""
    case = draw_case(seed, max_tensors=5, max_ops=5).scaled(16 * PAGE_BYTES)
    if seed % 3:
        return case
    ops = []
    read_by = [name for op in case.workload.ops for name in op.reads]
    sizes = {t.name: t for t in case.workload.tensors}
    for op in case.workload.ops:
        weights = [
            n for n in op.reads if sizes[n].kind == TensorKind.WEIGHT and read_by.count(n) == 1
        ]
        plain = weights and not op.gathers and weights[0] not in op.writes
        if plain and seed % 2:
            ops.append(replace(op, splits={weights[0]: 64}))
        elif plain:
            ops.append(replace(op, gathers={weights[0]: sizes[weights[0]].size_bytes // 16}))
        else:
            ops.append(op)
    return replace(case, workload=replace(case.workload, ops=tuple(ops)))


def outcome(
    workload: Workload,
    machine: Machine,
    limits_bytes: dict[str, int],
    *,
    time_limit_s: float,
    max_labels: int = 20_000,
    strategies: tuple[str, ...] = NAMES,
) -> Outcome:
    """Return all claims about a problem and all plans of it."""
    budget = Budget(
        gpu=limits_bytes.get("gpu"), cpu=limits_bytes.get("cpu"), nvme=limits_bytes.get("nvme")
    )
    claims: list[Claim] = []
    known: list[Known] = []
    kinds = {t.name: t.kind for t in workload.tensors}
    # Weights that change cannot lie in the arena.
    fixed = not any(kinds[n] == TensorKind.WEIGHT for op in workload.ops for n in op.writes)
    for who in ("streams", "moves all", *strategies, "ilp"):
        if not fixed and who != "moves all":
            continue
        try:
            plan = make_plan(
                workload,
                machine,
                budget,
                fingerprint={},
                time_limit_s=time_limit_s,
                move_all=who == "moves all",
                strategy=None if who in {"streams", "moves all"} else who,
            )
        except InfeasiblePlanError:
            continue
        assert not any("was dropped" in warning for warning in plan.warnings), plan.warnings
        claims += _claims(who, plan)
        known.append(Known(who, plan.certificate.predicted_s, _only_streams(plan)))
    for number, form in enumerate(forms(workload, machine)):
        known += _moved(number, form, machine, limits_bytes, time_limit_s, max_labels)
    return Outcome(tuple(claims), tuple(known))


def _claims(who: str, plan: Plan) -> Iterator[Claim]:
    found = plan.certificate
    yield Claim(f"{who}, limit", found.limit_s, everything=True)
    yield Claim(f"{who}, of all", found.lower_bound_all_s, everything=True)
    yield Claim(who, found.lower_bound_s, everything=found.holds_over == "everything")


def _only_streams(plan: Plan) -> bool:
    site = plan.machine.compute_tier
    stays = all(op.site == site for op in plan.ops)
    placed = all(
        t.address is not None or t.home != site
        for t in plan.tensors.values()
        if t.kind == TensorKind.WEIGHT
    )
    return stays and placed and all(isinstance(step, STREAMING) for step in plan.steps)


def _moved(
    number: int,
    form: Workload,
    machine: Machine,
    limits_bytes: dict[str, int],
    time_limit_s: float,
    max_labels: int,
) -> Iterator[Known]:
    """Yield the interval planner's plan of one form, and the optimum where it can be gone through."""
    try:
        found = plan_intervals(
            form, machine, limits_bytes, effort=Effort(time_limit_s=time_limit_s, mip_gap=0.0)
        )
    except (InfeasiblePlanError, UnsupportedOpError):
        return
    yield Known(f"intervals of form {number}", found.seconds, only_streams=False)
    if max_labels and len(form.tensors) <= 8:
        best = move_optimum(form, machine, limits_bytes, max_labels=max_labels)
        if best is not None and best.seconds < math.inf:
            yield Known(f"optimum of form {number}", best.seconds, only_streams=False)
