"""Predicted beside measured seconds of a step; and what more ranks or more memory do to predictions."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.ranks import jobs
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.parts import Found, Result, Setting

ASKED = 0.10
_SAME = 1.001
"""Plans of equal length differ by what the search leaves of its gap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One plan to make and to run."""

    model: str
    ranks: int
    budget: str
    bytes_per_s: float | None = None
    """Of the network; the loopback where it is ``None``."""


COMBINATIONS = (
    Combination(model="gpt2", ranks=1, budget="1GiB"),
    Combination(model="gpt2", ranks=2, budget="1GiB"),
    Combination(model="gpt2", ranks=2, budget="160MiB"),
    Combination(model="gpt2", ranks=2, budget="1GiB", bytes_per_s=125e6),
    Combination(model="gpt2", ranks=2, budget="160MiB", bytes_per_s=40e6),
    Combination(model="llama", ranks=2, budget="1GiB"),
    Combination(model="llama", ranks=2, budget="192MiB", bytes_per_s=125e6),
    Combination(model="convnet", ranks=2, budget="1GiB", bytes_per_s=40e6),
)
TOY = (
    Combination(model="gpt2", ranks=2, budget="16MiB"),
    Combination(model="gpt2", ranks=2, budget="16MiB", bytes_per_s=40e6),
)
_TABLE = {False: ("160MiB", "256MiB", "512MiB", "1GiB"), True: ("8MiB", "16MiB")}


def _task(combination: Combination, *, toy: bool) -> Result:
    rows = {"convnet": 64}.get(combination.model, 8)
    return {
        "model": combination.model,
        "size": "toy" if toy else "middle",
        "rows": [rows // combination.ranks] * combination.ranks,
        # The first two find memory and files for the first time.
        "steps": 3 if toy else 12,
        "sampled": False,
        "budget": combination.budget,
        "options": {"time_limit_s": 3.0},
    }


def run(setting: Setting) -> Found:
    """Run every combination, then plan the table."""
    found = Found()
    together: dict[tuple[int, float | None], list[Combination]] = {}
    for combination in TOY if setting.toy else COMBINATIONS:
        together.setdefault((combination.ranks, combination.bytes_per_s), []).append(combination)
    for (ranks, bytes_per_s), same in together.items():
        tasks = [_task(combination, toy=setting.toy) for combination in same]
        ended = jobs.run(
            setting.folder, {"tasks": tasks}, [ONE_CORE] * ranks, bytes_per_s=bytes_per_s
        )
        for combination, *results in zip(same, *ended.required(), strict=True):
            found.rows.append(_row(combination, results))
    errors = [abs(row["error"]) for row in found.rows if row["error"] is not None]
    within = sum(error <= ASKED for error in errors)
    found.at_most("largest error of a prediction", max(errors, default=None), ASKED)
    found.at_least(f"of {len(found.rows)} combinations within {ASKED:.0%}", within, len(found.rows))
    _table(found, setting)
    return found


def _row(combination: Combination, ranks: list[Result]) -> Result:
    row: Result = {
        "model": combination.model,
        "ranks": combination.ranks,
        "budget": combination.budget,
        "network": f"{(combination.bytes_per_s or 0) / 1e6:.0f} MB/s"
        if combination.bytes_per_s
        else "loopback",
        "predicted_s": None,
        "measured_s": None,
        "error": None,
    }
    refused = [rank["error"] for rank in ranks if "error" in rank]
    if refused:
        return {**row, "refused": refused[0]}
    # Ranks wait for each other in every step.
    row["predicted_s"] = max(rank["predicted_s"] for rank in ranks)
    row["measured_s"] = statistics.median(ranks[0]["seconds"][2:])
    row["error"] = row["predicted_s"] / row["measured_s"] - 1
    row["_seconds"] = ranks[0]["seconds"]
    return row


def _table(found: Found, setting: Setting) -> None:
    """Plan the same batches for more ranks and for more memory; nothing is run."""
    budgets, table = _TABLE[setting.toy], {}
    # Plans of before are found again in their cache, and rest on what was measured then.
    folder = setting.folder / "table"
    folder.mkdir()
    for ranks in (1, 2):
        tasks = [
            {**_task(_at(ranks, budget), toy=setting.toy), "prepare_only": True}
            for budget in budgets
        ]
        ended = jobs.run(folder, {"tasks": tasks}, [ONE_CORE] * ranks)
        for budget, *results in zip(budgets, *ended.required(), strict=True):
            if all("predicted_s" in result for result in results):
                table[ranks, budget] = max(result["predicted_s"] for result in results)
            found.notes.append(
                f"predicted, gpt2, {ranks} ranks of {budget}: {table.get((ranks, budget), 'refused')}"
            )
    memory = [
        table[ranks, more] / table[ranks, less]
        for ranks in (1, 2)
        for less, more in pairwise(budgets)
        if (ranks, less) in table and (ranks, more) in table
    ]
    both = [table[2, b] / table[1, b] for b in budgets if (1, b) in table and (2, b) in table]
    found.at_most("more memory, of the step predicted with less", max(memory, default=None), _SAME)
    found.at_most("two ranks, of the step predicted for one", max(both, default=None), _SAME)


def _at(ranks: int, budget: str) -> Combination:
    return Combination(model="gpt2", ranks=ranks, budget=budget)
