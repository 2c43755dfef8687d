"""Other moves: what a plan would take with one tensor kept, moved or computed again instead.

The steps that concern the tensor are replaced by the plainest ones that carry out the other choice; all
else stays as planned. Each variant is held to the verifier's rules of memory, and replayed. A plan made
anew could arrange itself around the change, so a price is at most what is said here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Link
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.passes.verify.account import account

KEEP, MOVE, RECOMPUTE = "keep", "move", "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherMove:
    """The plan with one tensor treated otherwise."""

    choice: str
    """``keep``, ``move`` or ``recompute``."""
    way: str
    """The tier it moves to, or the op that is run again; empty where it is kept."""
    peak_change_bytes: int
    """What the tier that computes would hold more at its peak."""
    seconds: float | None
    """One iteration; ``None`` where the variant cannot run."""
    change_s: float | None
    """``seconds`` minus those of the plan; negative where it would be faster."""
    obstacle: str = ""
    """Why it cannot run."""


def other_moves(plan: Plan, name: str) -> tuple[OtherMove, ...]:
    """Return the choices for tensor ``name``, which has no place in the arena, other than the plan's; pure."""
    kind = plan.tensors[name].kind
    now = choice_of(plan, name)
    kept = _stripped(plan, name)
    others: list[OtherMove] = []
    if now[0] != KEEP:
        others.append(_evaluate(plan, kept, (KEEP, "")))
    for out, back in _routes(plan):
        moved = _moved_state(kept, name, out, back) if kind in PERSISTENT else None
        if kind not in PERSISTENT:
            moved = _moved(kept, name, out, back)
        if moved is not None and now != (MOVE, back.source_tier):
            others.append(_evaluate(plan, moved, (MOVE, back.source_tier)))
    again = _recomputed(kept, name)
    if again is not None and now[0] != RECOMPUTE:
        others.append(_evaluate(plan, again, (RECOMPUTE, plan.ops[_writers(plan, name)[0]].name)))
    return tuple(others)


def choice_of(plan: Plan, name: str) -> tuple[str, str]:
    """Return what the plan does with the tensor, and the tier it moves to or the op that is run again."""
    for step in plan.steps:
        if isinstance(step, Recompute) and name in plan.workload.ops[step.source].writes:
            return RECOMPUTE, plan.ops[step.source].name
        if isinstance(step, Reload) and step.tensor == name:
            return MOVE, plan.machine.link(step.link).source_tier
    return KEEP, ""


def evaluate(plan: Plan, variant: Plan) -> tuple[float | None, dict[str, int], str]:
    """Return seconds and peaks of a variant of ``plan``, or what keeps it from running."""
    try:
        peaks, _ = account(variant)
        seconds = replay_plan(variant).seconds
    except PlanVerificationError as error:
        return None, {}, str(error).split("; the plan is refused")[0]
    for tier, limit_bytes in plan.budget_bytes.items():
        over_bytes = peaks.get(tier, 0) + others_bytes(plan, tier) - limit_bytes
        if over_bytes > 0:
            return None, peaks, f"{tier} would lack {format_size(over_bytes)}"
    return seconds, peaks, ""


def others_bytes(plan: Plan, tier: str) -> int:
    """Return the bytes of ``tier`` that are not the plan's to use."""
    return plan.reserved_bytes if tier == plan.machine.compute_tier else 0


def _evaluate(plan: Plan, variant: Plan, choice: tuple[str, str]) -> OtherMove:
    seconds, peaks, obstacle = evaluate(plan, variant)
    site = plan.machine.compute_tier
    before = plan.peak_bytes.get(site, 0)
    return OtherMove(
        choice=choice[0],
        way=choice[1],
        peak_change_bytes=peaks.get(site, before) - before,
        seconds=seconds,
        change_s=None if seconds is None else seconds - plan.certificate.predicted_s,
        obstacle=obstacle,
    )


def _routes(plan: Plan) -> list[tuple[Link, Link]]:
    """Return the links out of the tier that computes with those back."""
    site = plan.machine.compute_tier
    return [
        (out, back)
        for out in plan.machine.links
        for back in plan.machine.links_into(site)
        if out.source_tier == site and out.target_tier == back.source_tier
    ]


def _writers(plan: Plan, name: str) -> list[int]:
    return [i for i, op in enumerate(plan.workload.ops) if name in op.writes]


# ---------------------------------------------------------------- steps


def _stripped(plan: Plan, name: str) -> Plan:
    """Return the plan without the steps that concern the tensor: it stays where ops write it."""
    steps = [
        step
        for step in plan.steps
        if not (
            (isinstance(step, (Offload, Reload, Wait, Release)) and step.tensor == name)
            or (isinstance(step, Recompute) and name in plan.workload.ops[step.source].writes)
        )
    ]
    home = replace(plan.tensors[name], home=plan.machine.compute_tier)
    return replace(plan, steps=tuple(steps), tensors={**plan.tensors, name: home})


def _accesses(plan: Plan, name: str) -> list[int]:
    """Return the steps at which an op reads or writes the tensor."""
    steps = []
    for i, step in enumerate(plan.steps):
        if isinstance(step, (Compute, Recompute)):
            op = plan.workload.ops[_op_of(step)]
            if name in op.reads or name in op.writes:
                steps.append(i)
    return steps


def _op_of(step: Compute | Recompute) -> int:
    return step.op if isinstance(step, Compute) else step.source


def _seconds(plan: Plan, begin: int, end: int) -> float:
    """Return the seconds of the ops in ``steps[begin:end]``."""
    ran = (s for s in plan.steps[begin:end] if isinstance(s, (Compute, Recompute)))
    return sum(plan.ops[_op_of(step)].time_s for step in ran)


def _longest_gap(plan: Plan, name: str) -> tuple[int, int] | None:
    """Return the steps of the two accesses between which the tensor lies unused longest."""
    accesses = _accesses(plan, name)
    gaps = [(_seconds(plan, i + 1, j), i, j) for i, j in pairwise(accesses)]
    longest = max(gaps, default=(0.0, 0, 0))
    return longest[1:] if longest[0] > 0 else None


def _insert(plan: Plan, inserted: Sequence[tuple[int, Step]]) -> Plan:
    """Return the plan with steps put in front of those at the given places; they take their op from there."""
    num_ops = len(plan.ops)
    upcoming: list[int] = []
    ahead = num_ops
    for step in reversed(plan.steps):
        ahead = step.op if isinstance(step, Compute) else ahead
        upcoming.append(ahead)
    upcoming = [*reversed(upcoming), num_ops]
    steps: list[Step] = []
    for place in range(len(plan.steps) + 1):
        steps += [replace(step, op=upcoming[place]) for at, step in inserted if at == place]
        steps += plan.steps[place : place + 1]
    return replace(plan, steps=tuple(steps))


def _moved(plan: Plan, name: str, out: Link, back: Link) -> Plan | None:
    """Return the plan in which the tensor leaves over the longest time that no op needs it."""
    gap = _longest_gap(plan, name)
    if gap is None:
        return None
    begin, end = gap[0] + 1, gap[1]
    size_bytes = plan.tensors[name].size_bytes
    gone = _place_after(plan, begin, end, out.transfer_time_s(size_bytes))
    comes = max(gone, _place_before(plan, begin, end, back.transfer_time_s(size_bytes)))
    return _insert(
        plan,
        [
            (begin, Offload(op=0, tensor=name, link=out.name, size_bytes=size_bytes)),
            (gone, Wait(op=0, tensor=name)),
            (gone, Release(op=0, tensor=name)),
            (comes, Reload(op=0, tensor=name, link=back.name, size_bytes=size_bytes)),
            (end, Wait(op=0, tensor=name)),
        ],
    )


def _moved_state(plan: Plan, name: str, out: Link, back: Link) -> Plan | None:
    """Return the plan in which a persistent tensor lives elsewhere between its last use and its first."""
    accesses = _accesses(plan, name)
    if not accesses:
        return None
    first, last = accesses[0], accesses[-1] + 1
    size_bytes = plan.tensors[name].size_bytes
    comes = _place_before(plan, 0, first, back.transfer_time_s(size_bytes))
    inserted: list[tuple[int, Step]] = [
        (comes, Reload(op=0, tensor=name, link=back.name, size_bytes=size_bytes)),
        (first, Wait(op=0, tensor=name)),
    ]
    gone = last
    if _writers(plan, name):
        gone = _place_after(plan, last, len(plan.steps), out.transfer_time_s(size_bytes))
        inserted += [
            (last, Offload(op=0, tensor=name, link=out.name, size_bytes=size_bytes)),
            (gone, Wait(op=0, tensor=name)),
        ]
    inserted.append((gone, Release(op=0, tensor=name)))
    home = replace(plan.tensors[name], home=back.source_tier)
    return _insert(replace(plan, tensors={**plan.tensors, name: home}), inserted)


def _recomputed(plan: Plan, name: str) -> Plan | None:
    """Return the plan in which the tensor is dropped and its op run again before it is needed."""
    writers, gap = _writers(plan, name), _longest_gap(plan, name)
    if len(writers) != 1 or gap is None or plan.tensors[name].kind in PERSISTENT:
        return None
    if name in plan.workload.ops[writers[0]].reads:
        return None
    return _insert(
        plan,
        [
            (gap[0] + 1, Release(op=0, tensor=name)),
            (gap[1], Recompute(op=0, source=writers[0])),
        ],
    )


def _place_after(plan: Plan, begin: int, end: int, time_s: float) -> int:
    """Return the first place at which ops have taken ``time_s`` since ``begin``; at the latest ``end``."""
    passed_s = 0.0
    for place in range(begin, end):
        if passed_s >= time_s:
            return place
        passed_s += _seconds(plan, place, place + 1)
    return end


def _place_before(plan: Plan, begin: int, end: int, time_s: float) -> int:
    """Return the last place from which ops take ``time_s`` until ``end``; at the earliest ``begin``."""
    left_s = 0.0
    for place in range(end, begin, -1):
        if left_s >= time_s:
            return place
        left_s += _seconds(plan, place - 1, place)
    return begin
