"""Train a GPT on a text by several processes, each inside a memory budget and on rows of its own.

`torchrun` starts the ranks; nothing else differs from training in one process. Each rank keeps a part of the moments
of large weights. Rank 0 reports, and trains once more on whole batches without ranks and a budget to compare.

    torchrun --nproc-per-node=2 -m examples.train_ranks --budget 48MiB --steps 20
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import gascompile
from examples.small_gpt import Batch, SmallGPT, batch_at, next_byte_loss, read_text
from gascompile.commands.output import emit, fields, report_error, reserved_stdout
from gascompile.core.sizes import format_size, format_time, parse_size

TOLERANCE = 1e-4
_LR = 1e-3
_SIZES = {"layers": 4, "width": 256, "heads": 4, "tokens": 128}


def new_model() -> SmallGPT:
    """Return the model with the weights that training begins with."""
    torch.manual_seed(0)
    return SmallGPT(**_SIZES)


def whole_batch(text: bytes, number: int, rows: int) -> Batch:
    """Return the rows of a step, of all ranks."""
    return batch_at(text, number, batch=rows, tokens=_SIZES["tokens"])


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train; return what this rank has to report."""
    text, model = read_text(None), new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rows = [options.batch // size] * size

    def own(number: int) -> Batch:
        begin = sum(rows[:rank])
        ids, following = whole_batch(text, number, sum(rows))
        return ids[begin : begin + rows[rank]], following[begin : begin + rows[rank]]

    with gascompile.compile_step(
        model, next_byte_loss, optimizer, options.budget, own(0), cache_dir=options.cache_dir
    ) as step:
        losses, begin_s, peak_bytes = [float(step(own(0)))], time.perf_counter(), 0
        for number in range(1, options.steps):
            losses.append(float(step(own(number))))
            assert step.last_run is not None
            peak_bytes = max(peak_bytes, *step.last_run.peak_bytes.values())
        seconds = (time.perf_counter() - begin_s) / max(options.steps - 1, 1)
        own_moments = step.num_own_moments
    return {
        "ranks": size,
        "rows": rows,
        "losses": losses,
        "num_weights": sum(parameter.numel() for parameter in model.parameters()),
        "num_own_moments": own_moments,
        "peak_bytes": peak_bytes,
        "budget_bytes": options.budget,
        "seconds": seconds,
    }


def eager_losses(steps: int, rows: int) -> list[float]:
    """Return the losses of one process on whole batches, with everything in memory."""
    text, model, losses = read_text(None), new_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    for number in range(steps):
        optimizer.zero_grad()
        loss = next_byte_loss(model, whole_batch(text, number, rows))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def report(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows for people."""
    budget = format_size(found["budget_bytes"])
    return [
        ("ranks", f"{found['ranks']}, of {found['rows']} rows"),
        ("weights", f"{found['num_weights']:,}"),
        ("moments", f"{found['num_own_moments']:,} of {2 * found['num_weights']:,} on this rank"),
        ("peak", f"{format_size(found['peak_bytes'])} of {budget} on this rank"),
        ("per step", format_time(found["seconds"])),
        ("loss", f"{found['losses'][0]:.4f} to {found['losses'][-1]:.4f}"),
        ("difference", f"{found['max_difference']:.1e} at most from one process's losses"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when losses are those of one process and the budget was kept."""
    parser = argparse.ArgumentParser(
        prog="examples.train_ranks", description="Train a GPT on a text by several processes."
    )
    parser.add_argument(
        "--budget", default="48MiB", type=parse_size, help="memory of each rank (default: 48MiB)"
    )
    parser.add_argument("--steps", type=int, default=20, help="number of steps (default: 20)")
    parser.add_argument("--batch", type=int, default=8, help="rows of all ranks (default: 8)")
    parser.add_argument("--cache-dir", help="where the machine's profile and moved bytes go")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        with reserved_stdout(options.json):
            found = train(options)
    except gascompile.GASCompileError as error:
        report_error(error, as_json=options.json)
        return 1
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")):
        return 0
    expected = eager_losses(options.steps, sum(found["rows"]))
    differences = [abs(a - b) for a, b in zip(found["losses"], expected, strict=True)]
    found["max_difference"] = max(differences)
    emit(options.json, found, fields("Training by ranks", report(found)))
    is_right = found["max_difference"] <= TOLERANCE
    return 0 if is_right and found["peak_bytes"] <= found["budget_bytes"] else 1


if __name__ == "__main__":
    sys.exit(main())
