"""Alternatives: what a plan would take with one weight placed otherwise.

Each is scheduled within the same budget and compared with what the plan claims, so that its price
includes what it does to every other transfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.core.budget import Budget
from gascompile.core.plan import Plan
from gascompile.core.steps import Prefetch, Release
from gascompile.passes.model.problem import Placement, Problem, problem
from gascompile.passes.search.search import best_staging
from gascompile.passes.search.two_hops import staged_hops


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The plan with one weight placed otherwise (or, in an exchange, two)."""

    home: str
    """Where the weight would live."""
    arena_change_bytes: int
    """What residents would take more (positive) or less (negative) of the compute tier."""
    seconds: float | None
    """One iteration of the rescheduled plan; ``None`` when it does not fit the budget."""
    change_s: float | None
    """``seconds`` minus those of the plan; negative where it would be faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The resident weight whose place is the cheapest to give up."""

    name: str
    size_bytes: int
    streamed: Alternative
    """That weight streamed instead, all else as planned."""
    exchange: Alternative | None
    """That weight streamed and the explained one resident; ``None`` where both are resident now."""


def alternatives(plan: Plan, name: str) -> tuple[Alternative, Peer | None]:
    """Return the price of the other place for the weight ``name``, and the resident to compare it with; pure.

    Raises:
        ValueError: no op of the plan reads a weight of that name.
    """
    task = _problem_of(plan)
    index = next((i for i, weight in enumerate(task.weights) if weight.name == name), None)
    if index is None:
        raise ValueError(f"no op of {plan.workload.name} reads a weight called {name!r}")
    placed = _placement_of(plan, task)
    return _flip(plan, task, placed, (index,), index), _peer(plan, task, placed, index)


def _problem_of(plan: Plan) -> Problem:
    limits = plan.budget_bytes
    budget = Budget(limits)
    return problem(plan.workload, plan.machine, budget, reserved_bytes=plan.reserved_bytes)


def _placement_of(plan: Plan, task: Problem) -> Placement:
    """Return the placement that the plan's steps carry out."""
    sources = [link.source_tier for link in task.links]
    link_by_tensor: dict[str, int] = {}
    releases: dict[str, list[int]] = {}
    for step in plan.steps:
        if isinstance(step, Prefetch):
            # That of its home: what waits half the way is pushed on over another.
            link_by_tensor[step.tensor] = sources.index(plan.tensors[step.tensor].home)
        elif isinstance(step, Release):
            releases.setdefault(step.tensor, []).append(step.op)
    link_of = tuple(link_by_tensor.get(weight.name) for weight in task.weights)
    kept = set()
    for i, weight in enumerate(task.weights):
        if link_of[i] is None:
            continue
        ends, uses = releases.get(weight.name, []), weight.uses
        for j, use in enumerate(uses[:-1]):
            if not any(use < end <= uses[j + 1] for end in ends):
                kept.add((i, j))
        last = any(end > uses[-1] or end <= uses[0] for end in ends)
        if task.repeats and not last:
            kept.add((i, len(uses) - 1))
    return Placement(strategy="explain", link_of=link_of, kept=frozenset(kept))


def _flip(
    plan: Plan, task: Problem, placed: Placement, changed: tuple[int, ...], subject: int
) -> Alternative:
    """Return the plan with the homes of ``changed`` flipped; ``subject`` is the one it is told about."""
    site = plan.machine.compute_tier
    link_of = list(placed.link_of)
    for i in changed:
        link_of[i] = 0 if link_of[i] is None else None
    kept = frozenset(pair for pair in placed.kept if pair[0] not in changed)
    other = Placement(strategy="explain", link_of=tuple(link_of), kept=kept)
    flipped = best_staging(task, other, task.arena_limit_bytes) if task.links else None
    for place, middle_bytes in plan.arena_bytes.items():
        if place != site:
            flipped = staged_hops(task, other, place, middle_bytes, flipped)
    seconds = flipped.seconds if flipped is not None else None
    link = link_of[subject]
    sizes = [(link_of[i] is None, task.weights[i].reserved_bytes) for i in changed]
    return Alternative(
        home=site if link is None or not task.links else task.links[link].source_tier,
        arena_change_bytes=sum(size if stays else -size for stays, size in sizes),
        seconds=seconds,
        change_s=None if seconds is None else seconds - plan.certificate.predicted_s,
    )


def _peer(plan: Plan, task: Problem, placed: Placement, index: int) -> Peer | None:
    """Return the resident with the least time on a link per byte it holds, large enough where one is."""
    residents = [i for i, link in enumerate(placed.link_of) if link is None and i != index]
    if not residents or not task.links:
        return None
    needed = task.weights[index].reserved_bytes

    def price(i: int) -> tuple[bool, float, int]:
        weight = task.weights[i]
        busy_s = task.transfer_s(i, 0) * len(weight.uses)
        return weight.reserved_bytes < needed, busy_s / weight.reserved_bytes, weight.reserved_bytes

    cheapest = min(residents, key=price)
    streams = placed.link_of[index] is not None
    return Peer(
        name=task.weights[cheapest].name,
        size_bytes=task.weights[cheapest].size_bytes,
        streamed=_flip(plan, task, placed, (cheapest,), cheapest),
        exchange=_flip(plan, task, placed, (cheapest, index), index) if streams else None,
    )
