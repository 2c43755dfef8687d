"""Write the newest result of the GPU benchmark into the README, between its two markers.

``python -m benchmarks.gpu_table`` writes; with ``--check`` it only says whether the README is up to date.
Results of the emulated accelerator say nothing about a GPU and are never shown.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.readme_section import fill_in, read_result, table
from gascompile.core.sizes import format_size

BEGIN = "<!-- gpu:begin -->"
END = "<!-- gpu:end -->"
TITLES = ("weights in", "model", "contender", "budget", "batch", "tokens/s", "of limit", "peak")
_WHERE = {
    "memory": "CPU memory",
    "disk": "drive",
    "budgets": "CPU memory",
    "resident": "GPU memory",
    "large": "CPU memory",
}
_NAMES = {"gascompile": "GASCompile", "accelerate": "accelerate", "torch_compile": "torch.compile"}


def newest_result(folder: Path) -> Path | None:
    """Return the latest result of a real GPU in ``folder``; ``None`` where there is none.

    Raises:
        SystemExit: a file cannot be read.
    """
    found = []
    for path in folder.glob("gpu-*.json"):
        result = read_result(path)
        if result["environment"]["gpu"] is not None and result["machine"] == "this machine":
            found.append((result["date"], path))
    return max(found)[1] if found else None


def render(result: dict[str, Any], source: str) -> str:
    """Return a result as Markdown; ``source`` is where it can be looked up."""
    rows = [
        _row(name, job, row)
        for name, section in result["sections"].items()
        for job in section["contenders"]
        for row in job.get("rows", ())
    ]
    missing = [
        f"- {_NAMES[job['contender']]}, {job['shape']}, weights from {_WHERE[name]}, {_missing(job)}: {job['failed']}"
        for name, section in result["sections"].items()
        for job in section["contenders"]
        if "failed" in job
    ]
    listed = ["What gave no figure, and why:", "\n".join(missing)] if missing else []
    return "\n\n".join((_setting(result, source), table(TITLES, rows), *listed))


def _setting(result: dict[str, Any], source: str) -> str:
    environment = result["environment"]
    versions = ", ".join(
        f"{name} {found}" for name, found in environment["versions"].items() if found is not None
    )
    link = result["link"].get("bytes_per_s")
    carried = f"Pinned memory reaches it at {link / 1e9:.1f} GB/s. " if link else ""
    return (
        f"Random Llamas in bfloat16 on {environment['gpu']}, {versions}. {carried}Each step computes one token of "
        "every sequence behind an empty cache, each contender in a process of its own; a peak is "
        "`torch.cuda.max_memory_allocated`. The limit is the larger of the time of the bytes that the budget leaves no "
        f"room for and the plan's own limit. Medians of {result['runs']} steps, measured on {result['date']}: "
        f"[{source}]({source})."
    )


def _missing(job: dict[str, Any]) -> str:
    """Return the budgets and batches that a job was to run and did not."""
    ran = {(row.get("budget"), row["batch"]) for row in job.get("rows", ())}
    of: dict[str | None, list[int]] = {}
    for budget in job.get("budgets") or [None]:
        if left := [batch for batch in job["batches"] if (budget, batch) not in ran]:
            of[budget] = left
    return "; ".join(
        (f"{budget}, " if budget else "") + "batch " + " and ".join(map(str, left))
        for budget, left in of.items()
    )


def _row(section: str, job: dict[str, Any], row: dict[str, Any]) -> list[str]:
    share = row.get("share_of_limit")
    peak = row["allocated_peak_bytes"]
    return [
        _WHERE[section],
        job["shape"],
        _NAMES[job["contender"]],
        row.get("budget") or "-",
        str(row["batch"]),
        f"{row['tokens_per_s']:.1f}",
        "-" if share is None else f"{share:.1%}",
        "-" if peak is None else format_size(peak),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Fill in the README; 1 where there is no result, or where ``--check`` finds another table."""
    return fill_in(
        argv,
        about=__doc__,
        markers=(BEGIN, END),
        newest=newest_result,
        render=render,
        missing="no result of a GPU in {}; measure with: make bench-gpu",
    )


if __name__ == "__main__":
    sys.exit(main())
