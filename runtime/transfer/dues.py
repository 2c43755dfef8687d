"""Dues: which op each load of a plan is for."""

from __future__ import annotations

from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.steps import Evict, Fetch, Prefetch, Wait, fetched_to, is_push


def due_ops(plan: Plan) -> list[tuple[Prefetch, int]]:
    """Return each prefetch with the op of its wait; ``len(plan.ops)`` is added where that is in the next iteration.

    Raises:
        PlanMismatchError: nothing ever waits for a prefetch.
    """
    next_wait: dict[tuple[str, int], int] = {}
    for step in plan.steps:
        if isinstance(step, Wait) and step.address is not None:
            next_wait.setdefault((step.tensor, step.address), step.op + len(plan.ops))
    dues: list[tuple[Prefetch, int]] = []
    for step in reversed(plan.steps):
        if isinstance(step, Wait) and step.address is not None:
            next_wait[step.tensor, step.address] = step.op
        elif isinstance(step, Prefetch):
            due = next_wait.get((step.tensor, step.address))
            if due is None:
                raise PlanMismatchError(
                    f"the plan prefetches '{step.tensor}' to address {step.address} and never waits for it"
                )
            dues.append((step, due))
    return dues[::-1]


def due_fetches(plan: Plan) -> list[tuple[Fetch, int]]:
    """Return each fetch with the op that waits for the first push of it, in this iteration or a later one.

    ``len(plan.ops)`` is added for each iteration in between.

    Raises:
        PlanMismatchError: nothing is ever pushed of one.
    """
    middle, num_ops = fetched_to(plan.steps), len(plan.ops)
    prefetches = iter(due_ops(plan))
    dues = [next(prefetches)[1] if isinstance(s, Prefetch) else 0 for s in plan.steps]
    next_push: dict[str, int] = {}
    for step, due in zip(reversed(plan.steps), reversed(dues), strict=True):
        if is_push(step, middle) and isinstance(step, Prefetch):
            next_push[step.tensor] = due + num_ops
    found: list[tuple[Fetch, int]] = []
    for step, due in zip(reversed(plan.steps), reversed(dues), strict=True):
        if is_push(step, middle) and isinstance(step, Prefetch):
            next_push[step.tensor] = due
        elif isinstance(step, Fetch):
            if step.tensor not in next_push:
                raise PlanMismatchError(f"the plan fetches '{step.tensor}' and never pushes it on")
            found.append((step, next_push[step.tensor]))
    return found[::-1]


def fetches_ahead(plan: Plan) -> list[tuple[Fetch, int]]:
    """Return the fetches that stand for the next iteration, each with the op that waits for its first push.

    A cold run begins with them. They are the last ones of what is pushed or evicted before it is ever fetched.
    """
    middle = fetched_to(plan.steps)
    last: dict[str, tuple[Fetch, int]] = {}
    for fetch, due in due_fetches(plan):
        last[fetch.tensor] = (fetch, due)
    fetched: set[str] = set()
    ahead: dict[str, tuple[Fetch, int]] = {}
    for step in plan.steps:
        if isinstance(step, Fetch):
            fetched.add(step.tensor)
        elif isinstance(step, Evict) or is_push(step, middle):
            assert isinstance(step, (Evict, Prefetch)), "no other has a tensor half the way"
            if step.tensor not in fetched and step.tensor in last:
                ahead[step.tensor] = last[step.tensor]
    return sorted(ahead.values(), key=lambda pair: pair[1])
