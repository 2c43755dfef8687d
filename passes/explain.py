"""Explain: why a tensor is where it is or what an op costs, and what the alternatives would take.

The price of the other places comes from ``alternatives``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from gascompile.cost_models.replay import replay_plan
from gascompile.cost_models.trace import Transfer, trace
from gascompile.ir import OpSpec, Plan, Release, TensorKind, TensorSpec
from gascompile.passes.alternatives import Alternative, Peer, alternatives
from gascompile.units import format_size, format_time

_SAME = 1e-6
"""Relative difference of two iteration times below which they count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorExplanation:
    """Where a tensor lives, when it moves, and what else could be done with it."""

    name: str
    kind: TensorKind
    size_bytes: int
    home: str
    reason: str
    uses: tuple[str, ...]
    """Ops that read it, in order."""
    writers: tuple[str, ...]
    transfers: tuple[Transfer, ...]
    """Those of the steady iteration."""
    releases: tuple[int, ...]
    """Ops before which its bytes may be overwritten."""
    stall_s: float
    """Seconds that ops wait for it in one iteration."""
    plan_s: float
    """One iteration of the plan."""
    alternative: Alternative | None = None
    peer: Peer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an op reads or writes."""

    name: str
    size_bytes: int
    home: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpExplanation:
    """What an op costs and what bounds it."""

    name: str
    index: int
    site: str
    time_s: float
    flops: int
    moved_bytes: int
    """Read and written in the memory of its site."""
    arithmetic_intensity: float
    bound: str
    """``compute``, ``memory``, ``launch overhead``, or ``unknown`` where the machine does not say."""
    workspace_bytes: int
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    stall_s: float


Explanation = TensorExplanation | OpExplanation


def explain(plan: Plan, name: str) -> Explanation:
    """Return why the tensor or op called ``name`` is placed as it is; pure.

    Raises:
        ValueError: the plan has neither a tensor nor an op of that name; names near ones.
    """
    tensors = {tensor.name: tensor for tensor in plan.workload.tensors}
    if name in tensors:
        return _tensor(plan, tensors[name])
    for index, op in enumerate(plan.workload.ops):
        if op.name == name:
            return _op(plan, index, tensors)
    known = [*tensors, *(op.name for op in plan.workload.ops)]
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.5)
    near += [other for other in known if name in other and other not in near][: 4 - len(near)]
    hint = (
        f"did you mean {', '.join(repr(other) for other in near)}?"
        if near
        else "see the plan's tensors and ops"
    )
    raise ValueError(
        f"the plan of {plan.workload.name} has no tensor or op called {name!r}; {hint}"
    )


# ---------------------------------------------------------------- ops


def _op(plan: Plan, index: int, tensors: Mapping[str, TensorSpec]) -> OpExplanation:
    op, planned = plan.workload.ops[index], plan.ops[index]
    stalls = replay_plan(plan).stalls

    def operands(names: tuple[str, ...]) -> tuple[Operand, ...]:
        return tuple(
            Operand(name=n, size_bytes=tensors[n].size_bytes, home=_home(plan, tensors[n]))
            for n in names
        )

    return OpExplanation(
        name=op.name,
        index=index,
        site=planned.site,
        time_s=planned.time_s,
        flops=op.flops,
        moved_bytes=op.read_bytes + op.write_bytes,
        arithmetic_intensity=op.arithmetic_intensity,
        bound=_bound(plan, op, planned.site, planned.time_s),
        workspace_bytes=op.workspace_bytes,
        reads=operands(op.reads),
        writes=operands(op.writes),
        stall_s=sum(stall.time_s for stall in stalls if stall.op == index),
    )


def _bound(plan: Plan, op: OpSpec, site: str, time_s: float) -> str:
    """Return what sets the op's time: whatever is larger of its bytes and the rest, or the launch alone."""
    memory = next((rate for rate in plan.machine.memory if rate.device == site), None)
    if memory is None or not (op.flops or op.read_bytes or op.write_bytes):
        return "unknown" if time_s else "nothing"
    memory_s = (op.read_bytes + op.write_bytes) / memory.bandwidth_bytes_per_s
    work_s = time_s - memory.op_overhead_s
    if work_s < memory.op_overhead_s:
        return "launch overhead"
    return "memory" if work_s <= memory_s * (1 + 1e-3) else "compute"


# ---------------------------------------------------------------- tensors


def _tensor(plan: Plan, tensor: TensorSpec) -> TensorExplanation:
    ops = plan.workload.ops
    uses = tuple(op.name for op in ops if tensor.name in op.reads)
    found = trace(plan)
    stall_s = sum(s.time_s for s in found.stalls if s.tensor == tensor.name)
    base = TensorExplanation(
        name=tensor.name,
        kind=tensor.kind,
        size_bytes=tensor.size_bytes,
        home=_home(plan, tensor),
        reason="",
        uses=uses,
        writers=tuple(op.name for op in ops if tensor.name in op.writes),
        transfers=tuple(
            t for t in found.transfers if t.tensor == tensor.name and t.wait_op is not None
        ),
        releases=tuple(
            s.op for s in plan.steps if isinstance(s, Release) and s.tensor == tensor.name
        ),
        stall_s=stall_s,
        plan_s=plan.certificate.predicted_s,
    )
    if tensor.kind != TensorKind.WEIGHT or not uses:
        return _with(base, reason=_reason_without_choice(base, plan))
    alternative, peer = alternatives(plan, tensor.name)
    return _with(base, reason=_reason(plan, base, alternative), alternative=alternative, peer=peer)


def _with(
    base: TensorExplanation,
    *,
    reason: str,
    alternative: Alternative | None = None,
    peer: Peer | None = None,
) -> TensorExplanation:
    values = {name: getattr(base, name) for name in base.__dataclass_fields__}
    return TensorExplanation(
        **{**values, "reason": reason, "alternative": alternative, "peer": peer}
    )


def _home(plan: Plan, tensor: TensorSpec) -> str:
    planned = plan.tensors.get(tensor.name)
    return planned.home if planned is not None else plan.machine.compute_tier


def _reason_without_choice(found: TensorExplanation, plan: Plan) -> str:
    site = plan.machine.compute_tier
    if found.kind == TensorKind.INPUT:
        return "an input is the caller's memory; the plan neither moves nor counts it"
    if found.kind == TensorKind.WEIGHT:
        return "no op reads it, so it is never loaded"
    if found.kind == TensorKind.STATE:
        return f"a state is read and written in place, so it stays in {site} all the time"
    if found.kind == TensorKind.OUTPUT:
        return f"an output stays in {site} until it is handed to the caller"
    begins = found.writers[0] if found.writers else "the start"
    ends = found.uses[-1] if found.uses else begins
    return f"it lives in {site} from '{begins}' until '{ends}' has read it, and nowhere else"


def _reason(plan: Plan, found: TensorExplanation, other: Alternative) -> str:
    site = plan.machine.compute_tier
    if other.change_s is None:
        if found.home == site:
            return f"it stays in {site}: streamed, it would not fit beside what is in use at the same time"
        return (
            f"it is streamed from {found.home}: kept in {site} it takes {format_size(other.arena_change_bytes)}, which "
            f"the budget of {format_size(plan.budget_bytes[site])} does not leave"
        )
    small = abs(other.change_s) <= _SAME * found.plan_s
    if found.home == site:
        if small or other.change_s < 0:
            return f"it stays in {site} because there is room; streaming it would cost no time"
        return f"it stays in {site}: streaming it would cost {format_time(other.change_s)} per iteration"
    if small:
        return f"it is streamed from {found.home}: keeping it in {site} would save no time"
    if other.change_s > 0:
        return (
            f"it is streamed from {found.home}: keeping it in {site} would cost {format_time(other.change_s)} per "
            "iteration, because less room would be left to prefetch the others into"
        )
    return (
        f"it is streamed from {found.home}; keeping it in {site} would save {format_time(-other.change_s)}, which the "
        f"search left within its gap of {plan.certificate.gap:.2%}"
    )
