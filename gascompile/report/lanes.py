"""Lanes: what each processor and each link does over one iteration, as pictures and pages show it."""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size
from gascompile.cost_models.simulate.trace import Trace

OP, RECOMPUTED, WAITING = "op", "recomputed", "waiting"


@dataclass(frozen=True, slots=True)
class Span:
    """What happens for a time."""

    begun_s: float
    ended_s: float
    kind: str
    """``op``, ``recomputed``, ``waiting``, or the kind of a transfer: ``prefetch``, ``reload``, ``offload``."""
    label: str


@dataclass(frozen=True, slots=True)
class PictureLane:
    """A processor or a link, with what is worth saying of it."""

    name: str
    note: str
    spans: tuple[Span, ...]


def end_s(trace: Trace) -> float:
    """Return when the last thing of an iteration ends; never 0."""
    return max([trace.seconds, *(span.ended_s for span in trace.ops)]) or 1e-9


def lanes(plan: Plan, trace: Trace) -> tuple[PictureLane, ...]:
    """Return a lane for each processor and each link, cut at the ends of the iteration."""
    sites = list(dict.fromkeys([plan.machine.compute_tier, *(span.site for span in trace.ops)]))
    waiting = _waiting(trace)
    pictured = []
    for site in sites:
        spans = [
            Span(s.begun_s, s.ended_s, RECOMPUTED if s.recomputed else OP, plan.ops[s.op].name)
            for s in trace.ops
            if s.site == site
        ]
        pictured.append(
            PictureLane(f"{site} computes", "", (*spans, *(waiting if site == sites[0] else ())))
        )
    last_s = end_s(trace)
    for link in dict.fromkeys(transfer.link for transfer in trace.transfers):
        spans = [
            Span(max(0.0, t.begun_s), min(last_s, t.arrived_s), t.kind, t.tensor)
            for t in trace.transfers
            if t.link == link and min(last_s, t.arrived_s) > max(0.0, t.begun_s)
        ]
        busy = sum(span.ended_s - span.begun_s for span in spans) / last_s
        size = format_size(trace.link_bytes.get(link, 0))
        pictured.append(PictureLane(link, f"{busy:.0%} busy, {size}", tuple(spans)))
    return tuple(pictured)


def _waiting(trace: Trace) -> tuple[Span, ...]:
    """Return the waits; they fill the gaps in front of the ops."""
    waited = {(t.tensor, t.wait_op): t for t in trace.transfers}
    spans = []
    for stall in trace.stalls:
        transfer = waited[stall.tensor, stall.op]
        # A measured wait also takes until the thread is awake again.
        begun_s = max(transfer.arrived_s - stall.time_s, transfer.needed_s or 0.0)
        spans.append(Span(begun_s, transfer.arrived_s, WAITING, stall.tensor))
    return tuple(spans)
