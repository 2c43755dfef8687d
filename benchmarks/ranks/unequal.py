"""One of two ranks has half a core, or loses it: rows that follow, beside DDP and FSDP2 with equal rows.

The ideal step is that of ranks which share rows by their speed and exchange nothing: all rows, times the seconds of a
row of one rank alone on a full core, over one and a half cores. Half a core computes less than half of a full one, as
each pause costs its caches: beside it stands the ideal of the speeds that both ranks have when they are alone.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.ranks import jobs
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Found, Result, Setting, relative

SPEED_UP, OF_IDEAL, SOON = 1.4, 1.05, 10
_HALF = Limits(cores=0.5)
_CORES = 1.5


class _Runs:
    """Jobs of the same model and the same batches."""

    def __init__(self, setting: Setting) -> None:
        self._folder = setting.folder
        # About as many tokens as 12 rows of 256, in rows that two cores share by halves and one and a half by thirds:
        # of 32 either rank has a row of 32 too many, 3 % of the ideal step.
        self.total, self.tokens = (6, 16) if setting.toy else (36, 85)
        self.slow_at = 3 if setting.toy else 6
        self._task = {
            "model": "gpt2",
            "size": "toy" if setting.toy else "middle",
            "tokens": self.tokens,
            "budget": "64MiB" if setting.toy else "1GiB",
            "options": {"time_limit_s": 2.0},
        }

    def ranks(self, rows: list[int], limits: list[Limits], **more: Any) -> list[Result]:
        """Return what each rank found."""
        task = {**self._task, "rows": rows, **more}
        ended = jobs.run(self._folder, {"tasks": [task]}, limits)
        return [rank[0] for rank in ended.trained()]

    def alone(self, rows: int, limits: Limits, steps: int) -> float:
        """Return the seconds of a row of one rank that has no other beside it."""
        (rank,) = self.ranks([rows], [limits], steps=steps)
        return _late(rank, steps - 2) / rows


def run(setting: Setting) -> Found:
    """Measure one rank alone, both rivals, and planned steps whose rows follow."""
    found, runs = Found(), _Runs(setting)
    equal, few = [runs.total // 2] * 2, 2 if setting.toy else 5
    # As many rows as each is to have.
    row_s = runs.alone(runs.total * 2 // 3, ONE_CORE, few)
    half_row_s = runs.alone(runs.total // 3, _HALF, few)
    ideal_s = runs.total * row_s / _CORES
    own_ideal_s = runs.total / (1 / row_s + 1 / half_row_s)
    found.rows.append({"what": "ideal", "step_s": ideal_s, "row_s": row_s})
    found.rows.append({"what": "ideal of own speeds", "step_s": own_ideal_s, "row_s": half_row_s})
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
    for rival in found.rows[2:4]:
        found.at_least(
            f"times faster than {rival['what']}", rival["step_s"] / row["step_s"], SPEED_UP
        )
    found.at_most("of the ideal step", row["step_s"] / ideal_s, OF_IDEAL)
    found.at_most("of the ideal of own speeds", row["step_s"] / own_ideal_s, OF_IDEAL)
    found.at_most("losses beside DDP's", relative(ranks[0]["losses"][:few], losses["ddp"]), 1e-6)
    found.true(
        "both ranks' parameters have the same bits", ranks[0]["digest"] == ranks[1]["digest"]
    )
    _slowed(found, runs, 14 if setting.toy else runs.slow_at + 14, ideal_s)
    return found


def _slowed(found: Found, runs: _Runs, steps: int, ideal_s: float) -> None:
    """The last rank loses half its core in the middle of training."""
    equal = [runs.total // 2] * 2
    first = runs.ranks(
        equal, [ONE_CORE, ONE_CORE], steps=steps, balance=True, slow_at=runs.slow_at
    )[0]
    row = _row("planned, slowed in the middle", first, 4)
    row["steps_until_rows_last_changed"] = after = _settled(first["rows"], runs.slow_at)
    row["step_s_before"] = statistics.median(first["seconds"][2 : runs.slow_at])
    found.rows.append(row)
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
