"""Stages of a pipeline beside ranks that each have rows: over a slow network, and where memory is short.

Ranks with rows of their own send each other all gradients and parameters, stages what is between two layers: over a
slow network stages are faster. Of a model that is larger than a rank's budget each stage has its part in memory, where
ranks with rows read and write moments in every step, from drives of their own: there either way may be the faster one,
and predictions have to say which. The number of micro-batches is the one that is predicted to be best.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ranks import jobs
from benchmarks.ranks.drive_faults import drive
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.limits import Limits, network
from benchmarks.ranks.parts import Found, Result, Setting, relative
from benchmarks.training_prediction import with_disk
from gascompile.core.machine import Machine
from gascompile.core.serial import dumps, from_json, to_json

FASTER, ERROR, CLOSE = 1.0, 0.10, 1e-5
CHOSEN = 1 - ERROR  # ways that predictions cannot tell apart are as good as each other
DRIVE_BYTES_PER_S = 150e6
_WAYS = ("rows", "pp")
_DRIVE_BYTES = 768 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What two ranks have."""

    budget: str
    bytes_per_s: float | None = None
    """Of the network; the loopback where it is ``None``."""
    has_drives: bool = False
    """Whether each has a drive of its own, held to its speed."""


CASES = (
    Case(budget="512MiB", bytes_per_s=40e6),
    Case(budget="128MiB", has_drives=True),
)
TOY = (Case(budget="16MiB", bytes_per_s=40e6),)


def run(setting: Setting) -> Found:
    """Train the same batches both ways, in each case."""
    found = Found()
    for case in TOY if setting.toy else CASES:
        rows = _measured(setting, case)
        found.rows += rows
        what = rows[0]["network"] if case.bytes_per_s else "drives of their own"
        of_rows, of_stages = rows
        if "_losses" in of_rows and "_losses" in of_stages:
            difference = relative(of_stages["_losses"], of_rows["_losses"])
            found.at_most(f"losses beside those of rows, {what}", difference, CLOSE)
        has_both = of_rows["measured_s"] and of_stages["measured_s"]
        gain = of_rows["measured_s"] / of_stages["measured_s"] if has_both else None
        if case.bytes_per_s:
            found.at_least(f"times as fast as ranks with rows, {what}", gain, FASTER)
        of_best = None
        if gain is not None:
            of_best = gain if of_stages["predicted_s"] <= of_rows["predicted_s"] else 1 / gain
        found.at_least(f"times as fast as the other way, by prediction, {what}", of_best, CHOSEN)
        for row in rows:
            error = abs(row["error"]) if row.get("error") is not None else None
            found.at_most(f"error of the prediction, {row['way']}, {what}", error, ERROR)
    return found


def _measured(setting: Setting, case: Case) -> list[Result]:
    """Run both ways one after the other, on the same two ranks."""
    with contextlib.ExitStack() as held:
        caches, devices = [], {}
        machine: Path | None = None
        for number in range(2 if case.has_drives else 0):
            name = f"pipeline-{number}"
            mounted, device = held.enter_context(drive(setting.folder, name, _DRIVE_BYTES))
            caches.append(str(mounted / "cache"))
            devices[device] = DRIVE_BYTES_PER_S
        if case.has_drives:
            machine = setting.folder / "pipeline-machine.json"
            slow = with_disk(_machine_of_a_rank(setting), DRIVE_BYTES_PER_S)
            machine.write_text(dumps(to_json(slow)))
        tasks = [_task(case, way, caches, machine, toy=setting.toy) for way in _WAYS]
        hosts, given = held.enter_context(network(case.bytes_per_s))
        limits = [Limits(cores=ONE_CORE.cores, namespace=host) for host in hosts]
        shared = Limits(drives=devices)
        job = held.enter_context(
            jobs.started(setting.folder, {"tasks": tasks}, limits, given=given, shared=shared)
        )
        ranks = job.wait().required()
    found = list(zip(*ranks, strict=True))
    return [_row(case, way, list(of)) for way, of in zip(_WAYS, found, strict=True)]


def _machine_of_a_rank(setting: Setting) -> Machine:
    """Return this machine as one rank finds it: what more threads reach is another machine's name and speed."""
    worker = "benchmarks.ranks.machine_worker"
    measured = jobs.run(setting.folder, {"threads": 1}, [ONE_CORE], worker=worker).required()
    return from_json(Machine, measured[0], where="the machine of a rank")


def _task(case: Case, way: str, caches: list[str], machine: Path | None, *, toy: bool) -> Result:
    rows = 8
    return {
        "model": "llama",
        "size": "toy" if toy else "middle",
        "rows": [rows // 2] * 2,
        "steps": 3 if toy else 7,
        "budget": case.budget,
        "stages": way == "pp",
        "caches": caches or None,
        "options": {"time_limit_s": 5.0, **({"machine": str(machine)} if machine else {})},
    }


def _row(case: Case, way: str, ranks: list[Result]) -> Result:
    row: Result = {
        "way": "stages" if way == "pp" else way,
        "budget": case.budget,
        "network": f"{case.bytes_per_s / 1e6:.0f} MB/s" if case.bytes_per_s else "loopback",
        "drives": f"own, {DRIVE_BYTES_PER_S / 1e6:.0f} MB/s" if case.has_drives else "shared",
        "predicted_s": None,
        "measured_s": None,
        "error": None,
    }
    refused = [rank["error"] for rank in ranks if "error" in rank]
    if refused:
        return {**row, "refused": refused[0]}
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    # Ranks wait for each other in every step.
    row["predicted_s"] = max(rank["predicted_s"] for rank in ranks)
    row["measured_s"] = statistics.median(slowest[2:])
    row["error"] = row["predicted_s"] / row["measured_s"] - 1
    moved = [sum(rank["link_bytes"].values()) for rank in ranks]
    return {
        **row,
        "moved_bytes": moved,
        "_losses": ranks[0]["losses"],
        "_seconds": slowest,
        "_chosen": ranks[0]["division"],
    }
