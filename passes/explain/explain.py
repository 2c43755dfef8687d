"""Explain: why a tensor is where it is or what an op costs, and what the alternatives would take.

The price of another place for a weight in the arena comes from ``alternatives``, that of keeping, moving or
recomputing any other tensor from ``other_moves``, that of another device for an op from ``other_sites``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.reports import Stall
from gascompile.core.sizes import format_size, format_time
from gascompile.core.steps import Compute, Evict, Fetch, Prefetch, Release, Wait, fetched_to
from gascompile.core.tiles import base_name
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec
from gascompile.cost_models.formulas.gathers import gathered
from gascompile.cost_models.simulate.trace import Transfer, trace
from gascompile.passes.explain.alternatives import Alternative, Peer, alternatives
from gascompile.passes.explain.other_moves import KEEP, MOVE, OtherMove, choice_of, other_moves
from gascompile.passes.explain.other_sites import OtherSite, other_sites
from gascompile.passes.graph.divide import part_tensors

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
    stalls: tuple[Stall, ...] = ()
    """Those ops' waits, with their causes."""
    alternative: Alternative | None = None
    peer: Peer | None = None
    choices: tuple[OtherMove, ...] = ()
    """What else could be done with a tensor that has no place in the arena."""


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
    stalls: tuple[Stall, ...] = ()
    """What it waits for, with the causes."""
    sites: tuple[OtherSite, ...] = ()
    """What it would take elsewhere."""


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
    tiles = [tensor for tensor in plan.workload.tensors if base_name(tensor.name) == name]
    if tiles:
        return _tiled(plan, name, tiles)
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
    stalls = tuple(stall for stall in trace(plan).stalls if stall.op == index)

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
        stall_s=sum(stall.time_s for stall in stalls),
        stalls=stalls,
        sites=other_sites(plan, index),
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
    timeline = trace(plan)
    stalls = tuple(stall for stall in timeline.stalls if stall.tensor == tensor.name)
    base = TensorExplanation(
        name=tensor.name,
        kind=tensor.kind,
        size_bytes=tensor.size_bytes,
        home=_home(plan, tensor),
        reason="",
        uses=uses,
        writers=tuple(op.name for op in ops if tensor.name in op.writes),
        transfers=tuple(
            t for t in timeline.transfers if t.tensor == tensor.name and t.wait_op is not None
        ),
        releases=tuple(
            s.op for s in plan.steps if isinstance(s, Release) and s.tensor == tensor.name
        ),
        stall_s=sum(stall.time_s for stall in stalls),
        stalls=stalls,
        plan_s=plan.certificate.predicted_s,
    )
    if tensor.kind == TensorKind.INPUT or not (uses or base.writers):
        return replace(base, reason=_reason_without_choice(base, plan))
    if _in_arena(plan, tensor.name):
        if not _is_all_arena(plan):
            return replace(base, reason=_reason_in_arena(base, plan))
        alternative, peer = alternatives(plan, tensor.name)
        reason = _reason(plan, base, alternative)
        return replace(base, reason=reason, alternative=alternative, peer=peer)
    if (updated := _reason_of_update(plan, tensor.name)) is not None:
        return replace(base, reason=updated)
    choices = other_moves(plan, tensor.name)
    return replace(base, reason=_reason_of_choice(base, plan, choices), choices=choices)


def _tiled(plan: Plan, name: str, tiles: Sequence[TensorSpec]) -> TensorExplanation:
    """Return what all tiles or parts of a tensor do together."""
    names = {tile.name for tile in tiles}
    timeline = trace(plan)
    sizes: dict[str, int] = {}
    for tile in tiles:
        home = _home(plan, tile)
        sizes[home] = sizes.get(home, 0) + tile.size_bytes
    word = "parts" if names <= part_tensors(plan.workload.ops) else "tiles"
    shares = ", ".join(f"{format_size(size)} in {tier}" for tier, size in sizes.items())
    uses = [base_name(op.name) for op in plan.workload.ops if names.intersection(op.reads)]
    stalls = tuple(stall for stall in timeline.stalls if stall.tensor in names)
    return TensorExplanation(
        name=name,
        kind=tiles[0].kind,
        size_bytes=sum(tile.size_bytes for tile in tiles),
        home=", ".join(sizes),
        reason=f"it is divided into {len(tiles)} {word}, {shares}; ask about one of them, such as '{tiles[0].name}'",
        uses=tuple(dict.fromkeys(uses)),
        writers=(),
        transfers=tuple(
            t for t in timeline.transfers if t.tensor in names and t.wait_op is not None
        ),
        releases=tuple(s.op for s in plan.steps if isinstance(s, Release) and s.tensor in names),
        stall_s=sum(stall.time_s for stall in stalls),
        stalls=stalls,
        plan_s=plan.certificate.predicted_s,
    )


def _in_arena(plan: Plan, name: str) -> bool:
    streamed = any(isinstance(step, Prefetch) and step.tensor == name for step in plan.steps)
    return streamed or plan.tensors[name].address is not None


def _is_all_arena(plan: Plan) -> bool:
    """Whether weights in the arena are all that the plan decides about."""
    site = plan.machine.compute_tier
    plain = (Compute, Fetch, Evict, Prefetch, Wait, Release)
    return all(isinstance(step, plain) for step in plan.steps) and all(
        op.site == site for op in plan.ops
    )


def _home(plan: Plan, tensor: TensorSpec) -> str:
    planned = plan.tensors.get(tensor.name)
    return planned.home if planned is not None else plan.machine.compute_tier


def _reason_without_choice(tensor: TensorExplanation, plan: Plan) -> str:
    site = plan.machine.compute_tier
    if tensor.kind == TensorKind.INPUT:
        return "an input is the caller's memory; the plan neither moves nor counts it"
    if tensor.kind == TensorKind.WEIGHT:
        rows = next((op.name for op in plan.workload.ops if tensor.name in gathered(op)), None)
        if rows is not None:
            return f"'{rows}' reads the rows it needs from {tensor.home} by itself, so it is never loaded whole"
        return "no op reads it, so it is never loaded"
    if tensor.kind == TensorKind.STATE:
        return f"a state is read and written in place, so it stays in {site} all the time"
    if tensor.kind == TensorKind.OUTPUT:
        return f"an output stays in {site} until it is handed to the caller"
    begins = tensor.writers[0] if tensor.writers else "the start"
    ends = tensor.uses[-1] if tensor.uses else begins
    return f"it lives in {site} from '{begins}' until '{ends}' has read it, and nowhere else"


def _reason_of_update(plan: Plan, name: str) -> str | None:
    """Return what is done with a tensor that an op elsewhere changes, or reads to do so; ``None`` for others."""
    sites, own = plan_sites(plan), plan.machine.compute_tier
    for op, changed in sites.changed.items() if sites is not None else ():
        spec, site = plan.workload.ops[op], plan.ops[op].site
        if name in changed:
            users = zip(plan.workload.ops, plan.ops, strict=True)
            is_shared = any(name in other.reads and at.site == own for other, at in users)
            where = f"it rests in {site}, where '{spec.name}' changes it"
            return f"{where}; {own} fetches it anew once that is done" if is_shared else where
        if name in spec.reads and sites is not None and name in sites.queued:
            return f"it goes from {own} to {site}, where '{spec.name}' reads it"
    return None


def _reason_in_arena(tensor: TensorExplanation, plan: Plan) -> str:
    site = plan.machine.compute_tier
    if tensor.home == site:
        return f"it stays in the arena of {site}"
    return f"{_streamed(plan, tensor)} through the arena of {site}"


def _streamed(plan: Plan, tensor: TensorExplanation) -> str:
    middle = fetched_to(plan.steps).get(tensor.name)
    ahead = f" by way of {middle}, where it waits" if middle is not None else ""
    return f"it is streamed from {tensor.home}{ahead}"


def _reason_of_choice(tensor: TensorExplanation, plan: Plan, choices: tuple[OtherMove, ...]) -> str:
    """Return what is done with a tensor outside the arena, and why it is not simply kept."""
    site = plan.machine.compute_tier
    choice, way = choice_of(plan, tensor.name)
    if choice == KEEP:
        if tensor.kind == TensorKind.WEIGHT:
            where = f"it rests in {tensor.home}"
            return where if tensor.home == site else f"{where}, where the ops run that read it"
        return _reason_without_choice(tensor, plan)
    done = (
        f"it leaves {site} for {way} while no op needs it"
        if choice == MOVE
        else f"it is dropped and computed again by '{way}'"
    )
    keep = next((other for other in choices if other.choice == KEEP), None)
    if keep is None:
        return done
    if keep.change_s is None:
        return f"{done}: kept, {keep.obstacle}"
    if keep.change_s < -_SAME * tensor.plan_s:
        return (
            f"{done}; keeping it would save {format_time(-keep.change_s)}, which the search did not find "
            f"(its gap is {plan.certificate.gap:.2%})"
        )
    return f"{done}: keeping it would save no time"


def _reason(plan: Plan, tensor: TensorExplanation, other: Alternative) -> str:
    site = plan.machine.compute_tier
    if other.change_s is None:
        if tensor.home == site:
            return f"it stays in {site}: streamed, it would not fit beside what is in use at the same time"
        return (
            f"{_streamed(plan, tensor)}: kept in {site} it takes {format_size(other.arena_change_bytes)}, "
            f"which the budget of {format_size(plan.budget_bytes[site])} does not leave"
        )
    small = abs(other.change_s) <= _SAME * tensor.plan_s
    if tensor.home == site:
        if small or other.change_s < 0:
            return f"it stays in {site} because there is room; streaming it would cost no time"
        return f"it stays in {site}: streaming it would cost {format_time(other.change_s)} per iteration"
    if small:
        return f"{_streamed(plan, tensor)}: keeping it in {site} would save no time"
    if other.change_s > 0:
        return (
            f"{_streamed(plan, tensor)}: keeping it in {site} would cost {format_time(other.change_s)} per "
            "iteration, because less room would be left to prefetch the others into"
        )
    return (
        f"{_streamed(plan, tensor)}; keeping it in {site} would save {format_time(-other.change_s)}, which the "
        f"search left within its gap of {plan.certificate.gap:.2%}"
    )
