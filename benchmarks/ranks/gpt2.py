"""GPT-2 small on two ranks of 0.6 GiB each, in memory groups of the budget and what the process takes beside it.

The constant is measured: the most anonymous memory of a rank that builds the same model without values, plans for it
and trains a tiny one, above its budget. FSDP2 runs in groups of the same size with its parameters, gradients and
moments offloaded, its blocks computed again and its weights read by shards.
"""

from __future__ import annotations

import signal
import statistics
from typing import Any

import torch

from benchmarks.ranks import jobs
from benchmarks.ranks.cases import LANGUAGE, case_of
from benchmarks.ranks.jobs import ONE_CORE, Ended
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Found, Result, Setting
from benchmarks.training_large import write_checkpoint
from gascompile.core.sizes import MIB, format_size, parse_size

SLOWER = 1.15
_ROUND_BYTES = 32 * MIB


class _Jobs:
    """Jobs on the same weights and batches."""

    def __init__(self, setting: Setting) -> None:
        self._folder = setting.folder
        self.size = "toy" if setting.toy else "full"
        self.budget = "6MiB" if setting.toy else "0.6GiB"
        self.rows = 4
        self.steps = 2 if setting.toy else 3
        self._weights = setting.folder / "weights.safetensors"
        with torch.device("meta"):
            self._weights_bytes = write_checkpoint(
                case_of("gpt2", self.size).build(), self._weights
            )

    def run(
        self, limits: list[Limits], *, budget: str = "", threads: int = 1, **more: Any
    ) -> Ended:
        """Train on as many ranks as there are limits."""
        size = len(limits)
        task = {
            "model": "gpt2",
            "size": self.size,
            "rows": [self.rows // size] * size,
            "steps": self.steps,
            "budget": budget or self.budget,
            "checkpoint": str(self._weights),
            "options": {"time_limit_s": 10.0},
            **more,
        }
        return jobs.run(self._folder, {"tasks": [task], "threads": threads}, limits, limit_s=300)

    def process_bytes(self) -> int:
        """Return what a rank takes beside its budget, and let caches be filled."""
        ended = self.run([ONE_CORE, ONE_CORE], prepare_only=True)
        peaks = [int(rank[0]["setup_peak_bytes"]) for rank in ended.trained()]
        return -(-max(peaks) // _ROUND_BYTES) * _ROUND_BYTES


def run(setting: Setting) -> Found:
    """Measure what a process takes, then train in that and the budget."""
    found, made = Found(), _Jobs(setting)
    process_bytes = made.process_bytes()
    limit_bytes = parse_size(made.budget) + process_bytes
    found.notes.append(
        f"{LANGUAGE[made.size]}, {made.rows} rows; a process takes {format_size(process_bytes)} before its first step, "
        f"so that each has {format_size(limit_bytes)}"
    )
    narrow = Limits(cores=1.0, memory_bytes=limit_bytes)
    two = _row("planned, two ranks of one thread", made.run([narrow] * 2))
    rival = _row("FSDP2 with offload, two ranks", made.run([narrow] * 2, way="fsdp2"))
    found.rows += [two, rival]
    wide = Limits(cores=2.0)
    made.run([wide], threads=2, prepare_only=True)  # measures the machine for two threads
    for budget in (made.budget, "12MiB" if setting.toy else "1.2GiB"):
        held = Limits(cores=2.0, memory_bytes=parse_size(budget) + process_bytes)
        ended = made.run([held], threads=2, budget=budget)
        found.rows.append(_row(f"planned, one rank of two threads, {budget}", ended))
    found.true("two ranks train in the budget and the constant", "step_s" in two)
    found.true("FSDP2 with offload is killed there", rival["ended"] == "killed")
    for one in found.rows[2:]:
        ratio = two["step_s"] / one["step_s"] if "step_s" in two and "step_s" in one else None
        found.at_most(f"times as long as {one['what']}", ratio, SLOWER)
    if "step_s" in two:
        found.at_most(
            "measured peak of a rank, of its budget",
            two["run_peak_bytes"] / parse_size(made.budget),
            1.0,
        )
    return found


def _row(what: str, ended: Ended) -> Result:
    row: Result = {"what": what, "ended": _how(ended)}
    ranks = [rank[0] for rank in ended.found if rank]
    if not ended.is_well or any("error" in rank for rank in ranks):
        row["said"] = next((r["error"] for r in ranks if "error" in r), ended.said[0])[-300:]
        row["group_peak_bytes"] = max((peak or 0) for peak in ended.peaks_bytes)
        return row
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    return {
        **row,
        "step_s": statistics.median(slowest[1:]),
        "stage": ranks[0].get("stage"),
        "predicted_s": max((rank.get("predicted_s") or 0.0) for rank in ranks),
        "run_peak_bytes": max(rank["run_peak_bytes"] for rank in ranks),
        "anonymous_peak_bytes": max(max(rank["peaks_bytes"]) for rank in ranks),
        "group_peak_bytes": max((peak or 0) for peak in ended.peaks_bytes),
        "_seconds": slowest,
        "_losses": ranks[0]["losses"],
        "_moved": ranks[0].get("link_bytes"),
    }


def _how(ended: Ended) -> str:
    if ended.is_well:
        return "well"
    killed = {-signal.SIGKILL, 128 + signal.SIGKILL}
    return "killed" if killed & set(ended.codes) else f"codes {ended.codes}"
