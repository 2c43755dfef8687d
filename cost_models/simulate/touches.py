"""Touches: what lies outside the arena; at which steps a tensor comes, is used last, or loses a copy."""

from __future__ import annotations

from collections.abc import Iterator

from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT, TensorKind


def heap_tensors(plan: Plan) -> frozenset[str]:
    """Return the tensors outside the arena; a caller's inputs are nobody's."""
    streamed = {step.tensor for step in plan.steps if isinstance(step, Prefetch)}
    return frozenset(
        spec.name
        for spec in plan.workload.tensors
        if spec.kind != TensorKind.INPUT
        and spec.name not in streamed
        and plan.tensors[spec.name].address is None
    )


def first_touches(plan: Plan) -> dict[str, Step]:
    """Return the first step that reads, writes or moves each tensor."""
    first: dict[str, Step] = {}
    for step in plan.steps:
        for name in _names(plan, step):
            first.setdefault(name, step)
    return first


def last_touches(plan: Plan) -> dict[str, int]:
    """Return the index of the last step that reads, writes or moves each tensor."""
    return {name: i for i, step in enumerate(plan.steps) for name in _names(plan, step)}


def copy_ends(plan: Plan) -> frozenset[tuple[int, str, str]]:
    """Return ``(step, tensor, tier)`` of the last uses of copies on tiers that do not compute.

    A copy is used by a reload, until the wait for it, and by an op that runs on its tier. What
    persists is used again by the next iteration unless it is copied out or written first.
    """
    kinds = {tensor.name: tensor.kind for tensor in plan.workload.tensors}
    uses: dict[tuple[str, str], list[tuple[int, bool]]] = {}
    for i, name, tier, is_use in _copy_events(plan):
        uses.setdefault((name, tier), []).append((i, is_use))
    ends: set[tuple[int, str, str]] = set()
    for (name, tier), events in uses.items():
        following = events[1:]
        if kinds.get(name) in PERSISTENT:
            following = [*following, events[0]]
        for k, (i, is_use) in enumerate(events):
            used_again = k < len(following) and following[k][1]
            if is_use and not used_again:
                ends.add((i, name, tier))
    return frozenset(ends)


def _names(plan: Plan, step: Step) -> tuple[str, ...]:
    if isinstance(step, (Compute, Recompute)):
        op = plan.workload.ops[step.op if isinstance(step, Compute) else step.source]
        return (*op.reads, *op.writes)
    return (step.tensor,)


def _copy_events(plan: Plan) -> Iterator[tuple[int, str, str, bool]]:
    """Yield ``(step, tensor, tier, whether it is a use)``; the others make a new copy."""
    links = {link.name: link for link in plan.machine.links}
    slow = [tier for tier in plan.machine.tiers if tier != plan.machine.compute_tier]
    reading: dict[str, str] = {}
    for i, step in enumerate(plan.steps):
        match step:
            case Offload() if step.link in links:
                yield i, step.tensor, links[step.link].target_tier, False
            case Reload() if step.link in links:
                reading[step.tensor] = links[step.link].source_tier
            case Wait() if step.tensor in reading:
                yield i, step.tensor, reading.pop(step.tensor), True
            case Compute() | Recompute():
                index = step.op if isinstance(step, Compute) else step.source
                op, site = plan.workload.ops[index], plan.ops[index].site
                for name in dict.fromkeys(op.reads):
                    # What the op writes as well is its new copy, and stays.
                    if site in slow and name not in op.writes:
                        yield i, name, site, True
                for name in dict.fromkeys(op.writes):
                    for tier in slow:
                        yield i, name, tier, False
            case _:
                pass
