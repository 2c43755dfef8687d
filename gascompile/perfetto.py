"""A trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Devices, links
and memory are three processes; each site and each link is a thread of its own, each tier a counter.
"""

from __future__ import annotations

from typing import Any

from gascompile.cost_models.trace import Trace, Transfer
from gascompile.ir import Plan
from gascompile.reports import Stall
from gascompile.units import MIB

Event = dict[str, Any]
_DEVICES, _LINKS, _MEMORY = 1, 2, 3


def perfetto(plan: Plan, trace: Trace) -> dict[str, Any]:
    """Return one iteration of ``plan`` as the JSON object of a trace file.

    Transfers that begin before the iteration or end after it are cut at its ends, where the
    iterations before and after it would go on.
    """
    sites = list(dict.fromkeys([plan.machine.compute_tier, *(span.site for span in trace.ops)]))
    links = list(dict.fromkeys([*trace.link_bytes, *(t.link for t in trace.transfers)]))
    events: list[Event] = []
    for process, (name, tracks) in enumerate(
        (("devices", sites), ("links", links), ("memory", [])), start=1
    ):
        events += _names(process, name, tracks)
    end_s = max([trace.seconds, *(span.ended_s for span in trace.ops)])
    events += _devices(plan, trace, sites)
    for number, transfer in enumerate(trace.transfers):
        events += _transfer(plan, transfer, number, links.index(transfer.link) + 1, end_s)
    events += _memory(trace)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.workload.name,
            "machine": trace.machine,
            "seconds": trace.seconds,
        },
    }


def _names(process: int, name: str, tracks: list[str]) -> list[Event]:
    """Return the metadata that names a process and its threads, in order."""
    events: list[Event] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for thread, track in enumerate(tracks, start=1):
        place = {"ph": "M", "pid": process, "tid": thread}
        events.append({**place, "name": "thread_name", "args": {"name": track}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return events


def _slice(
    process: int, thread: int, name: str, kind: str, span: tuple[float, float], args: Event
) -> Event:
    begun_s, ended_s = span
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name,
        "cat": kind,
        "ts": _microseconds(begun_s),
        "dur": _microseconds(ended_s - begun_s),
        "args": args,
    }


def _microseconds(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _devices(plan: Plan, trace: Trace, sites: list[str]) -> list[Event]:
    """Return the ops of each site, and the waits in front of them."""
    stalls: dict[int, list[Stall]] = {}
    for stall in trace.stalls:
        stalls.setdefault(stall.op, []).append(stall)
    waits = {(t.tensor, t.wait_op): t for t in trace.transfers}
    events: list[Event] = []
    for span in trace.ops:
        thread = sites.index(span.site) + 1
        due = [] if span.recomputed else stalls.pop(span.op, [])
        events += [_stall(stall, waits.get((stall.tensor, stall.op)), thread) for stall in due]
        op = plan.workload.ops[span.op]
        name, kind = (f"{op.name} (again)", "recompute") if span.recomputed else (op.name, "op")
        args = {"op": span.op, "reads": ", ".join(op.reads), "writes": ", ".join(op.writes)}
        times = (span.begun_s, span.ended_s)
        events.append(_slice(_DEVICES, thread, name, kind, times, args))
    # What is left is waited for at the end.
    rest = [stall for due in stalls.values() for stall in due]
    return events + [_stall(stall, waits.get((stall.tensor, stall.op)), 1) for stall in rest]


def _stall(stall: Stall, transfer: Transfer | None, thread: int) -> Event:
    arrived_s = transfer.arrived_s if transfer is not None else 0.0
    args = {"tensor": stall.tensor, "link": stall.link, "cause": stall.cause}
    if stall.blocker:
        args["blocker"] = stall.blocker
    times = (arrived_s - stall.time_s, arrived_s)
    return _slice(_DEVICES, thread, f"wait for {stall.tensor}", "stall", times, args)


def _transfer(
    plan: Plan, transfer: Transfer, number: int, thread: int, end_s: float
) -> list[Event]:
    """Return the part of a transfer that lies in the iteration, and an arrow to the op that needs it."""
    begun_s, arrived_s = max(0.0, transfer.begun_s), min(end_s, transfer.arrived_s)
    if arrived_s <= begun_s:
        return []
    args: Event = {"bytes": transfer.size_bytes, "issued before op": transfer.issue_op}
    if transfer.wait_op is not None and transfer.wait_op < len(plan.ops):
        args["needed by"] = plan.ops[transfer.wait_op].name
        args["slack_ms"] = round(transfer.slack_s * 1e3, 6)
    name = f"{transfer.kind} {transfer.tensor}"
    events = [_slice(_LINKS, thread, name, transfer.kind, (begun_s, arrived_s), args)]
    if transfer.needed_s is not None:
        flow = {"cat": "arrival", "name": "arrival", "id": number}
        needed = _microseconds(max(transfer.needed_s, transfer.arrived_s))
        start = {"ph": "s", "pid": _LINKS, "tid": thread, "ts": _microseconds(begun_s)}
        events += [
            {**flow, **start},
            {**flow, "ph": "f", "bp": "e", "pid": _DEVICES, "tid": 1, "ts": needed},
        ]
    return events


def _memory(trace: Trace) -> list[Event]:
    """Return a counter per tier: one value for each use of its memory."""
    events: list[Event] = []
    for tier, curve in trace.memory.items():
        for i, time_s in enumerate(curve.times_s):
            levels = {u: round(c[i] / MIB, 3) for u, c in curve.bytes_by_use.items()}
            events.append(
                {
                    "ph": "C",
                    "pid": _MEMORY,
                    "name": f"{tier} (MiB)",
                    "ts": _microseconds(time_s),
                    "args": levels or {"used": 0},
                }
            )
    return events
