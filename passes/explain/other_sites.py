"""Other sites: what a plan would take with one op run on another device that can run it.

What the op reads is copied there right before it and what it writes is copied back right after it;
weights that no other op reads rest there instead. All else stays as planned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gascompile.core.machine import Link
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import TensorKind
from gascompile.passes.explain.other_moves import evaluate


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSite:
    """The plan with one op run elsewhere."""

    site: str
    op_s: float
    """What the op itself takes there."""
    copied_bytes: int
    """What is copied there and back for it."""
    seconds: float | None
    """One iteration; ``None`` where the variant cannot run."""
    change_s: float | None
    """``seconds`` minus those of the plan; negative where it would be faster."""
    obstacle: str = ""
    """Why it cannot run."""


def other_sites(plan: Plan, op: int) -> tuple[OtherSite, ...]:
    """Return the price of each other device that has seconds for op number ``op``; pure."""
    times_s = plan.workload.ops[op].time_s
    return tuple(
        _at(plan, op, site, time_s)
        for site, time_s in times_s.items()
        if site != plan.ops[op].site and site in plan.machine.tiers
    )


def _at(plan: Plan, op: int, site: str, time_s: float) -> OtherSite:
    home = plan.machine.compute_tier
    out, back = _link(plan, home, site), _link(plan, site, home)
    obstacle = ""
    if plan.ops[op].site != home:
        obstacle = f"it runs on {plan.ops[op].site}, and its copies would have to be planned anew"
    elif out is None or back is None:
        obstacle = f"no links lead from {home} to {site} and back"
    elif shared := _shared_weight(plan, op):
        obstacle = f"other ops read its weight '{shared}' on {home} too"
    elif any(isinstance(step, Recompute) and step.source == op for step in plan.steps):
        obstacle = "it is run again for another op"
    if obstacle or out is None or back is None:
        return OtherSite(
            site=site, op_s=time_s, copied_bytes=0, seconds=None, change_s=None, obstacle=obstacle
        )
    variant, copied_bytes = _variant(plan, op, site, out, back)
    seconds, _, obstacle = evaluate(plan, variant)
    return OtherSite(
        site=site,
        op_s=time_s,
        copied_bytes=copied_bytes,
        seconds=seconds,
        change_s=None if seconds is None else seconds - plan.certificate.predicted_s,
        obstacle=obstacle,
    )


def _link(plan: Plan, source: str, target: str) -> Link | None:
    links = plan.machine.links_into(target)
    return next((link for link in links if link.source_tier == source), None)


def _shared_weight(plan: Plan, op: int) -> str:
    """Return a weight of the op that another op reads, if there is one."""
    for name in _weights(plan, op):
        if any(name in other.reads for i, other in enumerate(plan.workload.ops) if i != op):
            return name
    return ""


def _weights(plan: Plan, op: int) -> list[str]:
    reads = dict.fromkeys(plan.workload.ops[op].reads)
    return [name for name in reads if plan.tensors[name].kind == TensorKind.WEIGHT]


def _variant(plan: Plan, op: int, site: str, out: Link, back: Link) -> tuple[Plan, int]:
    """Return the plan with the op elsewhere, and the bytes that are copied for it."""
    spec = plan.workload.ops[op]
    weights = _weights(plan, op)
    still = (TensorKind.WEIGHT, TensorKind.INPUT)
    reads = [n for n in dict.fromkeys(spec.reads) if plan.tensors[n].kind not in still]
    writes = [n for n in dict.fromkeys(spec.writes) if plan.tensors[n].kind not in still]
    written_before = [n for n in writes if n not in reads and _is_touched_before(plan, n, op)]
    sizes = {name: plan.tensors[name].size_bytes for name in (*reads, *writes)}
    before: list[Step] = []
    for name in (*reads, *written_before):
        before += [
            Offload(op=op, tensor=name, link=out.name, size_bytes=sizes[name]),
            Wait(op=op, tensor=name),
        ]
    after: list[Step] = []
    for name in writes:
        after += [
            Reload(op=op + 1, tensor=name, link=back.name, size_bytes=sizes[name]),
            Wait(op=op + 1, tensor=name),
        ]
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, (Prefetch, Reload, Wait, Release)) and step.tensor in weights:
            continue
        here = isinstance(step, Compute) and step.op == op
        steps += [*before, step, *after] if here else [step]
    tensors = dict(plan.tensors)
    for name in weights:
        tensors[name] = replace(tensors[name], home=site, address=None)
    ops = list(plan.ops)
    ops[op] = replace(ops[op], site=site, time_s=spec.time_s[site])
    copied = sum(sizes[n] for n in (*reads, *written_before)) + sum(sizes[n] for n in writes)
    return replace(plan, steps=tuple(steps), tensors=tensors, ops=tuple(ops)), copied


def _is_touched_before(plan: Plan, name: str, op: int) -> bool:
    return any(name in (*other.reads, *other.writes) for other in plan.workload.ops[:op])
