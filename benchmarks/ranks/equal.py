"""Losses of ranks beside one eager process's on the same batches, and their parameters beside each other's."""

from __future__ import annotations

from typing import Any

from benchmarks.ranks import jobs
from benchmarks.ranks.jobs import ONE_CORE
from benchmarks.ranks.limits import Limits
from benchmarks.ranks.parts import Found, Setting, relative

MODELS = ("gpt2", "gpt2-dropout", "llama", "convnet", "mixtral")
ASKED = 1e-6
_ROWS = {2: ([6, 6], [8, 4]), 4: ([3, 3, 3, 3], [5, 3, 3, 1])}
_TOTAL = 12
_BUDGETS = {"mixtral": "256MiB"}
"""One op alone gathers the experts of all tokens, 127 MiB for five rows."""


def _tasks(setting: Setting, rows: list[int]) -> list[dict[str, Any]]:
    """Return a task per model."""
    return [
        {
            "model": model,
            "size": "toy" if setting.toy else "small",
            "rows": rows,
            "steps": 3 if setting.toy else 50,
            "budget": _BUDGETS.get(model, "64MiB"),
            "options": {"time_limit_s": 2.0, **setting.options},
        }
        for model in MODELS
    ]


def run(setting: Setting) -> Found:
    """Train each model on two and four ranks, with equal and unequal rows."""
    found = Found()
    whole = [{**task, "way": "eager"} for task in _tasks(setting, [_TOTAL])]
    eager = jobs.run(setting.folder, {"tasks": whole}, [ONE_CORE]).required()[0]
    halves = Limits(cores=0.5)
    for size in (2,) if setting.toy else (2, 4):
        tasks = [t for rows in _ROWS[size] for t in _tasks(setting, rows)]
        ended = jobs.run(
            setting.folder, {"tasks": tasks}, [ONE_CORE if size == 2 else halves] * size
        )
        for number, (task, *ranks) in enumerate(zip(tasks, *ended.required(), strict=True)):
            found.rows.append(_row(task, ranks, eager[number % len(MODELS)]))
    ran = [row for row in found.rows if "refused" not in row]
    found.at_most(
        "losses beside one process's", max((r["difference"] for r in ran), default=None), ASKED
    )
    are_same = bool(ran) and all(row["same_bits"] for row in ran)
    found.true("all ranks' parameters have the same bits", are_same)
    found.true("no model is refused", len(ran) == len(found.rows))
    return found


def _row(
    task: dict[str, Any], ranks: list[dict[str, Any]], eager: dict[str, Any]
) -> dict[str, Any]:
    row = {"model": task["model"], "rows": task["rows"]}
    refused = [rank["error"] for rank in ranks if "error" in rank]
    if refused:
        return {**row, "refused": refused[0]}
    return {
        **row,
        "stage": ranks[0].get("stage"),
        "steps": len(ranks[0]["losses"]),
        "difference": max(relative(rank["losses"], eager["losses"]) for rank in ranks),
        "same_bits": len({rank["digest"] for rank in ranks}) == 1,
        "same_losses": all(rank["losses"] == ranks[0]["losses"] for rank in ranks),
        "step_s": sorted(ranks[0]["seconds"])[len(ranks[0]["seconds"]) // 2],
        "_losses": ranks[0]["losses"],
        "_eager": eager["losses"],
    }
