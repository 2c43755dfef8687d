"""Briefly: why each tensor is where it is, in a phrase, for all tensors of a plan from one replay.

``explain`` says more of one of them, and what the alternatives would take.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gascompile.core.plan import Plan
from gascompile.core.sizes import format_time
from gascompile.core.steps import Recompute
from gascompile.core.workload import TensorKind, TensorSpec
from gascompile.cost_models.formulas.gathers import gathered
from gascompile.cost_models.simulate.trace import Trace, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """A tensor in one line."""

    name: str
    kind: TensorKind
    size_bytes: int
    home: str
    moved_bytes: int
    """Over all links in one iteration."""
    stall_s: float
    """Seconds that ops wait for it in one iteration."""
    why: str


def briefly(plan: Plan, trace: Trace) -> tuple[Brief, ...]:
    """Return a line for each tensor, in the workload's order; pure."""
    transfers: dict[str, list[Transfer]] = {}
    for transfer in trace.transfers:
        transfers.setdefault(transfer.tensor, []).append(transfer)
    stall_s: dict[str, float] = {}
    for stall in trace.stalls:
        stall_s[stall.tensor] = stall_s.get(stall.tensor, 0.0) + stall.time_s
    again = {
        name: plan.ops[step.source].name
        for step in plan.steps
        if isinstance(step, Recompute)
        for name in plan.workload.ops[step.source].writes
    }
    by_rows = {name for op in plan.workload.ops for name in gathered(op)}
    site, briefs = plan.machine.compute_tier, []
    for tensor in plan.workload.tensors:
        planned = plan.tensors.get(tensor.name)
        home = planned.home if planned is not None else site
        moves = transfers.get(tensor.name, [])
        late_s = stall_s.get(tensor.name, 0.0)
        if moves:
            why = _moved(moves, late_s)
        elif tensor.name in again:
            why = f"dropped, and computed again by '{again[tensor.name]}'"
        elif tensor.name in by_rows and home != site:
            why = f"ops read the rows that they need from {home}"
        else:
            why = _kept(tensor, home, site)
        briefs.append(
            Brief(
                name=tensor.name,
                kind=tensor.kind,
                size_bytes=tensor.size_bytes,
                home=home,
                moved_bytes=sum(move.size_bytes for move in moves),
                stall_s=late_s,
                why=why,
            )
        )
    return tuple(briefs)


def _moved(moves: Iterable[Transfer], late_s: float) -> str:
    moves = list(moves)
    loads = [move for move in moves if move.kind not in ("offload", "fetch")]
    ahead = [move.link for move in moves if move.kind == "fetch"]
    stored = [move.link for move in moves if move.kind == "offload"]
    parts = []
    if stored:
        parts.append(f"leaves over {', '.join(dict.fromkeys(stored))}")
    if ahead:
        parts.append(f"is read ahead over {', '.join(dict.fromkeys(ahead))}")
    if loads:
        links = ", ".join(dict.fromkeys(move.link for move in loads))
        times = f"{len(loads)} times " if len(loads) > 1 else ""
        parts.append(f"comes {times}over {links}")
    waited = [move for move in loads if move.needed_s is not None]
    if late_s:
        parts.append(f"{format_time(late_s)} late")
    elif waited:
        parts.append(f"{format_time(min(move.slack_s for move in waited))} before it is needed")
    return ", ".join(parts)


def _kept(tensor: TensorSpec, home: str, site: str) -> str:
    match tensor.kind:
        case TensorKind.INPUT:
            return "the caller's memory, neither moved nor counted"
        case TensorKind.WEIGHT if home == site:
            return f"stays in {site}"
        case TensorKind.WEIGHT:
            return f"stays in {home}, where the ops run that read it, or none does"
        case TensorKind.STATE:
            return f"read and written in place in {home}"
        case TensorKind.OUTPUT:
            return f"stays in {site} until the caller has it"
        case _:
            return f"lives in {site} while it is in use"
