"""A trace as trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Devices, links
and memory are three processes; each site and each link is a thread of its own, each tier a counter. Where
several traces share a file, each of them is one process with all of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gascompile.core.plan import Plan
from gascompile.core.reports import Stall
from gascompile.core.sizes import MIB
from gascompile.cost_models.simulate.trace import Trace, Transfer

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where the events of a trace stand."""

    devices: int
    links: int
    memory: int
    """Processes."""
    sites: dict[str, int]
    link_threads: dict[str, int]
    first_arrow: int = 0


def perfetto(plan: Plan, trace: Trace) -> dict[str, Any]:
    """Return one iteration of ``plan`` as the JSON object of a trace file.

    Transfers that begin before the iteration or end after it are cut at its ends, where the
    iterations before and after it would go on.
    """
    sites, links = _tracks(plan, trace)
    places = _Places(
        devices=1,
        links=2,
        memory=3,
        sites=_numbered(sites),
        link_threads=_numbered(links),
    )
    names = _names(1, "devices", places.sites) + _names(2, "links", places.link_threads)
    events = [*names, *_names(3, "memory", {}), *_events(plan, trace, places)]
    return _file(plan, events, {"machine": trace.machine, "seconds": trace.seconds})


def perfetto_of_several(
    plan: Plan, traces: Mapping[str, Trace], *, first: int = 1
) -> dict[str, Any]:
    """Return several traces of an iteration of ``plan`` as one file: by name, a process each from ``first`` on."""
    events: list[Event] = []
    for process, (name, trace) in enumerate(traces.items(), start=first):
        sites, links = _tracks(plan, trace)
        threads = _numbered([*sites, *links])
        places = _Places(
            devices=process,
            links=process,
            memory=process,
            sites={site: threads[site] for site in sites},
            link_threads={link: threads[link] for link in links},
            first_arrow=process << 32,
        )
        events += _names(process, name, threads) + _events(plan, trace, places)
    return _file(plan, events, {"seconds": {name: t.seconds for name, t in traces.items()}})


def _file(plan: Plan, events: list[Event], said: dict[str, Any]) -> dict[str, Any]:
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"model": plan.workload.name, **said},
    }


def _tracks(plan: Plan, trace: Trace) -> tuple[list[str], list[str]]:
    """Return the sites and the links, in order."""
    sites = dict.fromkeys([plan.machine.compute_tier, *(span.site for span in trace.ops)])
    links = dict.fromkeys([*trace.link_bytes, *(t.link for t in trace.transfers)])
    return list(sites), list(links)


def _numbered(tracks: list[str]) -> dict[str, int]:
    return {track: thread for thread, track in enumerate(tracks, start=1)}


def _events(plan: Plan, trace: Trace, places: _Places) -> list[Event]:
    end_s = max([trace.seconds, *(span.ended_s for span in trace.ops)])
    events = _devices(plan, trace, places)
    for number, transfer in enumerate(trace.transfers, start=places.first_arrow):
        events += _transfer(plan, transfer, number, places, end_s)
    return events + _memory(trace, places)


def _names(process: int, name: str, tracks: dict[str, int]) -> list[Event]:
    """Return the metadata that names a process and its threads, in order."""
    events: list[Event] = [
        {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}},
    ]
    for track, thread in tracks.items():
        place = {"ph": "M", "pid": process, "tid": thread}
        events.append({**place, "name": "thread_name", "args": {"name": track}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": thread}})
    return events


def _slice(
    track: tuple[int, int], name: str, kind: str, span: tuple[float, float], args: Event
) -> Event:
    (process, thread), (begun_s, ended_s) = track, span
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


def _devices(plan: Plan, trace: Trace, places: _Places) -> list[Event]:
    """Return the ops of each site, and the waits in front of them."""
    stalls: dict[int, list[Stall]] = {}
    for stall in trace.stalls:
        stalls.setdefault(stall.op, []).append(stall)
    waits = {(t.tensor, t.wait_op): t for t in trace.transfers}
    events: list[Event] = []
    for span in trace.ops:
        track = (places.devices, places.sites[span.site])
        due = [] if span.recomputed else stalls.pop(span.op, [])
        events += [_stall(stall, waits.get((stall.tensor, stall.op)), track) for stall in due]
        op = plan.workload.ops[span.op]
        name, kind = (f"{op.name} (again)", "recompute") if span.recomputed else (op.name, "op")
        args = {"op": span.op, "reads": ", ".join(op.reads), "writes": ", ".join(op.writes)}
        times = (span.begun_s, span.ended_s)
        events.append(_slice(track, name, kind, times, args))
    # What is left is waited for at the end.
    rest = [stall for due in stalls.values() for stall in due]
    track = (places.devices, 1)
    return events + [_stall(stall, waits.get((stall.tensor, stall.op)), track) for stall in rest]


def _stall(stall: Stall, transfer: Transfer | None, track: tuple[int, int]) -> Event:
    arrived_s = transfer.arrived_s if transfer is not None else 0.0
    begun_s = arrived_s - stall.time_s
    if transfer is not None and transfer.needed_s is not None:
        # A measured wait also takes until the thread is awake again.
        begun_s = max(begun_s, transfer.needed_s)
    args = {"tensor": stall.tensor, "link": stall.link, "cause": stall.cause}
    if stall.blocker:
        args["blocker"] = stall.blocker
    times = (begun_s, arrived_s)
    return _slice(track, f"wait for {stall.tensor}", "stall", times, args)


def _transfer(
    plan: Plan, transfer: Transfer, number: int, places: _Places, end_s: float
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
    track = (places.links, places.link_threads[transfer.link])
    events = [_slice(track, name, transfer.kind, (begun_s, arrived_s), args)]
    if transfer.needed_s is not None:
        flow = {"cat": "arrival", "name": "arrival", "id": number}
        needed = _microseconds(max(transfer.needed_s, transfer.arrived_s))
        start = {"ph": "s", "pid": track[0], "tid": track[1], "ts": _microseconds(begun_s)}
        events += [
            {**flow, **start},
            {**flow, "ph": "f", "bp": "e", "pid": places.devices, "tid": 1, "ts": needed},
        ]
    return events


def _memory(trace: Trace, places: _Places) -> list[Event]:
    """Return a counter per tier: one value for each use of its memory."""
    events: list[Event] = []
    for tier, curve in trace.memory.items():
        for i, time_s in enumerate(curve.times_s):
            levels = {u: round(c[i] / MIB, 3) for u, c in curve.bytes_by_use.items()}
            events.append(
                {
                    "ph": "C",
                    "pid": places.memory,
                    "name": f"{tier} (MiB)",
                    "ts": _microseconds(time_s),
                    "args": levels or {"used": 0},
                }
            )
    return events
