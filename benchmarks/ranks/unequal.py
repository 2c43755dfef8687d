"""One of two ranks has half a core, or loses it: rows that follow, beside DDP and FSDP2 with equal rows.

The ideal step is that of ranks which share rows by their speed and exchange nothing. Their speeds are measured side by
side, in two jobs that know nothing of each other: on one host they have one memory, by which either slows the other
down, whatever program they run. Steps with exchanges and without take turns, and each turn with exchanges is held
against those before and after it.
"""

from __future__ import annotations

import statistics
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

from benchmarks.ranks import jobs
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Found, Result, Setting, relative
from benchmarks.ranks.restarts import lines_of

SPEED_UP, OF_IDEAL, SOON = 1.4, 1.05, 10
_HALF = Limits(cores=0.5)
_LOOK_S = 0.05
"""Between two looks at what jobs have done."""
_TURNS = 4
"""A host that others use is a tenth slower in one minute than in the next; what drifts from one turn to the next is
on both sides of each."""


class _Runs:
    """Jobs of the same model and the same batches."""

    def __init__(self, setting: Setting) -> None:
        self._folder, self.is_toy = setting.folder, setting.toy
        # The ideal takes fractions of a row: of 36 rows one is up to 4 % of the half core's step, of 72 it is 2 %. A
        # rank's share of the 48 MB of gradients and parameters costs about 0.08 s of a core whatever its rows are: of
        # a step of 3,000 tokens on half a core that is 8 %, of one of 12,000 it is 2 %.
        self.total, self.tokens = (6, 16) if setting.toy else (72, 170)
        self.slow_at = 3 if setting.toy else 6
        self._task = {
            "model": "gpt2",
            "size": "toy" if setting.toy else "middle",
            "tokens": self.tokens,
            "budget": "64MiB" if setting.toy else "4GiB",
            "options": {"time_limit_s": 2.0},
        }

    def ranks(self, rows: list[int], limits: list[Limits], **more: Any) -> list[Result]:
        """Return what each rank found."""
        task = {**self._task, "rows": rows, **more}
        ended = jobs.run(self._folder, {"tasks": [task]}, limits)
        return [rank[0] for rank in ended.trained()]

    def side_by_side(self, rows: list[int], limits: list[Limits], steps: int) -> list[float]:
        """Return the seconds of a row of each rank, while the other computes as if there were none."""
        folder = self._folder / f"beside-{uuid.uuid4().hex[:8]}"
        logs, stop = [folder / str(number) for number in range(len(rows))], folder / "stop"
        for log in logs:
            log.mkdir(parents=True)
        with ThreadPoolExecutor(len(rows)) as pool:
            jobs_of = [
                pool.submit(self.ranks, [own], [limit], log=str(log), stop=str(stop))
                for own, limit, log in zip(rows, limits, logs, strict=True)
            ]
            ends: list[list[float]] = [[] for _ in rows]
            while min(map(len, ends)) < steps and not any(job.done() for job in jobs_of):
                time.sleep(_LOOK_S)
                ends = [[line.at for line in lines_of(log / "steps-0")] for log in logs]
            stop.write_text("0")
            for job in jobs_of:
                job.result()
        # From when the later one has warmed up to when it was enough; each rank's whole steps within.
        begin, end = max(at[1] for at in ends), max(at[-1] for at in ends)
        within = [[at for at in of_rank if begin <= at <= end] for of_rank in ends]
        return [
            (at[-1] - at[0]) / (len(at) - 1) / own for at, own in zip(within, rows, strict=True)
        ]


def run(setting: Setting) -> Found:
    """Measure both rivals, planned steps whose rows follow, and what the same rows take without exchanges."""
    found, runs = Found(), _Runs(setting)
    equal, few = [runs.total // 2] * 2, 2 if setting.toy else 5
    pair = [ONE_CORE, _HALF]
    losses: dict[str, list[float]] = {}
    for way in ("ddp", "fsdp2"):
        ranks = runs.ranks(equal, pair, steps=few, way=way)
        losses[way] = ranks[0]["losses"]
        found.rows.append(_row(f"{way}, equal rows", ranks[0], few - 2))
    steps = 8 if setting.toy else 14
    ranks = runs.ranks(equal, pair, steps=steps, balance=True)
    row = _row("planned, rows follow", ranks[0], 4)
    found.rows.append(row)
    for rival in found.rows[:2]:
        found.at_least(
            f"times faster than {rival['what']}", rival["step_s"] / row["step_s"], SPEED_UP
        )
    found.at_most("losses beside DDP's", relative(ranks[0]["losses"][:few], losses["ddp"]), 1e-6)
    found.true(
        "both ranks' parameters have the same bits", ranks[0]["digest"] == ranks[1]["digest"]
    )
    _beside_ideal(found, runs, row["rows"])
    _slowed(found, runs, 14 if setting.toy else runs.slow_at + 14)
    return found


def _beside_ideal(found: Found, runs: _Runs, rows: list[int]) -> None:
    """The rows that the ranks have settled on, with exchanges between two measurements without."""
    pair, steps = [ONE_CORE, _HALF], 4 if runs.is_toy else 8
    speeds = [runs.side_by_side(rows, pair, steps)]
    steps_s = []
    for _ in range(1 if runs.is_toy else _TURNS):
        steps_s.append(_late(runs.ranks(rows, pair, steps=steps)[0], steps - 2))
        speeds.append(runs.side_by_side(rows, pair, steps))
    alone_s = [runs.total / sum(1 / row_s for row_s in rows_s) for rows_s in speeds]
    ideals_s = [statistics.mean(around) for around in pairwise(alone_s)]
    ratios = [step_s / ideal_s for step_s, ideal_s in zip(steps_s, ideals_s, strict=True)]
    for what, seconds in (("planned, settled rows", steps_s), ("ideal", ideals_s)):
        found.rows.append({"what": what, "step_s": statistics.median(seconds), "rows": rows})
    found.rows[-1] |= {"_steps_s": steps_s, "_row_s": speeds}
    found.at_most("of the ideal step", statistics.median(ratios), OF_IDEAL)


def _slowed(found: Found, runs: _Runs, steps: int) -> None:
    """The last rank loses half its core in the middle of training."""
    equal = [runs.total // 2] * 2
    first = runs.ranks(
        equal, [ONE_CORE, ONE_CORE], steps=steps, balance=True, slow_at=runs.slow_at
    )[0]
    row = _row("planned, slowed in the middle", first, 4)
    beside_s = runs.side_by_side(row["rows"], [ONE_CORE, _HALF], 4 if runs.is_toy else 10)
    ideal_s = runs.total / sum(1 / row_s for row_s in beside_s)
    row["steps_until_rows_last_changed"] = after = _settled(first["rows"], runs.slow_at)
    row["step_s_before"] = statistics.median(first["seconds"][2 : runs.slow_at])
    found.rows += [row, {"what": "ideal, after it", "step_s": ideal_s, "rows": row["rows"]}]
    found.at_most("steps until rows follow a rank that slows down", after, SOON)
    found.at_most("of the ideal step, after it slowed down", row["step_s"] / ideal_s, OF_IDEAL)


def _settled(rows: list[list[int]], slow_at: int) -> int | None:
    """Return after how many steps rows were as they stayed; ``None`` where they never changed."""
    changes = [n for n in range(slow_at + 1, len(rows)) if rows[n] != rows[n - 1]]
    return changes[-1] - slow_at if changes else None


def _late(rank: Result, count: int) -> float:
    return float(statistics.median(rank["seconds"][-max(count, 1) :]))


def _row(what: str, rank: Result, count: int) -> Result:
    rows = rank["rows"]
    changed = [n for n, own in enumerate(rows) if own != rows[0]]
    return {
        "what": what,
        "step_s": _late(rank, count),
        "rows": rows[-1],
        "first_changed_at": changed[0] if changed else None,
        "planning_s": sum(rank["prepared_s"]),
        "_seconds": rank["seconds"],
        "_rows": rows,
        "_losses": rank["losses"],
    }
